"""The commands of ``gptile bench`` that measure. Imports wait until one runs."""

import click

from gptile.console import examples


@click.group(
    **examples(
        "gptile bench model --quick",
        "gptile bench kernels attention -o results/attention.json",
        "gptile bench ladder --quick",
        "gptile bench report results",
    )
)
def bench() -> None:
    """Measure speed beside every baseline, each number next to its correctness check."""
