"""How every launcher starts its kernel, for real or only to compile it, and how a kernel file
states what its kernels cost."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

import torch

from gptile.kernels.jit import HAS_TRITON, triton

Sizes: TypeAlias = tuple[int, ...]
Shape: TypeAlias = Mapping[str, Any]
"""One of a kernel file's ``CASES``: sizes, and choices such as an activation, by name."""


class Work(NamedTuple):
    """What the kernels of one pass do on one shape.

    Attributes:
        loaded, stored: bytes of global memory, re-reads included; what the interpreter counts.
        distinct: bytes of the different addresses each kernel loads and stores: what must cross
            between chip and memory where a cache serves every re-read.
        flops: floating-point operations, a multiply-add being two.
    """

    loaded: int
    stored: int
    distinct: int
    flops: int


class Pass(NamedTuple):
    """One direction of an operation, as the tests, the compile check, the benchmarks and
    ``gptile inspect`` run it.

    Attributes:
        launch: launches the kernels once on tensors of that shape, dtype and device.
        work: what they then do.
    """

    launch: Callable[[Shape, torch.dtype, torch.device | str], object]
    work: Callable[[Shape, torch.dtype], Work]


def example(*size: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """A tensor to launch a case on: normal values, or on the meta device only the shape."""
    if torch.device(device).type == "meta":
        return torch.empty(size, dtype=dtype, device=device)
    return torch.randn(size, device=device).to(dtype)


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What kernels compute with."""

Launcher: TypeAlias = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], object]
"""Takes a kernel, its grid, its arguments and its options (constants and launch options)."""

_launcher: ContextVar[Launcher | None] = ContextVar("launcher", default=None)


@contextmanager
def launching_by(launcher: Launcher) -> Iterator[None]:
    """Within it each launch is a call of ``launcher``, and no kernel runs: tensors may lie on any
    device and need no values, and outputs hold anything."""
    token = _launcher.set(launcher)
    try:
        yield
    finally:
        _launcher.reset(token)


@contextmanager
def host_only() -> Iterator[None]:
    """Within it launchers stop short of the launch: what is left of a call is what the wrapper
    costs the host, without Triton's own part."""
    with launching_by(lambda *launch: None):
        yield


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return HAS_TRITON and triton.knobs.runtime.interpret


def check_inputs(*tensors: torch.Tensor, indices: Iterable[torch.Tensor | None] = ()) -> None:
    """Refuse what a kernel cannot take, before anything is launched.

    Args:
        tensors: what is computed with.
        indices: other tensors that the kernel reads; None for one that is not there.

    Raises:
        ValueError: for tensors on several devices: pointers are followed on one.
        TypeError: for tensors that are not fp32, fp16 or bf16 (kernels compute in fp32), on the CPU
            outside Triton's interpreter, or where Triton is missing.
    """
    if not HAS_TRITON:
        raise TypeError("Triton is not installed; use the PyTorch operations")
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise TypeError(f"a kernel takes float32, float16 or bfloat16, not {tensor.dtype}")
        if tensor.device.type == "cpu" and not (interpreting() or _launcher.get()):
            raise TypeError(
                "a Triton kernel cannot run on CPU tensors: it needs a GPU, or TRITON_INTERPRET=1 "
                "in the environment before Python starts"
            )
    for other in (*tensors[1:], *indices):
        if other is not None:
            _check_device(tensors[0], other)


def _check_device(like: torch.Tensor, tensor: torch.Tensor) -> None:
    if tensor.device != like.device:
        raise ValueError(f"a kernel's tensors lie on {like.device} and on {tensor.device}")


def check_operands(like: torch.Tensor, **operands: tuple[torch.Tensor | None, Sizes]) -> None:
    """Refuse operands that do not fit: a kernel would read beyond them, or round them.

    Args:
        like: gives the dtype.
        operands: by name, each (where there is one) with the shape it must have.

    Raises:
        ValueError: for another shape or device.
        TypeError: for another dtype.
    """
    for name, (tensor, shape) in operands.items():
        if tensor is None:
            continue
        _check_device(like, tensor)
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
        if tensor.dtype != like.dtype:
            raise TypeError(
                f"{name} is {tensor.dtype} beside {like.dtype}: a kernel takes one dtype, so "
                "convert the model (autocast does not reach kernels)"
            )


def check_indices(n_rows: int, **indices: torch.Tensor) -> None:
    """Refuse indices, by name, that are not one integer a row.

    Raises:
        ValueError: for another shape than ``[n_rows]``.
        TypeError: for another dtype than int32 or int64.
    """
    for name, index in indices.items():
        if index.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64, not {index.dtype}")
        if index.shape != (n_rows,):
            raise ValueError(f"{name} must be [{n_rows}], got {list(index.shape)}")


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run ``kernel`` over ``grid``; the first argument is a tensor on the device to run on.

    Triton launches on the current CUDA device whatever its arguments are, hence the guard.
    """
    launcher = _launcher.get()
    if launcher is not None:
        launcher(kernel, grid, args, options)
    elif args[0].is_cuda:
        with torch.cuda.device(args[0].device):
            kernel[grid](*args, **options)
    else:
        kernel[grid](*args, **options)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """``[..., C]`` as ``[rows, C]`` with unit column stride: a view where strides allow it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()
