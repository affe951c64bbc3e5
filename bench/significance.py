"""Is B faster than A? Two results of the same benchmark, row by row.

The samples of the two sides are independent, not paired, so the test is Mann and Whitney's (1947),
which asks nothing of their distribution. The ratio of times is the median over all pairs of a
sample of B and one of A (Hodges and Lehmann, 1963), and its interval is the test turned round: all
ratios that it would not reject. With many rows some differ by luck, so p values are adjusted
(Benjamini and Hochberg, 1995): of the rows called faster or slower, no more than a share of alpha
is expected to be luck, and where nothing differs at all, the chance of any such row is alpha.

A test sees what varied between its samples, and no more. Those of one run share its process, its
memory layout and the machine's mood, so a difference between two runs may be real and still say
nothing about the code. Give several runs a side, a directory each: then a run counts as one sample,
its median.
"""

import functools
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from gptile.bench.reading import check, number, timing
from gptile.bench.result import load_record
from gptile.model.errors import UserError

Record: TypeAlias = dict[str, Any]
Row: TypeAlias = dict[str, Any]

_MACHINE = ("device", "system", "cpu.name", "cpu.cores", "cpu.capability", "gpu.name")
_DIFFERING = (*_MACHINE, "cpu.threads", "gpu.driver", "gpu.clock_limit", "gpu.power_limit")


@dataclass(frozen=True)
class Comparison:
    """Times of B against those of A.

    Attributes:
        ratio: of B's to A's; below 1 B is faster. ``low`` and ``high`` bound it.
        p: not adjusted.
        least_p: the smallest that so many samples can give, whatever they are.
    """

    ratio: float
    low: float
    high: float
    p: float
    least_p: float


def mann_whitney(a: Sequence[float], b: Sequence[float], alpha: float) -> Comparison:
    """Compare two sets of independent times, all above 0; the interval's confidence is 1 - alpha.

    Raises:
        UserError: if SciPy is not installed.
    """
    try:
        from scipy import stats
    except ImportError:
        raise UserError("scipy is needed: in the repository, pip install '.[bench]'") from None
    ratios = sorted(y / x for x, y in itertools.product(a, b))
    # From the k-th smallest to the k-th largest, with the largest k for which U < k has a chance of
    # at most alpha / 2. Where there is none no ratio is ruled out, and their whole range is given.
    chances = itertools.accumulate(_distribution(len(a), len(b)))
    dropped = max(0, sum(chance <= alpha / 2 for chance in chances) - 1)
    return Comparison(
        statistics.median(ratios),
        ratios[dropped],
        ratios[-1 - dropped],
        float(stats.mannwhitneyu(a, b).pvalue),
        min(1.0, 2 / math.comb(len(a) + len(b), len(a))),
    )


@functools.cache
def _distribution(n: int, m: int) -> list[float]:
    """The chances of U = 0, 1, ..., n * m where the two sides do not differ: the coefficients of
    the Gaussian binomial, the product of (1 - x^(m + i)) / (1 - x^i) for i = 1 to n."""
    counts = [1] + [0] * (n * m)
    for i in range(1, n + 1):
        for power in range(n * m, m + i - 1, -1):
            counts[power] -= counts[power - m - i]
        for power in range(i, n * m + 1):
            counts[power] += counts[power - i]
    return [count / math.comb(n + m, n) for count in counts]


def adjusted(p_values: Sequence[float]) -> list[float]:
    """Benjamini and Hochberg's, in the order given."""
    from scipy import stats

    return stats.false_discovery_control(p_values).tolist() if p_values else []


@dataclass(frozen=True)
class Side:
    """One or several runs of one command.

    Attributes:
        name: what was given for it.
        records: of its files.
    """

    name: str
    records: list[Record]

    def rows(self) -> dict[str, list[Row]]:
        """Its rows, one for each run, by subject; a subject in only some runs counts as missing."""
        runs = []
        for record in self.records:
            run: dict[str, Row] = {}
            for row in record["rows"]:
                name = subject_name(row)
                if name in run:
                    raise UserError(f"{self.name}: more than one row is about {name}")
                run[name] = row
            runs.append(run)
        everywhere = [name for name in runs[0] if all(name in run for run in runs)]
        return {name: [run[name] for run in runs] for name in everywhere}


def load_side(path: Path) -> Side:
    """A result file, or a directory of the files of several runs.

    Raises:
        UserError: if there is none, or one is not a result or of another kind than the others.
    """
    paths = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not paths:
        raise UserError(f"{path}: no .json files in this directory")
    records = [load_record(file) for file in paths]
    for file, record in zip(paths, records, strict=True):
        if record["kind"] != records[0]["kind"]:
            raise UserError(
                f"{file} is of {record['kind']} and {paths[0]} of {records[0]['kind']}: one kind a "
                "directory"
            )
    return Side(str(path), records)


def subject_name(row: Row) -> str:
    """What a row is about, the same for the same subject."""
    return ", ".join(
        value if isinstance(value, str) else f"{name} {json.dumps(value, sort_keys=True)}"
        for name, value in sorted(row["subject"].items())
    )


def compare(a: Side, b: Side, alpha: float) -> dict[str, Any]:
    """Everything there is to say about two sides, as JSON values: ``differences`` in how they came
    about, ``same_machine``, ``rows`` for each subject of both, ``only_a`` and ``only_b``.

    A row's verdict is ``faster`` or ``slower`` (B, at ``alpha``, adjusted), ``no difference
    shown``, ``too few samples`` where so few could never show one, ``red`` where a check is, so
    that no time counts, or ``not timed``.

    Raises:
        UserError: if the sides are of different kinds, or one has several runs and the other one.
    """
    kinds = [side.records[0]["kind"] for side in (a, b)]
    if kinds[0] != kinds[1]:
        raise UserError(f"{a.name} is of {kinds[0]} and {b.name} of {kinds[1]}: nothing to compare")
    if (len(a.records) > 1) != (len(b.records) > 1):
        raise UserError(
            f"{a.name} has {len(a.records)} runs and {b.name} {len(b.records)}: give one each, or "
            "several each"
        )
    rows_a, rows_b = a.rows(), b.rows()
    shared = [name for name in rows_a if name in rows_b]
    rows = [_compare_rows(name, rows_a[name], rows_b[name], alpha) for name in shared]
    tested = [row for row in rows if "p" in row]
    best = adjusted([row.pop("least_p") for row in tested])
    for row, p, least in zip(tested, adjusted([row["p"] for row in tested]), best, strict=True):
        row["p_adjusted"] = p
        row["verdict"] = _verdict(row["ratio"], p, least, alpha)
    differences = _differences(a, b)
    return {
        "alpha": alpha,
        "kind": kinds[0],
        "runs": [len(a.records), len(b.records)],
        "same_machine": not any(difference["what"] in _MACHINE for difference in differences),
        "differences": differences,
        "rows": rows,
        "only_a": [name for name in rows_a if name not in rows_b],
        "only_b": [name for name in rows_b if name not in rows_a],
    }


def _compare_rows(name: str, a: list[Row], b: list[Row], alpha: float) -> dict[str, Any]:
    red = [any(check(row) is False for row in rows) for rows in (a, b)]
    row: dict[str, Any] = {
        "subject": a[0]["subject"],
        "name": name,
        "red": red,
        "error": [_worst_error(rows) for rows in (a, b)],
    }
    if any(red):
        return {**row, "verdict": "red"}
    times_a, times_b = _samples(a), _samples(b)
    if not (times_a and times_b):
        return {**row, "verdict": "not timed"}
    return {
        **row,
        "median": [statistics.median(times_a), statistics.median(times_b)],
        "samples": [len(times_a), len(times_b)],
        **vars(mann_whitney(times_a, times_b, alpha)),
    }


def _samples(rows: list[Row]) -> list[float]:
    """Those of the one run, or the median of each of several; none if any was not timed."""
    timings = [timing(row.get("seconds")) for row in rows]
    found = [one for one in timings if one is not None]
    if len(found) < len(rows):
        return []
    return list(found[0].samples) if len(found) == 1 else [one.median for one in found]


def _worst_error(rows: list[Row]) -> float | None:
    errors = [error for row in rows if (error := number(row.get("error"))) is not None]
    return max(errors, default=None)


def _verdict(ratio: float, p: float, least: float, alpha: float) -> str:
    if least >= alpha:
        return "too few samples"
    if p >= alpha:
        return "no difference shown"
    return "faster" if ratio < 1 else "slower"


def _differences(a: Side, b: Side) -> list[dict[str, Any]]:
    """What was not the same on both sides: machine, versions, commit, settings."""
    found = []
    facts = [[_facts(record) for record in side.records] for side in (a, b)]
    names = dict.fromkeys(name for side in facts for run in side for name in run)
    for name in names:
        values = [
            list(dict.fromkeys(json.dumps(run.get(name), sort_keys=True) for run in side))
            for side in facts
        ]
        if values[0] != values[1] or len(values[0]) > 1:
            sides = [[json.loads(value) for value in side] for side in values]
            found.append({"what": name, "a": sides[0], "b": sides[1]})
    return found


def _facts(record: Record) -> dict[str, Any]:
    environment, facts = record["environment"], {}
    for name in _DIFFERING:
        group, _, part = name.partition(".")
        value = environment.get(group)
        facts[name] = value.get(part) if part and isinstance(value, dict) else value
    facts["python"], facts["seed"] = environment.get("python"), environment.get("seed")
    versions = environment.get("versions")
    if isinstance(versions, dict):
        facts |= {f"version of {name}": version for name, version in versions.items()}
    facts["commit"] = environment.get("commit")
    return facts | {f"setting {name}": value for name, value in record["settings"].items()}
