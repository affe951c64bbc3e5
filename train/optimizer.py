"""AdamW with decay groups, and the learning-rate schedule."""

import math

import torch
from torch import nn

from gptile.train.config import TrainConfig


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Every parameter once: matrices decay, biases and LayerNorms do not.

    A tied head is the token embedding, so it is in the first group once.
    """
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW (https://arxiv.org/abs/1711.05101) over :func:`decay_groups`."""
    return torch.optim.AdamW(
        decay_groups(model, config.weight_decay),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
    )


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of step 0, 1, ...: linear warm-up, then a cosine that ends at the minimum."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    span = max(1, config.steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    floor = config.min_learning_rate
    return floor + 0.5 * (1 + math.cos(math.pi * progress)) * (config.learning_rate - floor)
