"""What ``gptile bench ladder`` prints: the rungs, then the on/off matrix."""

from typing import Any, TypeAlias

from gptile.bench.reading import MISSING, number, si, speedup, timing
from gptile.console import print_table

Row: TypeAlias = dict[str, Any]


def print_ladder(record: dict[str, Any]) -> None:
    """The tables, what was skipped and why, and the notes. Numbers are medians."""
    rungs = [row for row in record["rows"] if "rung" in row["subject"]]
    matrix = [row for row in record["rows"] if "matrix" in row["subject"]]
    if rungs:
        _print_rungs(rungs)
    for task in dict.fromkeys(row["subject"]["matrix"] for row in matrix):
        _print_task(task, [row for row in matrix if row["subject"]["matrix"] == task])
    for row in record["rows"]:
        if "skipped" in row:
            print(f"{', '.join(row['subject'].values())}: skipped: {row['skipped']}")
    for note in record["notes"]:
        print(f"Note: {note}")


def _print_rungs(rows: list[Row]) -> None:
    print_table(
        ["", "time", "tokens/s", "over first", "over previous", "memory", "error", "equal ids"],
        [
            (
                row["subject"]["rung"],
                _time(row),
                f"{row['tokens_per_second']:.3g}",
                _ratio(row, "speedup"),
                _ratio(row, "speedup_step"),
                si(row["peak_memory"], "B"),
                _error(row),
                f"{100 * row['equal_ids']:.3g} %",
            )
            for row in rows
            if "skipped" not in row
        ],
    )
    print(
        "time: median; over: how many times as fast as the first rung and as the previous one,\n"
        "with a 95 % interval (below 6 rounds, their range); error: of the logits, as a share of\n"
        "what is allowed; equal ids: of the text, to the first rung's"
    )


def _print_task(task: str, rows: list[Row]) -> None:
    done = [row for row in rows if "skipped" not in row]
    if not done:
        return
    timed = "seconds" in done[0]
    print(f"\n{task}" + ("" if timed else f", {done[0]['note']}"))
    speeds = ["time", "over all PyTorch", "over all Triton"]
    print_table(
        ["kernels", *speeds * timed, "error", "nearest its bound"],
        [(row["subject"]["kernels"], *_speeds(row), _error(row), row["worst"]) for row in done],
    )


def _speeds(row: Row) -> tuple[str, ...]:
    if "seconds" not in row:
        return ()
    return (_time(row), _ratio(row, "speedup"), _ratio(row, "speedup_over_all"))


def _time(row: Row) -> str:
    found = timing(row["seconds"])
    return MISSING if found is None else si(found.median, "s")


def _ratio(row: Row, name: str) -> str:
    found = speedup(row, name)
    if found is None:
        return MISSING
    return str(found) if found.resolved else "within noise"


def _error(row: Row) -> str:
    share = number(row["error"])
    if not row["ok"]:
        return "RED" if share is None else f"RED: {share / row['allowed']:.2g}x"
    return f"{100 * row['error'] / row['allowed']:.0f} %"
