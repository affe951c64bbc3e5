"""What ``gptile bench compare`` prints."""

from typing import Any

from gptile.bench.reading import MISSING, si, text
from gptile.console import print_table

_TOO_FEW, _NOT_TIMED = "too few samples", "not timed"


def print_comparison(found: dict[str, Any], a: str, b: str) -> None:
    """How the sides came about, where that differs, then the rows, then those of one side only."""
    if found["differences"]:
        print("Not the same on both sides:")
        print_table(
            ["", f"A: {a}", f"B: {b}"],
            [
                (difference["what"], *(" or ".join(map(text, difference[side])) for side in "ab"))
                for difference in found["differences"]
            ],
        )
    if not found["same_machine"]:
        print("The machines differ: these times say nothing about the code.\n")
    rows = [
        row for row in found["rows"] if row["verdict"] != _NOT_TIMED or row["error"] != [None, None]
    ]
    errors = any(a != b for a, b in (row["error"] for row in rows))
    print_table(
        ["A", "B", "B / A", "p", "verdict", *["error A", "error B"] * errors, "row"],
        [
            (*_cells(row), *(map(_error, row["error"]) if errors else ()), row["name"])
            for row in rows
        ],
    )
    if left_out := len(found["rows"]) - len(rows):
        print(f"Rows on both sides with neither times nor errors: {left_out}")
    for side, name in (("only_a", a), ("only_b", b)):
        if found[side]:
            print(f"Only in {name}: {'; '.join(found[side])}")
    runs = found["runs"]
    if runs == [1, 1]:
        print("One run a side: its samples share its luck, so repeat both before believing it.")
    else:
        print(f"{runs[0]} runs of A and {runs[1]} of B; a run counts as one sample.")
    if any(row["verdict"] == _TOO_FEW for row in found["rows"]):
        print(f"{_TOO_FEW}: no such samples could reach p < {found['alpha']}, however they fell.")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if row["verdict"] == "red":
        sides = " and ".join(side for side, red in zip("AB", row["red"], strict=True) if red)
        return (MISSING, MISSING, MISSING, MISSING, f"RED in {sides}")
    if "p" not in row:
        return (MISSING, MISSING, MISSING, MISSING, row["verdict"])
    return (
        *(si(median, "s") for median in row["median"]),
        f"{row['ratio']:.3f} ({row['low']:.3f}-{row['high']:.3f})",
        f"{row['p_adjusted']:.2g}",
        row["verdict"],
    )


def _error(error: float | None) -> str:
    return MISSING if error is None else f"{error:.1e}"
