"""What the tests of speculation share: prompts, parameters, drafts and what must hold."""

import copy
import dataclasses
from typing import Any

import pytest
import torch

from gptile.model.generation import Completion, generate
from gptile.model.gpt2 import GPT2
from gptile.model.sampling import SamplingParams
from gptile.model.speculative import Speculation, Statistics

PARAMS = {
    "greedy": SamplingParams(seed=0, temperature=0),
    "sampled": SamplingParams(seed=1),
    "cool": SamplingParams(seed=2, temperature=0.6),
    "filters": SamplingParams(seed=3, temperature=0.9, top_k=30, top_p=0.9, min_p=0.02),
    "penalty": SamplingParams(seed=4, temperature=0.7, repetition_penalty=1.4),
    "greedy, penalty": SamplingParams(seed=0, temperature=0, repetition_penalty=1.2),
}
SMALL_PROMPTS = [[5], [1, 2, 3, 1, 2, 3, 1], [60, 0, 60], [9] * 12, [7, 8]]


def noisy(model: GPT2, share: float = 0.2) -> GPT2:
    """A copy with noise of that share of each parameter's spread: right now and then."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise * parameter.std() * share)
    return model


def equal(found: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.ids == other.ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert dataclasses.replace(one, logprobs=other.logprobs) == other


def check(
    model: GPT2, prompts: Any, params: Any, speculate: Speculation, **keywords: Any
) -> Statistics:
    """The text is the plain text, and the counts add up."""
    expected = generate(model, prompts, params, **keywords)
    found = generate(model, prompts, params, speculate=speculate, **keywords)
    equal(found, expected)
    stats = speculate.stats
    # The first token of each comes from its prompt.
    assert stats.tokens == sum(c.n_new_tokens - 1 for c in found)
    assert 0 <= stats.tokens - stats.accepted <= stats.steps <= stats.tokens
    assert stats.accepted <= stats.drafted <= stats.steps * speculate.n_tokens
    return stats
