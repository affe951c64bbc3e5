"""What the commands share: options and their values, help, spinner and tables."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import torch
    from rich.progress import Progress
    from rich.status import Status

    from gptile.kernels import Ops
    from gptile.model.config import GPT2Config

DTYPES = ("float32", "float16", "bfloat16")
SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

device_option = click.option(
    "--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1"
)
kernels_option = click.option(
    "--kernels",
    default="auto",
    show_default=True,
    metavar="auto|torch|triton|NAMES",
    help="NAMES: Triton's of these operations (attention,linear), PyTorch's of the others. "
    "Triton's run on a GPU, or slowly on a CPU with TRITON_INTERPRET=1.",
)
revision_option = click.option("--revision", help="Branch, tag or commit of a hub model.")


def examples(*lines: str) -> dict[str, Any]:
    """The epilog of a command's help."""
    return {"epilog": "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)}


def parse_dtype(name: str) -> "torch.dtype":
    """The dtype of one of :data:`DTYPES`."""
    import torch

    return getattr(torch, name)


def parse_device(name: str) -> "torch.device":
    """``auto`` is a GPU where there is one.

    Raises:
        click.UsageError: for a device that is not here.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise click.UsageError(f"--device {name}: no such device; try auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise click.UsageError(f"--device {name}: only cpu and cuda are supported")
    if device.type == "cpu" and device.index:
        raise click.UsageError(f"--device {name}: there is one cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise click.UsageError(
            f"--device {name}: {torch.cuda.device_count()} CUDA devices here; see gptile doctor"
        )
    return device


def parse_kernels(name: str, device: "torch.device", config: "GPT2Config") -> "Ops | None":
    """``auto``, ``torch``, ``triton``, or names of operations, separated by commas, that are
    Triton's where the others are PyTorch's. None for ``auto``: the loader chooses what runs best.

    Raises:
        click.UsageError: for an unknown name, or Triton's kernels where they cannot run.
    """
    from gptile.kernels import Ops
    from gptile.kernels.jit import HAS_TRITON
    from gptile.kernels.launch import interpreting
    from gptile.kernels.ops import kernels_take

    if name == "auto":
        return None
    if name == "torch":
        return Ops.torch()
    operations = [field.name for field in dataclasses.fields(Ops)]
    chosen = operations if name == "triton" else [one.strip() for one in name.split(",")]
    if unknown := [one for one in chosen if one not in operations]:
        raise click.UsageError(
            f"--kernels {name}: no operation {unknown[0]!r}; there are {', '.join(operations)}, "
            "and auto, torch and triton"
        )
    if not HAS_TRITON:
        raise click.UsageError(f"--kernels {name}: Triton is not installed; pip install triton")
    if device.type == "cpu" and not interpreting():
        raise click.UsageError(
            f"--kernels {name} needs a GPU, or Triton's interpreter: set TRITON_INTERPRET=1"
        )
    if not kernels_take(config.n_embd, config.head_dim):
        raise click.UsageError(
            f"--kernels {name}: n_embd {config.n_embd} or head_dim {config.head_dim} exceeds what "
            "the kernels hold in registers; --kernels torch takes it"
        )
    triton = Ops.triton()
    return Ops.torch().replace(**{one: getattr(triton, one) for one in chosen})


def result_options(command: Callable) -> Callable:
    """Where a result goes, for :func:`deliver`: the parameters ``output`` and ``as_json``."""
    output = click.option(
        "--output",
        "-o",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Save the result as JSON, for gptile bench report and compare.",
    )
    as_json = click.option(
        "--json", "as_json", is_flag=True, help="End with one JSON object instead of tables."
    )
    return output(as_json(command))


def deliver(record: dict[str, Any], output: Path | None, as_json: bool) -> None:
    """Save a result and print it as the last line, as far as was asked."""
    from gptile.bench.result import save_record

    if output:
        save_record(record, output)
    if as_json:
        click.echo(json.dumps(record, allow_nan=False))


def check_writable(path: Path | None) -> None:
    """Refuse a file that could not be written, before the long work that ends with it.

    Raises:
        click.UsageError: if its directory is not there or is read-only.
    """
    if path is not None and not os.access(path.parent, os.W_OK):
        raise click.UsageError(f"{path}: no such directory, or it cannot be written to")


def progress() -> "Progress":
    """A progress bar on stderr where that is a terminal; give it tasks with add_task."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def status(message: str) -> "Status":
    """A spinner on stderr where that is a terminal."""
    from rich.console import Console

    return Console(stderr=True).status(message)


def print_table(columns: list[str], rows: list[tuple[Any, ...]]) -> None:
    """A table on stdout; long cells fold (those of the first column last), nothing is cut off."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=index == 0)
    for row in rows:
        table.add_row(*map(str, row))
    Console(highlight=False, markup=False).print(table)
