"""The engines that :mod:`gptile.bench.model_benchmark` compares: what each can do, and what it is.

An engine runs in a process of its own (:mod:`gptile.bench.workers`). This module is light, and so
is :mod:`gptile.bench.peers`, so that a peer's memory is its own and not PyTorch's.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

Ids: TypeAlias = list[list[int]]

PRECISIONS = ("float32", "float16", "bfloat16", "int8")
GENERATION = ("prefill", "decode")
TASKS = (*GENERATION, "score", "train")


@dataclass(frozen=True)
class Setup:
    """What an engine is made of.

    Attributes:
        source: directory of the Hugging Face checkpoint.
        converted: directory of a peer's own files, made from it.
        precision: one of :data:`PRECISIONS`; ``float64`` for the reference.
        device: for PyTorch.
        threads: to compute with.
    """

    source: Path
    converted: Path
    precision: str
    device: str
    threads: int


class Engine(Protocol):
    """A model that has been loaded. Rows of ids have one length; what an engine cannot do, its
    :class:`Entry` does not list.

    Attributes:
        weight_bytes: of one element of a weight matrix, as it is read.
        cache_bytes: of one element of the cache.
    """

    weight_bytes: float
    cache_bytes: int

    def generate(self, prompts: Ids, n_new: int) -> Ids:
        """The ``n_new`` likeliest ids after each prompt, one after the other; no id ends a row."""

    def logits(self, ids: Ids) -> Any:
        """``[B, T, V]`` float32, through the cache where that can be had."""

    def score(self, ids: Ids) -> float:
        """Mean negative log-likelihood, in nats, of each id after those before it."""


class Trainer(Protocol):
    """A model that is trained."""

    def step(self, ids: Ids) -> float:
        """The loss before a step of AdamW on ``ids``; dropout is off, so that it is one number."""


@dataclass(frozen=True)
class Entry:
    """An engine of the catalogue.

    Attributes:
        made_by: module and class.
        precisions, tasks: what it has.
        why_not: what it says of the other tasks.
        cuda: whether it runs there too.
        needs: modules to import, and to convert a checkpoint for it.
        settings: passed to the class.
    """

    made_by: str
    precisions: tuple[str, ...]
    tasks: tuple[str, ...] = TASKS
    why_not: str = ""
    cuda: bool = False
    needs: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def peer(self) -> bool:
        """Whether it has files of its own, converted from the checkpoint."""
        return self.made_by.startswith("gptile.bench.peers:")


_PYTORCH = PRECISIONS[:3]
_NO_LOSS = "it gives logits, and neither a loss nor gradients"


def _ours(tasks: tuple[str, ...] = TASKS, why_not: str = "", **settings: Any) -> Entry:
    made_by = "gptile.bench.torch_engines:Gptile"
    return Entry(made_by, _PYTORCH, tasks, why_not, cuda=True, settings=settings)


def _transformers(**settings: Any) -> Entry:
    made_by = "gptile.bench.torch_engines:Transformers"
    needs = ("transformers",)
    return Entry(made_by, _PYTORCH, cuda=True, needs=needs, settings=settings)


ENGINES = {
    "gptile": _ours(),
    "gptile-torch": _ours(kernels="torch"),
    "gptile-compile": _ours(
        ("score", "train"),
        "not compiled: PyTorch's operations read the cache's slots and lengths on the host, and "
        "there, in every layer, torch.compile's graph would break",
        kernels="torch",
        compiled=True,
    ),
    "gptile-fast": Entry(
        "gptile.bench.torch_engines:GptileFast",
        ("float32", "bfloat16", "int8"),
        GENERATION,
        "its compiled step only decodes",
        needs=("numba",),
    ),
    "transformers-eager": _transformers(attention="eager"),
    "transformers-sdpa": _transformers(attention="sdpa"),
    "transformers-compile": _transformers(attention="sdpa", compiled=True),
    "ctranslate2": Entry(
        "gptile.bench.peers:CTranslate2",
        ("float32", "int8"),
        (*GENERATION, "score"),
        "it does not train",
        needs=("ctranslate2", "transformers"),
    ),
    "onnxruntime": Entry(
        "gptile.bench.peers:OnnxRuntime",
        ("float32", "int8"),
        GENERATION,
        _NO_LOSS,
        needs=("onnxruntime", "onnx", "onnxscript"),
    ),
    "openvino": Entry(
        "gptile.bench.peers:OpenVino",
        ("float32", "bfloat16", "int8"),
        GENERATION,
        _NO_LOSS,
        needs=("openvino", "nncf", "onnx", "onnxscript"),
    ),
    "llama.cpp": Entry(
        "gptile.bench.peers:LlamaCpp",
        ("float32", "float16", "int8"),
        GENERATION,
        _NO_LOSS,
        needs=("llama_cpp", "gguf"),
    ),
}
"""By name. ``gptile`` runs on what it chooses by itself: on a CPU PyTorch's operations, as
``gptile-torch`` always does, on a GPU Triton's kernels. ``gptile-fast`` decodes by the compiled CPU
step, with weights in that precision and all else in float32. ``transformers-compile`` is sdpa with
``cache_implementation="static"``, which compiles each decoding step, and torch.compile elsewhere.
"""

BASELINE = "transformers-sdpa"
REFERENCE = "transformers-eager"


def is_ours(engine: str) -> bool:
    """Whether it is GPTile's, whose mistakes are our users' to know of."""
    return engine.startswith("gptile")


def default_engines(device: str, quick: bool) -> tuple[str, ...]:
    """Names: all that need no other package than transformers, or ours and the baseline. On a CPU
    ``gptile-torch`` is ``gptile``, and left out."""
    if quick:
        return ("gptile", BASELINE)
    plain = [name for name, entry in ENGINES.items() if not entry.peer]
    return tuple(name for name in plain if device != "cpu" or name != "gptile-torch")


class Choice(NamedTuple):
    """An engine in one precision."""

    engine: str
    precision: str

    def __str__(self) -> str:
        return f"{self.engine} {self.precision}"

    @property
    def entry(self) -> Entry:
        return ENGINES[self.engine]

    @property
    def ours(self) -> bool:
        return is_ours(self.engine)


def missing(choice: Choice) -> list[str]:
    """The modules that are not installed."""
    return [name for name in choice.entry.needs if importlib.util.find_spec(name) is None]


def load_class(made_by: str) -> type:
    """The class that ``module:Class`` names."""
    module, _, name = made_by.partition(":")
    return cast(type, getattr(importlib.import_module(module), name))
