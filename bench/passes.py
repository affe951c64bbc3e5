"""The same token ids through transformers and through our model, everything on the way kept.

Both compute them at once, forward and backward; then again with a cache, in the pieces of
:func:`pieces`. Ours does that for a ragged batch too, and for each of its rows alone.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptile.bench.huggingface import import_transformers
from gptile.bench.trace import (
    LOGITS,
    LOSS,
    Recorder,
    Trace,
    cached_calls,
    forward_calls,
    recording_reference,
)
from gptile.kernels import IGNORE_INDEX
from gptile.model.errors import UserError
from gptile.model.generation import stream
from gptile.model.gpt2 import GPT2
from gptile.model.kv_cache import KVCache
from gptile.model.sampling import SamplingParams
from gptile.weights.names import canonical_name
from gptile.weights.save import hugging_face_tensors

_RAGGED_STEPS = 2


@dataclass(frozen=True)
class Inputs:
    """What everything is computed for.

    Attributes:
        prompts: token ids; row b of the batch.
        n_greedy: tokens to continue each prompt by, taking the likeliest; 0 for none.
    """

    prompts: Sequence[Sequence[int]]
    n_greedy: int

    @property
    def lengths(self) -> Tensor:
        """``[B]`` tokens of each row."""
        return torch.tensor([len(prompt) for prompt in self.prompts])

    @property
    def ids(self) -> Tensor:
        """``[B, T]``, padded on the right with 0."""
        rows = [torch.tensor(prompt) for prompt in self.prompts]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    @property
    def targets(self) -> Tensor:
        """``[B, T]`` the id that follows; none after a row's last token."""
        following = F.pad(self.ids[:, 1:], (0, 1))
        return following.where(self.within(self.lengths - 1), IGNORE_INDEX)

    @property
    def ragged(self) -> Tensor:
        """``[B]`` lengths of rows that differ: each keeps a smaller share than the one before."""
        n_rows = len(self.prompts)
        return (self.lengths * (2 * n_rows - torch.arange(n_rows)) // (2 * n_rows)).clamp(min=1)

    def within(self, lengths: Tensor) -> Tensor:
        """``[B, T]`` bool: which positions lie within such lengths."""
        return torch.arange(int(self.lengths.max())) < lengths[:, None]


def pieces(n_tokens: int, most_steps: int = 24) -> list[tuple[int, int]]:
    """From where to where a cache is fed at a time: a prompt, then single tokens (decode steps, a
    third of all or ``most_steps``), then a chunk."""
    n_steps = min(n_tokens // 3, most_steps)
    first = (n_tokens - n_steps + 2) // 2
    ends = [*range(first, first + n_steps + 1), n_tokens]
    return [(start, end) for start, end in zip([0, *ends], ends, strict=False) if start < end]


@dataclass
class Run:
    """What one implementation computed. Tensors over positions hold rubbish in the padding.

    Attributes:
        forward: of all positions at once, with the gradients of the loss.
        hidden_states: as the model returns them.
        parameters: the gradient of each, in Hugging Face's layout, by our name.
        cached: the same positions piece by piece.
        is_ours: whether our model did; the next two are None where transformers did.
        ragged: logits ``[B, T, V]`` of the shortened rows of :attr:`Inputs.ragged`, with a cache;
            None for a single row.
        alone: the same, each row by itself.
        greedy: the new ids of each prompt.
    """

    forward: Trace
    hidden_states: Sequence[Tensor]
    parameters: dict[str, Tensor]
    cached: Trace = field(default_factory=Trace)
    is_ours: bool = False
    ragged: Tensor | None = None
    alone: Tensor | None = None
    greedy: list[list[int]] = field(default_factory=list)


def run_reference(model: Any, inputs: Inputs, *, cached: bool = True) -> Run:
    """All of transformers' but the ragged batch. The loss is as transformers computes it, from the
    logits in fp32 (fp64 in fp64), but kept for each token, ``[n]``."""
    ids, targets = inputs.ids.to(model.device), inputs.targets.to(model.device)
    with recording_reference(model) as trace:
        output = model(ids, output_hidden_states=True, use_cache=False)
    logits = output.logits if output.logits.dtype == torch.float64 else output.logits.float()
    losses = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )[targets.flatten() != IGNORE_INDEX]
    trace.note(LOSS, losses)
    losses.mean().backward()
    gradients = {canonical_name(name): p.grad for name, p in model.named_parameters()}
    run = Run(trace, [state.detach() for state in output.hidden_states], gradients)
    if cached:
        run.cached = _cached_reference(model, ids)
    if inputs.n_greedy:
        run.greedy = [_greedy_reference(model, p, inputs.n_greedy) for p in inputs.prompts]
    return run


def run_ours(model: GPT2, recorder: Recorder, inputs: Inputs) -> Run:
    """All of ours.

    Args:
        model: on the operations of ``recorder``.
    """
    device, n_layer = model.wte.weight.device, model.config.n_layer
    ids, targets = inputs.ids.to(device), inputs.targets.to(device)
    with recorder.recording(forward_calls(n_layer)) as trace:
        output = model(ids, targets, output_hidden_states=True)
    assert output.hidden_states is not None
    assert output.loss is not None
    output.loss.backward()
    gradients = hugging_face_tensors(model, gradients=True)
    run = Run(
        trace,
        [state.detach() for state in output.hidden_states],
        {canonical_name(name): gradient for name, gradient in gradients.items()},
        is_ours=True,
    )
    run.cached = _cached(model, recorder, ids, inputs.lengths, pieces(ids.shape[1]))
    if len(ids) > 1:
        run.ragged, run.alone = _ragged(model, recorder, ids, inputs.ragged)
    if inputs.n_greedy:
        run.greedy = _greedy(model, inputs)
    return run


def _greedy(model: GPT2, inputs: Inputs) -> list[list[int]]:
    """Shorter than asked for where the model's logits are NaN, for which generation stops."""
    params = SamplingParams(max_new_tokens=inputs.n_greedy, temperature=0, stop_token_ids=())
    events = stream(model, inputs.prompts, params)
    found: list[list[int]] = [[] for _ in inputs.prompts]
    with suppress(UserError):
        for event in events:
            found[event.prompt_index].append(event.id)
    return found


def _ragged(model: GPT2, recorder: Recorder, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of the rows as one batch, and of each by itself."""
    spans = pieces(ids.shape[1], _RAGGED_STEPS)
    together = _cached(model, recorder, ids, lengths, spans).values[LOGITS]
    alone = torch.zeros_like(together)
    for row, length in enumerate(lengths.tolist()):
        spans = pieces(length, _RAGGED_STEPS)
        one = _cached(model, recorder, ids[row : row + 1, :length], lengths[row : row + 1], spans)
        alone[row, :length] = one.values[LOGITS][0]
    return together, alone


@torch.inference_mode()
def _cached(
    model: GPT2, recorder: Recorder, ids: Tensor, lengths: Tensor, spans: list[tuple[int, int]]
) -> Trace:
    """Rows that have ended drop out, and cache slots are in reverse order."""
    n_rows, n_tokens = ids.shape
    weight = model.wte.weight
    cache = KVCache(model.config, n_rows, n_tokens, dtype=weight.dtype, device=weight.device)
    slots = torch.arange(n_rows, device=ids.device).flip(0)
    lengths = lengths.to(ids.device)
    whole = Trace()
    for start, end in spans:
        rows = (lengths > start).nonzero().flatten()
        counts = (lengths[rows] - start).clamp(max=end - start)
        with recorder.recording(cached_calls(model.config.n_layer)) as piece:
            model(ids[rows, start:end], lengths=counts, cache=cache, slots=slots[rows])
        _insert(whole, piece, rows, start, ids)
    return whole


@torch.inference_mode()
def _cached_reference(model: Any, ids: Tensor) -> Trace:
    cache = import_transformers().DynamicCache(config=model.config)
    whole = Trace()
    for start, end in pieces(ids.shape[1]):
        with recording_reference(model) as piece:
            # The second parameter is the cache; its name depends on the version.
            model(ids[:, start:end], cache, use_cache=True)
        _insert(whole, piece, torch.arange(len(ids), device=ids.device), start, ids)
    return whole


def _insert(whole: Trace, piece: Trace, rows: Tensor, start: int, ids: Tensor) -> None:
    for place, value in piece.values.items():
        if place not in whole.values:
            whole.values[place] = value.new_zeros(*ids.shape, *value.shape[2:])
        whole.values[place][rows, start : start + value.shape[1]] = value


def _greedy_reference(model: Any, prompt: Sequence[int], n_new: int) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=n_new,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return found[0, len(prompt) :].tolist()
