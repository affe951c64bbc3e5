"""What a GPU allows at most: warps resident at once, and the time its peak rates would take."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from gptile.bench.compiler import Compiled, Target
from gptile.kernels.launch import Work


class Occupancy(NamedTuple):
    """How full one multiprocessor (compute unit on AMD) can be of a kernel.

    Attributes:
        warps: resident at once.
        share: of the most there can be of any kernel.
        limit: what stops more: registers, shared memory, warps or blocks.
    """

    warps: int
    share: float
    limit: str


# A multiprocessor has 4 partitions, each with 512 registers for every lane of a warp, given out 8 a
# thread at a time. That holds for NVIDIA (64 K registers, 256 a warp at a time: cuda_occupancy.h,
# which Triton ships) and for CDNA2 and CDNA3 (a SIMD's unified VGPR file: getTotalNumVGPRs and
# getVGPRAllocGranule in LLVM's AMDGPUBaseInfo.cpp).
_PARTITIONS, _REGISTERS, _REGISTER_UNIT = 4, 512, 8
# Bytes of shared memory: reserved a block by the system, and the unit it is given out in.
_SHARED_RESERVED = {"cuda": 1024, "hip": 0}
_SHARED_UNIT = {"cuda": 128, "hip": 512}


def occupancy(target: Target, kernel: Compiled) -> Occupancy:
    """The occupancy of a compiled kernel, by NVIDIA's calculation (cuda_occupancy.h).

    Not counted: tensor memory on sm_100, for which resident blocks wait, and AMD's scalar
    registers, which at worst leave room for 7 waves a SIMD in place of 8.
    """
    registers = _round_up(max(kernel.registers, 1), _REGISTER_UNIT)
    reserved = _SHARED_RESERVED[target.backend]
    shared = _round_up(kernel.shared + reserved, _SHARED_UNIT[target.backend])
    blocks = {
        "warps": target.max_warps // kernel.warps,
        "registers": _PARTITIONS * (_REGISTERS // registers) // kernel.warps,
        "shared memory": (target.shared_limit + reserved) // shared if shared else math.inf,
        "blocks": target.max_blocks,
    }
    limit = min(blocks, key=lambda name: blocks[name])
    warps = int(blocks[limit]) * kernel.warps
    return Occupancy(warps, warps / target.max_warps, limit)


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


@dataclass(frozen=True)
class Gpu:
    """Peak rates by the vendor, dense: where only the rate with sparsity is printed, half of it.

    Attributes:
        target: what to compile for it.
        bandwidth: bytes of global memory a second.
        fp32: FLOPs a second in fp32 without tensor cores: our fp32 products are exact.
        tensor: FLOPs a second of tensor cores on fp16 or bf16, summing in fp32.
        source: where these rates are printed.
    """

    target: str
    bandwidth: float
    fp32: float
    tensor: float
    source: str


_NVIDIA = "https://www.nvidia.com/en-us/data-center"
GPUS = {
    "A100 SXM 80 GB": Gpu("sm_80", 2.039e12, 19.5e12, 312e12, f"{_NVIDIA}/a100/"),
    "H100 SXM": Gpu("sm_90", 3.35e12, 67e12, 1979e12 / 2, f"{_NVIDIA}/h100/"),
    "H200 SXM": Gpu("sm_90", 4.8e12, 67e12, 1979e12 / 2, f"{_NVIDIA}/h200/"),
    "L4": Gpu("sm_89", 300e9, 30.3e12, 242e12 / 2, f"{_NVIDIA}/l4/"),
    "RTX 4090": Gpu(
        "sm_89",
        1.008e12,
        82.6e12,
        165.2e12,
        "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
    ),
    "MI300X": Gpu(
        "gfx942",
        5.3e12,
        163.4e12,
        1307.4e12,
        "https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/"
        "amd-instinct-mi300x-data-sheet.pdf",
    ),
}


class Roofline(NamedTuple):
    """A time at peak rates, and which of them it waits for: memory or compute."""

    seconds: float
    limit: str


def roofline(gpu: Gpu, work: Work, *, tensor_cores: bool) -> Roofline:
    """The time of ``work`` if nothing but peak rates held it up, and caches served every re-read
    (Williams et al. 2009, https://doi.org/10.1145/1498765.1498785).

    Args:
        tensor_cores: whether the FLOPs are tile products on tensor cores in 16 bits.
    """
    memory = work.distinct / gpu.bandwidth
    compute = work.flops / (gpu.tensor if tensor_cores else gpu.fp32)
    return Roofline(memory, "memory") if memory >= compute else Roofline(compute, "compute")
