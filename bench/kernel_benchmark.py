"""Every operation, case, pass and provider: is it right, how long does it take, how near is that to
what the device allows.

Right: by correctness.py, in the same run. A row that is not is red: no rate, no speed-up.

Passes: ``forward`` without autograd, as in inference; ``backward`` alone, ``torch.autograd.grad``
on a graph made before the clock starts and kept; ``both``, a forward pass that records and its
backward pass. linear_cross_entropy of gptile and liger-kernel computes its gradients in its forward
pass, so that only ``both`` compares like with like there. ``overhead`` is what a call costs the
host: see :func:`_overhead`.

Cold: calls take turns on copies of the arguments, together four times the last cache where that
fits the memory set aside (:data:`_ROTATED`). Short: on a GPU, forward passes shorter than
:data:`_SHORT` are recorded in a CUDA graph, all copies after one another, which takes the launch
overhead out; where that fails the row says so.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from gptile.bench.correctness import ALLOWED_RATIO, Check, as_tuple, differentiate
from gptile.bench.operations import least_work, nbytes
from gptile.bench.peaks import Peaks, measure_peaks
from gptile.bench.problems import DIRECTIONS, Copies, Problem, Request, tiny
from gptile.bench.providers import BASELINE, OURS, PROVIDERS
from gptile.bench.result import Result
from gptile.bench.timing import (
    Call,
    Speedup,
    Timing,
    graphed,
    interleave,
    peak_memory,
    rotating,
    speedup,
)
from gptile.kernels.jit import HAS_TRITON
from gptile.kernels.launch import host_only
from gptile.model.errors import UserError

Row: TypeAlias = dict[str, Any]
Function: TypeAlias = Callable[..., Any]

_MIB = 2**20
_ROTATED = {"cpu": 512 * _MIB, "cuda": 2048 * _MIB}
"""Bytes of copies of a case's arguments, at most."""
_MOST_COPIES = 128
_SHORT = 100e-6
"""Seconds."""


def benchmark(request: Request, on_step: Callable[[str], object] = lambda _: None) -> Result:
    """Run it all.

    Args:
        on_step: called before each problem with its name, to show progress.

    Raises:
        UserError: for a case that is not there, or where none of the providers runs here.
    """
    problems = request.problems()
    absent = {name: PROVIDERS[name].missing(request.device) for name in request.providers}
    providers = [name for name, why in absent.items() if why is None]
    if not providers:
        raise UserError("; ".join(f"{name}: {why}" for name, why in absent.items()))
    on_step("peak rates")
    peaks = measure_peaks(request.device, request.dtypes)
    rows = []
    for problem in problems:
        on_step(f"{problem.name}, {problem.case}")
        rows += _run(problem, providers, request, peaks)
    if "overhead" in request.passes:
        for name in request.operations:
            on_step(f"{name}, overhead")
            rows += _overhead(name, request)
    cache = last_cache(request.device)
    settings = {
        "passes": request.passes,
        "providers": providers,
        "rounds": request.rounds,
        "quick": request.quick,
        "peaks": peaks.record(),
        "last_cache": cache,
        "rotated": _ROTATED[request.device.type],
        "allowed_ratio": ALLOWED_RATIO,
    }
    notes = [*_why_absent(absent), *_notes(request, cache)]
    return Result("kernels", settings, rows, notes, request.device.type, request.seed)


def _why_absent(absent: dict[str, str | None]) -> Iterator[str]:
    for why in dict.fromkeys(absent.values()):
        if why is not None:
            names = ", ".join(name for name, reason in absent.items() if reason == why)
            yield f"{why}: {names} not timed"


def _notes(request: Request, cache: int | None) -> Iterator[str]:
    rotated = _ROTATED[request.device.type]
    if cache is None:
        yield "the size of the last cache is not known: it may have been warm"
    elif 4 * cache > rotated:
        yield (
            f"arguments rotate over at most {rotated // _MIB} MiB beside a last cache of "
            f"{cache // _MIB} MiB, which may have been warm"
        )
    if request.device.type == "cpu" and any(dtype.itemsize == 2 for dtype in request.dtypes):
        yield "16-bit times on a CPU say little about a GPU's"
    if request.device.type == "cpu" and "overhead" in request.passes:
        yield (
            f"overhead of {OURS} is its wrapper up to the launch, without Triton's own part; of "
            "the others, a whole call on a tiny case; all with one thread"
        )


def last_cache(device: torch.device) -> int | None:
    """Bytes of the largest cache before memory; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    found = [int(path.read_text().strip().removesuffix("K")) * 1024 for path in sizes]
    return max(found, default=None)


def _run(problem: Problem, providers: list[str], request: Request, peaks: Peaks) -> list[Row]:
    """The rows of one problem."""
    why = problem.too_large(request.device)
    if why is not None:
        return [{"subject": problem.subject("all", "all"), "skipped": why}]
    torch.manual_seed(request.seed)
    copies = Copies(problem, request.device)
    runs = _Runs(problem, copies, _functions(problem.name, providers), request, peaks)
    directions = [name for name in DIRECTIONS if name in request.passes]
    if problem.operation.backward is None:
        directions = [name for name in directions if name == "forward"]
    return [row for direction in directions for row in runs.rows(direction)]


def _functions(name: str, providers: Iterable[str]) -> dict[str, Function]:
    loaded = {provider: PROVIDERS[provider].load() for provider in providers}
    return {provider: found[name] for provider, found in loaded.items() if name in found}


class _Runs:
    """One problem, pass by pass."""

    def __init__(
        self,
        problem: Problem,
        copies: Copies,
        functions: dict[str, Function],
        request: Request,
        peaks: Peaks,
    ) -> None:
        self.problem, self.copies, self.functions = problem, copies, functions
        self.request, self.peaks, self.device = request, peaks, request.device
        self.check = Check(problem.operation, copies.first, problem.dtype)
        self.moved = problem.operation.moved(copies.first)

    def rows(self, direction: str) -> list[Row]:
        """Of every provider in one pass."""
        rows: dict[str, Row] = {}
        with torch.set_grad_enabled(direction != "forward"):
            for provider, function in self.functions.items():
                rows[provider] = {"subject": self.problem.subject(direction, provider)}
                try:
                    rows[provider] |= self._checked(function, direction)
                except Exception as error:
                    if provider in (OURS, BASELINE):
                        raise
                    rows[provider]["skipped"] = _reason(error)
            running = [provider for provider, row in rows.items() if "skipped" not in row]
            held = sum(rows[provider]["peak_memory"] for provider in running)
            n_copies = self._n_copies(held if direction == "backward" else 0)
            timings = self._time(direction, running, n_copies, rows)
        self._measure(direction, rows, timings)
        for provider in running:
            rows[provider]["rotated"] = n_copies * self.moved
        return [*rows.values()]

    def _checked(self, function: Function, direction: str) -> Row:
        verdict = self.check.judge(function, direction)
        (call,) = self._calls(function, direction, 1)
        return {
            "ok": verdict.ok,
            **verdict._asdict(),
            "peak_memory": peak_memory(call, self.device),
        }

    def _calls(self, function: Function, direction: str, n: int) -> list[Call]:
        """One pass on each of ``n`` copies of the arguments."""
        forwards = [partial(function, **given) for given in self.copies.arguments(n)]
        if direction == "forward":
            return [*forwards]
        backward = self.problem.operation.backward
        assert backward is not None
        backwards = [
            partial(differentiate, given=given, of=backward.of, gradients=gradients)
            for given, gradients in zip(
                self.copies.arguments(n), self.copies.gradients(n), strict=True
            )
        ]
        pairs = zip(forwards, backwards, strict=True)
        if direction == "both":
            return [partial(_both, forward, back) for forward, back in pairs]
        return [partial(back, as_tuple(forward()), keep=True) for forward, back in pairs]

    def _n_copies(self, held: int) -> int:
        """Enough to leave the cache; ``held`` are the bytes that go with each."""
        cache, most = last_cache(self.device), _ROTATED[self.device.type]
        wanted = min(most, 4 * cache) if cache else most
        size = nbytes(self.copies.first.values()) + held
        return min(_MOST_COPIES, math.ceil(wanted / size))

    def _time(
        self, direction: str, running: list[str], n_copies: int, rows: dict[str, Row]
    ) -> dict[str, Timing]:
        variants: dict[str, Call] = {}
        calls_of = dict.fromkeys(running, 1)
        for provider in running:
            call = rotating(self._calls(self.functions[provider], direction, n_copies))
            variants[provider] = call
            if direction == "forward" and _is_short(call, self.device):
                try:
                    variants[provider] = graphed(call, n_copies)
                    calls_of[provider] = n_copies
                except RuntimeError as error:
                    rows[provider]["note"] = f"no CUDA graph: {_reason(error)}"
        timings = interleave(variants, rounds=self.request.rounds, device=self.device)
        return {
            name: Timing(tuple(sample / calls_of[name] for sample in timing.samples))
            for name, timing in timings.items()
        }

    def _measure(self, direction: str, rows: dict[str, Row], timings: dict[str, Timing]) -> None:
        """Add what the times say; rates and speed-ups only of what is right."""
        problem = self.problem
        work = least_work(
            problem.operation, problem.shape, self.copies.first, self.copies.outputs, direction
        )
        least, limit = self.peaks.roofline(*work, problem.dtype)
        right = {name: timing for name, timing in timings.items() if rows[name]["ok"]}
        for name, timing in timings.items():
            rows[name] |= _times(timing)
            if name not in right:
                continue
            rows[name] |= {
                "bytes": work[0],
                "flops": work[1],
                "bytes_per_second": work[0] / timing.median,
                "flops_per_second": work[1] / timing.median,
                "roofline": least / timing.median,
                "limit": limit,
            }
            if name != BASELINE and BASELINE in right:
                rows[name]["speedup"] = _record(speedup(right[BASELINE], timing))
            others = {other: found for other, found in right.items() if other != name}
            if others:
                best = min(others, key=lambda other: others[other].median)
                rows[name]["best_other"] = best
                rows[name]["speedup_over_best"] = _record(speedup(others[best], timing))


def _both(forward: Call, back: Callable[[tuple[torch.Tensor, ...]], object]) -> object:
    return back(as_tuple(forward()))


def _is_short(call: Call, device: torch.device) -> bool:
    """Whether a CUDA graph is called for."""
    if device.type != "cuda":
        return False
    return interleave({"": call}, rounds=3, device=device)[""].median < _SHORT


def _times(timing: Timing) -> Row:
    quantiles = {f"p{percent}": timing.quantile(percent) for percent in (20, 50, 80)}
    return {"seconds": timing.samples, **quantiles, "spread": timing.spread}


def _record(found: Speedup) -> Row:
    return {**found._asdict(), "resolved": found.resolved}


def _reason(error: Exception) -> str:
    first, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first}"


@contextmanager
def _host_alone() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # or a busy machine's threads wait for each other
    try:
        with host_only():
            yield
    finally:
        torch.set_num_threads(threads)


def _overhead(name: str, request: Request) -> list[Row]:
    """What a call of an operation costs the host, whatever the sizes: on a tiny case, calls issued
    one after another and none waited for.

    On a GPU that is Python, PyTorch's dispatch and the launch. On a CPU our wrapper stops short of
    the launch (:func:`~gptile.kernels.launch.host_only`); the others run, on a handful of numbers
    and with one thread.
    """
    problem = tiny(name, request.dtypes[0])
    on_cpu = request.device.type == "cpu"
    running = [
        provider
        for provider in request.providers
        if PROVIDERS[provider].missing(request.device) is None
        or (provider == OURS and on_cpu and HAS_TRITON)
    ]
    given = Copies(problem, request.device).first
    rows: dict[str, Row] = {}
    variants: dict[str, Call] = {}
    with _host_alone() if on_cpu else nullcontext(), torch.no_grad():
        for provider, function in _functions(name, running).items():
            rows[provider] = {"subject": problem.subject("overhead", provider)}
            try:
                function(**given)
                variants[provider] = partial(function, **given)
            except Exception as error:
                if provider in (OURS, BASELINE):
                    raise
                rows[provider]["skipped"] = _reason(error)
        # By the host's clock, and too few calls to fill the queue of launches.
        timings = interleave(variants, rounds=request.rounds, sample_seconds=0.002)
    for provider, timing in timings.items():
        rows[provider] |= {"ok": None, **_times(timing)}
    return [*rows.values()]
