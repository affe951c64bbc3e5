"""The commands of ``gptile bench`` that measure. Imports wait until one runs."""

import sys
from collections.abc import Collection, Iterable
from pathlib import Path

import click

from gptile.console import (
    DTYPES,
    SHORT_DTYPES,
    check_writable,
    deliver,
    device_option,
    examples,
    kernels_option,
    parse_device,
    parse_dtype,
    parse_kernels,
    progress,
    result_options,
    status,
)
from gptile.reports import compare, report


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


@bench.command(
    **examples(
        "gptile bench kernels --quick",
        "gptile bench kernels layer_norm attention --case gpt2-train -o results/kernels.json",
        "gptile bench kernels attention --pass forward --dtype bf16 --dtype fp16 --device cuda",
        "gptile bench kernels linear_activation --provider gptile --provider compile --json",
        "gptile bench kernels --pass overhead",
    )
)
@click.argument("operations", nargs=-1)
@click.option("--case", "cases", multiple=True, help="Shapes by name.  [default: all]")
@click.option(
    "--pass",
    "passes",
    multiple=True,
    help="forward, backward, both in one, or overhead of a call.  [default: all]",
)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice([*SHORT_DTYPES, *DTYPES]),
    multiple=True,
    metavar="DTYPE",
    help="bf16, fp16 or fp32, or their long names.  [default: bf16 on a GPU, fp32 on a CPU]",
)
@click.option(
    "--provider", "providers", multiple=True, help="Whose code; eager always runs.  [default: all]"
)
@click.option("--rounds", type=click.IntRange(1), help="Samples of each.  [default: 15, quick 7]")
@click.option("--quick", is_flag=True, help="One case of each operation that a CPU does quickly.")
@device_option
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw the rooflines as .png, .svg or .pdf.",
)
@result_options
def kernels(
    operations: tuple[str, ...],
    cases: tuple[str, ...],
    passes: tuple[str, ...],
    dtypes: tuple[str, ...],
    providers: tuple[str, ...],
    rounds: int | None,
    quick: bool,
    device: str,
    plot: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Each of OPERATIONS (default: all) on its cases, by our kernels, PyTorch and other libraries.

    Every result is first checked against fp64; where that is red there is no rate and no speed-up.
    Rates are of the bytes and FLOPs that no implementation does without, so they compare; the
    roofline is of peaks measured in the same run. Times start from a cold cache, as far as memory
    allows. Exit code 1 where our kernels are wrong. An unknown name is answered with those there
    are.
    """
    from gptile.bench.kernel_benchmark import benchmark
    from gptile.bench.operations import OPERATIONS
    from gptile.bench.problems import PASSES, Request
    from gptile.bench.providers import BASELINE, OURS, PROVIDERS
    from gptile.kernel_table import print_kernels

    check_writable(output)
    if plot is not None:
        from gptile.bench.figures import check_figure_path

        check_figure_path(plot)
        check_writable(plot)
    where = parse_device(device)
    default = "bfloat16" if where.type == "cuda" else "float32"
    request = Request(
        operations=_known("operation", operations, OPERATIONS),
        cases=cases or None,
        passes=_known("pass", passes, PASSES),
        dtypes=tuple(parse_dtype(SHORT_DTYPES.get(name, name)) for name in dtypes or (default,)),
        providers=_known("provider", {*providers, BASELINE} if providers else (), PROVIDERS),
        rounds=rounds or (7 if quick else 15),
        quick=quick,
        device=where,
    )
    with progress() as bar:
        task = bar.add_task("kernels", total=request.n_steps)
        result = benchmark(request, lambda step: bar.update(task, advance=1, description=step))
    record = result.record()
    if not as_json:
        print_kernels(record)
    if plot is not None:
        from gptile.bench.figures import save_figure
        from gptile.bench.plots import plot_kernels

        save_figure(plot_kernels(record), plot)
    deliver(record, output, as_json)
    if any(row["subject"]["provider"] == OURS and row.get("ok") is False for row in record["rows"]):
        sys.exit(1)


@bench.command(
    **examples(
        "gptile bench model --quick",
        "gptile bench model --peers -o results/model.json --plot results/model.svg",
        "gptile bench model gpt2 --task decode --batch 1 --batch 8 --rounds 9",
        "gptile bench model --engine gptile --engine ctranslate2 --dtype fp32 --dtype int8",
        "gptile bench model random:gpt2-xl --device cuda --dtype bf16 --json",
    )
)
@click.argument("model", default="random:gpt2")
@click.option(
    "--engine",
    "engines",
    multiple=True,
    help="gptile, gptile-torch, gptile-compile, transformers-eager, -sdpa, -compile; ctranslate2, "
    "onnxruntime, openvino, llama.cpp. transformers-sdpa always runs.  [default: the first six]",
)
@click.option("--peers", is_flag=True, help="The last four as well: pip install '.[peers]'.")
@click.option(
    "--task", "tasks", multiple=True, help="prefill, decode, score, train.  [default: all]"
)
@click.option(
    "--batch",
    "batches",
    type=click.IntRange(1),
    multiple=True,
    help="Rows.  [default: 1 and 8, quick 1 and 4]",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(2),
    multiple=True,
    help="Of a row.  [default: 32 and half the context, quick 32]",
)
@click.option(
    "--new-tokens", type=click.IntRange(2), help="Decoded by a call.  [default: 64, quick 8]"
)
@click.option("--threads", type=click.IntRange(1), help="Of every engine.  [default: PyTorch's]")
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice([*SHORT_DTYPES, *DTYPES, "int8"]),
    multiple=True,
    metavar="DTYPE",
    help="fp32, bf16, fp16, int8, or their long names.  [default: fp32 on a CPU, bf16 on a GPU, of "
    "peers all they have]",
)
@click.option("--rounds", type=click.IntRange(1), help="Samples of each.  [default: 7, quick 6]")
@click.option("--quick", is_flag=True, help="Small sizes; gptile and transformers-sdpa.")
@device_option
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw the speeds as .png, .svg or .pdf.",
)
@result_options
def model(
    model: str,
    engines: tuple[str, ...],
    peers: bool,
    tasks: tuple[str, ...],
    batches: tuple[int, ...],
    prompt_tokens: tuple[int, ...],
    new_tokens: int | None,
    threads: int | None,
    dtypes: tuple[str, ...],
    rounds: int | None,
    quick: bool,
    device: str,
    plot: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """MODEL in each engine: time to first token, time per output token, scoring, a training step.

    Engines are processes that stay loaded and take turns in an order shuffled each round, on the
    same weights and number of threads. Each is checked against transformers in fp64 first, and the
    ids it decodes while it is timed against transformers' in fp32; where that is red there is no
    speed-up. Exit code 1 where ours is wrong. MODEL as in generate --model, or random:gpt2,
    -medium, -large or -xl: that size with random weights. A full run takes a while: see the README.
    """
    import torch

    from gptile.bench.engines import ENGINES, TASKS, default_engines, is_ours
    from gptile.bench.model_benchmark import benchmark
    from gptile.bench.model_plan import make_plan
    from gptile.model_table import print_model

    check_writable(output)
    if plot is not None:
        from gptile.bench.figures import check_figure_path

        check_figure_path(plot)
        check_writable(plot)
    where = parse_device(device)
    names = _known("engine", engines, ENGINES) if engines else default_engines(where.type, quick)
    if peers:
        names += tuple(name for name, entry in ENGINES.items() if entry.peer)
    plan = make_plan(
        names,
        tuple(SHORT_DTYPES.get(name, name) for name in dtypes),
        device=str(where),
        tasks=_known("task", tasks, TASKS)
        if tasks or not quick
        else ("prefill", "decode", "train"),
        batches=batches or ((1, 4) if quick else (1, 8)),
        prompt_tokens=prompt_tokens or ((32,) if quick else ()),
        new_tokens=new_tokens or (8 if quick else 64),
        threads=threads or torch.get_num_threads(),
        rounds=rounds or (6 if quick else 7),
    )
    with status("starting") as shown:
        result = benchmark(model, plan, shown.update)
    record = result.record()
    if not as_json:
        print_model(record)
    if plot is not None:
        from gptile.bench.figures import save_figure
        from gptile.bench.plots import plot_model

        save_figure(plot_model(record), plot)
    deliver(record, output, as_json)
    if any(is_ours(row["subject"]["engine"]) and row.get("ok") is False for row in result.rows):
        sys.exit(1)


@bench.command(
    **examples(
        "gptile bench ladder --quick",
        "gptile bench ladder gpt2 -o results/ladder.json --plot ladder.svg",
        "gptile bench ladder --device cuda",
        "gptile bench ladder --matrix --device cuda",
        "TRITON_INTERPRET=1 gptile bench ladder --matrix",
    )
)
@click.argument("model", default="random:gpt2")
@click.option("--quick", is_flag=True, help="A smaller job, and no matrix: minutes on two cores.")
@click.option("--matrix", is_flag=True, help="Only the on/off matrix.")
@click.option("--rounds", type=click.IntRange(1), help="Samples of each.  [default: 7, quick 6]")
@device_option
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw the rungs as .png, .svg or .pdf.",
)
@result_options
def ladder(
    model: str,
    quick: bool,
    matrix: bool,
    rounds: int | None,
    device: str,
    plot: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Progressive optimisation: what each change earns, one at a time on top of the others.

    Prompts of different lengths are continued greedily: by transformers as a student writes it, by
    our model, in bigger batches, in length buckets, in 16 bits, with the last logits only, with a
    cache, compiled, and with each of our kernels. Every rung's logits are checked against fp64;
    a speed-up stands only between rungs that are right. Exit code 1 where one is not.

    The on/off matrix runs prefill, decoding and a training step with each kernel alone on top of
    PyTorch's operations, and with each left out of ours. It needs a GPU; with TRITON_INTERPRET=1 it
    checks every combination on a tiny random model, without times. It is part of the full run.

    MODEL as in generate --model, or random:gpt2, -medium, -large, -xl: random weights.
    """
    from gptile.bench.ladder import benchmark
    from gptile.ladder_table import print_ladder

    check_writable(output)
    if plot is not None:
        from gptile.bench.figures import check_figure_path

        if matrix:
            raise click.UsageError("--plot draws the rungs, which --matrix leaves out")
        check_figure_path(plot)
        check_writable(plot)
    where = parse_device(device)
    with status("making the model") as spinner:
        result = benchmark(
            model,
            quick=quick,
            only_matrix=matrix,
            rounds=rounds or (6 if quick else 7),
            device=where,
            report=spinner.update,
        )
    record = result.record()
    if not as_json:
        print_ladder(record)
    if plot is not None:
        from gptile.bench.figures import save_figure
        from gptile.bench.plots import plot_ladder

        save_figure(plot_ladder(record), plot)
    deliver(record, output, as_json)
    if any(row.get("ok") is False for row in record["rows"]):
        sys.exit(1)


@bench.command(
    **examples(
        "gptile bench profile --what decode",
        "gptile bench profile random:gpt2 --what train --batch 4 --output profiles/train",
        "gptile bench profile gpt2 --what prefill --tokens 512 --device cuda --dtype bfloat16",
        "nsys profile --trace cuda,nvtx gptile bench profile --device cuda",
    )
)
@click.argument("model", default="demo")
@click.option(
    "--what",
    type=click.Choice(["prefill", "decode", "train"]),
    default="decode",
    show_default=True,
)
@click.option("--steps", type=click.IntRange(1), default=8, show_default=True, help="To record.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--tokens", type=click.IntRange(2), default=128, show_default=True, help="A prompt, or a row."
)
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True)
@kernels_option
@device_option
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="New directory for profile.json, trace.json.gz and profile.png.",
)
@click.option("--json", "as_json", is_flag=True, help="End with one JSON object, not tables.")
def profile(
    model: str,
    what: str,
    steps: int,
    batch: int,
    tokens: int,
    dtype: str,
    kernels: str,
    device: str,
    output: Path | None,
    as_json: bool,
) -> None:
    """Where time and memory go in prefills, decode steps or training steps of our model.

    Prints the operations and the layers' ranges that took longest. With --output also a Chrome
    trace, for https://ui.perfetto.dev, and a plot with the memory over time. On a GPU the ranges
    are NVTX's too, and its load is read through NVML. MODEL as in bench ladder.
    """
    from gptile.bench.profiling import profile_model
    from gptile.profile_table import print_profile

    where = parse_device(device)
    with status(f"profiling {what}"):
        record = profile_model(
            model,
            what,
            rows=batch,
            tokens=tokens,
            steps=steps,
            dtype=parse_dtype(dtype),
            device=where,
            choose_ops=lambda config: parse_kernels(kernels, where, config),
            output=output,
        )
    if not as_json:
        print_profile(record)
        if output is not None:
            click.echo(f"{output}: profile.json, trace.json.gz, profile.png")
    deliver(record, None, as_json)


def _known(kind: str, chosen: Collection[str], names: Iterable[str]) -> tuple[str, ...]:
    """What was chosen, in the order there is, or all of it.

    Raises:
        click.UsageError: for an unknown name, with those there are.
    """
    names = tuple(names)
    for name in chosen:
        if name not in names:
            raise click.UsageError(f"unknown {kind} {name!r}; one of {', '.join(names)}")
    return tuple(name for name in names if not chosen or name in chosen)


bench.add_command(compare)
bench.add_command(report)
