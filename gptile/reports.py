"""The commands of ``gptile bench`` that read results. Imports wait until one runs."""

import json
import sys
from pathlib import Path

import click

from gptile.console import check_writable, examples, print_table


@click.command(
    **examples(
        "gptile bench compare main.json branch.json",
        "gptile bench compare runs/main runs/branch --alpha 0.01",
        "gptile bench compare runs/main runs/branch --fail-if-slower",
    )
)
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option(
    "--alpha",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.05,
    show_default=True,
    help="Share of the rows called faster or slower that may be luck.",
)
@click.option(
    "--fail-if-slower", is_flag=True, help="Exit code 1 where B is slower, or red and A is not."
)
@click.option("--json", "as_json", is_flag=True, help="End with one JSON object, not tables.")
def compare(a: Path, b: Path, alpha: float, fail_if_slower: bool, as_json: bool) -> None:
    """Is B faster than A? Two results of one command, row by row, with significance.

    A and B are files that --output saved, or directories with those of several runs of each. One
    run's samples share its luck, so a difference between two runs may not be the code's: from
    directories, each run counts as one sample, its median. Run the two sides in turn, at least five
    times each, on an idle machine.

    The test is Mann-Whitney's, p adjusted for the number of rows (Benjamini-Hochberg); the ratio
    of times is Hodges and Lehmann's, with its 1 - alpha interval.
    """
    from gptile.bench.significance import compare as run
    from gptile.bench.significance import load_side
    from gptile.comparison_table import print_comparison

    found = run(load_side(a), load_side(b), alpha)
    if as_json:
        click.echo(json.dumps(found, allow_nan=False))
    else:
        print_comparison(found, str(a), str(b))
    worse = [row for row in found["rows"] if row["verdict"] == "slower" or row["red"] == [0, 1]]
    if fail_if_slower and worse:
        sys.exit(1)


@click.command(
    **examples(
        "gptile bench report results",
        "gptile bench report results -o results/page.html",
    )
)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The page.  [default: DIRECTORY/report.html]",
)
@click.option("--json", "as_json", is_flag=True, help="End with one JSON object, not a table.")
def report(directory: Path, output: Path | None, as_json: bool) -> None:
    """Make one HTML page of all results in a directory: plots, tables, environments, commands.

    Reads each .json file under DIRECTORY that --output of gptile bench, parity and evaluate saved.
    The page is one file that loads nothing and runs nothing: send it, or print it.
    """
    from gptile.bench.report import write_report

    page = output or directory / "report.html"
    if directory.is_dir():
        check_writable(page)
    sections = write_report(directory, page)
    if as_json:
        results = [
            {"file": section.file, "kind": section.title, "verdict": section.verdict.summary}
            for section in sections
        ]
        click.echo(json.dumps({"page": str(page), "results": results}))
        return
    print_table(
        ["file", "result", "checks"],
        [(section.file, section.title, section.verdict.summary) for section in sections],
    )
    print(f"Wrote {page}")
