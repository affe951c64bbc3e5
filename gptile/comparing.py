"""The command ``gptile parity``. Imports wait until it runs."""

import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gptile.console import (
    DTYPES,
    check_writable,
    deliver,
    device_option,
    examples,
    kernels_option,
    parse_device,
    parse_dtype,
    parse_kernels,
    print_table,
    result_options,
    revision_option,
    status,
)

if TYPE_CHECKING:
    import torch

    from gptile.bench.parity import Line
    from gptile.kernels import Ops
    from gptile.model.config import GPT2Config
    from gptile.model.tokenizer import Tokenizer


@click.command(
    **examples(
        "gptile parity",
        "gptile parity my-gpt2 --dtype float32 --dtype bfloat16 --plot growth.svg",
        "gptile parity gpt2 --prompts prompts.txt --all",
        "gptile parity random:gpt2 --tokens 24 -o parity.json",
        "TRITON_INTERPRET=1 gptile parity --kernels attention,linear --tokens 8",
        "gptile parity gpt2 --device cuda --kernels each",
    )
)
@click.argument("model", default="demo")
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(DTYPES),
    multiple=True,
    default=("float32",),
    show_default=True,
    help="May be repeated. 16 bits are slow on most CPUs.",
)
@kernels_option
@device_option
@revision_option
@click.option("--tokens", type=click.IntRange(2), help="A row of random ids.  [default: 64]")
@click.option(
    "--prompts",
    "prompts_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help='Instead of random ids: one a line, or a .jsonl of {"prompt": ...}.',
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random ids.")
@click.option("--all", "show_all", is_flag=True, help="Every line, not the worst of each kind.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw how errors grow: .png, .svg or .pdf.",
)
@result_options
def parity(
    model: str,
    dtypes: tuple[str, ...],
    kernels: str,
    device: str,
    revision: str | None,
    tokens: int | None,
    prompts_file: Path | None,
    seed: int,
    show_all: bool,
    plot: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Compare a checkpoint with transformers, number by number, and name the first that is wrong.

    MODEL as in generate --model; or random:gpt2 (-medium, -large, -xl), random weights. Ours, and
    transformers with eager and sdpa attention, are measured against transformers in fp64: after
    every operation of every layer, forward, backward and with a cache; every parameter's gradient;
    each decode step; a ragged batch; greedy text. Layers count from 0.

    --kernels each compares every operation alone on Triton's kernel, the others on PyTorch's.

    Needs transformers: in the repository, pip install '.[bench]'. Exit code 1 where ours is further
    off than allowed.
    """
    from gptile.bench.checkpoints import checkpoint_directory
    from gptile.bench.parity import ALLOWED_RATIO, compare, first_red
    from gptile.bench.result import Result
    from gptile.model.tokenizer import NoTokenizerError
    from gptile.weights import open_checkpoint

    if prompts_file and tokens:
        raise click.UsageError("give --prompts or --tokens, not both")
    if plot:
        from gptile.bench.figures import check_figure_path

        check_figure_path(plot)
    for path in (plot, output):
        check_writable(path)
    where = parse_device(device)
    with (
        status(f"opening {model}") as spinner,
        checkpoint_directory(model, revision) as directory,
    ):
        checkpoint = open_checkpoint(directory)
        sets = _kernel_sets(kernels, where, checkpoint.config)
        tokenizer = None
        try:
            tokenizer = checkpoint.load_tokenizer()
        except NoTokenizerError:
            if prompts_file:
                raise
        prompts = None
        if prompts_file and tokenizer:
            prompts = _read_prompts(prompts_file, tokenizer, checkpoint.config.n_positions)
        found = compare(
            directory,
            prompts=prompts,
            n_tokens=tokens,
            n_greedy=min(24, tokens or 24),
            dtypes=[parse_dtype(dtype) for dtype in dict.fromkeys(dtypes)],
            device=where,
            kernels=sets,
            seed=seed,
            on_stage=spinner.update,
        )
    texts = {
        name: [tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids)) for ids in rows]
        for name, rows in found.greedy.items()
    }
    rows = [line.row() for line in found.lines]
    for row in rows:
        if row["subject"]["section"] == "greedy":
            row["text"] = texts[row["subject"]["kernels"]]
    settings = {
        "model": model,
        "revision": revision,
        "prompts": str(prompts_file) if prompts_file else "random ids",
        "tokens": found.n_tokens,
        "allowed_ratio": ALLOWED_RATIO,
    }
    record = Result("parity", settings, rows, found.notes, where.type, seed).record()
    if plot:
        from gptile.bench.figures import save_figure
        from gptile.bench.plots import plot_parity

        save_figure(plot_parity(record), plot)
    if not as_json:
        runs = _by_run(found.lines)
        if show_all or len(sets) == 1:
            for which, lines in runs.items():
                _print_tables(which, lines, show_all)
        for text in next(iter(texts.values()), []):
            click.echo(f"greedy text: {text!r}")
        for note in found.notes:
            click.echo(f"note: {note}")
        for which, lines in runs.items():
            _print_verdict(which, lines)
    deliver(record, output, as_json)
    if first_red(found.lines):
        sys.exit(1)


def _kernel_sets(
    kernels: str, device: "torch.device", config: "GPT2Config"
) -> "dict[str, Ops | None]":
    """What is compared, by name: one set, or each operation."""
    from gptile.kernels import Ops

    names = [field.name for field in dataclasses.fields(Ops)] if kernels == "each" else [kernels]
    return {name: parse_kernels(name, device, config) for name in names}


def _read_prompts(path: Path, tokenizer: "Tokenizer", n_positions: int) -> list[list[int]]:
    """Token ids of a file's prompts; empty lines are none.

    Raises:
        UserError: for a file without prompts, or that is not UTF-8 or JSONL.
        click.UsageError: for a prompt longer than the context.
    """
    from gptile.bench.corpus import read_documents

    field = "prompt" if path.suffix == ".jsonl" else None
    texts, _ = read_documents(path.read_bytes(), str(path), field)
    if field is None:
        texts = [line.rstrip("\r") for line in texts[0].split("\n")]
    prompts = [tokenizer.encode(text) for text in texts if text.strip()]
    if not prompts:
        raise click.UsageError(f"{path}: there is no prompt in it")
    for number, ids in enumerate(prompts, 1):
        if len(ids) > n_positions:
            raise click.UsageError(
                f"{path}: prompt {number} has {len(ids)} tokens, more than the context of "
                f"{n_positions}"
            )
    return prompts


def _by_run(lines: "Sequence[Line]") -> "dict[str, list[Line]]":
    """The lines of each dtype and set of kernels."""
    runs: dict[str, list[Line]] = {}
    for line in lines:
        runs.setdefault(f"{line.dtype}, kernels {line.kernels}", []).append(line)
    return runs


def _print_tables(which: str, lines: "list[Line]", show_all: bool) -> None:
    """Every line; or how errors grow from layer to layer, and the worst of each other kind."""
    errors = ["ours", "eager", "sdpa", "allowed"]
    if show_all:
        click.echo(f"\nEvery error, {which}")
        named = [_cells(line, f"{line.subject.section}: {line.name}") for line in lines]
        print_table(["", "what", *errors], named)
        return
    click.echo(f"\nError after each layer (in brackets, what is first red in it), {which}")
    print_table(["", "after", *errors], _growth(lines))
    click.echo(f"The largest error of each other kind (of so many), {which}")
    print_table(["", "what", *errors], _worst(lines))


def _cells(line: "Line", name: str) -> tuple[str, ...]:
    errors = (line.error.relative, *line.references.values(), line.allowed)
    return ("ok" if line.ok else "FAIL", name, *(f"{error:.1e}" for error in errors))


def _growth(lines: "Sequence[Line]") -> list[tuple[str, ...]]:
    """A row for each layer, and for the operations around them; red where anything in it is. A
    layer's error is that of the last thing it passes on: forward its output, backward the gradient
    with respect to its input."""
    from gptile.bench.parity import first_red
    from gptile.bench.trace import LN_1

    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        section, _, layer, operation, _ = line.subject
        if operation and (layer is not None or line.is_intermediate):
            where = operation if layer is None else f"layer {layer}"
            groups.setdefault((section, where), []).append(line)
    rows = []
    for (section, where), group in groups.items():
        last = group[-1]
        if section == "backward":
            passed_on = (line for line in group if line.subject.operation == LN_1)
            last = next(passed_on, group[0])
        red = first_red(group)
        culprit = f" ({red.subject.operation})" if red and red.subject.layer is not None else ""
        _, *cells = _cells(last, f"{section}, {where}{culprit}")
        rows.append(("FAIL" if red else "ok", *cells))
    return rows


def _worst(lines: "Sequence[Line]") -> list[tuple[str, ...]]:
    """Of what is no intermediate; kinds are alike but for the numbers in their names."""
    kinds: dict[str, list[Line]] = {}
    for line in lines:
        if not line.is_intermediate:
            kinds.setdefault(re.sub(r"\d+", "*", line.name), []).append(line)
    rows = []
    for kind, group in kinds.items():
        name = kind if len(group) == 1 else f"{kind} ({len(group)})"
        rows.append(_cells(max(group, key=lambda line: line.excess), name))
    return rows


def _print_verdict(which: str, lines: "Sequence[Line]") -> None:
    from gptile.bench.parity import ALLOWED_RATIO, first_red

    click.echo(
        f"{which}: {sum(line.ok for line in lines)} of {len(lines)} within {ALLOWED_RATIO} x "
        "transformers' own error, each against fp64"
    )
    if red := first_red(lines):
        click.echo(f"FAIL first in {red}")
