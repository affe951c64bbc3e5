"""What ``gptile bench profile`` prints."""

from typing import Any

from gptile.bench.reading import si
from gptile.console import print_table

_SHOWN = 15


def print_profile(record: dict[str, Any]) -> None:
    """The operations and the ranges that took longest, the peak of memory, and the notes."""
    rows = record["rows"]
    operations = [row for row in rows if "operation" in row["subject"]]
    print_table(
        ["own time", "share", "calls", "memory", "operation"],
        [
            (
                si(row["self_seconds"], "s"),
                f"{100 * row['share']:.1f} %",
                row["calls"],
                si(row["memory"], "B"),
                row["subject"]["operation"],
            )
            for row in operations[:_SHOWN]
        ],
    )
    if len(operations) > _SHOWN:
        rest = sum(row["share"] for row in operations[_SHOWN:])
        print(f"and {len(operations) - _SHOWN} more, together {100 * rest:.1f} %\n")
    ranges = [row for row in rows if "range" in row["subject"]]
    ranges.sort(key=lambda row: -row["total_seconds"])
    print_table(
        ["time", "calls", "range, with what it called"],
        [
            (si(row["total_seconds"], "s"), row["calls"], row["subject"]["range"])
            for row in ranges[:_SHOWN]
        ],
    )
    if len(ranges) > _SHOWN:
        print(f"and {len(ranges) - _SHOWN} more\n")
    for row in rows:
        if "skipped" in row:
            print(f"{row['subject']['timeline']} load: {row['skipped']}")
        elif "bytes" in row:
            print(f"{row['subject']['timeline']}: peak {si(max(row['bytes']), 'B')}")
        elif row.get("used"):
            most = max(row["utilisation"])
            print(f"gpu: load up to {most} %, {si(max(row['used']), 'B')} in use")
    for note in record["notes"]:
        print(f"Note: {note}")
