"""Compile kernels for GPUs that are not here, and say what became of them.

Triton compiles to machine code without a GPU: a stand-in driver names the target, and the
launchers, given meta tensors, compile by the ordinary JIT path (specialisation and launch choices
included) instead of running.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptile.kernels.launch import compile_only
from gptile.model.errors import UserError


@dataclass(frozen=True)
class Target:
    """A GPU to compile for.

    Attributes:
        arch: Triton's name of it: an int for CUDA, a string for ROCm.
        shared_limit: bytes of shared memory a block may use (CUDA C++ Programming Guide, table of
            technical specifications by compute capability; CDNA ISA guides for LDS).
    """

    backend: str
    arch: int | str
    warp_size: int
    shared_limit: int


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 * 1024),
    "sm_86": Target("cuda", 86, 32, 99 * 1024),
    "sm_89": Target("cuda", 89, 32, 99 * 1024),
    "sm_90": Target("cuda", 90, 32, 227 * 1024),
    "sm_100": Target("cuda", 100, 32, 227 * 1024),
    "sm_120": Target("cuda", 120, 32, 99 * 1024),
    "gfx90a": Target("hip", "gfx90a", 64, 64 * 1024),
    "gfx942": Target("hip", "gfx942", 64, 64 * 1024),
}


_MATRIX_INSTRUCTION = re.compile(r"wgmma\.mma|mma\.sync|tcgen05\.mma|v_mfma")


@dataclass(frozen=True)
class Compiled:
    """One kernel's machine code.

    Attributes:
        registers: per thread (VGPRs on AMD).
        spilled: bytes of stack a thread uses for what the registers could not hold.
        shared: bytes of shared memory a block uses.
        warps: of a block.
        tensor_cores: whether matrix products run on them (MFMA units on AMD).
    """

    kernel: str
    registers: int
    spilled: int
    shared: int
    warps: int
    tensor_cores: bool


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
def _compiling_for(target: Target) -> Iterator[list[Any]]:
    from triton.runtime import driver

    before = driver._active
    driver.set_active(_StandInDriver(target))
    try:
        with compile_only() as kernels:
            yield kernels
    finally:
        driver._active = before


def compile_launches(name: str, launches: Callable[[], Any]) -> list[Compiled]:
    """Compile every kernel that ``launches`` starts, for the target of that name.

    Args:
        name: a key of :data:`TARGETS`.
        launches: calls launchers on meta tensors.

    Raises:
        UserError: for an unknown target, or under TRITON_INTERPRET, which compiles nothing.
    """
    import triton

    if name not in TARGETS:
        raise UserError(f"unknown target {name}; one of {', '.join(TARGETS)}")
    if triton.knobs.runtime.interpret:
        raise UserError("TRITON_INTERPRET is set, so nothing is compiled; unset it")
    with _compiling_for(TARGETS[name]) as kernels:
        launches()
    read = _nvidia_resources if TARGETS[name].backend == "cuda" else _amd_resources
    return [
        Compiled(
            k.metadata.name,
            *read(k),
            k.metadata.shared,
            k.metadata.num_warps,
            tensor_cores=_MATRIX_INSTRUCTION.search(k.asm.get("ptx") or k.asm["amdgcn"])
            is not None,
        )
        for k in kernels
    ]


def _nvidia_resources(kernel: Any) -> tuple[int, int]:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (re.search(rf"{field}:(\d+)", listing) for field in ("REG", "STACK"))
    assert registers is not None, listing
    assert stack is not None, listing
    return int(registers[1]), int(stack[1])


def _amd_resources(kernel: Any) -> tuple[int, int]:
    fields = (r"\.vgpr_count:\s+(\d+)", r"\.private_segment_fixed_size:\s+(\d+)")
    registers, scratch = (re.search(field, kernel.asm["amdgcn"]) for field in fields)
    assert registers is not None
    assert scratch is not None
    return int(registers[1]), int(scratch[1])
