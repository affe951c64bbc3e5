"""Text file to token ids to batches. Every batch is a function of (seed, step), so a resumed run
sees the data it would have seen."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gptile.kernels import IGNORE_INDEX
from gptile.model.errors import UserError
from gptile.model.tokenizer import MERGES_FILE, VOCAB_FILE, Tokenizer
from gptile.train.config import TrainConfig

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Dataset:
    """Token ids of the two parts of a text, 1-D int64, and how many UTF-8 bytes the second has."""

    train: Tensor
    val: Tensor
    val_bytes: int


def read_text(path: Path) -> str:
    """A UTF-8 text file, its line ends untouched.

    Raises:
        UserError: if it is missing, empty or not UTF-8.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error})") from None
    if not text:
        raise UserError(f"{path}: the file is empty")
    return text


def split_text(text: str, val_fraction: float) -> tuple[str, str]:
    """The training and the validation part: the text's beginning and its end."""
    cut = int(len(text) * (1 - val_fraction))
    return text[:cut], text[cut:]


def train_tokenizer(text: str, vocab_size: int, directory: Path) -> None:
    """Train byte-level BPE and write ``vocab.json`` and ``merges.txt``: 256 bytes, then merges in
    order, then ``<|endoftext|>`` as the last id."""
    try:
        from tokenizers import Tokenizer as Trainable
        from tokenizers import models, pre_tokenizers, trainers
    except ImportError:
        raise UserError(
            "training a tokeniser needs tokenizers: in the repository, pip install '.[train]'"
        ) from None
    bpe = Trainable(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([text], trainer)
    model = json.loads(bpe.to_str())["model"]
    vocab = dict(sorted(model["vocab"].items(), key=lambda item: item[1]))
    vocab[END_OF_TEXT] = len(vocab)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    (directory / VOCAB_FILE).write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *merges]
    (directory / MERGES_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def encode_dataset(text: str, tokenizer: Tokenizer, config: TrainConfig) -> Dataset:
    """Tokenise both parts.

    Raises:
        UserError: if a part is shorter than one sequence.
    """
    parts = split_text(text, config.val_fraction)
    train, val = (torch.tensor(tokenizer.encode(part)) for part in parts)
    for name, ids in (("training", train), ("validation", val)):
        if len(ids) <= config.block_size:
            raise UserError(
                f"the {name} text has {len(ids)} tokens, too few for sequences of "
                f"{config.block_size}: give more text or a smaller block_size"
            )
    return Dataset(train, val, len(parts[1].encode()))


def training_batch(ids: Tensor, config: TrainConfig, step: int) -> tuple[Tensor, Tensor]:
    """Random windows of the training ids for one step.

    Returns:
        ``(inputs, targets)``, ``[batch_size, block_size]`` each, targets one token ahead.
    """
    generator = torch.Generator().manual_seed(step_seed(config.seed, step))
    starts = torch.randint(len(ids) - config.block_size, (config.batch_size,), generator=generator)
    windows = torch.stack([ids[start : start + config.block_size + 1] for start in starts])
    return windows[:, :-1], windows[:, 1:]


def validation_batches(ids: Tensor, config: TrainConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows that predict every validation id but the first exactly once, in order; the last one
    is filled up with IGNORE_INDEX targets."""
    size = config.block_size
    n_windows = -(-(len(ids) - 1) // size)
    padding = n_windows * size + 1 - len(ids)
    inputs = torch.cat([ids[:-1], ids.new_zeros(padding)]).view(n_windows, size)
    targets = torch.cat([ids[1:], ids.new_full((padding,), IGNORE_INDEX)]).view(n_windows, size)
    yield from zip(inputs.split(config.batch_size), targets.split(config.batch_size), strict=True)


def step_seed(seed: int, step: int) -> int:
    """A seed of its own for each step of each run."""
    return (seed * 1_000_003 + step) % 2**63
