"""The training loop."""

import dataclasses
import hashlib
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from gptile.kernels import IGNORE_INDEX
from gptile.model.config import GPT2Config
from gptile.model.errors import UserError
from gptile.model.gpt2 import GPT2, default_ops
from gptile.model.tokenizer import Tokenizer
from gptile.train.checkpoint import TrainState, load_optimizer, load_state, save_run
from gptile.train.config import TrainConfig
from gptile.train.data import (
    END_OF_TEXT,
    Dataset,
    encode_dataset,
    read_text,
    split_text,
    step_seed,
    train_tokenizer,
    training_batch,
    validation_batches,
)
from gptile.train.optimizer import build_optimizer, learning_rate
from gptile.weights import open_checkpoint, save_checkpoint
from gptile.weights.save import atomic_directory, copy_tokenizer

TOKENIZER, LAST, BEST, LOG_FILE = "tokenizer", "last", "best", "log.jsonl"


def train(
    data: Path,
    out: Path,
    config: TrainConfig,
    *,
    tokenizer_from: Path | None = None,
    resume: bool = False,
    stop_at: int | None = None,
    device: torch.device | str = "cpu",
) -> TrainState:
    """Train a GPT-2 on a text file.

    ``out`` then holds ``best/``, the Hugging Face directory with the lowest validation loss;
    ``last/``, the newest state, from which ``resume`` continues bit for bit (on the CPU, with the
    same number of threads); ``tokenizer/``; and ``log.jsonl``, a record per validation.

    Args:
        data: UTF-8 text.
        out: directory of the run; made by this call unless resuming.
        config: of the run; a resumed run must have the one it began with.
        tokenizer_from: directory with a tokeniser to use; by default one is trained on the
            training part of the text.
        resume: continue the run in ``out``.
        stop_at: save and end after this step, as if interrupted there.
        device: where to train.

    Raises:
        UserError: for bad data or a run that cannot be resumed.
    """
    if stop_at is not None and stop_at < 1:
        raise UserError(f"stop_at must be at least 1, got {stop_at}")
    if tokenizer_from is not None:
        if resume:
            raise UserError("a resumed run keeps its tokeniser: leave tokenizer_from out")
        Tokenizer.from_directory(tokenizer_from)
    text = read_text(data)
    digest = hashlib.sha256(text.encode()).hexdigest()
    if resume:
        state = load_state(out / LAST)
        _check_same_run(state, config, digest)
        model = open_checkpoint(out / LAST).load_model(device=device)
        optimizer = build_optimizer(model, config)
        load_optimizer(out / LAST, model, optimizer)
        tokenizer = Tokenizer.from_directory(out / TOKENIZER)
        dataset = encode_dataset(text, tokenizer, config)
    else:
        state = TrainState(config, digest)
        with atomic_directory(out) as staging:
            tokenizer = _make_tokenizer(staging / TOKENIZER, text, config, tokenizer_from)
            dataset = encode_dataset(text, tokenizer, config)
            model = _new_model(tokenizer, config, torch.device(device))
        optimizer = build_optimizer(model, config)

    console = Console(stderr=True)
    console.print(
        f"{model.num_parameters():,} parameters, {len(dataset.train):,} training and "
        f"{len(dataset.val):,} validation tokens of a vocabulary of {tokenizer.n_vocab:,}"
    )
    last_step = config.steps if stop_at is None else min(config.steps, stop_at)
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("training", total=config.steps, completed=state.step)
        started = time.perf_counter()
        while state.step < last_step:
            loss = _train_step(model, optimizer, dataset.train, config, state.step)
            state.pending_losses.append(loss)
            state.step += 1
            progress.update(bar, advance=1)
            evaluating = state.step % config.eval_interval == 0 or state.step == config.steps
            if evaluating:
                record = _evaluate(model, dataset, state, time.perf_counter() - started)
                if improved := record["val_loss"] < state.best_val_loss:
                    state.best_val_loss = record["val_loss"]
                    save_checkpoint(
                        model, out / BEST, tokenizer_from=out / TOKENIZER, overwrite=True
                    )
                progress.console.print(
                    f"step {record['step']:>6}  train {record['train_loss']:.4f}  "
                    f"val {record['val_loss']:.4f}  {record['val_bits_per_byte']:.4f} bits/byte"
                    + ("  best" if improved else "")
                )
                (out / LOG_FILE).write_text("".join(json.dumps(r) + "\n" for r in state.log))
                started = time.perf_counter()
            if evaluating or state.step == last_step:
                save_run(out / LAST, model, optimizer, state, out / TOKENIZER)
    return state


def _make_tokenizer(
    directory: Path, text: str, config: TrainConfig, tokenizer_from: Path | None
) -> Tokenizer:
    directory.mkdir()
    if tokenizer_from is None:
        train_tokenizer(split_text(text, config.val_fraction)[0], config.vocab_size, directory)
    else:
        copy_tokenizer(tokenizer_from, directory)
    return Tokenizer.from_directory(directory)


def _new_model(tokenizer: Tokenizer, config: TrainConfig, device: torch.device) -> GPT2:
    torch.manual_seed(config.seed)
    architecture = GPT2Config(
        vocab_size=tokenizer.n_vocab,
        n_positions=config.block_size,
        n_embd=config.n_embd,
        n_layer=config.n_layer,
        n_head=config.n_head,
        embd_pdrop=config.dropout,
        attn_pdrop=config.dropout,
        resid_pdrop=config.dropout,
        # An empty prompt starts a line: training on one text never teaches <|endoftext|>.
        bos_token_id=tokenizer.encode("\n")[0],
        eos_token_id=tokenizer.special_tokens.get(END_OF_TEXT),
    )
    # Initialised on the CPU, so that a seed is the same model on every device.
    return GPT2(architecture, default_ops(architecture, device)).to(device)


def _train_step(
    model: GPT2, optimizer: torch.optim.Optimizer, ids: Tensor, config: TrainConfig, step: int
) -> float:
    model.train()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, config)
    device = model.wte.weight.device
    inputs, targets = (part.to(device) for part in training_batch(ids, config, step))
    torch.manual_seed(step_seed(config.seed, step))  # dropout
    loss = model(inputs, targets, logits_for="none").loss
    value = loss.item()
    if not math.isfinite(value):
        raise UserError(f"the loss is {value} at step {step}; lower the learning rate")
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    if config.grad_clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
    optimizer.step()
    return value


def _evaluate(model: GPT2, dataset: Dataset, state: TrainState, seconds: float) -> dict[str, Any]:
    """Validate and add a record to the state's log; ``seconds`` is the time since the last one."""
    loss = validation_loss(model, dataset.val, state.config)
    bits_per_byte = loss * (len(dataset.val) - 1) / dataset.val_bytes / math.log(2)
    record = {
        "step": state.step,
        "train_loss": round(statistics.fmean(state.pending_losses), 6),
        "val_loss": round(loss, 6),
        "val_bits_per_byte": round(bits_per_byte, 6),
        "learning_rate": learning_rate(state.step - 1, state.config),
        "seconds": round(seconds, 1),
    }
    state.log.append(record)
    state.pending_losses = []
    return record


@torch.inference_mode()
def validation_loss(model: GPT2, ids: Tensor, config: TrainConfig) -> float:
    """Mean loss over every id but the first, in nats per token, without dropout."""
    model.eval()
    device = model.wte.weight.device
    total = 0.0
    for inputs, targets in validation_batches(ids, config):
        loss = model(inputs.to(device), targets.to(device), logits_for="none").loss
        total += float(loss) * int((targets != IGNORE_INDEX).sum())
    return total / (len(ids) - 1)


def _check_same_run(state: TrainState, config: TrainConfig, digest: str) -> None:
    if state.data_sha256 != digest:
        raise UserError("cannot resume: the data file is not the one the run began with")
    old, new = dataclasses.asdict(state.config), dataclasses.asdict(config)
    if changed := [name for name in old if old[name] != new[name]]:
        listed = ", ".join(f"{name} was {old[name]}, now {new[name]}" for name in changed)
        raise UserError(f"cannot resume: {listed}")
