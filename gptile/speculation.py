"""What ``gptile generate`` drafts with, and what it says of it. Imports wait until it runs."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from gptile.console import parse_kernels, status
from gptile.decoding import WEIGHTS, choose_decode_step

if TYPE_CHECKING:
    import torch

    from gptile.model.speculative import Speculation, Statistics
    from gptile.model.tokenizer import Tokenizer
    from gptile.weights import Checkpoint

LOOKUP = "lookup"


def speculation_options(command: Callable) -> Callable:
    """The parameters ``draft`` and ``draft_tokens``."""
    for option in (
        click.option(
            "--draft-tokens",
            type=click.IntRange(1),
            help="How many to draft a step.  [default: 4 with a model, 7 with lookup]",
        ),
        click.option(
            "--draft",
            metavar=f"MODEL|{LOOKUP}",
            help="Write the same text in fewer steps: a smaller MODEL of the same vocabulary "
            f"drafts tokens, or what followed the last words before does ({LOOKUP}), and --model "
            "checks several at a time.",
        ),
    ):
        command = option(command)
    return command


def choose_speculation(
    draft: str | None,
    n_tokens: int | None,
    *,
    model: str,
    checkpoint: "Checkpoint",
    tokenizer: "Tokenizer | None",
    dtype: "torch.dtype",
    device: "torch.device",
    kernels: str,
    engine: str,
    weights: str,
    threads: int | None,
) -> "Speculation | None":
    """What was asked for, its model loaded; None for none.

    Raises:
        click.UsageError: for what does not go together.
        UserError: if there is no such model.
    """
    if draft is None:
        if n_tokens is not None:
            raise click.UsageError(f"--draft-tokens needs --draft, a model or {LOOKUP}")
        return None
    if engine == "fast" or weights != WEIGHTS[0]:
        raise click.UsageError(
            f"--draft {draft} and the fast engine: choose one, its steps check no drafted tokens"
        )
    import torch

    from gptile.model.drafting import DraftModel, PromptLookup, check_vocabulary
    from gptile.model.errors import UserError
    from gptile.model.tokenizer import NoTokenizerError
    from gptile.weights import open_checkpoint

    count = {} if n_tokens is None else {"n_tokens": n_tokens}
    if draft == LOOKUP:
        return PromptLookup(**count)
    opened = open_checkpoint(draft)
    try:
        own_tokenizer = opened.load_tokenizer()
    except NoTokenizerError:
        own_tokenizer = None
    try:
        check_vocabulary(opened.config, own_tokenizer, checkpoint.config, tokenizer)
    except UserError as error:
        raise click.UsageError(f"--draft {draft} does not fit --model {model}: {error}") from None
    ops = parse_kernels(kernels, device, opened.config)
    with status(f"loading {draft}"):
        loaded = opened.load_model(dtype=dtype, device=device, ops=ops)
    # As many threads as there are: how many is for the larger model to say.
    step = choose_decode_step(loaded, engine, weights, threads or torch.get_num_threads(), kernels)
    return DraftModel(loaded, tokenizer=own_tokenizer, decode_step=step, **count)


def statistics_record(stats: "Statistics") -> dict[str, Any]:
    """The counts and what they come to."""
    return {
        **dataclasses.asdict(stats),
        "acceptance_rate": stats.acceptance_rate,
        "tokens_per_step": stats.tokens_per_step,
    }


def print_statistics(stats: "Statistics") -> None:
    """One line on stderr."""
    click.echo(
        f"{stats.accepted} of {stats.drafted} drafted tokens accepted "
        f"({stats.acceptance_rate:.0%}); {stats.tokens_per_step:.2f} tokens a step",
        err=True,
    )
