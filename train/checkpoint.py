"""Checkpoints of a run: a Hugging Face directory plus what exact resumption needs.

No random state is stored: data order and dropout are functions of (seed, step).
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gptile.model.config import read_json_object
from gptile.model.gpt2 import GPT2
from gptile.train.config import TrainConfig
from gptile.weights import CheckpointError
from gptile.weights.safetensors_file import open_safetensors, write_safetensors
from gptile.weights.save import atomic_directory, write_json, write_model

OPTIMIZER_FILE, STATE_FILE = "optimizer.safetensors", "trainer_state.json"
_ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of each parameter."""


@dataclass
class TrainState:
    """How far a run has come.

    Attributes:
        step: optimiser steps done.
        pending_losses: training losses since the last validation.
        best_val_loss: the lowest validation loss so far, in nats per token.
        log: one record per validation.
    """

    config: TrainConfig
    data_sha256: str
    step: int = 0
    best_val_loss: float = float("inf")
    pending_losses: list[float] = field(default_factory=list)
    log: list[dict[str, Any]] = field(default_factory=list)


def save_run(
    directory: Path,
    model: GPT2,
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    tokenizer_from: Path,
) -> None:
    """Replace ``directory`` by the run's present state, atomically."""
    with atomic_directory(directory, overwrite=True) as staging:
        write_model(model, staging, tokenizer_from=tokenizer_from)
        moments = {
            f"{name}.{moment}": optimizer.state[parameter][moment]
            for name, parameter in model.named_parameters()
            for moment in _ADAMW_STATE
        }
        write_safetensors(staging / OPTIMIZER_FILE, moments)
        write_json(staging / STATE_FILE, dataclasses.asdict(state))


def load_state(directory: Path) -> TrainState:
    """How far the run saved in ``directory`` had come.

    Raises:
        UserError: if there is none, or it is damaged.
    """
    path = directory / STATE_FILE
    if not path.exists():
        raise CheckpointError(
            f"{directory.parent}: no run was saved there; start it without resume, in a new place"
        )
    fields = read_json_object(path)
    try:
        state = TrainState(**{**fields, "config": TrainConfig(**fields["config"])})
        if type(state.step) is not int or state.step < 0:
            raise TypeError(f"step is {state.step!r}")
        return state
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not a trainer state ({error})") from None


def load_optimizer(directory: Path, model: GPT2, optimizer: torch.optim.Optimizer) -> None:
    """Restore the moments of every parameter.

    Raises:
        CheckpointError: if the file is damaged or lacks a parameter.
    """
    path = directory / OPTIMIZER_FILE
    with open_safetensors(path) as file:
        stored = set(file.keys())
        for name, parameter in model.named_parameters():
            keys = {moment: f"{name}.{moment}" for moment in _ADAMW_STATE}
            if missing := [key for key in keys.values() if key not in stored]:
                raise CheckpointError(f"{path}: no {missing[0]}")
            moments = {moment: file.get_tensor(key) for moment, key in keys.items()}
            for moment in ("exp_avg", "exp_avg_sq"):
                if moments[moment].shape != parameter.shape:
                    raise CheckpointError(f"{path}: {keys[moment]} is not of its parameter's shape")
                moments[moment] = moments[moment].to(parameter.device)
            optimizer.state[parameter] = moments
