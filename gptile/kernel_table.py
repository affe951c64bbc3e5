"""What ``gptile bench kernels`` prints: a table an operation and case, and one of the overheads."""

from collections.abc import Iterable
from typing import Any, TypeAlias

from gptile.bench.providers import OURS
from gptile.bench.reading import MISSING, si, speedup
from gptile.bench.timing import Speedup
from gptile.console import print_table

Row: TypeAlias = dict[str, Any]

_UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}


def print_kernels(record: dict[str, Any]) -> None:
    """The rows of a record, the peaks they are measured against, and its notes. An error is a share
    of what is allowed."""
    peaks = record["settings"]["peaks"]
    products = ", ".join(
        f"{si(rate, 'FLOP/s')} in {dtype}" for dtype, rate in peaks["matmul"].items()
    )
    print(
        f"Peaks, measured in this run: copy {si(peaks['copy'], 'B/s')}, "
        f"read {si(peaks['read'], 'B/s')}, matrix product {products}"
    )
    problems: dict[tuple[str, str, str], list[Row]] = {}
    overheads: list[Row] = []
    for row in record["rows"]:
        subject = row["subject"]
        if subject["pass"] == "overhead":
            overheads.append(row)
        else:
            key = (subject["operation"], subject["case"], subject["dtype"])
            problems.setdefault(key, []).append(row)
    for key, rows in problems.items():
        print(f"\n{', '.join(key)}")
        _print_problem(rows)
    if overheads:
        print("\nTime of the host a call, median, on tiny cases")
        _print_overheads(overheads)
    print(
        "\nroof: share of what the peaks allow; error: share of what is allowed;\n"
        "over: how many times as fast, with a 95 % interval"
    )
    for note in record["notes"]:
        print(f"Note: {note}")


def _print_problem(rows: list[Row]) -> None:
    timed = [row for row in rows if "seconds" in row]
    beside = any(row["subject"]["provider"] == OURS and _over_best(row) for row in timed)
    columns = ["", "p50 (p20-p80)", "GB/s", "TFLOP/s", "roof", "memory", "error", "over eager"]
    columns += ["over best other"] * beside
    if timed:
        cells = [(*_cells(row), *[_over_best(row)] * beside) for row in timed]
        print_table(columns, cells)
    for row in rows:
        remark = row.get("skipped") or row.get("note")
        if remark:
            name = f"{row['subject']['pass']}, {row['subject']['provider']}"
            print(f"  {name}{' skipped' if 'skipped' in row else ''}: {remark}")


def _cells(row: Row) -> tuple[str, ...]:
    share = row.get("roofline")
    return (
        f"{row['subject']['pass']} {row['subject']['provider']}",
        _quantiles(row),
        _rate(row.get("bytes_per_second"), 1e9),
        _rate(row.get("flops_per_second"), 1e12),
        MISSING if share is None else _percent(share),
        si(row["peak_memory"], "B"),
        _error(row),
        _ratio(speedup(row)),
    )


def _percent(share: float) -> str:
    """Two digits, or as many as come before the point."""
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def _rate(value: float | None, unit: float) -> str:
    if value is None:
        return MISSING
    return f"{value / unit:.3g}" if value >= unit else f"{value / unit:.2g}"


def _ratio(found: Speedup | None) -> str:
    if found is None:
        return MISSING
    return str(found) if found.resolved else "within noise"


def _quantiles(row: Row) -> str:
    """In one unit, that of the median."""
    fitting = (unit for unit, factor in _UNITS.items() if row["p50"] >= factor)
    unit = next(fitting, "µs")
    low, median, high = (f"{row[name] / _UNITS[unit]:.3g}" for name in ("p20", "p50", "p80"))
    return f"{median} ({low}-{high}) {unit}"


def _error(row: Row) -> str:
    if not row["ok"]:
        return f"RED: {row['quantity']}"
    return f"{100 * row['error'] / row['allowed']:.0f} %" if row["allowed"] else "0 %"


def _over_best(row: Row) -> str:
    found = speedup(row, "speedup_over_best")
    return "" if found is None else f"{_ratio(found)} {row['best_other']}"


def _print_overheads(rows: Iterable[Row]) -> None:
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        subject = row["subject"]
        cell = "skipped" if "skipped" in row else si(row["p50"], "s")
        found.setdefault(subject["operation"], {})[subject["provider"]] = cell
    providers = list(dict.fromkeys(name for cells in found.values() for name in cells))
    print_table(
        ["operation", *providers],
        [
            (operation, *(cells.get(name, MISSING) for name in providers))
            for operation, cells in found.items()
        ],
    )
