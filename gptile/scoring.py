"""The command that scores texts. Imports wait until it runs."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    progress,
    result_options,
    revision_option,
    status,
)

if TYPE_CHECKING:
    import torch

    from gptile.bench.corpus import Corpus
    from gptile.bench.evaluation import Score
    from gptile.weights.checkpoint import Checkpoint

# Tokens and rounds of a ladder.
_FULL, _QUICK = (16384, 5), (8192, 3)


@click.command(
    **examples(
        "gptile evaluate tinyshakespeare.txt",
        "gptile evaluate tinyshakespeare.txt --stride 128 --json",
        "gptile evaluate documents.jsonl --bos --batch-size 32 -o score.json",
        "gptile evaluate text.txt --model gpt2 --dtype bfloat16 --device cuda",
        "torchrun --nproc-per-node 2 -m gptile evaluate tinyshakespeare.txt",
        "gptile evaluate tinyshakespeare.txt --ladder --quick",
    )
)
@click.argument("text", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.option("--model", default="demo", show_default=True, help="As in generate --model.")
@revision_option
@device_option
@kernels_option
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True)
@click.option("--autocast", type=click.Choice(DTYPES[1:]), help="Of products of float32 weights.")
@click.option("--compile", "compiled", is_flag=True, help="Use torch.compile.")
@click.option("--documents", is_flag=True, help="TEXT is JSONL, whatever it is called.")
@click.option("--field", default="text", show_default=True, help="Of JSONL, that holds the text.")
@click.option("--window", type=click.IntRange(1), help="Tokens seen at once.  [default: context]")
@click.option(
    "--stride",
    type=click.IntRange(1),
    help="From window to window; a smaller one gives more context.  [default: the window]",
)
@click.option("--batch-size", type=click.IntRange(1), default=16, show_default=True)
@click.option(
    "--bucket",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Lengths that share a batch differ by less than this.",
)
@click.option("--bos", is_flag=True, help="Score first tokens too, after bos_token_id.")
@click.option("--special-tokens", is_flag=True, help="<|endoftext|> in a text is that token.")
@click.option("--limit", type=click.IntRange(2), help="Read this many tokens, no more.")
@click.option("--ladder", is_flag=True, help="What each optimisation earns, one in each row.")
@click.option("--quick", is_flag=True, help="A shorter ladder.")
@result_options
def evaluate(
    text: str,
    model: str,
    revision: str | None,
    device: str,
    documents: bool,
    field: str,
    window: int | None,
    stride: int | None,
    bos: bool,
    special_tokens: bool,
    limit: int | None,
    ladder: bool,
    quick: bool,
    output: Path | None,
    as_json: bool,
    **how: Any,
) -> None:
    """Score TEXT: negative log-likelihood, perplexity, bits per byte. "-" is standard input.

    A .jsonl file holds documents, an object a line; any other file is one text. Texts are taken
    byte for byte, newlines included; a byte order mark at the beginning is left out. Every token
    but the first of a text is scored exactly once.

    Under torchrun the batches are shared out, by gloo on CPUs and NCCL on GPUs, and the result is
    the same to the last bit.

    --ladder times the naive loop with transformers, and then one optimisation more in each row, on
    the first 16384 tokens (--quick: 8192) or --limit. Exit code 1 where a row does not score what
    the first does. Needs transformers: in the repository, pip install '.[bench]'.
    """
    from gptile.bench.corpus import Corpus, encode_documents, read_documents
    from gptile.bench.evaluation import summarise
    from gptile.bench.result import Result
    from gptile.weights import open_checkpoint

    check_writable(output)
    n_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if n_processes > 1 and (ladder or text == "-"):
        raise click.UsageError("under torchrun give a file, and no --ladder")
    if quick and not ladder:
        raise click.UsageError("--quick is for --ladder")
    checkpoint = open_checkpoint(model, revision)
    context = checkpoint.config.n_positions
    if window is not None and window > context:
        raise click.UsageError(f"--window {window}: {model} has a context of {context} tokens")
    window = window or context
    stride = stride or window
    n_tokens, rounds = _QUICK if quick else _FULL
    limit = limit or (n_tokens if ladder else None)
    where = _own_device(device, n_processes)

    raw = sys.stdin.buffer.read() if text == "-" else Path(text).read_bytes()
    is_jsonl = documents or text.endswith(".jsonl")
    texts, notes = read_documents(raw, text, field if is_jsonl else None)
    tokenizer = checkpoint.load_tokenizer()
    policy: dict[str, Any] = {"special_tokens": special_tokens, "bos": bos, "limit": limit}
    with status("tokenising"):
        ids = encode_documents(texts, tokenizer, checkpoint.config, **policy)
        corpus = Corpus(ids, window, stride)
    if limit == sum(map(len, ids)):
        notes.append(f"of {text} the first {limit:,} tokens only")

    if ladder:
        rows = _climb(checkpoint, corpus, where, rounds, **how)
        notes.append(
            f"s: median of {rounds} rounds; speed-up and off by: from the first row; "
            "MiB: peak beyond the weights"
        )
    else:
        measured = _measure(checkpoint, corpus, where, notes, **how)
        if measured is None:
            return  # another process tells
        row = _row(summarise(corpus, measured[0], tokenizer), measured[1], is_jsonl)
        rows = [{"subject": {"text": text, "model": model}, **row}]
    settings = {"text": text, "model": model, "window": window, "stride": stride}
    settings |= {"processes": n_processes, **policy, **how}
    if not as_json:
        print_table(*(_ladder_table(rows) if ladder else _score_table(rows[0])))
        skipped = [row for row in rows if "skipped" in row]
        not_run = [f"{row['subject']['rung']} not run: {row['skipped']}" for row in skipped]
        for note in [*not_run, *notes]:
            click.echo(f"note: {note}")
    record = Result("evaluation", settings, rows, notes, device=where.type).record()
    deliver(record, output, as_json)
    if not all(row.get("ok", True) for row in rows):
        sys.exit(1)


def _own_device(name: str, n_processes: int) -> "torch.device":
    """The device of this process: under torchrun each has a GPU of its own.

    Raises:
        click.UsageError: where there are more processes than GPUs.
    """
    import torch

    device = parse_device(name)
    if device.type == "cpu" or n_processes == 1:
        return device
    if device.index is not None:
        raise click.UsageError(f"--device {name}: under torchrun each process takes its own GPU")
    index = int(os.environ["LOCAL_RANK"])
    if index >= torch.cuda.device_count():
        raise click.UsageError(
            f"{torch.cuda.device_count()} GPUs here, too few for so many processes: "
            "run torchrun with a smaller --nproc-per-node, or use --device cpu"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _measure(
    checkpoint: "Checkpoint",
    corpus: "Corpus",
    device: "torch.device",
    notes: list[str],
    *,
    kernels: str,
    dtype: str,
    autocast: str | None,
    compiled: bool,
    batch_size: int,
    bucket: int,
) -> tuple["torch.Tensor", float] | None:
    """Sums of the windows and the seconds they took; None in every process but the first."""
    import torch

    from gptile.bench.evaluation import (
        missing_compiler,
        processes,
        slowdown,
        window_sums,
        without_full_logits,
    )
    from gptile.kernels import Ops
    from gptile.model.gpt2 import default_ops

    if autocast and dtype != "float32":
        raise click.UsageError(f"--autocast is for float32 weights, not for --dtype {dtype}")
    if autocast and kernels == "triton":
        raise click.UsageError(
            "--autocast is PyTorch's; for Triton's kernels in 16 bits use --dtype"
        )
    ops = Ops.torch() if autocast else parse_kernels(kernels, device, checkpoint.config)
    if compiled and (why := missing_compiler(device)):
        raise click.UsageError(why)
    if compiled:
        notes.append("the time includes compilation")
    weights = parse_dtype(dtype)
    ops = ops or default_ops(checkpoint.config, device, weights)
    short = parse_dtype(autocast or dtype)
    if device.type == "cpu" and short != torch.float32 and (ratio := slowdown(short, device)) > 1:
        notes.append(
            f"this CPU has no fast 16-bit products: one took {ratio:.1f} times as long as in fp32"
        )
    with processes(device) as (rank, n_ranks):
        with status("loading the model"):
            model = checkpoint.load_model(
                dtype=weights, device=device, ops=without_full_logits(ops)
            )
        plan = corpus.plan(batch_size, bucket)[rank::n_ranks]
        started = time.perf_counter()
        with _bar(corpus, plan, shown=rank == 0) as on_batch:
            sums = window_sums(
                [torch.compile(model) if compiled else model],
                corpus,
                plan,
                devices=[device],
                autocast=short if autocast else None,
                on_batch=on_batch,
            )
        seconds = time.perf_counter() - started
    return (sums, seconds) if rank == 0 else None


@contextmanager
def _bar(
    corpus: "Corpus", plan: list[list[int]], *, shown: bool
) -> Iterator[Callable[[Sequence[int]], None]]:
    """Gives what shows that a batch of those windows is under way."""
    if not shown:
        yield lambda _: None
        return
    total = sum(corpus.windows[row].n_scored for rows in plan for row in rows)
    started, done = time.perf_counter(), 0
    with progress() as bar:
        task = bar.add_task("scoring", total=total)

        def on_batch(rows: Sequence[int]) -> None:
            nonlocal done
            done += sum(corpus.windows[row].n_scored for row in rows)
            rate = done / (time.perf_counter() - started)
            bar.update(task, completed=done, description=f"scoring, {rate:,.0f} tokens/s")

        yield on_batch


def _row(score: "Score", seconds: float, is_jsonl: bool) -> dict[str, Any]:
    from gptile.bench.evaluation import perplexity

    row = {
        "tokens": score.n_tokens,
        "bytes": score.n_bytes,
        "nll": score.nll,
        "perplexity": perplexity(score.nll),
        "bits_per_byte": score.bits_per_byte,
        "seconds": [seconds],
        "tokens_per_second": score.n_tokens / seconds,
    }
    if is_jsonl:
        row["documents"] = [
            {"tokens": d.n_tokens, "bytes": d.n_bytes, "nll": d.nll} for d in score.documents
        ]
    elif score.loop_nll is not None:
        row["loop_perplexity"] = perplexity(score.loop_nll)
    return row


def _score_table(row: dict[str, Any]) -> tuple[list[str], list[tuple[Any, ...]]]:
    rows = [
        ("tokens scored", f"{row['tokens']:,}"),
        ("negative log-likelihood", f"{row['nll']:.6f} nats a token"),
        ("perplexity", f"{row['perplexity']:.4f}"),
        ("bits per byte", f"{row['bits_per_byte']:.6f}"),
        ("time", f"{row['seconds'][0]:.2f} s, {row['tokens_per_second']:,.0f} tokens/s"),
    ]
    if "documents" in row:
        scored = sum(document["tokens"] > 0 for document in row["documents"])
        found = f"{scored:,} with a token to score, of {len(row['documents']):,}"
        rows.insert(0, ("documents", found))
    if "loop_perplexity" in row:
        rows.insert(3, ("as Hugging Face's loop counts", f"{row['loop_perplexity']:.4f}"))
    return ["", row["subject"]["text"]], rows


def _climb(
    checkpoint: "Checkpoint",
    corpus: "Corpus",
    device: "torch.device",
    rounds: int,
    *,
    kernels: str,
    dtype: str,
    autocast: str | None,
    compiled: bool,
    batch_size: int,
    bucket: int,
) -> list[dict[str, Any]]:
    from gptile.bench.evaluation_ladder import Rung, climb, rungs

    if (kernels, dtype, compiled) != ("auto", "float32", False):
        raise click.UsageError(
            "--ladder has rows for --kernels, --dtype and --compile: leave them out"
        )
    with status("loading the models"):
        steps = list(
            rungs(
                checkpoint,
                corpus,
                batch_size=batch_size,
                bucket=bucket,
                device=device,
                dtype=parse_dtype(autocast or "bfloat16"),
            )
        )
    with progress() as bar:
        task = bar.add_task("", total=sum(isinstance(step, Rung) for step in steps) + rounds)
        return climb(
            steps,
            rounds=rounds,
            device=device,
            on_step=lambda name: bar.update(task, advance=1, description=name),
        )


def _ladder_table(rows: list[dict[str, Any]]) -> tuple[list[str], list[tuple[Any, ...]]]:
    from gptile.bench.timing import Speedup

    cells: list[tuple[Any, ...]] = []
    for row in rows:
        name = row["subject"]["rung"]
        if "skipped" in row:
            cells.append((name, "", "not run", "", "", ""))
            continue
        gain = str(Speedup(**row["speedup"])) if row["speedup"] else "withheld"
        cells.append(
            (
                name,
                f"{row['p50']:.2f}",
                gain if cells else "1",
                f"{row['memory'] / 2**20:.0f}",
                f"{row['nll']:.5f}",
                f"{'ok' if row['ok'] else 'FAIL'} {row['error']:.0e}" if cells else "",
            )
        )
    return ["", "s", "speed-up", "MiB", "NLL", "off by"], cells
