"""What a training run is: everything its result depends on besides the data."""

from dataclasses import dataclass

from gptile.model.config import GPT2Config
from gptile.model.errors import UserError


@dataclass(frozen=True)
class TrainConfig:
    """Hyperparameters; the defaults are the recipe of the bundled demo checkpoint.

    Attributes:
        steps: optimiser steps in all.
        batch_size: sequences of ``block_size`` tokens a step.
        block_size: tokens a sequence, and the model's context.
        vocab_size: of the byte-level BPE trained on the data, one special token included.
        learning_rate, min_learning_rate, warmup_steps: linear warm-up, then a cosine down to the
            minimum at the last step.
        weight_decay: AdamW's, on matrices only.
        grad_clip: largest norm of the gradient; 0 does not clip.
        dropout: on embedding, attention and residual alike.
        val_fraction: share of the text, at its end, kept for validation.
        eval_interval: steps between validations; each also saves a checkpoint.
        seed: decides initialisation, order of the data, and dropout.

    Raises:
        UserError: for a value that cannot be trained with.
    """

    steps: int = 1500
    batch_size: int = 12
    block_size: int = 256
    n_layer: int = 6
    n_head: int = 4
    n_embd: int = 256
    vocab_size: int = 2048
    dropout: float = 0.2
    learning_rate: float = 1e-3
    min_learning_rate: float = 1e-4
    warmup_steps: int = 100
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    grad_clip: float = 1.0
    val_fraction: float = 0.1
    eval_interval: int = 100
    seed: int = 1337

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "block_size", "eval_interval"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("warmup_steps", "weight_decay", "grad_clip", "min_learning_rate", "seed"):
            if not getattr(self, name) >= 0:
                raise UserError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 < self.learning_rate < float("inf"):
            raise UserError(f"learning_rate must be positive, got {self.learning_rate}")
        if not 0 < self.val_fraction < 1:
            raise UserError(f"val_fraction must be between 0 and 1, got {self.val_fraction}")
        if self.vocab_size < 257:
            raise UserError(
                f"vocab_size must be at least 257 (256 bytes and 1 special token), "
                f"got {self.vocab_size}"
            )

    def model_config(
        self, *, vocab_size: int, bos_token_id: int, eos_token_id: int | None
    ) -> GPT2Config:
        """The network of this run; the tokeniser decides the ids."""
        return GPT2Config(
            vocab_size=vocab_size,
            n_positions=self.block_size,
            n_embd=self.n_embd,
            n_layer=self.n_layer,
            n_head=self.n_head,
            embd_pdrop=self.dropout,
            attn_pdrop=self.dropout,
            resid_pdrop=self.dropout,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
        )
