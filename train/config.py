"""What a training run is: everything its result depends on besides the data.

Imports no PyTorch, for the command line's --help.
"""

from dataclasses import dataclass, field
from typing import Any

from gptile.model.errors import UserError


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class TrainConfig:
    """Hyperparameters; the defaults are the recipe of the bundled demo checkpoint. The metadata of
    a field says what it is; the command line shows it.

    Raises:
        UserError: for a value that cannot be trained with.
    """

    steps: int = _option(1500, "Optimiser steps in all.")
    batch_size: int = _option(12, "Sequences a step.")
    block_size: int = _option(256, "Tokens a sequence, and the model's context.")
    n_layer: int = _option(6, "Transformer blocks.")
    n_head: int = _option(4, "Attention heads.")
    n_embd: int = _option(256, "Width of the residual stream.")
    vocab_size: int = _option(2048, "Of the byte-level BPE to train; unused if one is given.")
    dropout: float = _option(0.2, "On embedding, attention and residual alike.")
    learning_rate: float = _option(2e-3, "Highest rate, reached after the warm-up.")
    min_learning_rate: float = _option(1e-4, "Where the cosine ends, at the last step.")
    warmup_steps: int = _option(100, "Steps of linear warm-up.")
    weight_decay: float = _option(0.1, "AdamW's, on matrices only.")
    beta1: float = _option(0.9, "AdamW's decay of the first moment.")
    beta2: float = _option(0.99, "AdamW's decay of the second moment.")
    grad_clip: float = _option(1.0, "Largest norm of the gradient; 0 does not clip.")
    val_fraction: float = _option(0.1, "Share of the text, at its end, kept for validation.")
    eval_interval: int = _option(100, "Steps between validations; each saves a checkpoint.")
    seed: int = _option(1337, "Decides initialisation, order of the data, and dropout.")

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "block_size", "eval_interval"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("warmup_steps", "weight_decay", "grad_clip", "min_learning_rate", "seed"):
            if not getattr(self, name) >= 0:
                raise UserError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if not 0 < self.learning_rate < float("inf"):
            raise UserError(f"learning_rate must be positive, got {self.learning_rate}")
        if self.min_learning_rate > self.learning_rate:
            raise UserError(
                f"min_learning_rate {self.min_learning_rate} is above learning_rate "
                f"{self.learning_rate}"
            )
        if not 0 < self.val_fraction < 1:
            raise UserError(f"val_fraction must be between 0 and 1, got {self.val_fraction}")
        if not 257 <= self.vocab_size <= 2**20:
            raise UserError(
                f"vocab_size must be from 257, 256 bytes and one special token, to {2**20}, "
                f"got {self.vocab_size}"
            )
        if self.seed >= 2**63:
            raise UserError(f"seed must be below 2^63, got {self.seed}")
