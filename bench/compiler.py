"""Compile kernels for GPUs that are not here, and say what became of them.

Triton compiles to machine code without a GPU: a stand-in driver names the target, and the
launchers, given meta tensors, compile by the ordinary JIT path (specialisation and launch choices
included) instead of running.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gptile.kernels.jit import HAS_TRITON, triton
from gptile.kernels.launch import interpreting, launching_by
from gptile.model.errors import UserError


@dataclass(frozen=True)
class Target:
    """A GPU to compile for.

    The limits are those of the CUDA C++ Programming Guide's table "Technical Specifications per
    Compute Capability" (https://docs.nvidia.com/cuda/cuda-c-programming-guide/), and of AMD's CDNA2
    and CDNA3 ISA guides (https://gpuopen.com/amd-isa-documentation/): 4 SIMDs of 8 waves a compute
    unit.

    Attributes:
        arch: Triton's name of it: an int for CUDA, a string for ROCm.
        warp_size: threads of a warp, or of a wave on AMD.
        shared_limit: bytes of shared memory (LDS on AMD) a block may use.
        max_warps: resident on one multiprocessor (compute unit).
        max_blocks: resident on one multiprocessor.
    """

    backend: str
    arch: int | str
    warp_size: int
    shared_limit: int
    max_warps: int
    max_blocks: int

    @property
    def stages(self) -> tuple[str, ...]:
        """What a kernel passes through on its way to the GPU."""
        last = ("ptx", "sass") if self.backend == "cuda" else ("amdgcn",)
        return "ttir", "ttgir", "llir", *last


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 * 1024, 64, 32),
    "sm_86": Target("cuda", 86, 32, 99 * 1024, 48, 16),
    "sm_89": Target("cuda", 89, 32, 99 * 1024, 48, 24),
    "sm_90": Target("cuda", 90, 32, 227 * 1024, 64, 32),
    "sm_100": Target("cuda", 100, 32, 227 * 1024, 64, 32),
    "sm_120": Target("cuda", 120, 32, 99 * 1024, 48, 24),
    "gfx90a": Target("hip", "gfx90a", 64, 64 * 1024, 32, 32),
    "gfx942": Target("hip", "gfx942", 64, 64 * 1024, 32, 32),
}

_MATRIX_INSTRUCTION = re.compile(r"(wgmma)\.mma|(mma\.sync)|(tcgen05)\.mma|v_(mfma)")


@dataclass(frozen=True)
class Compiled:
    """One launch of a kernel, as machine code.

    Attributes:
        grid: programs launched, by axis.
        warps: of a block.
        registers: per thread (VGPRs, accumulation registers included, on AMD).
        spilled: bytes of stack a thread uses for what the registers could not hold.
        shared: bytes of shared memory a block uses.
        products: how tiles are multiplied: the tensor cores' instruction (wgmma, mma.sync, tcgen05,
            or mfma on AMD), fma without them, none where the kernel multiplies no tiles.
        code: text by stage of the compilation; Triton disassembles "sass" when asked for it.
    """

    kernel: str
    grid: tuple[int, ...]
    warps: int
    registers: int
    spilled: int
    shared: int
    products: str
    code: Mapping[str, str] = field(repr=False, compare=False)


class _StandInDriver:
    """What Triton's JIT asks of a driver before it launches."""

    def __init__(self, target: Target) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget(target.backend, target.arch, target.warp_size)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        # The JIT keeps one cache, and one target, per device.
        return hash((self._target.backend, self._target.arch))

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


@contextmanager
def compiling_for(name: str) -> Iterator[Target]:
    """Within it Triton's JIT compiles for the target of that name.

    Raises:
        UserError: for an unknown target, without Triton, or under TRITON_INTERPRET, which compiles
            nothing.
    """
    target = find_target(name)
    if not HAS_TRITON:
        raise UserError("Triton is not installed, so nothing is compiled; pip install triton")
    if interpreting():
        raise UserError("TRITON_INTERPRET is set, so nothing is compiled; unset it")
    from triton.runtime import driver

    before = driver._active
    driver.set_active(_StandInDriver(target))
    try:
        yield target
    finally:
        driver._active = before


def find_target(name: str) -> Target:
    """The target of that name.

    Raises:
        UserError: where there is none.
    """
    if name not in TARGETS:
        raise UserError(f"unknown target {name!r}; one of {', '.join(TARGETS)}")
    return TARGETS[name]


def compile_launches(name: str, launches: Callable[[], Any]) -> list[Compiled]:
    """Compile every kernel that ``launches`` starts, for the target of that name.

    Args:
        name: a key of :data:`TARGETS`.
        launches: calls launchers on meta tensors.

    Raises:
        UserError: as :func:`compiling_for`.
    """
    kernels: list[tuple[Any, tuple[int, ...]]] = []

    def compile_one(kernel: Any, grid: tuple[int, ...], args: Any, options: Any) -> None:
        kernels.append((kernel.warmup(*args, grid=grid, **options), grid))

    with compiling_for(name) as target, launching_by(compile_one):
        launches()
    return [read_kernel(target, kernel, grid) for kernel, grid in kernels]


def read_kernel(target: Target, kernel: Any, grid: tuple[int, ...]) -> Compiled:
    """What one of Triton's CompiledKernels, made for that target, is."""
    read = _nvidia_resources if target.backend == "cuda" else _amd_resources
    return Compiled(
        kernel.metadata.name,
        grid,
        kernel.metadata.num_warps,
        *read(kernel),
        kernel.metadata.shared,
        _products(kernel),
        kernel.asm,
    )


def _products(kernel: Any) -> str:
    if "tt.dot" not in kernel.asm["ttir"]:
        return "none"
    code = kernel.asm.get("ptx") or kernel.asm["amdgcn"]
    found = {match[match.lastindex or 0] for match in _MATRIX_INSTRUCTION.finditer(code)}
    return ", ".join(sorted(found)) or "fma"


@cache  # the JIT gives launches of equal specialisation one and the same kernel
def _nvidia_resources(kernel: Any) -> tuple[int, int]:
    try:
        cuobjdump = triton.knobs.nvidia.cuobjdump.path
    except RuntimeError as error:
        raise UserError(f"{error}: Triton's package ships it; reinstall triton") from None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [cuobjdump, "-res-usage", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (re.search(rf"{field}:(\d+)", listing) for field in ("REG", "STACK"))
    assert registers is not None, listing
    assert stack is not None, listing
    return int(registers[1]), int(stack[1])


@cache
def _amd_resources(kernel: Any) -> tuple[int, int]:
    fields = (r"\.vgpr_count:\s+(\d+)", r"\.private_segment_fixed_size:\s+(\d+)")
    registers, scratch = (re.search(field, kernel.asm["amdgcn"]) for field in fields)
    assert registers is not None
    assert scratch is not None
    return int(registers[1]), int(scratch[1])
