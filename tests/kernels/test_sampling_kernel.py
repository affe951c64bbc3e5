"""The sampling kernel in Triton's interpreter: the tokens of the reference (itself tested against
transformers), cuts counted by hand, ties, random bits, layouts, and proof that wrong kernels are
seen."""

from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gptile.kernels import sampling as kernels
from gptile.kernels.jit import tl, triton
from gptile.kernels.philox import uniform, uniform_in_kernel
from gptile.kernels.sampling import CASES, sample_reference, sample_triton

# Infinities and NaN are meant, and NumPy, which the interpreter runs on, warns of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NEUTRAL = {
    "temperature": (1.0, torch.float32),
    "top_k": (0, torch.int64),
    "top_p": (1.0, torch.float64),
    "min_p": (0.0, torch.float32),
    "repetition_penalty": (1.0, torch.float32),
    "seeds": (0, torch.int64),
    "positions": (0, torch.int64),
}


def columns(n_rows: int, **given_values: object) -> dict[str, Tensor]:
    """Parameters of a batch, neutral where none are given; a single value is every row's."""
    return {
        name: torch.as_tensor(given_values.get(name, value), dtype=dtype).expand(n_rows)
        for name, (value, dtype) in NEUTRAL.items()
    }


def mixed(n_rows: int, seed: int = 0) -> dict[str, Tensor]:
    """A batch with every parameter on in some row and off in another."""
    r = torch.Generator().manual_seed(seed)
    on = torch.rand(5, n_rows, generator=r) < 0.7
    values = torch.rand(4, n_rows, generator=r, dtype=torch.float64)
    return columns(
        n_rows,
        temperature=torch.where(on[0], 0.1 + 2 * values[0], 0),
        top_k=torch.where(on[1], torch.randint(1, 60, (n_rows,), generator=r), 0),
        top_p=torch.where(on[2], values[1], 1),
        min_p=torch.where(on[3], 0.2 * values[2], 0),
        repetition_penalty=torch.where(on[4], 0.7 + values[3], 1),
        seeds=torch.randint(2**63 - 1, (n_rows,), generator=r),
        positions=torch.randint(2**40, (n_rows,), generator=r),
    )


def peaked(n_rows: int, n_vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits like a language model's: far from 0, a few high, and in 16 bits many equal."""
    return (torch.randn(n_rows, n_vocab) * 3 - 30).to(dtype)


def logprobs_of(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.double().log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def assert_as_reference(
    logits: Tensor, seen: Tensor | None, parameters: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    ids, logprobs = sample_triton(logits, seen, **parameters)
    assert ids.dtype == torch.int64
    assert torch.equal(ids, sample_reference(logits, seen, **parameters)[0])
    torch.testing.assert_close(logprobs, logprobs_of(logits, ids).float())
    return ids, logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_every_case_chooses_as_the_reference(case: str, dtype: torch.dtype) -> None:
    n_rows, n_vocab = min(CASES[case]["rows"], 3), min(CASES[case]["vocab"], 3000)
    seen = torch.rand(n_rows, n_vocab) < 0.3
    assert_as_reference(peaked(n_rows, n_vocab, dtype), seen, mixed(n_rows, seed=4))


@pytest.mark.parametrize("n_vocab", [1, 2, 255, 1023, 1024, 1025, 2049])
def test_sizes_around_every_block_edge(n_vocab: int) -> None:
    seen = torch.rand(3, n_vocab) < 0.3
    assert_as_reference(peaked(3, n_vocab), seen, mixed(3, seed=n_vocab))
    # The last token, alone likely, is found in whatever block it is.
    logits = torch.full((1, n_vocab), -50.0)
    logits[0, -1] = 0
    assert sample_triton(logits, None, **columns(1, top_k=1))[0].tolist() == [n_vocab - 1]


def test_the_whole_vocabulary_of_gpt2() -> None:
    parameters = columns(2, temperature=[1.3, 0.8], top_k=[0, 50], top_p=[1, 0.9], seeds=[1, 2])
    assert_as_reference(peaked(2, 50257), None, parameters)


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    n_vocab=st.integers(1, 70),
    levels=st.sampled_from([1, 2, 5, 1000]),
    temperature=st.sampled_from([0.0, 1e-45, 1e-3, 0.7, 1.0, 50.0, 1e30]),
    top_k=st.sampled_from([0, 1, 2, 7, 50, 2**40]),
    top_p=st.sampled_from([1.0, 1 - 1e-16, 0.99, 0.9, 0.5, 1e-4, 0.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 0.999, 1.0]),
    penalty=st.sampled_from([1.0, 1.3, 0.6]),
    hidden=st.sampled_from([0.0, 0.5]),
)
def test_any_parameters_choose_as_the_reference(
    seed, n_vocab, levels, temperature, top_k, top_p, min_p, penalty, hidden
) -> None:
    """With few levels most scores are equal, and cuts fall among equals."""
    r = torch.Generator().manual_seed(seed)
    logits = torch.randint(levels, (1, n_vocab), generator=r) * (6.1 / levels) - 2
    logits[torch.rand(1, n_vocab, generator=r) < hidden] = -torch.inf
    logits[:, seed % n_vocab] = 0.5
    seen = torch.rand(1, n_vocab, generator=r) < 0.5
    parameters = columns(
        1,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=penalty,
        seeds=seed,
    )
    ids, _ = assert_as_reference(logits, seen, parameters)
    assert logits[0, ids[0]].isfinite()


@cache
def extreme(largest: bool) -> int:
    """A position whose random number, with seed 0, is within 2e-5 of 1, or of 0."""
    positions = torch.arange(2**18)
    numbers = uniform(torch.zeros_like(positions), positions)
    position = int(numbers.argmax() if largest else numbers.argmin())
    assert abs(float(numbers[position]) - largest) < 2e-5
    return position


def last_kept(logits: Tensor, module: ModuleType = kernels, **given_values: object) -> list[int]:
    """The highest id that the filters keep: a random number near 1 draws it."""
    parameters = columns(len(logits), positions=extreme(largest=True), **given_values)
    return module.sample_triton(logits, None, **parameters)[0].tolist()


@pytest.mark.parametrize("k", [1, 2, 15, 16, 17, 63, 64, 100])
def test_top_k_keeps_exactly_k(k: int) -> None:
    falling = torch.linspace(2, -2, 64).unsqueeze(0)
    equal = torch.full((1, 64), -3.0)
    assert last_kept(torch.cat([falling, equal]), top_k=k) == [min(k, 64) - 1] * 2


def reaches(falling: Tensor, share: float) -> int:
    """The index at which the running mass of falling scores reaches a share of the whole."""
    mass = falling.double().exp().cumsum(0)
    return int((mass < share * mass[-1]).sum())


@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 0.77, 0.999])
def test_top_p_keeps_the_fewest_that_reach_it(share: float) -> None:
    falling = torch.linspace(2, -2, 64)
    assert last_kept(falling.unsqueeze(0), top_p=share) == [reaches(falling, share)]


def test_top_p_sees_what_top_k_left() -> None:
    # 2 : 1 : 1 : ... With top-k 3 the shares are 1/2, 1/4, 1/4; of all nine 1/5, 1/10, ...
    logits = torch.tensor([[2.0] + [1.0] * 8]).log()
    assert last_kept(logits, top_p=0.65) == [5]
    assert last_kept(logits, top_p=0.65, top_k=3) == [1]
    assert last_kept(logits, top_p=0.8, top_k=3) == [2]
    assert last_kept(logits, top_p=0.999, top_k=3) == [2]


def test_min_p_drops_what_is_less_likely_than_its_share_of_the_likeliest() -> None:
    logits = torch.tensor([[1.0, 0.5, 0.25, 0.125]]).log()
    for min_p, expected in ((0.0, 3), (0.12, 3), (0.13, 2), (0.26, 1), (0.51, 0), (1.0, 0)):
        assert last_kept(logits, min_p=min_p) == [expected], min_p


def test_equals_are_kept_by_lower_id_across_blocks() -> None:
    logits = torch.zeros(1, 2100)
    assert last_kept(logits, top_k=1500) == [1499]
    assert last_kept(logits, top_p=0.75) == [1574]
    assert last_kept(logits, top_p=0.5, top_k=1800) == [899]
    # The likeliest comes last: it, and the first two of the others.
    logits[0, -1] = 0.1
    ids, _ = sample_triton(logits.expand(12, 2100), None, **columns(12, top_k=3, seeds=range(12)))
    assert set(ids.tolist()) == {0, 1, 2099}


def test_zeros_of_both_signs_are_equal() -> None:
    for logits in ([0.0, -0.0, 0.0], [-0.0, 0.0, -0.0]):
        assert last_kept(torch.tensor([logits]), top_k=2) == [1]
        assert last_kept(torch.tensor([logits]), temperature=0.0) == [0]
    # -1e-20 / 1e30 is -0.
    assert last_kept(torch.tensor([[-1e-20, 0.0, 0.0]]), top_k=2, temperature=1e30) == [1]


def test_greedy_takes_the_first_of_the_greatest_penalised_scores() -> None:
    logits = torch.tensor([[1.0, 3.0, -1.0, 3.0], [-2.0, -1.0, -1.2, -9.0]])
    seen = torch.tensor([[False, True, False, False], [False, True, False, False]])
    parameters = columns(2, temperature=0.0, repetition_penalty=[2.0, 1.5])
    assert sample_triton(logits, None, **parameters)[0].tolist() == [1, 1]
    assert sample_triton(logits, seen, **parameters)[0].tolist() == [3, 2]


@triton.jit
def _uniform_kernel(
    seeds_ptr,  # int64, [n_programs]
    positions_ptr,  # int64, [n_programs]
    out_ptr,  # fp32, [n_programs]
):
    index = tl.program_id(0)
    number = uniform_in_kernel(tl.load(seeds_ptr + index), tl.load(positions_ptr + index))
    tl.store(out_ptr + index, number)


def test_random_numbers_have_the_bits_of_the_reference() -> None:
    corners = [0, 1, 12345, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 7, 2**62, 2**63 - 1]
    seeds, positions = (
        x.flatten() for x in torch.meshgrid([torch.tensor(corners)] * 2, indexing="ij")
    )
    out = torch.empty(len(seeds))
    _uniform_kernel[(len(seeds),)](seeds, positions, out)
    assert torch.equal(out, uniform(seeds, positions))


def test_draws_follow_the_distribution() -> None:
    logits, n = torch.tensor([0.0, 1.0, 2.0, -0.5]), 200
    parameters = columns(n, temperature=0.8, seeds=3, positions=range(n))
    ids, _ = sample_triton(logits.expand(n, 4), None, **parameters)
    expected = (logits.double() / 0.8).softmax(-1) * n
    counts = ids.bincount(minlength=4)
    # Chi-square with 3 degrees of freedom: 21.1 has probability 1e-4.
    assert float(((counts - expected) ** 2 / expected).sum()) < 21.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_logprobs_are_as_near_to_fp64_as_pytorchs(dtype: torch.dtype) -> None:
    logits, parameters = peaked(40, 3000, dtype), columns(40, temperature=0.0)
    ids, ours = sample_triton(logits, None, **parameters)
    _, pytorchs = sample_reference(logits, None, **parameters)
    assert ours.dtype == torch.float32
    truth = logprobs_of(logits, ids)
    ours, pytorchs = ((x - truth).norm() / truth.norm() for x in (ours, pytorchs))
    assert ours <= 2 * pytorchs + torch.finfo(torch.float32).eps


def test_a_row_draws_the_same_with_any_neighbours() -> None:
    logits, seen, parameters = peaked(6, 40), torch.rand(6, 40) < 0.3, mixed(6, seed=1)
    together = sample_triton(logits, seen, **parameters)
    again = sample_triton(logits, seen, **parameters)
    for row in range(6):
        only = slice(row, row + 1)
        own = {name: column[only] for name, column in parameters.items()}
        alone = sample_triton(logits[only], seen[only], **own)
        for one, all_rows, repeated in zip(alone, together, again, strict=True):
            assert torch.equal(one, all_rows[only])
            assert torch.equal(one, repeated[only])


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "row-strided": lambda t: torch.cat([t, t.new_full(t.shape, torch.nan)], 1)[:, : t.shape[1]],
    "column-strided": lambda t: torch.stack([t, t.new_full(t.shape, torch.nan)], -1)[..., 0],
    "transposed": lambda t: t.T.contiguous().T,
    "expanded": lambda t: t[:1].expand_as(t),
}


@pytest.mark.parametrize("seen", LAYOUTS)
@pytest.mark.parametrize("logits", LAYOUTS)
def test_layouts_of_logits_and_seen(logits: str, seen: str) -> None:
    """NaN, True in ``seen``, stands wherever nothing may be read."""
    scores, marks = peaked(2, 33), torch.rand(2, 33) < 0.3
    parameters = columns(2, temperature=[0.0, 0.9], top_k=20, repetition_penalty=1.4)
    assert_as_reference(LAYOUTS[logits](scores), LAYOUTS[seen](marks), parameters)


def test_parameters_of_any_stride() -> None:
    parameters = {
        name: torch.stack([column, torch.full_like(column, 9)], 1)[:, 0]
        for name, column in mixed(4, seed=2).items()
    }
    assert_as_reference(peaked(4, 33), None, parameters)


def test_hidden_tokens_are_never_chosen() -> None:
    logits = torch.full((4, 2100), -torch.inf)  # the whole first block, and most of the others
    logits[:, [1500, 2099]] = torch.tensor([0.0, 0.5])
    parameters = columns(4, temperature=[0.0, 1, 1, 5], top_p=[1, 1, 0.99, 1], seeds=[1, 2, 3, 4])
    assert_as_reference(logits, None, parameters)
    first = columns(2, positions=extreme(largest=False))
    assert sample_triton(logits[:2], None, **first)[0].tolist() == [1500, 1500]
    assert last_kept(logits[:2], top_k=99) == [2099, 2099]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_give_an_id_in_range_and_a_nan_logprob(temperature: float) -> None:
    logits = torch.randn(5, 20)
    logits[0, 3] = logits[1] = torch.nan
    logits[2] = -torch.inf
    logits[3, 7] = torch.inf
    ids, logprobs = sample_triton(
        logits, None, **columns(5, temperature=temperature, top_k=5, top_p=0.9, min_p=0.1)
    )
    assert ((ids >= 0) & (ids < 20)).all()
    assert logprobs.isnan().tolist() == [True, True, True, True, False]


def test_no_rows_and_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, logprobs = sample_triton(torch.empty(0, 9), None, **columns(0))
    assert ids.shape == logprobs.shape == (0,)
    logits = torch.zeros(2, 9)
    with pytest.raises(TypeError, match="float64"):
        sample_triton(logits.double(), None, **columns(2))
    for n_vocab in (0, 2**24 + 1):
        with pytest.raises(ValueError, match=f"vocabulary of {n_vocab} tokens"):
            sample_triton(torch.zeros(1, 1).expand(1, n_vocab), None, **columns(1))
    with pytest.raises(ValueError, match=r"shape \(3,\) for 2 rows"):
        sample_triton(logits, None, **columns(2) | {"min_p": torch.zeros(3)})
    for seen in (torch.zeros(2, 8, dtype=torch.bool), torch.zeros(2, 9)):
        with pytest.raises(ValueError, match=r"not bool \(2, 9\)"):
            sample_triton(logits, seen, **columns(2))
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    with pytest.raises(TypeError, match="TRITON_INTERPRET=1"):
        sample_triton(logits, None, **columns(2))


def test_opcheck_and_compile() -> None:
    logits, seen, parameters = peaked(2, 24), torch.rand(2, 24) < 0.3, mixed(2)
    operation = torch.ops.gptile.sample.default
    for marks in (None, seen):
        torch.library.opcheck(operation, (logits, marks, *parameters.values()))
    compiled = torch.compile(sample_triton, backend="aot_eager", fullgraph=True)
    for got, expected in zip(
        compiled(logits, seen, **parameters),
        sample_triton(logits, seen, **parameters),
        strict=True,
    ):
        assert torch.equal(got, expected)


def wrong(module: ModuleType) -> Iterator[str]:
    """What a kernel gets wrong of rows that each put one of its promises to the test."""
    falling, equal = torch.linspace(2, -2, 64).unsqueeze(0), torch.zeros(1, 64)
    hidden = torch.cat([torch.full((1, 1100), -torch.inf), falling], 1)
    shares = torch.tensor([[2.0] + [1.0] * 8]).log()
    halves = torch.tensor([[1.0, 0.5, 0.25, 0.125]]).log()
    for name, logits, parameters, expected in (
        ("top-k", falling, {"top_k": 17}, 16),
        ("top-k of equals", equal, {"top_k": 17}, 16),
        ("top-p", falling, {"top_p": 0.5}, reaches(falling[0], 0.5)),
        ("top-p 0", falling, {"top_p": 0.0}, 0),
        ("top-p of equals", equal, {"top_p": 0.25}, 15),
        ("top-p after top-k", shares, {"top_p": 0.65, "top_k": 3}, 1),
        ("min-p", halves, {"min_p": 0.26}, 1),
        ("-0 equals 0", torch.tensor([[-1e-20, 0.0]]), {"top_k": 1, "temperature": 1e30}, 0),
        ("later blocks", hidden, {"top_k": 5}, 1104),
        ("tiny temperature", halves, {"temperature": 1e-30}, 0),
        ("greedy", equal, {"temperature": 0.0}, 0),
    ):
        if last_kept(logits, module, **parameters) != [expected]:
            yield name
    logits = torch.tensor(
        [[-1.0, 0.9, -1.2, 1.0], [-1.0, -2.0, -1.5, -3.0], [-1.0, 0.9, -1.0, 1.0]]
    )
    padded = torch.cat([logits, logits.new_full((3, 9), 7.0)], 1)[:, :4]
    seen = torch.tensor([[True, False, False, True]] * 3)
    penalised = columns(3, repetition_penalty=3.0, temperature=[0.5, 0, 2], seeds=[2**40, 2, 9])
    for scores, marks, parameters in (
        (padded, seen, penalised),
        (hidden, None, columns(1, seeds=2**40)),
    ):
        ids, logprobs = module.sample_triton(scores, marks, **parameters)
        if not torch.equal(ids, sample_reference(scores, marks, **parameters)[0]):
            yield "ids"
        if not torch.allclose(logprobs, logprobs_of(scores, ids).float(), atol=1e-5):
            yield "logprobs"


def test_the_right_kernel_keeps_what_the_wrong_ones_break() -> None:
    assert [*wrong(kernels)] == []


PLANTED = {
    "the sign of zero ranks": ("bitcast=True) & 0x7FFFFFFF", "bitcast=True)"),
    "one equal too many": ("else 1.0) >= goal", "else 1.0) > goal"),
    "likelier tokens not counted": ("before + earlier", "0 * before + earlier"),
    "a digit never raised": ("limit += (tl.sum(", "limit += 0 * (tl.sum("),
    "all equals kept": ("(equal > 0) & ~reached", "equal > 0"),
    "an equal counts itself": ("tl.cumsum(equal, axis=0) - equal", "tl.cumsum(equal, axis=0)"),
    "top-p of the whole vocabulary": (
        "_narrow((limit, last), top_p",
        "_narrow((tl.full((), 0xFFFFFFFF, tl.uint32), -1), top_p",
    ),
    "nothing left of top-p 0": ("tl.maximum(amount * total, 1.0)", "amount * total"),
    "min-p of all the mass": (
        "whole += tl.sum(tl.where(kept & (mass >= min_p)",
        "whole += tl.sum(tl.where(kept",
    ),
    "a sum started at -inf": ("maximum = -3.4028234663852886e38", 'maximum = -float("inf")'),
    "the last of the greatest": ("block_best > best, first", "block_best >= best, first + 1"),
    "negative scores divided": (
        "tl.where(logits < 0, logits * penalty, tl.div_rn(logits, penalty))",
        "tl.div_rn(logits, penalty)",
    ),
    "logprob of the penalised scores": ("tl.sum(tl.exp(logits", "tl.sum(tl.exp(scores"),
    "the seed's low half": (
        "tl.load(seeds_ptr + index)",
        "tl.load(seeds_ptr + index).to(tl.int32)",
    ),
    "rows read as if unpadded": ("index * logits_row_stride", "index * n_cols"),
    "temperature forgotten": ("divisor = tl.maximum(temperature,", "divisor = tl.maximum(1.0,"),
    "the draw not below the number": ("axis=0) > share * whole", "axis=0) > 0 * whole"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_seen(plant: Callable[..., ModuleType], fault: str) -> None:
    assert any(wrong(plant(kernels, *PLANTED[fault])))
