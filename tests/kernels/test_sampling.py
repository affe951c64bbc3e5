"""Sampling against transformers' logits processors, published Philox vectors, Triton's own
generator and plain counting."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptile.bench.huggingface import import_transformers
from gptile.kernels.philox import _INT32_TO_UNIT, philox4x32, uniform
from gptile.kernels.sampling import filter_scores, sample_reference


def sample(logits, seen=None, **given_parameters):
    """``sample_reference`` with neutral parameters where none are given."""
    n_rows = len(logits)
    neutral = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seeds": 0,
        "positions": 0,
    }
    columns = {
        name: torch.as_tensor(given_parameters.get(name, value)).expand(n_rows)
        for name, value in neutral.items()
    }
    return sample_reference(logits, seen, **columns)


def words(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # Known-answer tests published with Random123.
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected) -> None:
    assert tuple(int(w) for w in philox4x32(words(*counter), words(*key))) == expected


def test_uniform_has_the_bits_of_tritons_generator(tmp_path: Path) -> None:
    seeds = [0, 1, 12345, 2**31, 2**32 + 7, 2**63 - 1]
    program = f"""
        import torch, triton
        import triton.language as tl

        @triton.jit
        def kernel(out_ptr, seed_ptr, N: tl.constexpr):
            seed = tl.load(seed_ptr + tl.program_id(0))
            position = tl.arange(0, N).to(tl.int64)
            tl.store(out_ptr + tl.program_id(0) * N + position, tl.randint(seed, position))

        seeds = torch.tensor({seeds})
        out = torch.empty(len(seeds), 64, dtype=torch.int32)
        kernel[(len(seeds),)](out, seeds, 64)
        print(out.tolist())
    """
    path = tmp_path / "program.py"  # the JIT reads its source from a file
    path.write_text(textwrap.dedent(program))
    run = subprocess.run(
        [sys.executable, path],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    # tl.rand folds the sign of these integers away and scales, in fp32.
    bits = np.array(json.loads(run.stdout), dtype=np.int32)
    expected = np.where(bits < 0, ~bits, bits).astype(np.float32) * np.float32(4.6566127342e-10)
    positions = torch.arange(64).expand(len(seeds), 64)
    got = uniform(torch.tensor(seeds).unsqueeze(1).expand_as(positions), positions)
    assert np.array_equal(got.numpy(), expected)


def test_uniform_never_reaches_one() -> None:
    # The largest word there is, converted as `uniform` does it.
    assert (torch.tensor(2**31 - 1).float() * _INT32_TO_UNIT).item() < 1


def processors(top_k: int, top_p: float, min_p: float) -> list:
    transformers = import_transformers()
    return [
        *([transformers.TopKLogitsWarper(top_k)] if top_k else []),
        *([transformers.TopPLogitsWarper(top_p)] if top_p < 1 else []),
        *([transformers.MinPLogitsWarper(min_p)] if min_p else []),
    ]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    top_k=st.sampled_from([0, 1, 2, 7, 49, 50, 1000]),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.1, 1e-4]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 0.999]),
)
def test_filters_keep_what_transformers_keeps(seed, top_k, top_p, min_p) -> None:
    scores = torch.randn(3, 50, generator=torch.Generator().manual_seed(seed)) * 3
    expected = scores.clone()
    for processor in processors(top_k, top_p, min_p):
        expected = processor(None, expected)
    columns = (torch.tensor([top_k] * 3), torch.tensor([top_p] * 3).double(), torch.tensor([min_p]))
    assert torch.equal(filter_scores(scores, *columns), expected)


def test_filters_are_per_row() -> None:
    scores = torch.randn(3, 20)
    top_k = torch.tensor([0, 3, 1])
    kept = filter_scores(scores, top_k, torch.ones(3).double(), torch.zeros(3)).isfinite().sum(-1)
    assert kept.tolist() == [20, 3, 1]


def test_the_strictest_filters_leave_the_likeliest_token() -> None:
    logits = torch.randn(6, 20)
    seeds = torch.arange(6)
    for strictest in ({"top_p": torch.zeros(()).double()}, {"min_p": 1.0}, {"top_k": 1}):
        ids, logprobs = sample(logits, seeds=seeds, **strictest)
        assert torch.equal(ids, logits.argmax(-1)), strictest
        assert logprobs.isfinite().all()


def test_equal_scores_do_not_defeat_top_k_or_top_p() -> None:
    scores = torch.zeros(2, 10)
    kept = filter_scores(
        scores, torch.tensor([1, 0]), torch.tensor([1.0, 0.35]).double(), torch.zeros(2)
    ).isfinite()
    assert kept[0].tolist() == [True] + [False] * 9
    assert kept[1].sum() == 4


def test_repetition_penalty_divides_positive_and_multiplies_negative_scores() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, -3.0]])
    seen = torch.tensor([[True, True, False, False]])
    # Greedy shows the order: 2 / 1.5 = 1.33 still wins; with 5 it is 0.4 < 0.5.
    assert sample(logits, seen, temperature=0.0, repetition_penalty=1.5)[0].tolist() == [0]
    assert sample(logits, seen, temperature=0.0, repetition_penalty=5.0)[0].tolist() == [2]
    # -1 becomes -1.5 and not -0.67: among {-1, -1.2} the seen one loses.
    logits, seen = torch.tensor([[-1.0, -1.2]]), torch.tensor([[True, False]])
    assert sample(logits, seen, temperature=0.0, repetition_penalty=1.5)[0].tolist() == [1]


def test_repetition_penalty_equals_transformers() -> None:
    processor = import_transformers().RepetitionPenaltyLogitsProcessor(1.7)
    logits, ids = torch.randn(4, 30), torch.randint(30, (4, 9))
    seen = torch.zeros(4, 30, dtype=torch.bool).scatter(1, ids, True)
    got, _ = sample(logits, seen, temperature=0.0, repetition_penalty=1.7)
    assert torch.equal(got, processor(ids, logits).argmax(-1))


def test_temperature_zero_is_greedy_beside_a_sampled_row() -> None:
    logits = torch.randn(1, 40).expand(2, 40)
    seeds = torch.arange(2)
    draws = [sample(logits, temperature=[0.0, 0.7], seeds=seeds, positions=p)[0] for p in range(50)]
    assert {int(d[0]) for d in draws} == {int(logits[0].argmax())}
    assert len({int(d[1]) for d in draws}) > 1


@pytest.mark.parametrize("temperature", [1e-8, 1e-30, 1e-45])
def test_a_tiny_temperature_is_finite_and_greedy(temperature: float) -> None:
    logits = torch.randn(5, 40) * 50
    ids, logprobs = sample(logits, temperature=temperature)
    assert torch.equal(ids, logits.argmax(-1))
    assert logprobs.isfinite().all()


def test_top_k_one_is_greedy_and_top_k_beyond_the_vocabulary_is_off() -> None:
    logits = torch.randn(20, 30)
    seeds = torch.arange(20)
    assert torch.equal(sample(logits, top_k=1, seeds=seeds)[0], logits.argmax(-1))
    assert torch.equal(sample(logits, top_k=999, seeds=seeds)[0], sample(logits, seeds=seeds)[0])


def test_a_row_draws_the_same_with_any_neighbours() -> None:
    logits = torch.randn(6, 30)
    own = {"temperature": 0.9, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 5, "positions": 11}
    alone, alone_logprob = sample(logits[2:3], **own)
    others = {
        "temperature": [0.0, 2.0, 0.9, 0.5, 1.0, 1.0],
        "top_k": [3, 0, 0, 9, 1, 0],
        "top_p": torch.tensor([0.5, 1.0, 1.0, 0.9, 1.0, 0.1]).double(),
        "min_p": [0.0, 0.2, 0.0, 0.0, 0.0, 0.5],
        "seeds": [1, 2, 5, 3, 4, 6],
        "positions": [0, 9, 11, 3, 4, 5],
    }
    batch, batch_logprobs = sample(logits, **others)
    assert int(batch[2]) == int(alone)
    assert float(batch_logprobs[2]) == float(alone_logprob)


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    n = 40_000
    ids, _ = sample(logits.expand(n, 5), temperature=0.8, seeds=3, positions=torch.arange(n))
    counts = ids.bincount(minlength=5).double()
    expected = (logits.double() / 0.8).softmax(-1) * n
    # Chi-square with 4 degrees of freedom: 23.5 has probability 1e-4.
    assert float(((counts - expected) ** 2 / expected).sum()) < 23.5


def test_seeds_and_positions_are_independent_streams() -> None:
    grid = uniform(
        torch.arange(200).unsqueeze(1).expand(200, 200), torch.arange(200).expand(200, 200)
    )
    assert grid.unique().numel() > 39_900
    assert abs(float(grid.mean()) - 0.5) < 0.01
    correlation = torch.corrcoef(torch.stack([grid[:-1].flatten(), grid[1:].flatten()]))[0, 1]
    assert abs(float(correlation)) < 0.03


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(8, 30)
    ids, logprobs = sample(logits, temperature=0.3, top_k=4, seeds=torch.arange(8))
    seen = torch.ones(8, 30, dtype=torch.bool)
    penalised, penalised_logprobs = sample(logits, seen, temperature=0.0, repetition_penalty=3.0)
    ids, logprobs = torch.cat([ids, penalised]), torch.cat([logprobs, penalised_logprobs])
    logits = torch.cat([logits, logits])
    expected = logits.double().log_softmax(-1).gather(1, ids.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-6)
