"""The peak rates of a device, measured on it: a roofline of datasheet numbers flatters nobody, but
is not reached by anybody either.

Bandwidth: a large copy, which reads and writes, and a large sum, which only reads, over buffers of
several sizes. A CPU moves more than is counted in a copy (what is written is fetched first), and
its last cache may be larger than any buffer, hundreds of megabytes shared with other machines: what
is measured is what a program gets. Compute: square matrix products in each dtype, fp32 without
tf32 unless PyTorch is set to it. All threads take part. Each rate is that of the shortest time
seen, and so an upper bound: noise only lowers it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gptile.bench.timing import Call, interleave

_MIB = 2**20
_BUFFER_BYTES = {"cpu": (64 * _MIB, 256 * _MIB), "cuda": (256 * _MIB, 1024 * _MIB)}
_PRODUCT_SIZES = {"cpu": (512, 1024, 2048), "cuda": (2048, 4096, 8192)}
_LONG = 0.2
"""Seconds of one product after which no larger one is tried: 16-bit products on a CPU without
instructions for them are a hundred times slower than fp32's."""
_ROUNDS = 5


@dataclass(frozen=True)
class Peaks:
    """Rates a second.

    Attributes:
        copy: bytes read plus bytes written by a copy.
        read: bytes read by a sum.
        matmul: FLOPs of a matrix product by dtype, a multiply-add being two.
    """

    copy: float
    read: float
    matmul: dict[torch.dtype, float]

    @property
    def bandwidth(self) -> float:
        """Bytes a second: the higher of the two, as most of our operations read more than they
        write."""
        return max(self.copy, self.read)

    def roofline(self, n_bytes: int, flops: int, dtype: torch.dtype) -> tuple[float, str]:
        """The seconds that so many bytes and FLOPs take at the peaks, whichever take longer, and
        which of them that is: ``memory`` or ``compute``."""
        memory, compute = n_bytes / self.bandwidth, flops / self.matmul[dtype]
        return (memory, "memory") if memory >= compute else (compute, "compute")

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "copy": self.copy,
            "read": self.read,
            "matmul": {
                str(dtype).removeprefix("torch."): rate for dtype, rate in self.matmul.items()
            },
        }


def measure_peaks(device: torch.device | str, dtypes: Iterable[torch.dtype]) -> Peaks:
    """The peaks of ``device``, with products in ``dtypes``; some seconds, and up to half a gigabyte
    on a CPU, two on a GPU."""
    device = torch.device(device)
    copied, read = [], []
    for size in _BUFFER_BYTES[device.type]:
        source, target = torch.ones(2, size // 4, device=device)
        copied.append(2 * size / _shortest(partial(target.copy_, source), device))
        read.append(size / _shortest(source.sum, device))
    return Peaks(max(copied), max(read), {dtype: _product_rate(device, dtype) for dtype in dtypes})


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    best = 0.0
    for n in _PRODUCT_SIZES[device.type]:
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        seconds = _shortest(partial(torch.mm, a, b), device)
        best = max(best, 2 * n**3 / seconds)
        if seconds > _LONG:
            break
    return best


def _shortest(call: Call, device: torch.device) -> float:
    timing = interleave({"": call}, rounds=_ROUNDS, warmup=1, device=device)[""]
    return min(timing.samples)
