"""Whose code computes the operations of operations.py. Each provider has functions of the same
arguments for some of them:

- gptile: our kernels, on a GPU; Triton's interpreter is never timed;
- eager: the plain PyTorch reference. Where PyTorch has a fused operation it is that one already
  (``F.layer_norm``, ``F.scaled_dot_product_attention``, ``F.cross_entropy`` of ``F.linear``);
- batched: where the reference goes row by row, so that rows are computed as if they were alone,
  what people write instead: one PyTorch operation for all rows. It takes the cache's slots to be
  the batch's rows, as they are in the cases;
- compile: ``torch.compile`` of batched, or else of eager, for the shapes of the case alone;
- liger-kernel, flash-attn, xformers, flag-gems: the libraries of these names, where installed; of
  FlagGems its functions themselves, of which the current ones have no backward pass.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptile.bench.environment import NO_GPU
from gptile.bench.operations import OPERATIONS
from gptile.kernels.launch import interpreting


@dataclass(frozen=True)
class Provider:
    """Whose code.

    Attributes:
        load: imports what it needs and gives its function for each operation it has.
        package: to be imported by that name; None for what is always there.
        needs_gpu: it does not run on a CPU.
    """

    load: Callable[[], dict[str, Callable[..., Any]]]
    package: str | None = None
    needs_gpu: bool = False

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot run here, if so."""
        if self.needs_gpu and device.type != "cuda":
            return NO_GPU
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if self.package == "triton" and interpreting():
            return "TRITON_INTERPRET is set, and the interpreter is not timed"
        return None


def _ours() -> dict[str, Callable[..., Any]]:
    return {name: operation.ours for name, operation in OPERATIONS.items()}


def _eager() -> dict[str, Callable[..., Any]]:
    return {name: operation.reference for name, operation in OPERATIONS.items()}


def _batched() -> dict[str, Callable[..., Any]]:
    return {
        "cached_attention": _attend_batch,
        "decode_attention": _attend_batch,
        "kv_append": _append_batch,
    }


def _attend_batch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
    scale: float,
) -> Tensor:
    """Over the whole cache, masked: what a static cache does."""
    positions = starts.unsqueeze(1) + torch.arange(q.shape[1], device=q.device)
    mask = torch.arange(k_cache.shape[2], device=q.device) <= positions.unsqueeze(2)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k_cache, v_cache, attn_mask=mask.unsqueeze(1), scale=scale
    )
    return out.transpose(1, 2).flatten(2)


def _append_batch(
    qkv: Tensor,
    bias: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    starts: Tensor,
    counts: Tensor,
) -> Tensor:
    q, k, v = (qkv + bias).unflatten(2, (3, k_cache.shape[1], k_cache.shape[3])).unbind(2)
    rows = slots.unsqueeze(1)
    positions = starts.unsqueeze(1) + torch.arange(qkv.shape[1], device=qkv.device)
    k_cache[rows, :, positions] = k
    v_cache[rows, :, positions] = v
    return q


def _compiled() -> dict[str, Callable[..., Any]]:
    # What was compiled for other cases counts against this one: after eight PyTorch gives up.
    torch.compiler.reset()
    # Else a backward pass uses up its graph, and cannot be timed on it again.
    torch._functorch.config.donated_buffer = False
    functions = {**_eager(), **_batched()}
    return {name: torch.compile(function, dynamic=False) for name, function in functions.items()}


def _liger() -> dict[str, Callable[..., Any]]:
    from liger_kernel.transformers.functional import (
        liger_fused_linear_cross_entropy,
        liger_layer_norm,
    )

    def cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return liger_fused_linear_cross_entropy(x, weight, targets)

    def norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return liger_layer_norm(x, weight, bias, eps)

    return {"layer_norm": norm, "linear_cross_entropy": cross_entropy}


def _flash_attention() -> dict[str, Callable[..., Any]]:
    from flash_attn import flash_attn_func, flash_attn_with_kvcache
    from flash_attn.ops.triton.layer_norm import layer_norm_fn

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return flash_attn_func(q, k, v, softmax_scale=scale, causal=True).flatten(2)

    def attend_cache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        starts: Tensor,
        counts: Tensor,
        scale: float,
    ) -> Tensor:
        return flash_attn_with_kvcache(
            q,
            k_cache.transpose(1, 2),
            v_cache.transpose(1, 2),
            cache_seqlens=starts + counts,
            cache_batch_idx=slots,
            softmax_scale=scale,
            causal=True,
        ).flatten(2)

    def norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return layer_norm_fn(x, weight, bias, eps=eps)

    def add_norm(
        x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        y, total = layer_norm_fn(delta, weight, bias, residual=x, eps=eps, prenorm=True)
        return total, y

    return {
        "attention": attend,
        "cached_attention": attend_cache,
        "decode_attention": attend_cache,
        "layer_norm": norm,
        "add_layer_norm": add_norm,
    }


def _xformers() -> dict[str, Callable[..., Any]]:
    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        mask = LowerTriangularMask()
        return memory_efficient_attention(q, k, v, attn_bias=mask, scale=scale).flatten(2)

    return {"attention": attend}


def _flag_gems() -> dict[str, Callable[..., Any]]:
    import flag_gems

    def norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y, *_ = flag_gems.layer_norm(x, weight.shape, weight, bias, eps)
        return y

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = flag_gems.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return out.transpose(1, 2).flatten(2)

    return {"layer_norm": norm, "attention": attend}


OURS, BASELINE = "gptile", "eager"

PROVIDERS: dict[str, Provider] = {
    OURS: Provider(_ours, package="triton", needs_gpu=True),
    BASELINE: Provider(_eager),
    "batched": Provider(_batched),
    "compile": Provider(_compiled),
    "liger-kernel": Provider(_liger, package="liger_kernel", needs_gpu=True),
    "flash-attn": Provider(_flash_attention, package="flash_attn", needs_gpu=True),
    "xformers": Provider(_xformers, package="xformers", needs_gpu=True),
    "flag-gems": Provider(_flag_gems, package="flag_gems", needs_gpu=True),
}
"""By name, the first one ours."""
