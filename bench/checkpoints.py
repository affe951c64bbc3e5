"""Checkpoints to measure on where none is at hand: GPT-2's sizes with random weights."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from gptile.model.config import PRESETS, GPT2Config
from gptile.model.errors import UserError
from gptile.model.gpt2 import GPT2
from gptile.model.tokenizer import NoTokenizerError, Tokenizer
from gptile.weights import open_checkpoint
from gptile.weights.files import find_checkpoint
from gptile.weights.save import save_checkpoint

RANDOM = "random:"


@contextmanager
def checkpoint_directory(source: str, revision: str | None = None) -> Iterator[Path]:
    """The directory of a checkpoint. ``random:gpt2`` (or another of PRESETS) is made on the spot,
    without a tokeniser, and removed afterwards: its speed is GPT-2's, its text is noise.

    Raises:
        UserError: if there is no such checkpoint.
    """
    if not source.startswith(RANDOM):
        files = open_checkpoint(source, revision).files
        # Others are given the directory: they must find the same weights in it.
        if find_checkpoint(files.directory) != files:
            raise UserError(
                f"{source}: other weights lie beside it; move it to a directory of its own"
            )
        yield files.directory
        return
    with random_checkpoint(_preset(source)) as directory:
        yield directory


def _preset(source: str) -> GPT2Config:
    config = PRESETS.get(source.removeprefix(RANDOM))
    if config is None:
        raise UserError(
            f"{source}: random models are {', '.join(RANDOM + name for name in PRESETS)}"
        )
    return config


def read_sizes(source: str, revision: str | None = None) -> tuple[GPT2Config, Tokenizer | None]:
    """The config of a checkpoint, and its tokeniser if it has one, without its weights; of
    ``random:gpt2`` too.

    Raises:
        UserError: if there is no such checkpoint.
    """
    if source.startswith(RANDOM):
        return _preset(source), None
    checkpoint = open_checkpoint(source, revision)
    try:
        return checkpoint.config, checkpoint.load_tokenizer()
    except NoTokenizerError:
        return checkpoint.config, None


@contextmanager
def random_checkpoint(config: GPT2Config) -> Iterator[Path]:
    """A directory, removed afterwards, with random weights: the same ones each time."""
    with tempfile.TemporaryDirectory(prefix="gptile-") as parent, torch.random.fork_rng([]):
        torch.manual_seed(0)
        directory = Path(parent, "random")
        model = GPT2(config)
        _disturb(model)
        save_checkpoint(model, directory)
        del model
        yield directory


@torch.no_grad()
def _disturb(model: GPT2) -> None:
    """Move biases and LayerNorm off 0 and 1, where a mistake with them would not show."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
