"""The comparison of two results against SciPy, against counting by hand, and on samples whose truth
is known: how often it sees a difference, and how often one that is not there."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from gptile.bench.result import Result, save_record
from gptile.bench.significance import (
    Side,
    _distribution,
    adjusted,
    compare,
    load_side,
    mann_whitney,
    subject_name,
)
from gptile.model.errors import UserError

times = st.floats(1e-6, 1e3)
samples = st.lists(times, min_size=1, max_size=9)
A = [1.0, 1.02, 0.99, 1.01, 1.03]


def record(*rows: dict[str, Any], kind: str = "ladder", **environment: Any) -> dict[str, Any]:
    found = Result(kind, {"model": "demo", "rounds": 5}, list(rows)).record()
    found["environment"] |= environment
    return found


def row(name: str, seconds: list[float] | None = None, **measures: Any) -> dict[str, Any]:
    timed = {} if seconds is None else {"seconds": seconds}
    return {"subject": {"rung": name}, **timed, **measures}


def verdicts(a: list[dict], b: list[dict], alpha: float = 0.05) -> dict[str, str]:
    found = compare(Side("a", [record(*a)]), Side("b", [record(*b)]), alpha)
    return {row["name"]: row["verdict"] for row in found["rows"]}


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 4), (2, 3), (4, 4), (5, 3)])
def test_the_distribution_of_u_is_that_of_counting_every_order(n: int, m: int) -> None:
    counts = [0] * (n * m + 1)
    for first in itertools.combinations(range(n + m), n):
        rest = [place for place in range(n + m) if place not in first]
        counts[sum(x > y for x in first for y in rest)] += 1
    assert _distribution(n, m) == pytest.approx([count / sum(counts) for count in counts])


@pytest.mark.parametrize(("n", "m"), [(3, 3), (5, 7), (8, 8)])
def test_the_least_p_is_that_of_sides_apart(n: int, m: int) -> None:
    a, b = [1 + i / 100 for i in range(n)], [2 + i / 100 for i in range(m)]
    found = mann_whitney(a, b, 0.05)
    assert found.least_p == pytest.approx(stats.mannwhitneyu(a, b, method="exact").pvalue)
    assert found.p == pytest.approx(found.least_p)


@given(samples, samples)
def test_p_is_scipys_and_the_ratio_is_within_its_interval(a: list[float], b: list[float]) -> None:
    found = mann_whitney(a, b, 0.05)
    assert found.p == stats.mannwhitneyu(a, b).pvalue
    assert found.low <= found.ratio <= found.high
    ratios = [y / x for x in a for y in b]
    assert found.ratio == pytest.approx(np.median(ratios))


@given(st.lists(times, min_size=4, max_size=8, unique=True), st.integers(0, 2**32 - 1))
def test_the_interval_excludes_1_just_where_the_exact_test_does(a: list[float], seed: int) -> None:
    b = (np.random.default_rng(seed).permutation(a) * 1.37).tolist()
    assume(len({*a, *b}) == len(a) + len(b))  # ties have no exact test
    found = mann_whitney(a, b, 0.05)
    p = stats.mannwhitneyu(a, b, method="exact").pvalue
    assert (p <= 0.05) == (not found.low <= 1 <= found.high)


def test_swapping_the_sides_turns_the_ratio_over() -> None:
    b = [0.9, 0.95, 0.97, 1.0, 0.96]
    one, other = mann_whitney(A, b, 0.05), mann_whitney(b, A, 0.05)
    assert one.ratio == pytest.approx(1 / other.ratio)
    assert one.low == pytest.approx(1 / other.high)
    assert one.p == pytest.approx(other.p)


def test_the_interval_holds_the_true_ratio_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    trials, held = 1000, 0
    for _ in range(trials):
        a, b = random.lognormal(0, 0.1, 8), random.lognormal(np.log(1.1), 0.1, 8)
        found = mann_whitney(a.tolist(), b.tolist(), 0.05)
        held += found.low <= 1.1 <= found.high
    assert 0.94 <= held / trials <= 0.98  # 95 %, or a little more: U is discrete


def test_a_false_alarm_is_as_rare_as_alpha_over_all_rows() -> None:
    random = np.random.default_rng(1)
    trials = alarms = 0
    for _ in range(150):
        sides = [
            [row(str(i), random.lognormal(0, 0.1, 9).tolist()) for i in range(20)] for _ in "ab"
        ]
        found = verdicts(*sides)
        trials += 1
        alarms += any(verdict in ("faster", "slower") for verdict in found.values())
    assert alarms / trials <= 0.09  # 0.05, and two standard deviations of 150 trials


def test_without_adjustment_false_alarms_would_be_common() -> None:
    """What the test before this one would miss nothing of."""
    random = np.random.default_rng(1)
    alarms = sum(
        min(
            stats.mannwhitneyu(random.lognormal(0, 0.1, 9), random.lognormal(0, 0.1, 9)).pvalue
            for _ in range(20)
        )
        < 0.05
        for _ in range(100)
    )
    assert alarms > 40


def test_a_difference_larger_than_the_noise_is_seen() -> None:
    random = np.random.default_rng(2)
    seen = 0
    for _ in range(100):
        a = [row("x", random.lognormal(0, 0.02, 7).tolist())]
        b = [row("x", random.lognormal(np.log(0.92), 0.02, 7).tolist())]
        seen += verdicts(a, b)["x"] == "faster"
    assert seen >= 98


def test_p_values_are_adjusted_as_by_hand() -> None:
    # Sorted 0.01 0.02 0.04 0.9: times 4 / rank, then the least from there on.
    found = adjusted([0.04, 0.01, 0.9, 0.02])
    assert found == pytest.approx([4 / 3 * 0.04, 0.04, 0.9, 0.04])
    assert adjusted([]) == []


def test_the_verdicts() -> None:
    a = [row(name, A) for name in ("same", "faster", "slower", "close")] + [row("few", A[:3])]
    b = [
        row("same", A),
        row("faster", [x / 2 for x in A]),
        row("slower", [2 * x for x in A]),
        row("close", [1.004 * x for x in A]),
        row("few", [9 * x for x in A[:3]]),
    ]
    assert verdicts(a, b) == {
        "same": "no difference shown",
        "faster": "faster",
        "slower": "slower",
        "close": "no difference shown",
        "few": "too few samples",
    }
    assert verdicts(a, b, alpha=0.005) == dict.fromkeys(verdicts(a, b), "too few samples")


@pytest.mark.parametrize(("ok_a", "ok_b"), [(True, False), (False, True), (False, False)])
def test_a_red_row_is_never_faster(ok_a: bool, ok_b: bool) -> None:
    a, b = row("x", A, ok=ok_a, error=0.1), row("x", [x / 2 for x in A], ok=ok_b, error=0.3)
    (found,) = compare(Side("a", [record(a)]), Side("b", [record(b)]), 0.05)["rows"]
    assert found["verdict"] == "red"
    assert found["red"] == [not ok_a, not ok_b]
    assert "ratio" not in found
    assert found["error"] == [0.1, 0.3]


@pytest.mark.parametrize("seconds", [None, [], [1.0, None], [1.0, 0.0], ["1.0"], "fast"])
def test_what_is_no_list_of_times_counts_as_not_timed(seconds: Any) -> None:
    broken = {"subject": {"rung": "x"}, "seconds": seconds}
    assert verdicts([row("x", A)], [broken]) == {"x": "not timed"}


def test_rows_are_matched_by_subject_in_any_order_and_the_others_named() -> None:
    a = Side("a", [record(row("x", A), row("gone", A))])
    swapped = {"subject": {"b": 1, "a": "y"}}
    b = Side("b", [record(row("new", A), row("x", A), swapped)])
    found = compare(a, b, 0.05)
    assert [row["name"] for row in found["rows"]] == ["x"]
    assert found["only_a"] == ["gone"]
    assert found["only_b"] == ["new", "y, b 1"]
    assert subject_name(swapped) == subject_name({"subject": {"a": "y", "b": 1}})


def test_two_rows_about_one_subject_are_refused() -> None:
    twice = Side("a.json", [record(row("x", A), row("x", A))])
    with pytest.raises(UserError, match=r"a\.json: more than one row is about x"):
        compare(twice, twice, 0.05)


def test_what_is_not_the_same_is_listed() -> None:
    a = record(row("x", A))
    b = json.loads(json.dumps(a))
    assert compare(Side("a", [a]), Side("b", [b]), 0.05)["differences"] == []
    b["environment"]["cpu"]["threads"] = 99
    b["environment"]["versions"]["torch"] = "9.9"
    b["environment"]["commit"] = "abc"
    b["settings"]["rounds"] = 7
    b["environment"]["date"] = "another day"  # no difference worth a word
    found = compare(Side("a", [a]), Side("b", [b]), 0.05)
    assert {difference["what"] for difference in found["differences"]} == {
        *("cpu.threads", "version of torch", "commit", "setting rounds")
    }
    assert found["same_machine"]
    b["environment"]["cpu"]["name"] = "another CPU"
    assert not compare(Side("a", [a]), Side("b", [b]), 0.05)["same_machine"]


def test_of_several_runs_each_is_one_sample(tmp_path: Path) -> None:
    """Within a run all is steady, between runs it is not: seven runs a side show nothing where one
    a side would swear to it."""
    random = np.random.default_rng(3)
    for side in "ab":
        (tmp_path / side).mkdir()
        for run in range(7):
            luck = random.lognormal(0, 0.1)
            found = record(row("x", [luck * (1 + i / 1000) for i in range(9)]))
            save_record(found, tmp_path / side / f"{run}.json")
    many = compare(load_side(tmp_path / "a"), load_side(tmp_path / "b"), 0.05)
    assert many["runs"] == [7, 7]
    assert many["rows"][0]["samples"] == [7, 7]
    assert many["rows"][0]["verdict"] == "no difference shown"
    one = compare(load_side(tmp_path / "a" / "0.json"), load_side(tmp_path / "b" / "0.json"), 0.05)
    assert one["rows"][0]["verdict"] in ("faster", "slower")


def test_sides_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    one, other = record(row("x", A)), record(row("x", A), kind="model")
    with pytest.raises(UserError, match="a is of ladder and b of model"):
        compare(Side("a", [one]), Side("b", [other]), 0.05)
    with pytest.raises(UserError, match="a has 2 runs and b 1"):
        compare(Side("a", [one, one]), Side("b", [one]), 0.05)
    with pytest.raises(UserError, match=r"no \.json files"):
        load_side(tmp_path)
    save_record(one, tmp_path / "1.json")
    save_record(other, tmp_path / "2.json")
    with pytest.raises(UserError, match="one kind a directory"):
        load_side(tmp_path)
