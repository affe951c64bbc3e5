"""The ``gptile`` command. Heavy imports wait until a command runs, so that --help is instant."""

import dataclasses
import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import gptile
from gptile.benchmarks import bench
from gptile.checks import doctor, inspect
from gptile.comparing import parity
from gptile.compiling import compile_command
from gptile.console import (
    DTYPES,
    device_option,
    examples,
    kernels_option,
    parse_device,
    parse_dtype,
    parse_kernels,
    print_table,
    revision_option,
    status,
)
from gptile.decoding import choose_decode_step, decoding_options
from gptile.model.errors import UserError
from gptile.scoring import evaluate
from gptile.speculation import (
    choose_speculation,
    print_statistics,
    speculation_options,
    statistics_record,
)
from gptile.train.config import TrainConfig

if TYPE_CHECKING:
    from gptile.model.generation import Completion

_OUT_OF_MEMORY = r"out of memory|can't allocate memory"
_NO_COMPILER = "Failed to find C compiler"  # Triton's words


def main() -> None:
    """Run the command line: one line on stderr and exit code 2 for what the user can mend, 1 for
    what the machine refused."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    # PyTorch's profiler, which counts memory, else reports each of its stages on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        code = cli.main(prog_name="gptile", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = 2
    except (click.ClickException, UserError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        code = _fail(message, 2)
    except (click.Abort, KeyboardInterrupt):
        code = _fail("interrupted", 130)
    except BrokenPipeError:
        # The reader has gone (`| head`); keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        code = _fail(f"{where}{error.strerror or error}", 1)
    except (MemoryError, RuntimeError) as error:
        if _NO_COMPILER in str(error):
            sys.exit(_fail("Triton needs a C compiler: install gcc, or use --kernels torch", 1))
        # PyTorch reports a full memory as a RuntimeError; any other is ours to mend, and is shown.
        full = isinstance(error, MemoryError) or re.search(_OUT_OF_MEMORY, str(error))
        if not full:
            raise
        code = _fail("not enough memory; make the request, the batch or the model smaller", 1)
    sys.exit(code)


def _fail(message: str, code: int) -> int:
    click.echo(f"gptile: error: {' '.join(message.split())}", err=True)
    return code


def model_options(command: Callable) -> Callable:
    """Where a model comes from and how it runs."""
    for option in (
        click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True),
        kernels_option,
        device_option,
        revision_option,
        click.option(
            "--model",
            default="demo",
            show_default=True,
            help="Directory, .safetensors file, hub id such as gpt2, or the demo in the package.",
        ),
    ):
        command = option(command)
    return command


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    **examples('gptile generate "ROMEO:"', "gptile generate --model gpt2 'The'", "gptile doctor"),
)
@click.version_option(gptile.__version__, prog_name="gptile")
def cli() -> None:
    """GPT-2 from scratch, equal to transformers."""


@cli.command(
    **examples(
        'gptile generate "ROMEO:" --max-new-tokens 60 --seed 1',
        'gptile generate --model gpt2 --temperature 0 "The capital of France is"',
        "gptile generate --file prompt.txt --n 4 --json",
        r"printf 'ROMEO:' | gptile generate --stop $'\n\n'",
        "TRITON_INTERPRET=1 gptile generate --kernels triton --max-new-tokens 8 'ROMEO:'",
        "gptile generate --model DIR --ids '50256 464'",
        "gptile generate --model gpt2 --engine fast --weights int8 'Once upon a time'",
        "gptile generate --model gpt2-xl --draft gpt2 --device cuda 'Once upon a time'",
        "gptile generate --draft lookup --temperature 0 'To be, or not to be, or'",
    )
)
@click.argument("prompt", required=False)
@click.option(
    "--file",
    "prompt_file",
    type=click.Path(path_type=Path),
    help="Read the prompt from a file, byte for byte.",
)
@click.option("--ids", "as_ids", is_flag=True, help="Prompt and output are token ids.")
@model_options
@decoding_options
@speculation_options
@click.option("--max-new-tokens", type=int, help="[default: what the context has room for]")
@click.option("--temperature", type=float, default=0.8, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, show_default=True, help="0 keeps all.")
@click.option("--top-p", type=float, default=0.95, show_default=True, help="1 keeps all.")
@click.option("--min-p", type=float, default=0.0, show_default=True, help="0 keeps all.")
@click.option("--repetition-penalty", type=float, default=1.0, show_default=True)
@click.option("--seed", type=int, help="Makes the text reproducible.  [default: a fresh one]")
@click.option("--n", type=int, default=1, show_default=True, help="Samples of the prompt.")
@click.option("--stop", multiple=True, help="End before this string; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def generate(
    prompt: str | None,
    prompt_file: Path | None,
    as_ids: bool,
    model: str,
    revision: str | None,
    device: str,
    kernels: str,
    dtype: str,
    engine: str,
    weights: str,
    threads: int | None,
    draft: str | None,
    draft_tokens: int | None,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Continue PROMPT; without one, a file or standard input. "-" is standard input too.

    The text appears as it is written. Nothing is stripped from a prompt: a final newline counts. An
    empty prompt starts from the model's beginning-of-text token.
    """
    from gptile.model.sampling import SamplingParams
    from gptile.model.tokenizer import NoTokenizerError
    from gptile.weights import open_checkpoint

    text = _read_prompt(prompt, prompt_file)
    params = SamplingParams(**sampling)
    checkpoint = open_checkpoint(model, revision)
    try:
        tokenizer = checkpoint.load_tokenizer()
    except NoTokenizerError:
        if not as_ids or params.stop:
            raise
        tokenizer = None
    given: str | list[int] = _parse_ids(text) if as_ids else text
    where = parse_device(device)
    ops = parse_kernels(kernels, where, checkpoint.config)
    speculation = choose_speculation(
        draft,
        draft_tokens,
        model=model,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        dtype=parse_dtype(dtype),
        device=where,
        kernels=kernels,
        engine=engine,
        weights=weights,
        threads=threads,
    )
    with status(f"loading {model}"):
        loaded = checkpoint.load_model(dtype=parse_dtype(dtype), device=where, ops=ops)
    engine = "plain" if speculation else engine
    step = choose_decode_step(loaded, engine, weights, threads, kernels)
    how: Any = {"tokenizer": tokenizer, "decode_step": step, "speculate": speculation}

    from gptile.model.generation import generate as run
    from gptile.model.generation import stream

    if as_json:
        with status("generating"):
            completions = run(loaded, [given], params, **how)
        record: dict[str, Any] = {
            "model": model,
            "prompt": given,
            "completions": [_completion_record(completion) for completion in completions],
        }
        if speculation:
            record["speculation"] = statistics_record(speculation.stats)
        click.echo(json.dumps(record, ensure_ascii=False))
    elif params.n > 1:
        with status("generating"):
            completions = run(loaded, [given], params, **how)
        for completion in completions:
            click.echo(f"--- sample {completion.sample_index + 1} of {params.n} ---")
            body = " ".join(map(str, completion.ids)) if as_ids else f"{text}{completion.text}"
            click.echo(body)
    else:
        events = stream(loaded, [given], params, **how)
        click.echo("" if as_ids else text, nl=False)
        for index, event in enumerate(events):
            separator = " " if index else ""
            click.echo(f"{separator}{event.id}" if as_ids else event.text, nl=False)
        click.echo()
    if speculation and not as_json:
        print_statistics(speculation.stats)


def _completion_record(completion: "Completion") -> dict[str, Any]:
    return {
        "text": completion.text,
        "ids": completion.ids,
        "logprobs": completion.logprobs,
        "finish_reason": completion.finish_reason,
        "n_prompt_tokens": completion.n_prompt_tokens,
        "n_new_tokens": completion.n_new_tokens,
        "seed": completion.seed,
    }


def _read_prompt(prompt: str | None, path: Path | None) -> str:
    if prompt is not None and path is not None:
        raise click.UsageError("give a PROMPT or --file, not both")
    if path is not None:
        source, raw = str(path), path.read_bytes()
    elif sys.stdin is not None and (prompt == "-" or (prompt is None and not sys.stdin.isatty())):
        source, raw = "standard input", sys.stdin.buffer.read()
    else:
        return prompt or ""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{source} is not UTF-8 text ({error})") from None


def _parse_ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not all(word.isascii() and word.isdigit() for word in words):
        raise click.UsageError(
            f"--ids takes whole numbers such as '50256 464', got {text.strip()[:60]!r}"
        )
    return [int(word) for word in words]


@cli.command(**examples("gptile info demo", "gptile info gpt2 --json"))
@click.argument("model", default="demo")
@revision_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def info(model: str, revision: str | None, as_json: bool) -> None:
    """What a checkpoint is: architecture, size, tokeniser. MODEL as in generate --model."""
    from gptile.info import describe

    record = describe(model, revision)
    if as_json:
        click.echo(json.dumps(record, ensure_ascii=False))
    else:
        print_table(["", model], [(name.replace("_", " "), record[name]) for name in record])


@cli.command(
    **examples(
        "gptile convert downloads/my-gpt2 my-gpt2",
        "gptile convert out/ckpt.pt my-gpt2 --tokenizer-from downloads/gpt2",
        "gptile convert my-gpt2 my-gpt2-fp16 --dtype float16",
    )
)
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(DTYPES), help="To store.  [default: the source's]")
@click.option(
    "--tokenizer-from",
    type=click.Path(path_type=Path),
    help="Directory with the tokeniser's files.  [default: the source's]",
)
@click.option(
    "--vocab-size",
    type=int,
    help="Keep this many embedding rows.  [default: all, but 50257 of nanoGPT's padded 50304]",
)
def convert(
    source: Path,
    target: Path,
    dtype: str | None,
    tokenizer_from: Path | None,
    vocab_size: int | None,
) -> None:
    """Write SOURCE as a safetensors checkpoint directory TARGET.

    SOURCE is a pytorch_model.bin or its directory, a nanoGPT ckpt.pt, or a safetensors checkpoint.
    Pickles are read with weights_only, so that no code in them runs.
    """
    from gptile.weights.convert import convert as run

    with status(f"converting {source}"):
        model = run(
            source,
            target,
            dtype=parse_dtype(dtype) if dtype else None,
            tokenizer_from=tokenizer_from,
            vocab_size=vocab_size,
        )
    stored = str(model.wte.weight.dtype).removeprefix("torch.")
    click.echo(
        f"{target}: {model.num_parameters():,} parameters in {stored}, "
        f"vocabulary of {model.config.vocab_size:,}"
    )


def train_options(command: Callable) -> Callable:
    """An option for every field of TrainConfig."""
    for field in reversed(dataclasses.fields(TrainConfig)):
        command = click.option(
            "--" + field.name.replace("_", "-"),
            type=field.type,
            default=field.default,
            show_default=True,
            help=field.metadata["help"],
        )(command)
    return command


@cli.command(
    **examples(
        "gptile train tinyshakespeare.txt --out runs/demo",
        "gptile train tinyshakespeare.txt --out runs/demo --resume",
        "gptile generate --model runs/demo/best 'ROMEO:'",
    )
)
@click.argument("data", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory of the run.")
@click.option("--resume", is_flag=True, help="Continue the run in --out, bit for bit.")
@click.option("--stop-at", type=int, help="Save and end after this step.")
@click.option(
    "--tokenizer-from",
    type=click.Path(path_type=Path),
    help="Directory with a tokeniser to use instead of training one.",
)
@device_option
@train_options
def train(
    data: Path,
    out: Path,
    resume: bool,
    stop_at: int | None,
    tokenizer_from: Path | None,
    device: str,
    **hyperparameters: Any,
) -> None:
    """Train a GPT-2 on a text file. The defaults are the recipe of the demo checkpoint."""
    from gptile.train.loop import train as run

    config = TrainConfig(**hyperparameters)
    state = run(
        data,
        out,
        config,
        tokenizer_from=tokenizer_from,
        resume=resume,
        stop_at=stop_at,
        device=parse_device(device),
    )
    best = f"{state.best_val_loss:.4f}" if state.log else "not measured yet"
    click.echo(f"{out}: step {state.step}, best validation loss {best}")


for _command in (doctor, parity, inspect, bench, evaluate, compile_command):
    cli.add_command(_command)
