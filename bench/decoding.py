"""Greedy decoding in all the ways that the ladder compares, driven by one loop."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gptile.kernels import Ops
from gptile.model.gpt2 import GPT2
from gptile.model.kv_cache import KVCache

Ids: TypeAlias = list[list[int]]
NextLogits: TypeAlias = Callable[[Ids], Tensor]
"""The logits ``[B, V]`` of what follows each row; at each call the rows are one token longer."""


@dataclass(frozen=True)
class Setup:
    """How prompts are continued.

    Attributes:
        ours: by our model, or by transformers'.
        ops: of ours.
        batch: prompts at a time.
        bucketed: prompts of similar length share a batch.
        dtype: of the weights.
        last_only: compute the logits that are used, and no others.
        cached: keep keys and values, and compute each token once.
        compiled: by torch.compile.
    """

    ours: bool = False
    ops: Ops = field(default_factory=Ops.torch)
    batch: int = 1
    bucketed: bool = False
    dtype: torch.dtype = torch.float32
    last_only: bool = False
    cached: bool = False
    compiled: bool = False


@dataclass(frozen=True)
class Loop:
    """Continues each of ``prompts`` by ``n_new`` tokens, on a model that is as ``setup`` says."""

    setup: Setup
    model: Any
    prompts: Ids
    n_new: int

    def greedy_ids(self) -> Ids:
        """The new ids of each prompt; an end-of-text id ends nothing."""
        new: Ids = [[] for _ in self.prompts]
        for prompt, _, id in self._steps(None):
            new[prompt].append(id)
        return new

    def forced_logits(self, forced: Ids) -> Tensor:
        """``[P, n_new, V]``: what each id is chosen from, where the chosen one gives way to that of
        ``forced``, ``n_new`` ids a prompt."""
        found: list[list[Tensor]] = [[] for _ in self.prompts]
        for prompt, logits, _ in self._steps(forced):
            found[prompt].append(logits)
        return torch.stack([torch.stack(logits) for logits in found])

    @torch.inference_mode()
    def _steps(self, forced: Ids | None) -> Iterator[tuple[int, Tensor, int]]:
        """For each new token the prompt it belongs to, its logits, and the id chosen."""
        for batch in self.batches():
            rows = [list(self.prompts[prompt]) for prompt in batch]
            next_logits = self._start(len(rows), max(map(len, rows)) + self.n_new - 1)
            for step in range(self.n_new):
                logits = next_logits(rows)
                chosen = logits.argmax(-1).tolist()
                yield from zip(batch, logits, chosen, strict=True)
                for row, prompt, id in zip(rows, batch, chosen, strict=True):
                    row.append(id if forced is None else forced[prompt][step])

    def batches(self) -> list[list[int]]:
        """Which prompts are continued together, in turn."""
        order = list(range(len(self.prompts)))
        if self.setup.bucketed:
            order.sort(key=lambda prompt: len(self.prompts[prompt]))
        size = self.setup.batch
        return [order[start : start + size] for start in range(0, len(order), size)]

    def _start(self, n_rows: int, longest: int) -> NextLogits:
        """For a new batch, whose longest row ends with ``longest`` tokens computed."""
        model, setup = self.model, self.setup
        if setup.cached:
            return _cached(model, n_rows, longest)
        device = next(model.parameters()).device

        def next_logits(rows: Ids) -> Tensor:
            # Padding is on a row's right, where causality keeps it out of sight.
            ids, lengths = padded(rows, device)
            if setup.last_only:
                return model(ids, lengths=lengths, logits_for="last").logits[:, 0]
            logits = (model(ids) if setup.ours else model(ids, use_cache=False)).logits
            return logits[torch.arange(len(rows), device=device), lengths - 1]

        return next_logits


def _cached(model: GPT2, n_rows: int, longest: int) -> NextLogits:
    weight = model.wte.weight
    cache = KVCache(model.config, n_rows, longest, dtype=weight.dtype, device=weight.device)
    held = [0] * n_rows

    def next_logits(rows: Ids) -> Tensor:
        ids, lengths = padded([row[n:] for row, n in zip(rows, held, strict=True)], weight.device)
        held[:] = map(len, rows)
        ragged = lengths if ids.shape[1] > 1 else None
        logits = model(ids, lengths=ragged, cache=cache, logits_for="last").logits
        assert logits is not None
        return logits[:, 0]

    return next_logits


def padded(rows: Ids, device: torch.device) -> tuple[Tensor, Tensor]:
    """``ids [B, T]``, padded with id 0, and ``lengths [B]``."""
    longest = max(map(len, rows))
    ids = [row + [0] * (longest - len(row)) for row in rows]
    lengths = [len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(lengths, device=device)
