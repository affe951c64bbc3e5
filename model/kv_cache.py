"""The preallocated key/value cache."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gptile.model.config import GPT2Config
from gptile.model.errors import UserError


class ContextLengthError(UserError):
    """More tokens than the context, or the cache, has room for."""


@dataclass(frozen=True)
class KVSpan:
    """Where one forward pass writes: row b holds ``counts[b]`` tokens from ``starts[b]`` on in slot
    ``slots[b]``. All ``[B]`` int32 on the cache's device."""

    slots: Tensor
    starts: Tensor
    counts: Tensor


class KVCache:
    """K and V of every layer, ``[n_layer, n_slots, n_head, max_len, head_dim]`` each, and how many
    tokens each slot holds (``lengths``, int32 ``[n_slots]``).

    A slot is one sequence; a batch may use any of them in any order. What lies beyond a slot's
    length is never read.
    """

    def __init__(
        self,
        config: GPT2Config,
        n_slots: int,
        max_len: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate once, uninitialised.

        Raises:
            ContextLengthError: if ``max_len`` exceeds the model's context.
        """
        if max_len > config.n_positions:
            raise ContextLengthError(
                f"a cache of {max_len} positions exceeds the model's context of "
                f"{config.n_positions}"
            )
        shape = (config.n_layer, n_slots, config.n_head, max_len, config.head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.lengths = torch.zeros(n_slots, dtype=torch.int32, device=device)

    @property
    def max_len(self) -> int:
        return self.k.shape[3]

    def append(self, slots: Tensor, counts: Tensor) -> KVSpan:
        """Make room for ``counts[b]`` more tokens in slot ``slots[b]`` (``[B]`` each).

        The forward pass that called this then writes K and V of each layer into the span.

        Raises:
            ContextLengthError: before anything changes, if a slot would overflow.
            ValueError: likewise, if a slot is not one of the cache's, or is given twice.
        """
        listed = slots.tolist()
        n_slots = len(self.lengths)
        if len(set(listed)) < len(listed) or not all(0 <= slot < n_slots for slot in listed):
            raise ValueError(f"slots must be distinct and from 0 to {n_slots - 1}, got {listed}")
        slots, counts = slots.to(self.lengths), counts.to(self.lengths)
        starts = self.lengths.index_select(0, slots)
        if (overflow := starts + counts > self.max_len).any():
            row = int(overflow.nonzero()[0])
            raise ContextLengthError(
                f"slot {int(slots[row])} holds {int(starts[row])} of {self.max_len} "
                f"tokens and has no room for {int(counts[row])} more"
            )
        return self.advance(slots, counts)

    def advance(self, slots: Tensor, counts: Tensor) -> KVSpan:
        """:meth:`append` unchecked: two operations on the device, in place, nothing read back.

        For a step captured in a CUDA graph, where the host has checked before that the slots are
        distinct and have room for every replay to come. ``slots`` and ``counts`` are int32 on the
        cache's device, and the span refers to them.
        """
        span = KVSpan(slots, self.lengths.index_select(0, slots), counts)
        self.lengths.index_add_(0, slots, counts)
        return span

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first ``length`` tokens of a slot."""
        held = int(self.lengths[slot])
        if not 0 <= length <= held:
            raise ValueError(f"cannot truncate slot {slot} to {length}: it holds {held} tokens")
        self.lengths[slot] = length

    def copy(self, source: int, target: int) -> None:
        """Make slot ``target`` a copy of slot ``source``: a prompt computed once, sampled often."""
        length = int(self.lengths[source])
        for cache in (self.k, self.v):
            cache[:, target, :, :length] = cache[:, source, :, :length]
        self.lengths[target] = length

    def reset(self) -> None:
        """Empty every slot."""
        self.lengths.zero_()
