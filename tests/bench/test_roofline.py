"""Occupancy and rooflines against calculations by hand."""

import pytest

from gptile.bench.compiler import TARGETS, Compiled
from gptile.bench.roofline import GPUS, occupancy, roofline
from gptile.kernels.launch import Work

# target, warps, registers a thread, shared bytes; resident blocks, limit.
OCCUPANCY = {
    # 64 K registers / (128 threads * 64) = 8.
    "registers": ("sm_80", 4, 64, 0, 8, "registers"),
    "half the registers": ("sm_80", 4, 32, 0, 16, "warps"),
    # 37 become 40, of which a partition's 512 hold 12: 48 warps, where 64 K / (128 * 37) is 13.
    "registers come in eights": ("sm_80", 4, 37, 0, 12, "registers"),
    # 168 a thread: 3 warps a partition, 12 in all, which hold one block of 8 (not 1.5).
    "whole blocks": ("sm_90", 8, 168, 0, 1, "registers"),
    # 96 fit 5 times into each of 4 partitions; a file in one piece would hold 21.
    "partitions": ("sm_90", 1, 96, 0, 20, "registers"),
    "most registers": ("sm_86", 8, 255, 0, 1, "registers"),
    "fewer warps than sm_80": ("sm_86", 4, 32, 0, 12, "warps"),
    "blocks": ("sm_86", 1, 16, 0, 16, "blocks"),
    "more blocks": ("sm_89", 1, 16, 0, 24, "blocks"),
    "as many blocks as sm_80": ("sm_100", 1, 16, 0, 32, "blocks"),
    "consumer Blackwell": ("sm_120", 1, 16, 0, 24, "blocks"),
    # 164 KB / 41 KB would be 4, but each block reserves 1 KB more.
    "reserved memory": ("sm_80", 4, 32, 41 * 1024, 3, "shared memory"),
    # 228 KB / (56 + 1) KB = 4 exactly, and one byte more is another 128.
    "just fits": ("sm_90", 4, 32, 56 * 1024, 4, "shared memory"),
    "just does not": ("sm_90", 4, 32, 56 * 1024 + 1, 3, "shared memory"),
    "all of it": ("sm_120", 4, 32, 99 * 1024, 1, "shared memory"),
    "more than there is": ("sm_120", 4, 32, 99 * 1024 + 1, 0, "shared memory"),
    # 512 VGPRs / 128 = 4 waves on each of 4 SIMDs.
    "VGPRs": ("gfx90a", 4, 128, 0, 4, "registers"),
    "VGPRs come in eights": ("gfx942", 4, 129, 0, 3, "registers"),
    "8 waves a SIMD": ("gfx942", 4, 24, 0, 8, "warps"),
    # 6500 become 6656: 64 KiB hold 9, not 10.
    "LDS": ("gfx942", 1, 24, 6500, 9, "shared memory"),
    "more LDS than there is": ("gfx90a", 4, 24, 64 * 1024 + 1, 0, "shared memory"),
}
MOST_WARPS = {"sm_80": 64, "sm_86": 48, "sm_89": 48, "sm_90": 64, "sm_100": 64, "sm_120": 48}
MOST_WARPS |= {"gfx90a": 32, "gfx942": 32}


@pytest.mark.parametrize("name", OCCUPANCY)
def test_occupancy_is_the_hand_calculation(name: str) -> None:
    target, warps, registers, shared, blocks, limit = OCCUPANCY[name]
    kernel = Compiled("kernel", (1,), warps, registers, 0, shared, "none", {})
    found = occupancy(TARGETS[target], kernel)
    assert found.warps == blocks * warps
    assert found.share == found.warps / MOST_WARPS[target]
    assert found.limit == limit


def test_a_roofline_is_the_longer_time_without_re_reads() -> None:
    h100 = GPUS["H100 SXM"]
    # 3.35 TB/s move 3.35 MB in a microsecond; 989.5 TFLOP/s of tensor cores, 67 in fp32.
    assert roofline(h100, Work(9_000_000, 1_000_000, 3_350_000, 1), tensor_cores=True) == (
        pytest.approx(1e-6),
        "memory",
    )
    flops = Work(9_000_000, 1_000_000, 3_350_000, 2 * 989_500_000)
    assert roofline(h100, flops, tensor_cores=True) == (pytest.approx(2e-6), "compute")
    flops = Work(9_000_000, 1_000_000, 3_350_000, 2 * 67_000_000)
    assert roofline(h100, flops, tensor_cores=True) == (pytest.approx(1e-6), "memory")
    assert roofline(h100, flops, tensor_cores=False) == (pytest.approx(2e-6), "compute")


# fp32 lanes, boost clock in GHz, memory bus in bits, Gbit/s a pin, tensor-core FLOPs a lane's FLOP.
HARDWARE = {
    "A100 SXM 80 GB": (108 * 64, 1.41, 5120, 3.186, 16),
    "H100 SXM": (132 * 128, 1.98, 5120, 5.23, 14.8),  # tensor cores at 1.83 GHz
    "H200 SXM": (132 * 128, 1.98, 6144, 6.25, 14.8),
    "L4": (58 * 128, 2.04, 192, 12.5, 4),
    "RTX 4090": (128 * 128, 2.52, 384, 21, 2),
    "MI300X": (304 * 64 * 2, 2.1, 8192, 5.2, 8),  # two packed fp32 a lane
}


@pytest.mark.parametrize("name", GPUS)
def test_peaks_follow_from_the_hardware(name: str) -> None:
    """The datasheets' numbers, dense, are lanes times clock: a slip or a sparse rate is not."""
    gpu = GPUS[name]
    lanes, clock, bus, rate, tensor = HARDWARE[name]
    assert gpu.fp32 == pytest.approx(2 * lanes * clock * 1e9, rel=0.005)
    assert gpu.bandwidth == pytest.approx(bus / 8 * rate * 1e9, rel=0.005)
    assert gpu.tensor == pytest.approx(tensor * gpu.fp32, rel=0.005)
    assert gpu.target in TARGETS
    assert gpu.source.startswith("https://")
