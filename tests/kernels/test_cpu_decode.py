"""The parts of the compiled decode step against fp64: stored weights, products, LayerNorm,
attention; and proof that what is wrong is seen."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gptile.kernels.activations import ACTIVATIONS, REFERENCES
from gptile.kernels.cpu_decode import (
    CASES,
    NO_FUNCTION,
    PRECISIONS,
    Packed,
    PackedNorm,
    append_and_attend,
    layer_norm,
    pack,
    packed_linear,
    packed_linear_reference,
    product,
    unpack,
)
from gptile.kernels.decode_attention import decode_attention_reference

NO_BIAS = np.empty(0, np.float32)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / (expected.norm() or 1.0))


def allowed(reference: Tensor, expected: Tensor) -> float:
    """The policy of the kernels' tests: twice PyTorch's own error, and one rounding."""
    return 2 * relative(reference, expected) + torch.finfo(torch.float32).eps


def surrounded(x: Tensor) -> Tensor:
    """The same numbers with NaN before and after them in memory."""
    whole = torch.full((x.numel() + 128,), torch.nan, dtype=x.dtype)
    whole[64:-64] = x.flatten()
    return whole[64:-64].view(x.shape)


def problem(rows: int, n_in: int, n_out: int, precision: str) -> tuple[Tensor, Packed]:
    x = torch.randn(rows, n_in) * torch.linspace(0.5, 3, rows).unsqueeze(1) + 1
    packed = pack(surrounded(torch.randn(n_out, n_in) / n_in**0.5), torch.randn(n_out), precision)
    return surrounded(x), packed


def check(x: Tensor, packed: Packed, found: Tensor, activation: str | None = None) -> None:
    """Against the definition in fp64, on the numbers that are stored. Few numbers may be right by
    luck in PyTorch: then the bound is what rounding each product once may cost at most."""
    expected = x.double() @ unpack(packed).double().T + torch.from_numpy(packed.bias).double()
    if activation:
        expected = REFERENCES[ACTIVATIONS[activation]](expected)
    reference = packed_linear_reference(x, packed, activation)
    bound = allowed(reference, expected)
    if expected.numel() < 100:
        sizes = x.double().abs() @ unpack(packed).double().abs().T
        sizes += torch.from_numpy(packed.bias).double().abs()
        bound += float(sizes.norm() / expected.norm()) * torch.finfo(torch.float32).eps
    assert relative(found, expected) <= bound


def zeroed(x: Tensor) -> Tensor:
    return torch.cat([x[:, :-1], torch.zeros(len(x), 1)], 1)


# What the product is given in place of what it should read, by the precision that shows it.
FAULTS: dict[str, tuple[str, Callable[[Tensor, Packed], tuple[Tensor, Packed]]]] = {
    "scale forgotten": ("int8", lambda x, p: (x, p._replace(scale=NO_BIAS))),
    "scale of the next row": ("int8", lambda x, p: (x, p._replace(scale=np.roll(p.scale, 1)))),
    "bias forgotten": ("float32", lambda x, p: (x, p._replace(bias=NO_BIAS))),
    "bias of the next row": ("float32", lambda x, p: (x, p._replace(bias=np.roll(p.bias, 1)))),
    "last weight not read": ("float32", lambda x, p: (zeroed(x), p)),
    "a bit of a weight lost": ("bfloat16", lambda x, p: (x, p._replace(weight=p.weight & 0xFFFE))),
    "bits as a number": ("bfloat16", lambda x, p: (x, p._replace(weight=p.weight.astype("f4")))),
    "rows out of order": ("float32", lambda x, p: (x.roll(1, 0), p)),
}


class TestStoredWeights:
    def test_float32_is_not_copied(self) -> None:
        weight = torch.randn(5, 3)
        packed = pack(weight, None, "float32")
        weight[2, 1] = 7.0
        assert packed.weight[2, 1] == 7.0

    def test_bfloat16_is_rounded_to_nearest(self) -> None:
        weight = torch.randn(50, 30)
        assert torch.equal(unpack(pack(weight, None, "bfloat16")), weight.bfloat16().float())

    def test_int8_is_half_a_step_off_at_most(self) -> None:
        weight = torch.randn(50, 30)
        weight[7] = 0
        packed = pack(weight, None, "int8")
        step = weight.abs().amax(dim=1, keepdim=True) / 127
        assert ((unpack(packed) - weight).abs() <= 0.5001 * step).all()
        assert packed.weight.dtype == np.int8
        assert np.abs(packed.weight).max() == 127

    def test_another_precision_is_refused(self) -> None:
        with pytest.raises(ValueError, match="int4"):
            pack(torch.randn(2, 2), None, "int4")


class TestProduct:
    @pytest.mark.parametrize("precision", PRECISIONS)
    @pytest.mark.parametrize("case", CASES)
    def test_cases(self, case: str, precision: str) -> None:
        x, packed = problem(**CASES[case], precision=precision)
        check(x, packed, packed_linear(x, packed))

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_activations(self, activation: str) -> None:
        x, packed = problem(6, 40, 300, "float32")
        packed.bias[::3] *= 30  # far out on both sides, where tanh and exp saturate
        check(x, packed, packed_linear(x, packed, activation), activation)

    @settings(max_examples=60, deadline=None)
    @given(
        rows=st.integers(1, 17),
        n_in=st.integers(1, 70),
        n_out=st.integers(1, 40),
        precision=st.sampled_from(PRECISIONS),
    )
    def test_any_shape(self, rows: int, n_in: int, n_out: int, precision: str) -> None:
        x, packed = problem(rows, n_in, n_out, precision)
        check(x, packed, packed_linear(x, packed))

    def test_a_residual_is_added(self) -> None:
        x, packed = problem(5, 30, 20, "float32")
        before = torch.randn(5, 20)
        out = before.clone()
        product(x.numpy(), packed, NO_FUNCTION, True, out.numpy())
        check(x, packed, out - before)

    def test_without_a_bias(self) -> None:
        x, packed = problem(5, 30, 20, "int8")
        zero = packed._replace(bias=np.zeros(20, np.float32))
        assert torch.equal(packed_linear(x, packed._replace(bias=NO_BIAS)), packed_linear(x, zero))

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    def test_what_is_not_finite_shows_in_its_row_only(self, bad: float) -> None:
        x, packed = problem(6, 30, 20, "bfloat16")
        x[4, 7] = bad
        found = packed_linear(x, packed)
        assert not found[4].isfinite().any()
        assert found[[0, 1, 2, 3, 5]].isfinite().all()

    @pytest.mark.parametrize("fault", FAULTS)
    def test_faults_are_seen(self, fault: str) -> None:
        precision, spoil = FAULTS[fault]
        x, packed = problem(5, 768, 300, precision)
        with pytest.raises(AssertionError):
            check(x, packed, packed_linear(*spoil(x, packed)))

    def test_a_wrong_activation_is_seen(self) -> None:
        x, packed = problem(5, 40, 300, "float32")
        for wrong in ("gelu", "relu", "silu"):
            with pytest.raises(AssertionError):
                check(x, packed, packed_linear(x, packed, wrong), "gelu_new")


class TestLayerNorm:
    @pytest.mark.parametrize("mean", [0.0, 1000.0])
    @pytest.mark.parametrize("n_cols", [1, 7, 768])
    def test_values(self, n_cols: int, mean: float) -> None:
        x = surrounded(torch.randn(3, n_cols) + mean)
        norm = PackedNorm(*torch.randn(2, n_cols).numpy(), 1e-5)
        expected, reference = (
            torch.nn.functional.layer_norm(
                x.to(dtype), (n_cols,), *(torch.from_numpy(p).to(dtype) for p in norm[:2]), 1e-5
            )
            for dtype in (torch.float64, torch.float32)
        )
        found = torch.empty(3, n_cols)
        layer_norm(x.numpy(), norm, found.numpy())
        assert relative(found, expected) <= allowed(reference, expected)
        wrong = torch.empty(3, n_cols)
        layer_norm(x.numpy(), norm._replace(eps=1e-3), wrong.numpy())
        if n_cols > 1:
            assert relative(wrong, expected) > allowed(reference, expected)


class TestAttention:
    N_SLOTS, N_HEAD, MAX_LEN, HEAD_DIM = 5, 3, 70, 20
    SLOTS, STARTS, SCALE = [3, 0, 4], [69, 0, 33], 0.3

    def caches(self) -> tuple[Tensor, Tensor]:
        """Sharp enough that softmax is not flat; NaN where nothing was written."""
        shape = (self.N_SLOTS, self.N_HEAD, self.MAX_LEN, self.HEAD_DIM)
        caches = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        for cache in caches:
            for slot, start in zip(self.SLOTS, self.STARTS, strict=True):
                cache[slot, :, :start] = 2 * torch.randn(self.N_HEAD, start, self.HEAD_DIM)
        return caches

    def attend(
        self, qkv: Tensor, caches: tuple[Tensor, Tensor], slots: list, starts: list, scale: float
    ) -> Tensor:
        n_embd = self.N_HEAD * self.HEAD_DIM
        out = torch.full((len(qkv), n_embd), torch.nan)
        scores = np.full((len(qkv) * self.N_HEAD, self.MAX_LEN), np.nan, np.float32)
        where = np.array(slots, np.int32), np.array(starts, np.int32)
        append_and_attend(
            qkv.numpy(), caches[0].numpy(), caches[1].numpy(), *where, scale, scores, out.numpy()
        )
        return out

    def expected(
        self, qkv: Tensor, caches: tuple[Tensor, Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """By the reference of decode attention, and what the caches hold then."""
        after = caches[0].to(dtype), caches[1].to(dtype)
        q, k, v = qkv.to(dtype).unflatten(1, (3, self.N_HEAD, self.HEAD_DIM)).unbind(1)
        for row, (slot, start) in enumerate(zip(self.SLOTS, self.STARTS, strict=True)):
            after[0][slot, :, start], after[1][slot, :, start] = k[row], v[row]
        where = (torch.tensor(list_) for list_ in (self.SLOTS, self.STARTS, [1, 1, 1]))
        out = decode_attention_reference(q.unsqueeze(1), *after, *where, self.SCALE)
        return out[:, 0], after

    def run(self, **wrong: object) -> None:
        qkv, caches = 2 * torch.randn(3, 3 * self.N_HEAD * self.HEAD_DIM), self.caches()
        expected, after = self.expected(qkv, caches, torch.float64)
        reference, _ = self.expected(qkv, caches, torch.float32)
        given = {"slots": self.SLOTS, "starts": self.STARTS, "scale": self.SCALE, **wrong}
        found = self.attend(surrounded(qkv), caches, **given)
        assert relative(found, expected) <= allowed(reference, expected)
        for cache, right in zip(caches, after, strict=True):
            assert torch.equal(cache.double().nan_to_num(9.0), right.nan_to_num(9.0))

    def test_ragged_rows_in_any_slots(self) -> None:
        self.run()

    @pytest.mark.parametrize(
        "wrong",
        [
            {"scale": 0.31},
            {"slots": [0, 3, 4]},
            {"starts": [68, 0, 33]},
            {"starts": [69, 0, 34]},
        ],
        ids=str,
    )
    def test_faults_are_seen(self, wrong: dict) -> None:
        with pytest.raises(AssertionError):
            self.run(**wrong)
