"""Quantiles, intervals and pairing by hand; what is counted, by a clock that only calls advance."""

import gc
import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from gptile.bench import timing
from gptile.bench.timing import (
    Timing,
    interleave,
    median_interval,
    peak_memory,
    rotating,
    speedup,
)


def test_quantiles_lie_between_samples() -> None:
    found = Timing((5.0, 1.0, 3.0, 2.0, 4.0, 6.0))
    assert [found.quantile(percent) for percent in (20, 50, 80)] == [2.0, 3.5, 5.0]
    assert found.median == 3.5
    assert found.spread == pytest.approx(3 / 3.5)
    assert Timing((7.0,)).quantile(80) == 7.0
    assert Timing((7.0,)).spread == 0


# From tables of confidence intervals of the median: ranks of the two ends, counted from 1.
RANKS = {1: (1, 1), 2: (1, 2), 5: (1, 5), 6: (1, 6), 8: (1, 8), 9: (2, 8), 10: (2, 9)}
RANKS |= {12: (3, 10), 15: (4, 12), 20: (6, 15), 25: (8, 18)}


@pytest.mark.parametrize("n", RANKS)
def test_the_interval_of_the_median_has_the_ranks_of_the_tables(n: int) -> None:
    shuffled = sorted(range(1, n + 1), key=lambda rank: rank * 7 % 11)
    assert median_interval(shuffled) == RANKS[n]


@given(n=st.integers(6, 200))
def test_the_interval_is_the_narrowest_that_misses_at_most_five_in_a_hundred(n: int) -> None:
    low, high = median_interval(range(n))
    assert low + high == n - 1
    assert 2 * binom.cdf(low, n, 0.5) <= 0.05  # at most `low` samples below the median
    assert 2 * binom.cdf(low + 1, n, 0.5) > 0.05


def test_a_speedup_is_paired_by_round() -> None:
    drifting = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
    found = speedup(Timing(drifting), Timing(tuple(s / 1.1 for s in drifting)))
    assert found == pytest.approx((1.1, 1.1, 1.1))
    assert found.resolved
    assert str(found) == "1.10x (1.10-1.10)"
    # The same times in another order of rounds say nothing.
    assert not speedup(Timing(drifting), Timing(drifting[::-1])).resolved
    with pytest.raises(ValueError, match="zip"):
        speedup(Timing((1.0, 2.0)), Timing((1.0,)))


def test_a_difference_within_the_noise_is_called_that() -> None:
    found = speedup(Timing((1.0,) * 7), Timing((0.8, 1.2, 0.9, 1.1, 1.0, 0.95, 1.05)))
    assert not found.resolved
    assert str(found).endswith(", within noise)")
    slower = speedup(Timing((1.0,) * 7), Timing((2.0,) * 7))
    assert slower.resolved
    assert slower.ratio == 0.5


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[[], None]]:
    """Makes calls that take as long as they say, and the first of each a second more."""
    now = 0.0
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)

    def make(seconds: float, log: list[str] | None = None, name: str = "") -> Callable[[], None]:
        counter = itertools.count()

        def call() -> None:
            nonlocal now
            now += seconds + (0 if next(counter) else 1)
            if log is not None:
                log.append(name)

        return call

    return make


def test_a_sample_is_the_mean_of_enough_calls_and_first_calls_count_for_nothing(
    work: Callable,
) -> None:
    log: list[str] = []
    variants = {"short": work(0.003, log, "short"), "long": work(0.5, log, "long")}
    done: list[int] = []
    found = interleave(variants, rounds=5, sample_seconds=0.01, warmup=1, on_round=done.append)
    assert found["short"].samples == pytest.approx((0.003,) * 5)
    assert found["long"].samples == pytest.approx((0.5,) * 5)
    # A call to warm up, one to see how long it takes, then 4 or 1 a round.
    assert (log.count("short"), log.count("long")) == (1 + 1 + 5 * 4, 1 + 1 + 5)
    assert done == [1, 2, 3, 4, 5]


def test_every_round_has_every_variant_in_an_order_of_its_own(work: Callable) -> None:
    def orders(seed: int) -> list[tuple[str, ...]]:
        log: list[str] = []
        variants = {name: work(1.0, log, name) for name in "abcd"}
        interleave(variants, rounds=20, warmup=1, seed=seed)
        rounds = log[2 * 4 :]
        return [tuple(rounds[i : i + 4]) for i in range(0, len(rounds), 4)]

    found = orders(0)
    assert all(sorted(order) == [*"abcd"] for order in found)
    assert len(set(found)) > 10
    assert found == orders(0) != orders(1)


def test_garbage_is_not_collected_while_a_clock_runs(work: Callable) -> None:
    enabled: list[bool] = []
    interleave({"": lambda: enabled.append(gc.isenabled())}, rounds=2, sample_seconds=0)
    assert enabled[-1] is False
    assert gc.isenabled()

    def fail() -> None:
        if not gc.isenabled():
            raise RuntimeError

    with pytest.raises(RuntimeError):
        interleave({"": fail})
    assert gc.isenabled()


def test_rotating_takes_each_call_in_turn() -> None:
    call = rotating([lambda n=n: n for n in range(3)])
    found = [call() for _ in range(6)]
    assert sorted(found[:3]) == [0, 1, 2]
    assert found[3:] == found[:3]


def test_peak_memory_is_what_lives_at_a_time() -> None:
    before = torch.ones(10_000)

    def together() -> None:
        a = torch.empty(1000)
        b = torch.empty(2000)
        del a, b
        torch.empty(500)

    def after_another() -> None:
        a = torch.empty(1000)
        del a
        torch.empty(2000)

    assert peak_memory(together) == 4 * 3000
    assert peak_memory(after_another) == 4 * 2000
    assert peak_memory(lambda: torch.empty(700)) == 4 * 700  # what is returned counts too
    assert peak_memory(lambda: before.sum()) < 100
