"""How every launcher starts its kernel, for real or only to compile it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from gptile.kernels.jit import HAS_TRITON, triton

_compiled: ContextVar[list[Any] | None] = ContextVar("compiled", default=None)


@contextmanager
def compile_only() -> Iterator[list[Any]]:
    """Within it launchers take meta tensors, and compile their kernels instead of running them.

    Yields:
        the list that each CompiledKernel is appended to, in the order of the launches.
    """
    kernels: list[Any] = []
    token = _compiled.set(kernels)
    try:
        yield kernels
    finally:
        _compiled.reset(token)


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return HAS_TRITON and triton.knobs.runtime.interpret


def check_inputs(*tensors: torch.Tensor) -> None:
    """Refuse what a kernel cannot take, before anything is launched.

    Raises:
        TypeError: for tensors that are not fp32, fp16 or bf16 (kernels compute in fp32), on the CPU
            outside Triton's interpreter, or where Triton is missing.
    """
    if not HAS_TRITON:
        raise TypeError("Triton is not installed; use the PyTorch operations")
    for tensor in tensors:
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise TypeError(f"a kernel takes float32, float16 or bfloat16, not {tensor.dtype}")
        if tensor.device.type == "cpu" and not interpreting():
            raise TypeError(
                "a Triton kernel cannot run on CPU tensors: it needs a GPU, or TRITON_INTERPRET=1 "
                "in the environment before Python starts"
            )


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run ``kernel`` over ``grid``; the first argument is a tensor on the device to run on.

    Triton launches on the current CUDA device whatever its arguments are, hence the guard.
    """
    compiled = _compiled.get()
    if compiled is not None:
        compiled.append(kernel.warmup(*args, grid=grid, **options))
    elif args[0].is_cuda:
        with torch.cuda.device(args[0].device):
            kernel[grid](*args, **options)
    else:
        kernel[grid](*args, **options)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """``[..., C]`` as ``[rows, C]`` with unit column stride: a view where strides allow it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()
