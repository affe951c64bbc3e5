"""What a model launches, on a machine without a GPU.

The model lies on the CPU, as do all tensors of the run, and none of them is ever filled: a large
one costs address space only. What stands in a tensor does not matter to a launch but for the
lengths in the cache, which are real. Pointers are aligned as a GPU's would be: PyTorch's allocators
align to 64 bytes and more, and views lie where they would.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from gptile.kernels import Ops
from gptile.kernels.launch import Launcher, launching_by
from gptile.model.config import GPT2Config
from gptile.model.generation import stream
from gptile.model.gpt2 import GPT2
from gptile.model.kv_cache import KVCache
from gptile.model.sampling import SamplingParams
from gptile.model.tokenizer import Tokenizer


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: its name.
        operation: the kernel file it is in, a key of :data:`~gptile.kernels.catalog.OPERATIONS`.
        arguments: by name, constants included.
        options: of the launch, such as ``num_warps``.
    """

    kernel: str
    operation: str
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    options: Mapping[str, Any]

    @classmethod
    def of(
        cls, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
    ) -> "Launch":
        """From what a :data:`~gptile.kernels.launch.Launcher` is given."""
        names = kernel.arg_names
        constants = {name: value for name, value in options.items() if name in names}
        return cls(
            kernel.fn.__name__,
            kernel.fn.__module__.rpartition(".")[2],
            grid,
            {**dict(zip(names, args, strict=False)), **constants},
            {name: value for name, value in options.items() if name not in names},
        )


def hollow_model(config: GPT2Config, dtype: torch.dtype) -> GPT2:
    """A model on Triton's kernels, its weights never filled, for :func:`dry_run`; it draws token 0
    every time."""
    with torch.device("meta"):
        model = GPT2(config, Ops.triton().replace(sample=_sample))
    return model.to(dtype).to_empty(device="cpu").eval()


def _sample(*args: Any, **columns: Any) -> tuple[Tensor, Tensor]:
    ids, logprobs = Ops.triton().sample(*args, **columns)
    return ids.zero_(), logprobs.zero_()


@contextmanager
def dry_run(launcher: Launcher) -> Iterator[None]:
    """Within it models on the CPU run on Triton's kernels: each launch is a call of ``launcher``,
    and the products that are left to PyTorch are left out."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return x.new_empty(*x.shape[:-1], len(weight))

    def mm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
        return a.new_empty(len(a), b.shape[1]) if out is None else out

    with ExitStack() as stack:
        stack.enter_context(patch.object(F, "linear", linear))
        stack.enter_context(patch.object(torch, "mm", mm))
        stack.enter_context(launching_by(launcher))
        yield


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """A :func:`dry_run` that lists the launches and compiles nothing."""
    launches: list[Launch] = []
    with dry_run(lambda *launch: launches.append(Launch.of(*launch))):
        yield launches


def generation(
    model: GPT2,
    n_rows: int,
    n_tokens: int,
    max_new_tokens: int | None,
    *,
    tokenizer: Tokenizer | None = None,
    penalty: float = 1.0,
) -> Iterator[None]:
    """Generate from ``n_rows`` prompts of ``n_tokens`` each, stopping whenever each row has got a
    token: after the prompt, then after each decode step.

    Args:
        max_new_tokens: None for all that the context has room for; the cache is as long as needed.
        tokenizer: without it the whole vocabulary is drawn from.
        penalty: on repetition; 1 is none.
    """
    params = SamplingParams(
        max_new_tokens=max_new_tokens, repetition_penalty=penalty, stop_token_ids=(), seed=0
    )
    events = stream(model, [[0] * n_tokens] * n_rows, params, tokenizer=tokenizer)
    while list(islice(events, n_rows)):
        yield


@torch.inference_mode()
def chunk(model: GPT2, n_tokens: int, n_slots: int, max_len: int) -> None:
    """A row of ``n_tokens`` against an empty cache of that size, and its last logits."""
    cache = KVCache(model.config, n_slots, max_len, dtype=model.wte.weight.dtype)
    model(torch.zeros(1, n_tokens, dtype=torch.int64), cache=cache, logits_for="last")


@torch.inference_mode()
def scoring(model: GPT2, n_rows: int, n_tokens: int) -> None:
    """The losses of ``n_rows`` windows of ``n_tokens``."""
    ids = torch.zeros(n_rows, n_tokens, dtype=torch.int64)
    model(ids, ids, logits_for="none", reduction="none")
