"""The products with an epilogue in Triton's interpreter against fp64: values, gradients, layouts,
which kernel is chosen when, and proof that wrong kernels are seen."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from gptile.kernels import activations, linear
from gptile.kernels.activations import ACTIVATIONS, REFERENCES
from gptile.kernels.linear import CASES
from gptile.kernels.tiles import product_options

Results = dict[str, Tensor]


def inputs(rows: int, n_in: int, n_out: int, dtype: torch.dtype) -> list[Tensor]:
    """x, weight, bias, residual, dout: arguments of the activation on both sides of 0."""
    tensors = [
        torch.randn(rows, n_in) * 1.5 + 0.5,
        torch.randn(n_out, n_in) / n_in**0.5 + 0.05,
        torch.randn(n_out),
        torch.randn(rows, n_out),
        torch.randn(rows, n_out) + 0.2,
    ]
    return [t.to(dtype) for t in tensors]


def exact_activation(y: Tensor, name: str) -> Tensor:
    function = ACTIVATIONS[name]
    if function == "erf":
        return y * 0.5 * (1 + torch.erf(y / 2**0.5))
    if function == "tanh":
        return 0.5 * y * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3)))
    return y.clamp(min=0) if function == "relu" else y / (1 + torch.exp(-y))


def truth(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, name: str | None) -> Tensor:
    """By the formula, in the precision of the arguments."""
    y = x @ weight.T + bias
    return residual + y if name is None else exact_activation(y, name)


def pytorch(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, name: str | None) -> Tensor:
    if name is None:
        return linear.linear_residual_reference(x, weight, bias, residual)
    return linear.linear_activation_reference(x, weight, bias, name)


def through(module: ModuleType) -> Callable[..., Tensor]:
    def run(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, name: str | None) -> Tensor:
        if name is None:
            return module.linear_residual_triton(x, weight, bias, residual)
        return module.linear_activation_triton(x, weight, bias, name)

    return run


def results(
    function: Callable, tensors: list[Tensor], name: str | None, dtype: torch.dtype
) -> Results:
    """Output and gradients."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors[:4]]
    out = function(*leaves, name)
    out.backward(tensors[4].to(dtype))
    names = ("dx", "dweight", "dbias", "dresidual")
    gradients = {n: t.grad for n, t in zip(names, leaves, strict=True) if t.grad is not None}
    return {"out": out.detach(), **gradients}


def wrong(module: ModuleType, tensors: list[Tensor], name: str | None) -> list[str]:
    """What is further from fp64 than twice (forward) or three times (backward) PyTorch's error."""
    dtype = tensors[0].dtype
    exact = results(truth, tensors, name, torch.float64)
    reference = results(pytorch, tensors, name, dtype)
    ours = results(through(module), tensors, name, dtype)
    assert ours.keys() == exact.keys()

    def error(got: Tensor, expected: Tensor) -> float:
        return ((got.double() - expected).norm() / expected.norm()).item()

    floor = torch.finfo(dtype).eps
    return [
        key
        for key, expected in exact.items()
        if not error(ours[key], expected)
        <= (2 if key == "out" else 3) * error(reference[key], expected) + floor
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_every_case_against_fp64(case: str, dtype: torch.dtype) -> None:
    shape = CASES[case]
    rows, n_out = min(shape["rows"], 20), min(shape["out"], 200)
    assert wrong(linear, inputs(rows, shape["in"], n_out, dtype), shape.get("activation")) == []


@pytest.mark.parametrize("name", [None, *ACTIVATIONS])
def test_every_activation(name: str | None) -> None:
    assert wrong(linear, inputs(30, 20, 70, torch.float32), name) == []


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "relu", "silu"])
def test_activations_far_from_zero(name: str) -> None:
    """Where exponentials over- or underflow, through a product with 1."""
    values = torch.tensor(
        [-1e4, -88.0, -20.0, -5.0, -2.699, -1e-6, 0.0, 1e-6, 3.0, 20.0, 88.0, 1e4]
    )
    x = values.unsqueeze(1).repeat(2, 1).requires_grad_()  # 24 rows: more than the small kernels'
    y = linear.linear_activation_triton(x, torch.ones(1, 1), torch.zeros(1), name)
    y.sum().backward()
    exact = x.detach().double().requires_grad_()
    expected = REFERENCES[ACTIVATIONS[name]](exact)
    expected.sum().backward()
    torch.testing.assert_close(y.detach().double(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [17, 63, 64, 65, 129, 200])
@pytest.mark.parametrize("n_out", [40, 64, 65])
@pytest.mark.parametrize("n_in", [2, 16, 17])
def test_sizes_around_every_block_edge(rows: int, n_in: int, n_out: int) -> None:
    for name in (None, "gelu_new"):
        assert wrong(linear, inputs(rows, n_in, n_out, torch.float32), name) == []


def test_tiles_run_in_groups() -> None:
    """More rows of tiles than a group holds, the last group cut short."""
    tensors = inputs(64 * 10 + 1, 3, 70, torch.float32)
    assert wrong(linear, tensors, None) == []


def test_large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_ENOUGH_TILES", 1)
    assert linear._tiles(130, 140, torch.float16)["BLOCK_M"] == 128
    for name in (None, "gelu_new"):
        assert wrong(linear, inputs(130, 40, 140, torch.float16), name) == []


def poisoned(t: Tensor) -> Tensor:
    """The same values amid NaN, with rows apart."""
    around = t.new_full((t.shape[0] + 2, t.shape[1] + 5), torch.nan)
    around[1:-1, 2 : 2 + t.shape[1]] = t
    return around[1:-1, 2 : 2 + t.shape[1]]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "amid NaN": poisoned,
    "column-strided": lambda t: torch.stack([t, t.new_full(t.shape, torch.nan)], -1)[..., 0],
    "transposed": lambda t: t.T.contiguous().T,
    "expanded": lambda t: t[:1].expand_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", [0, 1, 3, 4])
@pytest.mark.parametrize("name", [None, "gelu_new"])
def test_layouts(which: int, layout: str, name: str | None) -> None:
    tensors = inputs(20, 24, 30, torch.float32)
    tensors[which] = LAYOUTS[layout](tensors[which])

    def run(function: Callable) -> Results:
        leaves = [t.requires_grad_() if t is not tensors[4] else t for t in tensors]
        out = function(*leaves[:4], name)
        wanted = leaves[:4] if name is None else leaves[:3]
        return dict(enumerate([out, *torch.autograd.grad(out, wanted, tensors[4])]))

    ours, reference = run(through(linear)), run(pytorch)
    for key, expected in reference.items():
        torch.testing.assert_close(ours[key], expected, rtol=1e-4, atol=1e-5)


def test_three_dimensions_and_a_summed_gradient() -> None:
    x = torch.randn(3, 9, 24, requires_grad=True)
    _, weight, bias, *_ = inputs(1, 24, 10, torch.float32)
    for name in ("gelu", None):
        residual = torch.randn(3, 9, 10)
        gradients = []
        for function in (through(linear), pytorch):
            (gradient,) = torch.autograd.grad(function(x, weight, bias, residual, name).sum(), x)
            gradients.append(gradient)
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("activation", [None, "gelu_new"])
def test_layer_norm_linear(rows: int, activation: str | None) -> None:
    x, weight, bias, *_ = inputs(rows, 24, 30, torch.float32)
    norm = (torch.randn(24), torch.randn(24), 1e-5)
    arguments = (x, *norm, weight, bias, activation)
    expected = linear.layer_norm_linear_reference(
        *(t.double() if isinstance(t, Tensor) else t for t in arguments)
    )
    got = linear.layer_norm_linear_triton(*arguments)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    leaves = [t.requires_grad_() if isinstance(t, Tensor) else t for t in arguments]
    wanted = [t for t in leaves if isinstance(t, Tensor)]
    gradients = [
        torch.autograd.grad(function(*leaves).square().sum(), wanted)
        for function in (linear.layer_norm_linear_triton, linear.layer_norm_linear_reference)
    ]
    for ours, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-3, atol=1e-4)


def launched(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> list[str]:
    """Names of the kernels that run."""
    names: list[str] = []
    for module in ("linear", "small_linear", "layer_norm"):
        path = f"gptile.kernels.{module}.launch"
        monkeypatch.setattr(path, lambda kernel, *_, **__: names.append(kernel.__name__))
    run()
    return names


def test_few_rows_stream_the_weights_unless_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias, residual, _ = inputs(17, 24, 30, torch.float32)
    norm = (torch.randn(24), torch.randn(24), 1e-5)

    def all_four(n: int) -> None:
        linear.linear_triton(x[:n], weight, bias)
        linear.linear_activation_triton(x[:n], weight, bias, "gelu")
        linear.linear_residual_triton(x[:n], weight, bias, residual[:n])
        linear.layer_norm_linear_triton(x[:n], *norm, weight, bias, "gelu")

    many = ["_product_kernel", "_product_kernel", "_forward_kernel", "_product_kernel"]
    assert launched(monkeypatch, lambda: all_four(1)) == ["_row_kernel"] * 4
    assert launched(monkeypatch, lambda: all_four(16)) == ["_rows_kernel"] * 4
    assert launched(monkeypatch, lambda: all_four(17)) == many
    weight.requires_grad_()
    assert launched(monkeypatch, lambda: all_four(1)) == many
    with torch.no_grad():
        assert launched(monkeypatch, lambda: all_four(1)) == ["_row_kernel"] * 4


def test_the_argument_is_kept_only_to_differentiate() -> None:
    x, weight, bias, *_ = inputs(20, 8, 10, torch.float32)
    for keep in (False, True):
        _, argument = linear.launch_forward(x, weight, bias, "gelu", None, keep)
        assert argument.numel() == (200 if keep else 0)


def test_gradients_are_the_same_bits_every_time() -> None:
    tensors = inputs(300, 16, 40, torch.float32)
    first, second = (results(through(linear), tensors, "gelu_new", torch.float32) for _ in range(2))
    for key, tensor in first.items():
        assert torch.equal(tensor, second[key]), key


def test_no_rows_and_twice_differentiated() -> None:
    x, weight, bias, residual, _ = (t.requires_grad_() for t in inputs(20, 8, 10, torch.float32))
    out = linear.linear_activation_triton(x[:0], weight, bias, "gelu")
    assert out.shape == (0, 10)
    assert not torch.autograd.grad(out.sum(), weight)[0].any()
    y = linear.linear_activation_triton(x, weight, bias, "gelu")
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        gradient.sum().backward()
    # The other is linear: its gradient is made of PyTorch's products, which differentiate again.
    seconds = []
    for function in (linear.linear_residual_triton, linear.linear_residual_reference):
        loss = function(x, weight, bias, residual).square().sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        seconds.append(torch.autograd.grad(gradient.square().sum(), weight)[0])
    torch.testing.assert_close(*seconds, rtol=1e-3, atol=1e-2)


def test_operands_that_do_not_fit_are_refused() -> None:
    x, weight, bias, residual, _ = inputs(20, 8, 10, torch.float32)
    with pytest.raises(ValueError, match="weight must be"):
        linear.linear_activation_triton(x[:, :5], weight, bias, "gelu")
    with pytest.raises(ValueError, match="bias must be"):
        linear.linear_activation_triton(x, weight, bias[:3], "gelu")
    with pytest.raises(ValueError, match="residual must be"):
        linear.linear_residual_triton(x, weight, bias, residual[:1])
    with pytest.raises(TypeError, match="weight is torch"):
        linear.linear_residual_triton(x.half(), weight, bias.half(), residual.half())
    with pytest.raises(ValueError, match="comes with a bias"):
        linear.layer_norm_linear_triton(x, x[0], x[0], 1e-5, weight, None, "gelu")


def test_a_vector_and_a_frozen_bias() -> None:
    x, weight, bias, residual, _ = inputs(1, 8, 10, torch.float32)
    for name in (None, "gelu"):
        gradients = []
        for function in (through(linear), pytorch):
            vector = x[0].clone().requires_grad_()
            out = function(vector, weight, bias, residual[0], name)
            gradients.append(torch.autograd.grad(out.square().sum(), vector)[0])
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("restore", [torch.backends.cuda.matmul.fp32_precision])
def test_tf32_only_where_pytorch_is_set_to_it(restore: str) -> None:
    assert product_options(torch.float32)["PRECISION"] == "ieee"
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert product_options(torch.float32)["PRECISION"] == "tf32"
        assert product_options(torch.float16)["PRECISION"] == "ieee"
    finally:
        torch.backends.cuda.matmul.fp32_precision = restore


def test_opcheck_and_compile() -> None:
    x, weight, bias, residual, _ = (t.requires_grad_() for t in inputs(20, 8, 10, torch.float32))
    ops = torch.ops.gptile
    torch.library.opcheck(ops.linear_activation.default, (x, weight, bias, "gelu", True))
    torch.library.opcheck(ops.linear_residual.default, (x, weight, bias, residual))
    run = through(linear)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for name in ("gelu_new", None):
        args = (x, weight, bias, residual, name)
        assert torch.equal(compiled(*args), run(*args))
        with torch.no_grad():
            assert torch.equal(compiled(*args), run(*args))


PLANTED = {
    "the last inputs lost": ("range(0, n_in, BLOCK_K)", "range(0, n_in - BLOCK_K, BLOCK_K)"),
    "rows of the first tile": ("x_ptr += first_row * x_row_stride", "x_ptr += 0"),
    "channels of the first tile": ("weight_ptr += first_out", "weight_ptr += 0 * first_out"),
    "bias of the first tile": ("tl.load(bias_ptr + first_out + outs", "tl.load(bias_ptr + outs"),
    "a group too high": (
        "height = tl.minimum(n_tile_rows - group * GROUP, GROUP)",
        "height = GROUP",
    ),
    "the residual's rows of the first tile": (
        "residual_ptr += first_row * residual_row_stride + first_out",
        "residual_ptr += first_out",
    ),
    "the argument kept after the activation": (
        "y.to(argument_ptr.dtype.element_ty)",
        "activate(y, FUNCTION).to(argument_ptr.dtype.element_ty)",
    ),
    "no slope": ("* slope(argument.to(tl.float32), FUNCTION)", "* 1.0"),
    "the bias's gradient before the slope": ("dbias += gradient", "dbias += dout.to(tl.float32)"),
    "shares overwrite each other": ("dbias_ptr + program * n_cols", "dbias_ptr + 0 * n_cols"),
    "the last row of a run lost": ("tl.minimum(first + run, n", "tl.minimum(first + run - 1, n"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_seen(plant: Callable[..., ModuleType], fault: str) -> None:
    module = plant(linear, *PLANTED[fault])
    tensors = inputs(150, 33, 70, torch.float32)
    assert wrong(module, tensors, None) or wrong(module, tensors, "gelu_new")


@pytest.mark.parametrize(
    ("right", "wrong_text"),
    [
        ("0.134145", "0.044715"),
        ("0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x", "0.5 * (1.0 + tl.erf(x)) + x"),
        ("tl.where(x > 0.0, 1.0, 0.0)", "tl.where(x > 0.5, 1.0, 0.0)"),
        ("s * (1.0 + x * (1.0 - s))", "s * (1.0 - s)"),
        ("1.5957691216057308 * (x + 0.044715 * x * x * x))\n    if", "1.702 * x)\n    if"),
    ],
)
def test_a_fault_planted_in_an_activation_is_seen(
    plant: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch, right: str, wrong_text: str
) -> None:
    planted = plant(activations, right, wrong_text)
    monkeypatch.setattr(linear, "activate", planted.activate)
    monkeypatch.setattr(linear, "slope", planted.slope)
    tensors = inputs(30, 20, 70, torch.float32)
    assert any(wrong(linear, tensors, name) for name in ("gelu", "gelu_new", "relu", "silu"))
