"""Compile what a deployment of a model will launch into a directory that its Triton reads.

Triton compiles a kernel anew for each specialisation of its arguments: integers that are 1, or
divisible by 16; pointers that are aligned to 16 bytes and, on AMD, whose memory is below 2 GB. So
the model is run dry (dry_run.py) on sizes that stand for all there are: a number's divisibility by
1, 2, 4, 8 and 16 decides that of every product it is a factor of, and between two powers of two
launchers choose alike. Each launch that would compile anew is then compiled once.

The directory is a cache of Triton's: a process that has it as TRITON_CACHE_DIR compiles none of
this. What a cache's entries depend on, and so must be equal there (Triton 3.6 and 3.7,
``get_cache_key``): the files of the Triton package, its library for this Python included; the
kernels' source; the target; ptxas's version; the environment variables that Triton compiles by, of
which :func:`compile_ahead` notes those set; on AMD the path at which Triton is installed. And an
entry names its files by absolute path, which :func:`compile_ahead` may be told.
"""

import json
import platform
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptile.bench.compiler import Compiled, compiling_for, read_kernel
from gptile.bench.dry_run import chunk, dry_run, generation, hollow_model, scoring
from gptile.kernels.jit import triton
from gptile.model.config import GPT2Config
from gptile.model.errors import UserError
from gptile.model.generation import PREFILL_CHUNK
from gptile.model.gpt2 import GPT2
from gptile.model.tokenizer import Tokenizer

MANIFEST = "gptile-kernels.json"
"""In the directory: what was compiled, and with what."""

_SHORT_CHUNK = 32
"""Tokens up to which the length of a chunk is met with every length of a cache: beyond both powers
of two at which kernels change, 8 queries a row and 16 rows."""

Track = Callable[..., Iterable[Any]]
"""Gives back the items of a sequence, and shows how far it is under ``description``."""


@dataclass(frozen=True)
class Deployment:
    """What will run.

    Attributes:
        target: a key of :data:`~gptile.bench.compiler.TARGETS`.
        batch: rows at most.
        tokenizer: the model's, if it has one.
    """

    config: GPT2Config
    dtype: torch.dtype
    target: str
    batch: int
    tokenizer: Tokenizer | None


@dataclass(frozen=True)
class Variant:
    """A launch that needs a compilation of its own; what a
    :data:`~gptile.kernels.launch.Launcher` is given."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


def representatives(largest: int) -> list[int]:
    """Of 1 to ``largest``: up to each power of two the greatest number that 1, 2, 4, 8 or 16, and
    none higher of these, divides."""
    found: dict[tuple[int, int], int] = {}
    for number in range(largest, 0, -1):
        power, octave = min(number & -number, 16), (number - 1).bit_length()
        found.setdefault((power, octave), number)
    return sorted(found.values())


def runs(model: GPT2, batch: int, tokenizer: Tokenizer | None) -> list[Callable[[], object]]:
    """Runs of the model that together launch every variant: prompts of any length, in any number
    of rows up to the batch, with their first decode step; sampling with a penalty and without; a
    chunk of tokens against a cache of any length; scored windows."""

    def generate(*args: Any, **options: Any) -> None:
        for _ in generation(model, *args, **options):
            pass

    longest = model.config.n_positions
    rows, lengths = representatives(batch), representatives(longest)
    # A token must follow the prompt, and another the decode step.
    prompts = representatives(min(PREFILL_CHUNK, longest - 2))
    chunks = representatives(min(_SHORT_CHUNK, longest))
    tokenizers = dict.fromkeys((None, tokenizer))
    return [
        *(partial(generate, *size, 2) for size in product(rows, prompts)),
        *(
            partial(generate, n_rows, 1, 2, tokenizer=given, penalty=penalty)
            for n_rows, given, penalty in product(rows, tokenizers, (1.0, 1.1))
        ),
        # The number of rows has no part in how a chunk meets the cache, but for the memory of all.
        *(
            partial(chunk, model, n_tokens, n_slots, max_len)
            for n_tokens, n_slots, max_len in product(chunks, {1, batch}, lengths)
            if n_tokens <= max_len
        ),
        *(partial(scoring, model, *size) for size in product(rows, lengths)),
    ]


def find_variants(chosen: Sequence[Callable[[], object]], track: Track) -> list[Variant]:
    """Of all launches of these runs, those that Triton would compile, once each. Within
    :func:`~gptile.bench.compiler.compiling_for`."""
    met: set[Hashable] = set()
    found: dict[Hashable, Variant] = {}

    def collect(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: Any) -> None:
        # Triton takes a millisecond to tell, and launches repeat from layer to layer.
        launch = (kernel, *map(_form, args), *options.items())
        if launch in met:
            return
        met.add(launch)
        # What this process has compiled before lies in another directory.
        kernel.device_caches.clear()
        keys.clear()
        kernel.warmup(*args, grid=grid, **options)
        found.setdefault(keys[0], Variant(kernel, grid, args, options))

    with _telling_keys() as keys, dry_run(collect):
        for run in track(chosen, description="finding what is launched"):
            run()
    return [*found.values()]


def _form(argument: Any) -> Hashable:
    """All that Triton may look at in an argument."""
    if isinstance(argument, Tensor):
        large = argument.untyped_storage().nbytes() >= 2**31
        return argument.dtype, argument.data_ptr() % 16, large
    return type(argument), argument


@contextmanager
def _telling_keys() -> Iterator[list[Hashable]]:
    """Within it Triton compiles nothing, and adds the key of what it would have compiled."""
    keys: list[Hashable] = []

    def tell(*, key: str, fn: Any, **_: Any) -> bool:
        keys.append((fn.module, fn.name, key))
        return True

    knobs = triton.knobs.runtime
    before = knobs.jit_cache_hook
    knobs.jit_cache_hook = tell
    try:
        yield keys
    finally:
        knobs.jit_cache_hook = before


def compile_ahead(
    deployment: Deployment,
    directory: Path,
    *,
    at: Path | None = None,
    track: Track = lambda items, description: items,
) -> dict[str, Any]:
    """Compile, and write the directory whole or not at all.

    Args:
        directory: a new one, or one that an earlier call wrote, which is replaced.
        at: where the kernels will be loaded from, if elsewhere.
        track: shows the progress.

    Returns:
        the manifest, which is in the directory too.

    Raises:
        UserError: for a directory that holds something else, or where nothing can be compiled.
    """
    check_directory(directory)
    directory = directory.absolute()
    home = at or directory
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as parent:
        cache = Path(parent, "kernels")
        with compiling_for(deployment.target) as target, triton.knobs.cache.scope():
            triton.knobs.cache.dir = str(cache)
            model = hollow_model(deployment.config, deployment.dtype)
            chosen = runs(model, deployment.batch, deployment.tokenizer)
            variants = find_variants(chosen, track)
            kernels = []
            for variant in track(variants, description="compiling"):
                start = time.perf_counter()
                compiled = variant.kernel.warmup(
                    *variant.args, grid=variant.grid, **variant.options
                )
                seconds = time.perf_counter() - start
                kernels.append(
                    {
                        "operation": variant.kernel.fn.__module__.rpartition(".")[2],
                        "entry": Path(next(iter(compiled.metadata_group.values()))).parent.name,
                        "seconds": seconds,
                        **_resources(read_kernel(target, compiled, variant.grid)),
                    }
                )
        manifest = {**_versions(deployment), "directory": str(home), "kernels": kernels}
        _move_entries(cache, home)
        (cache / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        if directory.exists():
            directory.replace(Path(parent, "before"))
        cache.replace(directory)
    return manifest


def check_directory(directory: Path) -> None:
    """Refuse to write where something else is.

    Raises:
        UserError: saying what there is, or is not.
    """
    if not directory.parent.is_dir():
        raise UserError(f"{directory}: there is no directory {directory.parent}")
    if directory.exists() and not (directory / MANIFEST).is_file():
        raise UserError(
            f"{directory} is there and was not written by gptile compile; name another directory"
        )


def _resources(kernel: Compiled) -> dict[str, Any]:
    fields = ("kernel", "warps", "registers", "spilled", "shared")
    return {name: getattr(kernel, name) for name in fields}


def _versions(deployment: Deployment) -> dict[str, Any]:
    """What the directory was made for and with; see the module's docstring."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    return {
        "target": deployment.target,
        "dtype": str(deployment.dtype).removeprefix("torch."),
        "batch": deployment.batch,
        "config": asdict(deployment.config),
        "triton": triton.__version__,
        "triton_path": str(Path(triton.__file__).parent),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "environment": get_cache_invalidating_env_vars(),
    }


def _move_entries(cache: Path, home: Path) -> None:
    """Let each entry name its files where they will be."""
    for path in cache.glob("*/__grp__*.json"):
        group = json.loads(path.read_text(encoding="utf-8"))
        entry = home / path.parent.name
        group["child_paths"] = {name: str(entry / name) for name in group["child_paths"]}
        path.write_text(json.dumps(group), encoding="utf-8")
