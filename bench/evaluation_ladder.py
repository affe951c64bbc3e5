"""The table of a course homework: scoring a text with GPT-2, one optimisation more in each row.

The first row is transformers with eager attention as a student writes it: one window at a time,
all logits, keys and values kept though nobody reads them (``use_cache`` as it comes), and
``.item()`` after every step. Every row scores the same tokens of the same windows and is timed in
turn with the others. A speed-up stands only where the row's negative log-likelihood is the first
row's, within :func:`bound`.

One row of such tables is never run: reuse of keys and values has nothing to do with scoring, see
:mod:`gptile.bench.evaluation`. It stays, with that reason, for the reader who looks for it.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from gptile.bench.corpus import Corpus
from gptile.bench.environment import NO_GPU
from gptile.bench.evaluation import (
    Model,
    missing_compiler,
    slowdown,
    window_sums,
    without_full_logits,
)
from gptile.bench.huggingface import load_reference
from gptile.bench.timing import interleave, peak_memory, speedup
from gptile.bench.workloads import with_ops
from gptile.kernels import IGNORE_INDEX, Ops
from gptile.model.gpt2 import default_ops
from gptile.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class Rung:
    """One row.

    Attributes:
        run: scores the corpus, returns nats a token.
        dtype: that its products are in.
    """

    name: str
    run: Callable[[], float]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Skipped:
    """A row that is not run, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class _Ours:
    """A way to score the corpus with our model: see :func:`window_sums`, :meth:`Corpus.plan`."""

    corpus: Corpus
    models: Sequence[Model]
    devices: Sequence[torch.device]
    batch_size: int
    bucket: int
    autocast: torch.dtype | None = None

    def __call__(self) -> float:
        plan = self.corpus.plan(self.batch_size, self.bucket)
        sums = window_sums(
            self.models, self.corpus, plan, devices=self.devices, autocast=self.autocast
        )
        return math.fsum(sums[0].tolist()) / self.corpus.n_scored


@torch.no_grad()
def naive_loop(model: Any, attention: str, corpus: Corpus) -> float:
    """The homework: transformers, nats a token."""
    model.set_attn_implementation(attention)
    total = 0.0
    for window in corpus.windows:
        ids = corpus.documents[window.document][window.start : window.stop + 1].to(model.device)
        targets = ids[1:].clone()
        targets[: -window.n_scored] = IGNORE_INDEX
        logits = model(ids[None, :-1]).logits
        total += F.cross_entropy(logits[0].float(), targets).item() * window.n_scored
    return total / corpus.n_scored


def rungs(
    checkpoint: Checkpoint,
    corpus: Corpus,
    *,
    batch_size: int,
    bucket: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[Rung | Skipped]:
    """The rows, each on top of those before it.

    Args:
        checkpoint: that transformers can read too.
        batch_size, bucket: of the rows that have them.
        device: of the models.
        dtype: of the row in 16 bits.
    """
    reference = load_reference(checkpoint.files.directory, torch.float32).to(device)
    for attention in ("eager", "sdpa"):
        name = f"transformers {attention}, batch 1"
        yield Rung(name, partial(naive_loop, reference, attention, corpus))

    model = checkpoint.load_model(device=device, ops=Ops.torch())
    everything = max(window.length for window in corpus.windows)
    ours = _Ours(corpus, [model], [device], 1, everything)
    yield Rung("our model, no host sync", ours)
    ours = replace(ours, batch_size=batch_size)
    yield Rung(f"batches of {batch_size}", ours)

    name = f"length buckets {bucket} wide"
    if len(corpus.documents) > 1:
        ours = replace(ours, bucket=bucket)
        yield Rung(name, ours)
    else:
        yield Skipped(name, "for documents: the windows of one text are equally long")

    model = with_ops(model, without_full_logits(model.ops))
    ours = replace(ours, models=[model])
    yield Rung("no full logits", ours)

    products = torch.float32
    short = str(dtype).removeprefix("torch.")
    name = f"{short} autocast"
    ratio = slowdown(dtype, device)
    if ratio < 1:
        products = dtype
        ours = replace(ours, autocast=dtype)
        yield Rung(name, ours, products)
    else:
        yield Skipped(name, f"a {short} product took {ratio:.1f} times as long as fp32 here")

    yield Skipped("reuse of keys and values", "for generation: one pass has every past in it")

    why = missing_compiler(device)
    compiled = (lambda model: model) if why else torch.compile
    if why:
        yield Skipped("torch.compile", why)
    else:
        ours = replace(ours, models=[compiled(model)])
        yield Rung("torch.compile", ours, products)

    name = f"Triton kernels, {short}"
    if device.type != "cuda":
        yield Skipped(name, NO_GPU)
        yield Skipped("data parallel", f"{NO_GPU}; for CPUs see gptile evaluate --help")
        return
    if default_ops(checkpoint.config, device, dtype) == Ops.torch():
        yield Skipped(name, "not for this GPU, or not for this width of model")
    else:
        products = dtype
        model = checkpoint.load_model(device=device, dtype=dtype, ops=Ops.triton())
        ours = replace(ours, models=[compiled(model)], autocast=None)
        yield Rung(name, ours, products)

    if torch.cuda.device_count() == 1:
        yield Skipped("data parallel", "one GPU here")
        return
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    replicas = [compiled(copy.deepcopy(model).to(device)) for device in devices]
    ours = replace(ours, models=replicas, devices=devices)
    yield Rung(f"data parallel over {len(devices)} GPUs", ours, products)


def bound(dtype: torch.dtype) -> float:
    """How far, relatively, a row's NLL may be from the first row's: 1e-6 in fp32, as promised in
    :mod:`gptile.bench.evaluation`; in 16 bits half a step of the dtype, the error of rounding once.
    """
    return 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2


def climb(
    steps: Sequence[Rung | Skipped],
    *,
    rounds: int,
    device: torch.device,
    on_step: Callable[[str], object] = lambda _: None,
) -> list[dict[str, Any]]:
    """Run the rows: each once to warm up and for its result, once for its memory, then all of them
    ``rounds`` times in turn.

    Args:
        on_step: called with the name of what begins, ``len(runnable) + rounds`` times.

    Returns:
        A row each, as in :class:`gptile.bench.result.Result`; ``nll`` in nats a token, ``error``
        its relative distance from the first row's, ``memory`` the peak of a pass in bytes beyond
        the weights.
    """
    running = [step for step in steps if isinstance(step, Rung)]
    nll, memory = {}, {}
    for rung in running:
        on_step(rung.name)
        nll[rung.name] = rung.run()
        memory[rung.name] = peak_memory(rung.run, device)
    timings = interleave(
        {rung.name: rung.run for rung in running},
        rounds=rounds,
        sample_seconds=0,
        warmup=0,
        device=device,
        on_round=lambda done: on_step(f"round {done} of {rounds}"),
    )
    first = running[0].name
    rows: list[dict[str, Any]] = []
    for step in steps:
        row: dict[str, Any] = {"subject": {"rung": step.name}}
        if isinstance(step, Skipped):
            rows.append(row | {"skipped": step.why})
            continue
        timing = timings[step.name]
        error = abs(nll[step.name] - nll[first]) / nll[first]
        ok = error <= bound(step.dtype)  # NaN is not
        gain = speedup(timings[first], timing)._asdict() if ok else None
        rows.append(
            row
            | {
                "seconds": timing.samples,
                **{f"p{percent}": timing.quantile(percent) for percent in (20, 50, 80)},
                "memory": memory[step.name],
                "nll": nll[step.name],
                "error": error,
                "bound": bound(step.dtype),
                "ok": ok,
                "speedup": gain,
            }
        )
    return rows
