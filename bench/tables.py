"""The rows of a result as tables for people: readable numbers, verdicts, and no speed-up beside a
check that is not green."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gptile.bench.reading import MISSING, check, number, si, speedup, text, timing

MOST_ROWS = 400
"""Shown of one table; the file has them all."""

Row = Mapping[str, Any]


class Cell(NamedTuple):
    """What one field shows, and the kind it is styled as: text, number, or a verdict (ok, red,
    none, skipped)."""

    text: str
    kind: str = "number"


@dataclass(frozen=True)
class Table:
    """Rows whose subjects have the same fields.

    Attributes:
        title: the fields that say which row it is.
        caption: what all of the rows share.
        columns: headings; the first ``n_subject`` say which row it is.
        rows: as many cells as columns, and whether the row is red.
        left_out: rows of the file that are not shown.
    """

    title: str
    caption: str
    columns: list[str]
    n_subject: int
    rows: list[tuple[list[Cell], bool]]
    left_out: int


def _quantity(unit: str) -> Callable[[Any], str]:
    def show(value: Any) -> str:
        found = number(value)
        return text(value) if found is None else si(found, unit)

    return show


def _share(value: Any) -> str:
    found = number(value)
    return text(value) if found is None else f"{100 * found:.3g} %"


def _error(value: Any) -> str:
    found = number(value)
    return text(value) if found is None else f"{found:.1e}" if found else "0"


def _seconds(value: Any) -> str:
    """Median and, of several samples, their spread."""
    found = timing(value)
    if found is None:
        return text(value) if number(value) is None else _quantity("s")(value)
    median = si(found.median, "s")
    return median if len(found.samples) == 1 else f"{median} ({100 * found.spread:.0f} %)"


_MEASURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "seconds": ("time, p50 (p20 to p80, by it)", _seconds),
    "peak_memory": ("peak memory", _quantity("B")),
    "memory": ("memory", _quantity("B")),
    "bytes_per_second": ("bandwidth", _quantity("B/s")),
    "flops_per_second": ("compute", _quantity("FLOP/s")),
    "roofline": ("of roofline", _share),
    "bandwidth": ("of bandwidth", _share),
    "share": ("share", _share),
    "spread": ("spread", _share),
    "self_seconds": ("own time", _seconds),
    "tokens_per_second": ("tokens/s", text),
    "error": ("error", _error),
    "allowed": ("allowed error", _error),
    "total_seconds": ("time", _seconds),
}
_SPEEDUPS = {"speedup": "speed-up", "speedup_step": "speed-up to the row before"}
_REMARKS = ("skipped", "note")
# Said by seconds, by a rate, by the check or by the remark; or for whoever opens the file.
_SAID = {"subject", "ok", "p20", "p50", "p80", "spread", "bytes", "flops", *_REMARKS}
_SAID |= {"reference_error", "rotated", "quantity", "limit", "best_other", "speedup_over_best"}


def make_tables(rows: Iterable[Row]) -> list[Table]:
    """One table for each set of fields that subjects have, in the order of the file."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row["subject"]), []).append(row)
    return [_table(fields, group) for fields, group in groups.items()]


def red_rows(rows: Iterable[Row]) -> list[str]:
    """What each red row is about, in one line."""
    return [text(row["subject"]) for row in rows if check(row) is False]


def _table(fields: tuple[str, ...], rows: list[Row]) -> Table:
    shared = [field for field in fields if len(rows) > 1 and _same(rows, field)]
    varying = [field for field in fields if field not in shared]
    names = dict.fromkeys(name for row in rows for name in row if name not in _SAID)
    measures = [name for name in names if not any(_is_series(row, name) for row in rows)]
    checked = any(check(row) is not None or row.get("skipped") for row in rows)
    remarked = any(row.get(name) for row in rows for name in _REMARKS)
    columns = [*map(_heading, varying), *["check"] * checked]
    columns += [*map(_heading, measures), *["remark"] * remarked]
    shown = []
    for row in rows[:MOST_ROWS]:
        cells = [Cell(text(row["subject"][field]), "text") for field in varying]
        cells += [_verdict(row)] * checked
        cells += [_measure(row, name) for name in measures]
        cells += [Cell(_remark(row), "text")] * remarked
        shown.append((cells, check(row) is False))
    caption = ", ".join(f"{_heading(field)} {text(rows[0]['subject'][field])}" for field in shared)
    title = ", ".join(map(_heading, varying or fields)) or "number"
    return Table(title, caption, columns, len(varying), shown, max(0, len(rows) - MOST_ROWS))


def _is_series(row: Row, name: str) -> bool:
    """Many values, for a plot and not for a cell."""
    return name != "seconds" and isinstance(row.get(name), list) and len(row[name]) > 3


def _same(rows: list[Row], field: str) -> bool:
    first = rows[0]["subject"][field]
    return all(row["subject"][field] == first for row in rows)


def _heading(name: str) -> str:
    known = _SPEEDUPS.get(name) or (_MEASURES[name][0] if name in _MEASURES else None)
    return known or text(name.replace("_", " ").strip()) or MISSING


def _verdict(row: Row) -> Cell:
    if row.get("skipped"):
        return Cell("skipped", "skipped")
    ok = check(row)
    return Cell(MISSING, "none") if ok is None else Cell("ok", "ok") if ok else Cell("FAIL", "red")


def _measure(row: Row, name: str) -> Cell:
    value = row.get(name)
    if value is None:
        return Cell(MISSING)
    if name in _SPEEDUPS or _like_speedup(value):
        found = speedup(row, name)
        return Cell(str(found), "text") if found else Cell("withheld", "skipped")
    show = _MEASURES[name][1] if name in _MEASURES else text
    return Cell(show(value), "number" if show is not text or number(value) is not None else "text")


def _like_speedup(value: Any) -> bool:
    return isinstance(value, dict) and {"ratio", "low", "high"} <= set(value)


def _remark(row: Row) -> str:
    return "; ".join(text(row[name]) for name in _REMARKS if row.get(name))
