"""The linear cross-entropy kernels in Triton's interpreter against fp64: values, gradients, chunks,
layouts, memory, and proof that wrong kernels are seen."""

import math
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gptile.kernels import IGNORE_INDEX, Ops
from gptile.kernels import linear_cross_entropy as kernels
from gptile.kernels.linear_cross_entropy import (
    CASES,
    linear_cross_entropy_reference,
    linear_cross_entropy_triton,
    rows_per_chunk,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
REDUCTIONS = ["mean", "sum", "none"]


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """What torch.empty returns is NaN here, the padding of the logits included."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def budget(module: ModuleType, rows: int, vocab: int, dtype: torch.dtype) -> Any:
    """Within it a chunk has that many rows."""
    size = rows * -(-vocab // 16) * 16 * dtype.itemsize
    return patch.object(module, "LOGITS_BUDGET", size)


def inputs(rows: int, vocab: int, cols: int, spread: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and targets: logits of that spread, a mean that is not 0, every third ignored."""
    x = torch.randn(rows, cols) + 0.5
    weight = torch.randn(vocab, cols) * spread / math.sqrt(cols) + 0.1
    targets = torch.randint(vocab, (rows,))
    targets[1::3] = IGNORE_INDEX
    return x, weight, targets


def exact(logits: Tensor) -> tuple[Tensor, Tensor]:
    """x and weight with just these logits, free of rounding."""
    return torch.eye(len(logits)), logits.T


def truth(x: Tensor, weight: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """By the formula, in the precision of the arguments."""
    logits = x @ weight.T
    counts = targets != IGNORE_INDEX
    lookup = logits.gather(-1, targets.clamp(min=0).long().unsqueeze(-1)).squeeze(-1)
    losses = torch.where(counts, logits.logsumexp(-1) - lookup, 0)
    if reduction == "none":
        return losses
    return losses.sum() / (max(counts.sum().item(), 1) if reduction == "mean" else 1)


OURS_AND_TRUTH = ((linear_cross_entropy_triton, torch.float32), (truth, torch.float64))


def results(
    function: Callable,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    reduction: str,
    dtype: torch.dtype,
    upstream: float = 0.7,
) -> dict[str, Tensor]:
    """Loss and gradients under a gradient of the loss that is not 1."""
    x, weight = (t.detach().to(dtype).requires_grad_() for t in (x, weight))
    loss = function(x, weight, targets, reduction)
    dloss = torch.linspace(-1, 2, targets.numel()).view(targets.shape) + 0.05
    loss.backward(dloss.to(loss) if reduction == "none" else loss.new_tensor(upstream))
    return {"loss": loss.detach(), "dx": x.grad, "dweight": weight.grad}


def error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm().clamp(min=1e-12)).item()


FEW = 32
"""Numbers: whether PyTorch is nearly exact on fewer is luck, and its error no measure."""


def product_error(
    x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, chunk: int
) -> float:
    """Of dx, where PyTorch multiplies the exact gradient of the logits by the weight, as we have it
    do: so many rows at a time, padded. On some CPUs that path of its library sums one by one."""
    wide = (x.double() @ weight.double().T).requires_grad_()
    eye = torch.eye(len(x), dtype=torch.float64)
    (gradient,) = torch.autograd.grad(truth(eye, wide.T, targets, "sum"), wide)
    padded = torch.zeros(len(x), -(-len(weight) // 16) * 16, dtype=dtype)
    padded[:, : len(weight)] = gradient.to(dtype)
    parts = [part[:, : len(weight)] @ weight for part in padded.split(chunk)]
    return error(torch.cat(parts), gradient @ weight.double())


def wrong(
    module: ModuleType,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    dtype: torch.dtype = torch.float32,
    chunk: int = 4,
) -> list[str]:
    """What is further from fp64 than twice (forward) or three times (backward) PyTorch's error."""
    x, weight, seen = x.to(dtype), weight.to(dtype), []
    product = product_error(x, weight, targets, dtype, chunk)
    for reduction in REDUCTIONS:
        arguments = (x, weight, targets, reduction)
        expected = results(truth, *arguments, torch.float64)
        reference = results(linear_cross_entropy_reference, *arguments, dtype)
        with budget(module, chunk, len(weight), dtype):
            ours = results(module.linear_cross_entropy_triton, *arguments, dtype)
        assert ours["loss"].dtype == torch.float32
        assert ours["dx"].dtype == ours["dweight"].dtype == dtype
        for name, value in expected.items():
            ratio = 4 if targets.numel() < FEW and name == "loss" else 2 if name == "loss" else 3
            theirs = error(reference[name], value)
            theirs = max(theirs, product) if name == "dx" else theirs
            if not error(ours[name], value) <= ratio * theirs + torch.finfo(dtype).eps:
                seen.append(f"{name} of {reduction}")
    return seen


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_every_case_against_fp64(case: str, dtype: torch.dtype) -> None:
    rows, vocab, cols = CASES[case].values()
    assert wrong(kernels, *inputs(min(rows, 5), vocab, min(cols, 24)), dtype, chunk=3) == []


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 4095, 4096, 4097, 8193])
def test_vocabularies_around_every_block_edge(vocab: int) -> None:
    x, weight, targets = inputs(3, vocab, 5)
    targets[0] = vocab - 1
    if vocab == 1:  # nothing to choose: no loss and no gradient
        for name, got in results(
            linear_cross_entropy_triton, x, weight, targets, "sum", torch.float32
        ).items():
            assert not got.any(), name
    else:
        assert wrong(kernels, x, weight, targets) == []


@pytest.mark.parametrize("chunk", [1, 2, 3, 10, 11, 100])
def test_chunks_of_any_size(chunk: int) -> None:
    assert wrong(kernels, *inputs(11, 37, 9), chunk=chunk) == []


def test_a_chunk_is_whole_tiles_of_rows_that_fit_the_budget() -> None:
    # 256 MiB hold 2669.9 rows of 50272 16-bit logits, and half as many of 32 bits.
    assert rows_per_chunk(8192, 50257, torch.bfloat16) == 2560
    assert rows_per_chunk(8192, 50257, torch.float32) == 1280
    assert rows_per_chunk(100, 50257, torch.float32) == 100
    assert rows_per_chunk(8192, 2**20, torch.float32) == 64
    assert rows_per_chunk(8192, 2**30, torch.float32) == 1
    assert rows_per_chunk(0, 50257, torch.float32) == 1


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("rows", [0, 5])
def test_nothing_to_predict_is_zero_not_nan(rows: int, reduction: str) -> None:
    x, weight, _ = inputs(rows, 20, 8)
    targets = torch.full((rows,), IGNORE_INDEX)
    got = results(linear_cross_entropy_triton, x, weight, targets, reduction, torch.float32)
    assert got["dx"].shape == x.shape
    for name, tensor in got.items():
        assert torch.equal(tensor, torch.zeros_like(tensor)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("offset", [0, 1e4, -3e4])
def test_peaked_logits_far_from_zero(offset: float, dtype: torch.dtype) -> None:
    logits = offset + torch.randn(6, 300) * 30
    targets = torch.tensor([0, 1, 299, 7, IGNORE_INDEX, int(logits[5].argmax())])
    assert wrong(kernels, *exact(logits), targets, dtype) == []
    assert wrong(kernels, *inputs(6, 300, 24, spread=30), dtype) == []


def test_digits_of_the_sum_survive_a_large_maximum() -> None:
    """Near 1e4 neighbours in fp32 are 1e-3 apart; log(3) - 1 must not be rounded to that."""
    logits = torch.tensor([[1e4, 1e4, 1e4, 1e4 - 60]])
    got = results(
        linear_cross_entropy_triton, *exact(logits), torch.tensor([2]), "sum", torch.float32, 1.0
    )
    assert got["loss"].item() == pytest.approx(math.log(3), rel=1e-6)
    gradient = torch.tensor([1 / 3, 1 / 3, -2 / 3, math.exp(-60) / 3])
    torch.testing.assert_close(got["dweight"].flatten(), gradient, rtol=1e-6, atol=0)


def test_a_loss_scale_beyond_fp16() -> None:
    x, weight, targets = inputs(6, 11, 8)
    arguments = ((x * 0.02).half(), (weight * 0.02).half(), targets, "sum")
    got, expected = (
        results(function, *arguments, dtype, upstream=1e5)
        for function, dtype in ((linear_cross_entropy_triton, torch.float16), OURS_AND_TRUTH[1])
    )
    for name in ("dx", "dweight"):
        assert error(got[name], expected[name]) < 2e-3, name


def summed_beyond_fp16(module: ModuleType) -> bool:
    """Whether a mean of 1500 survives a sum of 96000, because every row pulls the same way."""
    x, weight, targets = torch.full((64, 2), 2000.0), torch.zeros(4, 2), torch.zeros(64).long()
    function = module.linear_cross_entropy_triton
    got = results(function, x, weight, targets, "mean", torch.float16, upstream=1.0)
    return (
        error(got["dweight"], torch.tensor([-1500.0, 500, 500, 500]).view(4, 1).expand(4, 2)) < 1e-3
    )


def test_a_summed_gradient_beyond_fp16() -> None:
    assert summed_beyond_fp16(kernels)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan_where_ignored_stays_there() -> None:
    x, weight, targets = inputs(7, 20, 8)
    targets[1] = IGNORE_INDEX
    poisoned = x.clone()
    poisoned[1] = torch.nan
    for reduction in REDUCTIONS:
        arguments = (weight, targets, reduction, torch.float32)
        clean = results(linear_cross_entropy_triton, x, *arguments)
        got = results(linear_cross_entropy_triton, poisoned, *arguments)
        assert torch.equal(got["loss"], clean["loss"])
        assert torch.equal(got["dx"], clean["dx"])
        assert not got["dx"][1].any()
        assert got["dweight"].isnan().all()  # 0 * NaN, as documented


@pytest.mark.parametrize("bad", [-1, -101, 20, 31, 2**40])
def test_a_target_out_of_range_is_not_looked_up(bad: int) -> None:
    """Nor is the padding, in which column 20 and 31 would lie; the loss says so."""
    around = torch.randn(3, 32)
    targets = torch.tensor([4, bad, 5])
    loss, maximum, total = torch.empty(3, 3).unbind()
    kernels.launch_loss(around[:, :20], targets, loss, maximum, total)
    assert loss.isnan().tolist() == [False, True, False]


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e30])
def test_padding_counts_for_nothing(poison: float) -> None:
    buffer = torch.full((4, 32), poison)
    buffer[:, :20] = torch.randn(4, 20)
    logits, targets = buffer[:, :20], torch.tensor([0, 19, IGNORE_INDEX, 7])
    expected = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(expected, targets, reduction="none")
    loss, maximum, total, factor = torch.empty(4, 4).unbind()
    kernels.launch_loss(logits, targets, loss, maximum, total)
    torch.testing.assert_close(loss.double(), losses.detach(), rtol=1e-6, atol=1e-6)
    factor.copy_(torch.tensor([1.0, -2, 3, 0.5]))
    kernels.launch_gradient(logits, targets, maximum, total, factor)
    losses.backward(factor.double())
    torch.testing.assert_close(logits.double(), expected.grad, rtol=1e-6, atol=1e-7)
    assert not buffer[:, 20:].any()


def test_a_block_of_nothing_but_infinities() -> None:
    logits = torch.full((1, 8192), -torch.inf)
    logits[0, 5000] = 1.0
    loss, maximum, total = torch.empty(3, 1).unbind()
    kernels.launch_loss(logits, torch.tensor([5000]), loss, maximum, total)
    assert loss.item() == 0


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "column-strided": lambda t: torch.stack([t, t.new_full(t.shape, torch.nan)], -1)[..., 0],
    "row-strided": lambda t: torch.cat([t, t.new_full(t.shape, torch.nan)], 1)[:, : t.shape[1]],
    "transposed": lambda t: t.T.contiguous().T,
    "expanded": lambda t: t[:1].expand_as(t),
}


@pytest.mark.parametrize("weight_layout", LAYOUTS)
@pytest.mark.parametrize("x_layout", LAYOUTS)
def test_layouts_of_x_and_weight(x_layout: str, weight_layout: str) -> None:
    """Given to the launcher, because a leaf made from a view would lose its layout."""
    x, weight, targets = inputs(7, 21, 8)
    x, weight = LAYOUTS[x_layout](x), LAYOUTS[weight_layout](weight)
    factor = torch.linspace(-1, 2, 7)
    with budget(kernels, 4, 21, torch.float32):
        *_, dx, dweight = kernels.launch_chunks(x, weight, targets, True, True, factor)
    leaves = [t.double().requires_grad_() for t in (x, weight)]
    expected = torch.autograd.grad(truth(*leaves, targets, "none"), leaves, factor.double())
    torch.testing.assert_close(dx.double(), expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dweight.double(), expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_three_dimensions_of_views(reduction: str) -> None:
    """x and targets transposed, a weight that is stored [C, V]; integers of either size."""
    x, weight, targets = inputs(12, 19, 8)
    leaves = [x.requires_grad_(), weight.T.contiguous().requires_grad_()]
    at = targets.view(3, 4).T
    for indices in (at, at.int()):
        gradients = []
        for function, dtype in OURS_AND_TRUTH:
            viewed = leaves[0].to(dtype).view(3, 4, 8).transpose(0, 1)
            loss = function(viewed, leaves[1].to(dtype).T, indices, reduction)
            assert loss.shape == (indices.shape if reduction == "none" else ())
            gradients.append(torch.autograd.grad(loss.sum() * 1.5, leaves))  # stride 0 upstream
        for ours, expected in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


def test_transposed_and_expanded_gradients_of_each_loss() -> None:
    x, weight, targets = inputs(12, 19, 8)
    targets = targets.view(3, 4)
    for dloss in (torch.randn(4, 3).T, torch.randn(3, 1).expand(3, 4), torch.ones(()).expand(3, 4)):
        gradients = []
        for function, dtype in OURS_AND_TRUTH:
            leaves = [x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
            loss = function(leaves[0].view(3, 4, 8), leaves[1], targets, "none")
            gradients.append(torch.autograd.grad(loss, leaves, dloss.to(dtype)))
        for ours, expected in zip(*gradients, strict=True):
            assert error(ours, expected) < 1e-6


class Sizes(TorchDispatchMode):
    """Bytes of every tensor that PyTorch's operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [t.nbytes for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.of.setdefault(func.__name__, []).extend(sizes)
        return out

    @property
    def largest(self) -> int:
        return max(max(sizes, default=0) for sizes in self.of.values())


def test_the_logits_are_never_held_together() -> None:
    x, weight, targets = inputs(32, 200, 2)
    with Sizes() as sizes:
        linear_cross_entropy_reference(x, weight, targets)
    assert sizes.largest == 4 * 32 * 200  # so this would be seen
    with budget(kernels, 2, 200, torch.float32), Sizes() as sizes:
        kernels.launch_chunks(x, weight, targets, True, True, torch.ones(32))
    assert sizes.largest == 4 * 2 * 208
    with budget(kernels, 2, 200, torch.float32), Sizes() as sizes:
        kernels.launch_chunks(x, weight, targets, False, False)
    assert sizes.largest == 4 * 2 * 208
    assert len(sizes.of["mm.out"]) == 16  # one product a chunk


def frugal(module: ModuleType) -> bool:
    """Whether dx and dweight are made only where wanted, and nothing in their place."""
    x, weight, targets = inputs(6, 50, 8)
    for wants_x, wants_weight, recorded in (
        (True, True, False),
        (False, False, True),
        (True, False, True),
        (False, True, True),
    ):
        leaves = (x.clone().requires_grad_(wants_x), weight.clone().requires_grad_(wants_weight))
        with torch.set_grad_enabled(recorded), Sizes() as sizes:
            loss = module.linear_cross_entropy_triton(*leaves, targets, "sum")
        wanted = [4 * 6 * 8 * (wants_x and recorded), 4 * 50 * 8 * (wants_weight and recorded)]
        if sizes.of["linear_cross_entropy_sum.default"] != [4, *wanted]:
            return False
        if recorded and (wants_x or wants_weight):
            with Sizes() as sizes:
                loss.backward()
            sizes.of.pop("detach.default", None)
            if sizes.of.pop("linear_cross_entropy_sum_backward.default") != wanted:
                return False
            if sizes.largest > 4:
                return False
    return True


def test_gradients_are_made_only_where_wanted() -> None:
    assert frugal(kernels)


@pytest.mark.parametrize("wants", ["x", "weight"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_gradient_of_one_alone(reduction: str, wants: str) -> None:
    x, weight, targets = inputs(6, 50, 8)
    both = results(linear_cross_entropy_triton, x, weight, targets, reduction, torch.float32)
    leaf = {"x": x, "weight": weight}[wants].requires_grad_()
    loss = linear_cross_entropy_triton(x, weight, targets, reduction)
    dloss = torch.linspace(-1, 2, 6) + 0.05 if reduction == "none" else torch.tensor(0.7)
    loss.backward(dloss)
    assert torch.equal(leaf.grad, both[f"d{wants}"])
    assert (x if wants == "weight" else weight).grad is None


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_weight_used_elsewhere_too(reduction: str) -> None:
    """GPT-2's head is its embedding; and a second backward pass adds the same again."""
    _, weight, targets = inputs(9, 23, 8)
    ids = torch.randint(23, (9,))
    gradients = []
    for function, dtype in OURS_AND_TRUTH:
        leaf = weight.detach().to(dtype).requires_grad_()
        loss = function(leaf[ids], leaf, targets, reduction).sum()
        loss.backward(retain_graph=True)
        first = leaf.grad.clone()
        loss.backward()
        torch.testing.assert_close(leaf.grad, 2 * first)
        gradients.append(first)
    assert error(*gradients) < 1e-6


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_same_bits_every_time(reduction: str) -> None:
    arguments = (*inputs(40, 70, 9), reduction, torch.float32)
    with budget(kernels, 16, 70, torch.float32):
        first, second = (results(linear_cross_entropy_triton, *arguments) for _ in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_second_derivative_is_refused(reduction: str) -> None:
    x, weight, targets = inputs(4, 9, 8)
    x.requires_grad_()
    loss = linear_cross_entropy_triton(x, weight, targets, reduction)
    (gradient,) = torch.autograd.grad(loss.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        gradient.sum().backward()


def test_what_a_kernel_cannot_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, targets = inputs(4, 9, 8)
    for function in (linear_cross_entropy_triton, linear_cross_entropy_reference):
        with pytest.raises(ValueError, match="'average', not mean, sum or none"):
            function(x, weight, targets, "average")
    for shapes in ((x, weight[:, :7], targets), (x, weight, targets[:3]), (x, weight[0], targets)):
        with pytest.raises(ValueError, match=r"weight \[V, C\] and targets \[...\] do not match"):
            linear_cross_entropy_triton(*shapes)
    with pytest.raises(TypeError, match=r"one dtype .* torch.float32, torch.float16"):
        linear_cross_entropy_triton(x, weight.half(), targets)
    with pytest.raises(TypeError, match="targets integers"):
        linear_cross_entropy_triton(x, weight, targets.float())
    with pytest.raises(TypeError, match="float64"):
        linear_cross_entropy_triton(x.double(), weight.double(), targets)
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    with pytest.raises(TypeError, match="TRITON_INTERPRET=1"):
        linear_cross_entropy_triton(x, weight, targets)


def test_opcheck() -> None:
    x, weight, targets = inputs(4, 9, 8)
    x, weight, ops = x.requires_grad_(), weight.requires_grad_(), torch.ops.gptile
    torch.library.opcheck(ops.linear_cross_entropy_sum.default, (x, weight, targets, True, True))
    torch.library.opcheck(ops.linear_cross_entropy_rows.default, (x, weight, targets))
    x, weight = x.detach(), weight.detach()
    for needs in ((False, False), (True, False), (False, True)):
        torch.library.opcheck(ops.linear_cross_entropy_sum.default, (x, weight, targets, *needs))
        torch.library.opcheck(
            ops.linear_cross_entropy_rows_backward.default,
            (torch.randn(4), x, weight, targets, torch.ones(2, 4), *needs),
        )
    torch.library.opcheck(
        ops.linear_cross_entropy_sum_backward.default, (torch.tensor(0.5), x.half(), weight)
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_compiled_is_eager(reduction: str) -> None:
    """On an x that another operation made, with and without gradients."""
    x, weight, targets = inputs(6, 9, 8)

    def head(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy_triton(x * 2, weight, targets, reduction)

    compiled = torch.compile(head, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x, weight), head(x, weight))
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    gradients = [torch.autograd.grad(f(*leaves).sum(), leaves) for f in (compiled, head)]
    for ours, eager in zip(*gradients, strict=True):
        assert torch.equal(ours, eager)


def test_the_model_on_this_loss_is_the_model(small_model: Callable) -> None:
    model = small_model()
    ids, targets = torch.randint(61, (2, 2, 20)).unbind(0)
    targets[0, :5] = IGNORE_INDEX
    kernels_too = Ops.torch().replace(linear_cross_entropy=linear_cross_entropy_triton)
    twin = type(model)(model.config, kernels_too).eval()
    twin.load_state_dict(model.state_dict())
    losses = [m(ids, targets, logits_for="none").loss for m in (model, twin)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for (name, ours), reference in zip(twin.named_parameters(), model.parameters(), strict=True):
        assert error(ours.grad, reference.grad.double()) < 1e-5, name


def accurate(module: ModuleType) -> bool:
    """Small chunks of ordinary logits, over two blocks; and exact ones far from zero."""
    x, weight, seven_targets = inputs(7, 4099, 5)
    weight[4097] = 4 * x[0]  # the maximum of row 0 is in the second block
    logits = 1e4 + torch.randn(6, 300)
    targets = torch.tensor([0, 1, 299, 7, IGNORE_INDEX, 4])
    return not (
        wrong(module, x, weight, seven_targets) or wrong(module, *exact(logits), targets, chunk=6)
    )


def test_these_kernels_are_accurate() -> None:
    assert accurate(kernels)


PLANTED: dict[str, tuple[str, str, Callable[[ModuleType], bool]]] = {
    "the sum not rescaled": ("total * tl.exp(maximum - new_maximum)", "total", accurate),
    "padding counts": ("tl.where(cols < n_cols,", "tl.where(cols < row_stride,", accurate),
    "the last column lost": ("tl.where(cols < n_cols,", "tl.where(cols < n_cols - 1,", accurate),
    "the loss without its maximum": ("+ (maximum - logit)", "- logit", accurate),
    "ignored targets cost": ("tl.where(target == IGNORE, 0.0, loss)", "loss", accurate),
    "ignored targets pull": (
        "tl.where((target == IGNORE) | (cols >= n_cols), 0.0, gradient)",
        "gradient",
        accurate,
    ),
    "the neighbour's column": ("cols == target,", "cols == target + 1,", accurate),
    "no column": ("cols == target,", "cols < 0,", accurate),
    "the factor forgotten": (" * factor\n", "\n", accurate),
    "one block of gradients": ("tl.program_id(1) * BLOCK +", "0 * BLOCK +", accurate),
    "log-sum-exp in one number": (
        "tl.exp(logits - maximum) / total",
        "tl.exp(logits - (maximum + tl.log(total)))",
        accurate,
    ),
    "only the last share kept": ("dweight += _product", "dweight = _product", accurate),
    "the first chunk's factor": ("factor[chunk])", "factor[: chunk.stop - start])", accurate),
    "the first chunk's targets": (
        "launch_gradient(logits, targets[chunk]",
        "launch_gradient(logits, targets[: chunk.stop - start]",
        accurate,
    ),
    "the last chunk unseen": ("range(0, n_rows, step)", "range(0, n_rows - 3, step)", accurate),
    "dweight rounded before it is scaled": (
        "return loss.sum(), dx, dweight\n",
        "return loss.sum(), dx, dweight.to(x.dtype).float()\n",
        summed_beyond_fp16,
    ),
    "gradients without need": ("recorded and x.requires_grad", "True", frugal),
    "zeros for gradients nobody has": ("ctx.set_materialize_grads(False)", "pass", frugal),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_seen(plant: Callable[..., ModuleType], fault: str) -> None:
    right, replacement, check = PLANTED[fault]
    assert not check(plant(kernels, right, replacement))
