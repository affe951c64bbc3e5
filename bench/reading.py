"""What a result's rows say, for plots and tables. A file may come from anybody: whatever is not
what it should be reads as missing, never as a number, and never as a green check."""

import math
from collections.abc import Mapping
from typing import Any

from gptile.bench.timing import Speedup, Timing

_PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "µ": 1e-6, "n": 1e-9}
MISSING = "\u2013"  # a dash
_LONGEST = 200  # characters of a text
_MOST = 12  # items of a list
_DEEPEST = 4  # levels of one value in another


def number(value: Any) -> float | None:
    """A finite number, else None; a text of digits is no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:  # an integer of more than 308 digits
        return None
    return found if math.isfinite(found) else None


def positive(value: Any) -> float | None:
    """A finite number above zero, else None."""
    found = number(value)
    return found if found is not None and found > 0 else None


def timing(value: Any) -> Timing | None:
    """Samples, in seconds: a list of numbers above zero and nothing else, else None."""
    samples = [positive(sample) for sample in value] if isinstance(value, list) else []
    found = tuple(sample for sample in samples if sample is not None)
    return Timing(found) if found and len(found) == len(samples) else None


def speedup(row: Mapping[str, Any], name: str = "speedup") -> Speedup | None:
    """A speed-up, where the row's own check is green and nowhere else."""
    value = row.get(name)
    if check(row) is not True or not isinstance(value, dict):
        return None
    ratio, low, high = (positive(value.get(part)) for part in Speedup._fields)
    if ratio is None or low is None or high is None:
        return None
    return Speedup(ratio, low, high)


def check(row: Mapping[str, Any]) -> bool | None:
    """A row's verdict; None where nothing was checked. What is neither true, false nor null is
    red: it may not pass for a check."""
    value = row.get("ok")
    return None if value is None else value is True


def si(value: float, unit: str) -> str:
    """Three digits, and the unit with its prefix: ``1.61 GB/s``."""
    size = abs(value)
    fitting = (prefix for prefix, factor in _PREFIXES.items() if size >= 0.9995 * factor)
    prefix = next(fitting, "n") if size else ""
    return f"{value / _PREFIXES[prefix]:.3g} {prefix}{unit}"


def text(value: Any, depth: int = 0, limit: int = _LONGEST) -> str:
    """Any JSON value as one line for people, shortened where it is long or deep."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and (found := number(value)) is not None and abs(found) < 1e15:
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, (int, float)):
        found = number(value)
        return MISSING if found is None else f"{found:.4g}"
    if isinstance(value, (list, dict)):
        if depth == _DEEPEST:
            return "…"
        return _shorten(_items(value, depth + 1), limit)
    return _shorten(str(value), limit)


def _items(value: list[Any] | dict[str, Any], depth: int) -> str:
    if isinstance(value, dict):
        named = list(value.items())[:_MOST]
        parts = [f"{_shorten(name)} {text(item, depth)}" for name, item in named]
    else:
        parts = [text(item, depth) for item in value[:_MOST]]
    more = len(value) - len(parts)
    return ", ".join([*parts, f"and {more:,} more"] if more else parts) or MISSING


def _shorten(value: str, limit: int = _LONGEST) -> str:
    value = value if len(value) <= limit else value[: limit - 1] + "…"
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in value)
