"""``gptile compile``. Imports wait until it runs."""

import json
from pathlib import Path
from typing import Any

import click

from gptile.console import (
    DTYPES,
    examples,
    parse_dtype,
    print_table,
    progress,
    revision_option,
)


@click.command(
    "compile",
    **examples(
        "gptile compile gpt2 --target sm_90 --dtype bfloat16 -o kernels",
        "gptile compile demo --target gfx942 --batch 16 -o build/kernels --at /srv/kernels",
        "TRITON_CACHE_DIR=kernels gptile generate --model gpt2 --dtype bfloat16 'The'",
    ),
)
@click.argument("model")
@click.option("--target", required=True, help="GPU to compile for, such as sm_90 or gfx942.")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Directory to write; one that this command wrote is replaced.",
)
@click.option(
    "--at",
    type=click.Path(path_type=Path),
    help="Absolute path of the directory where it will be used.  [default: where it is written]",
)
@click.option(
    "--batch",
    type=click.IntRange(1, 1024),
    default=8,
    show_default=True,
    help="Rows at most.",
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default=DTYPES[0],
    show_default=True,
    help="Of the model, as in generate.",
)
@revision_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def compile_command(
    model: str,
    target: str,
    output: Path,
    at: Path | None,
    batch: int,
    dtype: str,
    revision: str | None,
    as_json: bool,
) -> None:
    """Compile every kernel that MODEL will launch, for a GPU that need not be here.

    With TRITON_CACHE_DIR=DIRECTORY in its environment a deployment then compiles no kernel: not for
    prompts of any length, the decode steps after them, sampling, and scoring, in batches up to
    --batch, with a cache of any length, in this dtype. Not covered: training, other dtypes, fp32
    products in tf32.

    MODEL is as in generate --model, or random:gpt2 (-medium, -large, -xl) for its sizes alone. The
    deployment needs the same Triton (for the same Python), on AMD at the same path, this version of
    gptile, and the directory at the path it was compiled for. Triton itself still builds its
    launcher, one small C file, once on a machine: so the directory must be writable and gcc there.
    """
    from gptile.bench.ahead_of_time import Deployment, check_directory, compile_ahead
    from gptile.bench.checkpoints import read_sizes
    from gptile.bench.compiler import find_target

    if at is not None and not at.is_absolute():
        raise click.UsageError(f"--at {at}: the path must be absolute")
    find_target(target)
    check_directory(output)
    config, tokenizer = read_sizes(model, revision)
    deployment = Deployment(config, parse_dtype(dtype), target, batch, tokenizer)
    with progress() as bar:
        manifest = compile_ahead(deployment, output, at=at, track=bar.track)
    if as_json:
        click.echo(json.dumps(manifest))
    else:
        _print(manifest, output)


def _print(manifest: dict[str, Any], output: Path) -> None:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for kernel in manifest["kernels"]:
        groups.setdefault((kernel["operation"], kernel["kernel"]), []).append(kernel)
    rows = [
        (
            " ".join(names),
            len(found),
            *(_range([kernel[name] for kernel in found]) for name in ("registers", "spilled")),
            f"{sum(kernel['seconds'] for kernel in found):.1f} s",
        )
        for names, found in groups.items()
    ]
    print_table(["", "variants", "registers", "spilled bytes", "time"], rows)
    seconds = sum(kernel["seconds"] for kernel in manifest["kernels"])
    click.echo(
        f"{output}: {len(manifest['kernels'])} kernels for {manifest['target']} in "
        f"{manifest['dtype']}, Triton {manifest['triton']}, in {seconds:.0f} s. Use it with\n"
        f"TRITON_CACHE_DIR={manifest['directory']}"
    )


def _range(values: list[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
