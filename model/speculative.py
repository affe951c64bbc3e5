"""Speculative decoding: several tokens a pass of the model, and the text it would write alone.

A pass over one token or over five reads the same weights, and reading them is what a decode step
waits for. So something cheap drafts the next tokens, one pass of the model (the target) computes
the logits after each of them, and those that the target would have chosen too are kept. The pass
also yields a token of its own: the one in place of the first that differs, or the one after the
last. What was rejected is forgotten with :meth:`~gptile.model.kv_cache.KVCache.truncate`. Leviathan
et al. 2023 (https://arxiv.org/abs/2211.17192), Chen et al. 2023
(https://arxiv.org/abs/2302.01318).

Which drafted tokens are kept. Every draw here is a function of the logits and of one random number
of its own, fixed by (seed, position). The target makes that draw at each drafted position, and a
drafted token is kept if it is the token drawn. So every token of the text is the target's draw
after the tokens before it: token for token the text without speculation, whatever the temperature,
the filters and the draft. (Up to rounding: a pass over several tokens may round its logits
otherwise than a pass over one, which shows where two tokens tie to within that: hardly ever in
fp32, now and then in 16 bits.) That its distribution is right needs no other proof.

Both papers reject by another rule: keep a drafted token x with probability min(1, p(x) / q(x)),
for target p and draft q, else draw from what p has more than q. Its text has the distribution of
p too, but depends on the draft. The two rules accept equally often where the draft is certain of
its tokens (greedy, prompt look-up): with probability p(x). A draft model that samples is accepted
less often by ours. It draws with the target's own random number, so that the same logits give the
same token; by inverse transform the draws agree where the two tokens' intervals overlap, which is
at most the papers' 1 - TV(p, q), the overlap of the probabilities. That is the cost, and it is
not small: between the demo and copies of it with noise on their weights, at temperature 1, ours
accepts 0.69 where 1 - TV is 0.97, and 0.47 where it is 0.89. It buys texts that a seed fixes, with
any draft or none ("drafter-invariant": Daliri et al. 2024, https://arxiv.org/abs/2408.07978, whose
Gumbel draws agree more often, at a random number for every token of the vocabulary), and needs
neither the draft's probabilities nor further random numbers.

What drafts is in :mod:`gptile.model.drafting`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from gptile.model.errors import UserError
from gptile.model.generation import Row, TokenEvent, check_logprob, prepare
from gptile.model.gpt2 import GPT2
from gptile.model.kv_cache import KVCache
from gptile.model.sampling import SamplingBatch, is_id
from gptile.model.tokenizer import Tokenizer

Propose: TypeAlias = Callable[[list[Row], list[int], SamplingBatch, list[int]], list[list[int]]]
"""From the running rows, their cache slots, their parameters and how many tokens to draft for each
at most, to the tokens drafted for each."""


@dataclass
class Statistics:
    """What speculation did, over all texts so far. The first token of a text is not counted: it
    comes from the pass over the prompt.

    Attributes:
        steps: passes of the target, one for each row in them.
        tokens: that these passes added to the texts.
        drafted: tokens that they checked.
        accepted: drafted tokens that became text.
    """

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted of the drafted; 0 where nothing was drafted."""
        return self.accepted / max(self.drafted, 1)

    @property
    def tokens_per_step(self) -> float:
        """1 without speculation, at most one more than are drafted; 0 before the first step."""
        return self.tokens / max(self.steps, 1)

    def add(self, draft: list[int], pushed: list[int]) -> None:
        """Count one row of one pass: what was drafted, and what the text grew by."""
        self.steps += 1
        self.tokens += len(pushed)
        self.drafted += len(draft)
        self.accepted += sum(a == b for a, b in zip(draft, pushed, strict=False))


class Speculation(ABC):
    """Drafts tokens and lets a target check them; the subclasses say how to draft.

    One object serves any number of texts, also at the same time.

    Attributes:
        n_tokens: how many tokens to draft a step.
        stats: what came of it.
    """

    def __init__(self, n_tokens: int) -> None:
        """
        Raises:
            UserError: unless ``n_tokens`` is 1 or more.
        """
        if not is_id(n_tokens) or n_tokens < 1:
            raise UserError(
                f"n_tokens, how many tokens to draft, must be 1 or more, got {n_tokens!r}"
            )
        self.n_tokens = n_tokens
        self.stats = Statistics()

    @abstractmethod
    def check(self, target: GPT2, rows: list[Row], tokenizer: Tokenizer | None) -> None:
        """Refuse a target or rows that cannot be drafted for, before anything is computed.

        Raises:
            UserError: saying why not.
        """

    @abstractmethod
    def begin(self, rows: list[Row], n_vocab: int) -> Propose:
        """What drafts for the rows, each in the cache slot of its index, ids below ``n_vocab``."""

    @torch.inference_mode()
    def run(self, model: GPT2, rows: list[Row], n_vocab: int) -> Iterator[TokenEvent]:
        """Fill in the rows, yielding an event per token: those of one row and pass together."""
        weight = model.wte.weight
        cache, batch, logits = prepare(model, rows, n_vocab)
        propose = self.begin(rows, n_vocab)
        slots = list(range(len(rows)))
        drafts: list[list[int]] = [[] for _ in rows]
        while rows:
            columns = vars(_at_each_position(batch, drafts))
            positions = torch.tensor(_positions(rows, drafts), device=weight.device)
            found = model.ops.sample(logits[:, :n_vocab], positions=positions, **columns)
            draws = list(zip(*(column.tolist() for column in found), strict=True))
            running = []
            for index, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
                own, draws = draws[: len(draft) + 1], draws[len(draft) + 1 :]
                before = len(row.ids)
                for id, logprob in own[: _kept(draft, [id for id, _ in own])]:
                    check_logprob(logprob, weight.dtype)
                    yield row.push(id, logprob)
                    if row.finish_reason is not None:
                        break  # what was drafted beyond the end is dropped
                if before:
                    self.stats.add(draft, row.ids[before:])
                mark(batch.seen, [(index, id) for id in row.ids[before:]])
                if row.finish_reason is None:
                    running.append(index)
                    # All but the last token, which is fed next.
                    cache.truncate(slots[index], len(row.prompt) + len(row.ids) - 1)
            if len(running) < len(rows):
                rows, slots = [rows[i] for i in running], [slots[i] for i in running]
                batch = batch.take(torch.tensor(running, dtype=torch.int64, device=weight.device))
            if rows:
                # The pass yields one token more than are drafted, and may not pass the budget.
                limits = [min(self.n_tokens, row.budget - len(row.ids) - 1) for row in rows]
                drafts = propose(rows, slots, batch, limits)
                logits = _check_pass(model, cache, rows, slots, drafts)


def _at_each_position(batch: SamplingBatch, drafts: list[list[int]]) -> SamplingBatch:
    """The parameters of every draw of a pass: for each row, after its last token and after each
    drafted one, which the draws behind it have seen."""
    index = [row for row, draft in enumerate(drafts) for _ in range(len(draft) + 1)]
    wide = batch.take(torch.tensor(index, device=batch.seeds.device))
    start, marks = 0, []
    for draft in drafts:
        end = start + len(draft) + 1
        marks += [(at, id) for t, id in enumerate(draft) for at in range(start + t + 1, end)]
        start = end
    mark(wide.seen, marks)
    return wide


def _positions(rows: list[Row], drafts: list[list[int]]) -> list[int]:
    """Where the draws of a pass stand, in the order of :func:`_at_each_position`."""
    starts = [len(row.prompt) + len(row.ids) for row in rows]
    return [
        start + t
        for start, draft in zip(starts, drafts, strict=True)
        for t in range(len(draft) + 1)
    ]


def _kept(draft: list[int], draws: list[int]) -> int:
    """How many draws of a row, one more than were drafted, are text: up to and with the first that
    is not the drafted token. The later ones follow a token that the text does not have."""
    agreed = (drafted == drawn for drafted, drawn in zip(draft, draws, strict=False))
    return 1 + next((n for n, same in enumerate(agreed) if not same), len(draft))


def mark(seen: Tensor | None, marks: list[tuple[int, int]]) -> None:
    """Set these (row, id) of ``seen``."""
    if seen is not None and marks:
        index, ids = zip(*marks, strict=True)
        seen[torch.tensor(index, device=seen.device), torch.tensor(ids, device=seen.device)] = True


def _check_pass(
    model: GPT2,
    cache: KVCache,
    rows: list[Row],
    slots: list[int],
    drafts: list[list[int]],
) -> Tensor:
    """The logits after each row's last token and each drafted one, ``[draws, V]``."""
    device = model.wte.weight.device
    width = 1 + max(map(len, drafts))
    fed = [
        [row.ids[-1], *draft, *[0] * (width - 1 - len(draft))]
        for row, draft in zip(rows, drafts, strict=True)
    ]
    lengths = torch.tensor([len(draft) + 1 for draft in drafts], device=device)
    output = model(
        torch.tensor(fed, device=device),
        lengths=lengths,
        cache=cache,
        slots=torch.tensor(slots, device=device),
    )
    assert output.logits is not None
    return output.logits[torch.arange(width, device=device) < lengths.unsqueeze(1)]
