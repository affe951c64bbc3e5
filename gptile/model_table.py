"""What ``gptile bench model`` prints: a table of checks, and one for each task and size."""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from gptile.bench.reading import MISSING, si, speedup
from gptile.console import SHORT_DTYPES, print_table

Row: TypeAlias = dict[str, Any]

_MEASURED = {
    "prefill": "time to first token",
    "decode": "time per output token, {new_tokens} new",
    "score": "negative log-likelihood",
    "train": "forward, backward and AdamW",
}
_SHORT = {long: short for short, long in SHORT_DTYPES.items()}


def print_model(record: dict[str, Any]) -> None:
    """The rows of a record, what they are compared with, and its notes."""
    settings = record["settings"]
    print(
        f"{settings['model']}, {settings['parameters'] / 1e6:.1f} M parameters\n"
        f"{settings['threads']} threads an engine, {settings['rounds']} rounds, read bandwidth "
        f"{si(settings['peaks']['read'], 'B/s')}"
    )
    rows = [row for row in record["rows"] if "seconds" in row]
    _print_checks(rows)
    sizes: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        subject = row["subject"]
        key = (subject["task"], subject["batch"], subject["prompt_tokens"])
        sizes.setdefault(key, []).append(row)
    for (task, batch, n_tokens), of_size in sizes.items():
        what = _MEASURED[task].format(**of_size[0]["subject"])
        print(f"\n{task}, batch {batch}, {n_tokens} tokens: {what}")
        _print_speeds(of_size, settings["baseline"], task)
    print(
        "±: from the 20 % to the 80 % quantile, by the median; MB: peak memory\n"
        f"speed-up: over {settings['baseline']}, with a 95 % interval\n"
        "(of fewer than 6 rounds, their range)"
    )
    if "decode" in settings["tasks"]:
        print("read: share of the read bandwidth; weights in a CPU's cache may exceed it")
    for remark in [*_remarks(record["rows"]), *record["notes"]]:
        print(f"Note: {remark}")


def _print_checks(rows: list[Row]) -> None:
    """The worst of each engine's errors, all sizes together."""
    engines: dict[str, list[Row]] = {}
    for row in rows:
        engines.setdefault(_name(row), []).append(row)
    if not engines:
        return
    print(
        "\nRelative errors: logits and training against fp64, scores against fp32.\n"
        "top-1: likeliest tokens that are fp64's; ids: decoded ones that are fp32's"
    )
    cells = []
    for name, found in engines.items():
        generated = [row for row in found if row["subject"]["task"] in ("prefill", "decode")]
        cells.append(
            (
                name,
                _worst(generated, "error", max, ".0e"),
                _worst(generated, "equal_top1", min, ".0%"),
                _worst(generated, "equal_ids", min, ".0%"),
                *(
                    _worst([r for r in found if r["subject"]["task"] == task], "error", max, ".0e")
                    for task in ("score", "train")
                ),
                "ok" if all(row["ok"] for row in found) else "RED",
            )
        )
    columns = ["", "logits", "top-1", "ids", "score", "training", "check"]
    print_table(columns, cells)


def _worst(rows: list[Row], field: str, worst: Callable[[Iterable[Any]], Any], form: str) -> str:
    values = [row[field] for row in rows if row.get(field) is not None]
    return format(worst(values), form) if values else MISSING


def _print_speeds(rows: list[Row], baseline: str, task: str) -> None:
    columns = ["", "ms", "±", "tok/s", "speed-up", "MB", *["read"] * (task == "decode")]
    rows = sorted(rows, key=lambda row: _is_baseline(row, baseline) is False)
    print_table(columns, [_cells(row, baseline, task) for row in rows])


def _cells(row: Row, baseline: str, task: str) -> tuple[str, ...]:
    memory = row["peak_memory"]
    return (
        _name(row),
        _short(1000 * row["p50"]),
        f"{(row['p80'] - row['p20']) / row['p50']:.0%}",
        _short(row["tokens_per_second"]),
        "1" if _is_baseline(row, baseline) else _ratio(row),
        MISSING if memory is None else f"{memory / 1e6:.0f}",
        *([f"{row['bandwidth']:.0%}"] if task == "decode" else []),
    )


def _ratio(row: Row) -> str:
    if not row["ok"]:
        return "RED"
    found = speedup(row)
    if found is None:
        return MISSING
    low, high = _short(found.low), _short(found.high)
    return f"{_short(found.ratio)}x {low}-{high}" if found.resolved else "within noise"


def _short(value: float) -> str:
    """Three digits, or as many as come before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def _is_baseline(row: Row, baseline: str) -> bool:
    return f"{row['subject']['engine']} {row['subject']['precision']}" == baseline


def _name(row: Row) -> str:
    precision = row["subject"]["precision"]
    return f"{row['subject']['engine']} {_SHORT.get(precision, precision)}"


def _remarks(rows: list[Row]) -> list[str]:
    """Why something was not measured or is red, once each."""
    found = []
    for row in rows:
        remark = row.get("skipped") or row.get("note")
        if remark:
            subject = row["subject"]
            parts = [f"{subject['engine']} {subject.get('precision', '')}".strip()]
            if "task" in subject:
                parts.append(subject["task"])
            if "batch" in subject:
                parts.append(f"batch {subject['batch']}, {subject['prompt_tokens']} tokens")
            verdict = "RED, " * (row.get("ok") is False)
            found.append(f"{', '.join(parts)}: {verdict}{remark}")
    return list(dict.fromkeys(found))
