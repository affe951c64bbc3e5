"""How long something takes, so that two such times can be compared.

Variants run in turn, round by round, in an order shuffled each time: whatever the machine does
meanwhile (clocks, neighbours, temperature) does it to all of them. A round gives one sample a
variant, the mean of as many calls as make it long enough to measure. A speed-up is the median of
the rounds' ratios with its 95 % interval, and where that interval holds 1 there is none to speak
of. Compilation and first calls are never counted.
"""

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch.profiler import ProfilerActivity, profile

Call: TypeAlias = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Seconds a call: one sample a round, in the order of the rounds."""

    samples: tuple[float, ...]

    def quantile(self, percent: int) -> float:
        """By linear interpolation; 50 is the median."""
        if len(self.samples) == 1:
            return self.samples[0]
        return statistics.quantiles(self.samples, n=100, method="inclusive")[percent - 1]

    @property
    def median(self) -> float:
        return self.quantile(50)

    @property
    def spread(self) -> float:
        """From the 20 % to the 80 % quantile, as a share of the median."""
        return (self.quantile(80) - self.quantile(20)) / self.median


class Speedup(NamedTuple):
    """How many times as fast: the median of the rounds' ratios and its interval."""

    ratio: float
    low: float
    high: float

    @property
    def resolved(self) -> bool:
        """Whether the difference is larger than the noise."""
        return self.low > 1 or self.high < 1

    def __str__(self) -> str:
        within = "" if self.resolved else ", within noise"
        return f"{self.ratio:.2f}x ({self.low:.2f}-{self.high:.2f}{within})"


def speedup(baseline: Timing, other: Timing) -> Speedup:
    """Of ``other`` over ``baseline``, both from one :func:`interleave`: paired by round."""
    ratios = [b / o for b, o in zip(baseline.samples, other.samples, strict=True)]
    return Speedup(statistics.median(ratios), *median_interval(ratios))


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """A 95 % confidence interval of the median, whatever the distribution.

    From the k-th smallest to the k-th largest sample, with the largest k that still brackets the
    median at least 95 times in 100 (a binomial probability). Fewer than six samples never do: then
    it is their whole range.
    """
    ordered = sorted(samples)
    n, dropped = len(ordered), 0
    tail = 0.5**n  # the chance that at most `dropped` samples fall below the median
    while 2 * (tail := tail + math.comb(n, dropped + 1) / 2**n) <= 0.05:
        dropped += 1
    return ordered[dropped], ordered[n - 1 - dropped]


def interleave(
    variants: Mapping[str, Call],
    *,
    rounds: int = 7,
    sample_seconds: float = 0.01,
    warmup: int = 2,
    device: torch.device | str = "cpu",
    seed: int = 0,
    on_round: Callable[[int], object] = lambda _: None,
) -> dict[str, Timing]:
    """Time the variants against each other, as the module's docstring says.

    Args:
        variants: what to call, by name. To read memory rather than caches, each call has to take
            the next of several buffers: :func:`rotating`.
        rounds: samples a variant.
        sample_seconds: a sample is so many calls that it takes about this long, or one call.
        warmup: uncounted calls of each before the first round.
        device: on CUDA, times are the GPU's own between two events.
        seed: of the order.
        on_round: called with the number of rounds done, to show progress.
    """
    clock = _cuda_seconds if torch.device(device).type == "cuda" else _cpu_seconds
    for call in variants.values():
        for _ in range(warmup):
            call()
    n_calls = {
        name: max(1, math.ceil(sample_seconds / max(clock(call, 1), 1e-9)))
        for name, call in variants.items()
    }
    order = random.Random(seed)
    names = list(variants)
    samples: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()  # a collection would land in somebody's sample
    try:
        for done in range(1, rounds + 1):
            order.shuffle(names)
            for name in names:
                samples[name].append(clock(variants[name], n_calls[name]))
            on_round(done)
    finally:
        gc.enable()
    return {name: Timing(tuple(samples[name])) for name in variants}


def _cpu_seconds(call: Call, n: int) -> float:
    started = time.perf_counter()
    for _ in range(n):
        call()
    return (time.perf_counter() - started) / n


def _cuda_seconds(call: Call, n: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(n):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000 / n


def rotating(calls: Sequence[Call]) -> Call:
    """A call that runs the next of ``calls`` each time: the same work on other buffers."""
    index = 0

    def call() -> object:
        nonlocal index
        index = (index + 1) % len(calls)
        return calls[index]()

    return call


def graphed(call: Call, n: int = 1) -> Call:
    """``n`` calls recorded in a CUDA graph: without the launch overhead, for kernels shorter than
    it. Run ``call`` once or twice before, so that nothing is compiled while recording."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(n):
            call()
    return graph.replay


def peak_memory(call: Call, device: torch.device | str = "cpu") -> int:
    """The most bytes of tensors that one call has allocated at a time, beyond what there was.

    On CUDA by the allocator's count, on the CPU by the profiler's; temporaries that a library
    allocates for itself are not seen.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = call()
    del kept
    held = peak = 0
    events = profiler.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
