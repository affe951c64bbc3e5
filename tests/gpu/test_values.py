"""Every operation at the sizes of GPT-2: its values beside fp64, the same bits every time, stores
that round, and nothing that waits for the GPU.

The truth is the PyTorch reference in fp64. The sizes need 12 GB of free memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from gptile.kernels import IGNORE_INDEX, Ops, linear, sampling, small_linear
from gptile.kernels.catalog import OPERATIONS
from gptile.kernels.launch import Shape

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5
GIGABYTES = 12

OURS = {**vars(Ops.triton()), "small_linear": small_linear.small_linear_triton}
REFERENCES = {**vars(Ops.torch()), "small_linear": small_linear.small_linear_reference}
for ops in (OURS, REFERENCES):  # a chunk of a prompt, and losses one by one: other kernels
    ops |= {"prefill": ops["decode_attention"], "losses": ops["linear_cross_entropy"]}
NAMES = [*OURS]
NOT_DIFFERENTIABLE = ("small_linear", "kv_append", "decode_attention", "prefill", "sample")

FILES = {name: OPERATIONS.get(name, linear) for name in NAMES}
FILES |= {
    name: OPERATIONS[file]
    for name, file in (
        ("add_layer_norm", "layer_norm"),
        ("prefill", "attention"),
        ("sample", "sampling"),
        ("losses", "linear_cross_entropy"),
    )
}


class Example(NamedTuple):
    """Arguments of an operation.

    Attributes:
        tensors: fp64, holding values of the dtype under test.
        call: calls an implementation on the tensors, converted.
        terms: how many products an fp32 sum adds, at most.
    """

    tensors: tuple[Tensor, ...]
    call: Callable
    terms: int = 0


def example(name: str, shape: Shape, dtype: torch.dtype, device: str) -> Example:
    """Arguments of an operation: means that are not 0, and NaN in what must not be read."""

    def make(*size: int, mean: float = 0.3, spread: float = 1.0) -> Tensor:
        values = torch.randn(size, dtype=torch.float64, device=device) * spread + mean
        return values.to(dtype).double()

    def affine(n_in: int, n_out: int) -> tuple[Tensor, Tensor]:
        return make(n_out, n_in, mean=0.3 * n_in**-0.5, spread=n_in**-0.5), make(n_out)

    def integers(end: int, *size: int) -> Tensor:
        return torch.randint(end, size, device=device)

    activation = shape.get("activation")
    if name == "embedding":
        rows, tokens, cols, vocab = shape.values()
        ids, positions = integers(vocab, rows, tokens), torch.arange(tokens, device=device)
        tables = make(vocab, cols), make(tokens, cols)
        return Example(tables, lambda op, *tables: op(ids, positions, *tables))
    if name in ("layer_norm", "add_layer_norm"):
        rows, cols = shape.values()
        xs = [make(rows, cols) for _ in ("x", "delta")[: 1 + (name == "add_layer_norm")]]
        return Example((*xs, make(cols), make(cols)), lambda op, *tensors: op(*tensors, EPS))
    if FILES[name] is linear:
        rows, n_in, n_out = shape["rows"], shape["in"], shape["out"]
        x, weights = make(rows, n_in), affine(n_in, n_out)
        if name == "layer_norm_linear":
            return Example(
                (x, make(n_in), make(n_in), *weights),
                lambda op, x, w, b, *weights: op(x, w, b, EPS, *weights, activation),
                n_in,
            )
        added = (make(rows, n_out),) if name == "linear_residual" else ()
        last = (activation or "gelu_new",) if name == "linear_activation" else ()
        return Example((x, *weights, *added), lambda op, *tensors: op(*tensors, *last), n_in)
    if name == "small_linear":
        (weight, bias), scales = affine(shape["in"], shape["out"]), None
        if shape.get("int8"):
            weight, scales = small_linear.quantize_weight(weight)

        def call(op: Callable, x: Tensor, w: Tensor, b: Tensor, added: Tensor, n: Tensor) -> Tensor:
            options = {"norm": (n[0], n[1], EPS)} if shape.get("norm") else {}
            options |= {"residual": added} if shape.get("residual") else {}
            w = w if scales is None else weight
            return op(x, w, b, scales=scales, activation=activation, **options)

        x, added = make(shape["few"], shape["in"]), make(shape["few"], shape["out"])
        tensors = (x, weight.double(), bias, added, make(2, shape["in"]))
        return Example(tensors, call, shape["in"])
    if name == "attention":
        rows, tokens, heads, head_dim = shape.values()

        def call(op: Callable, qkv: Tensor) -> Tensor:
            return op(*qkv.unflatten(2, (3, heads, head_dim)).unbind(2), head_dim**-0.5)

        qkv = make(rows, tokens, 3 * heads * head_dim, spread=1.5)
        return Example((qkv,), call, max(tokens, head_dim))
    if name in ("kv_append", "decode_attention", "prefill"):
        rows, tokens, heads, head_dim = (shape[n] for n in ("rows", "tokens", "heads", "head_dim"))
        length = shape.get("length", shape.get("max_len", 2 * tokens))
        slots = torch.arange(rows, device=device).flip(0) + 1
        counts = torch.full_like(slots, tokens)
        starts = (length - tokens - (slots == 1).int()).clamp(min=0)  # rows that differ
        cache = (rows + 1, heads, length + 3, head_dim)
        if name == "kv_append":

            def call(op: Callable, qkv: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
                k, v = qkv.new_zeros(2, *cache)
                return op(qkv, bias, k, v, slots, starts, counts), k, v

            width = 3 * heads * head_dim
            return Example((make(rows, tokens, width), make(width)), call)

        def call(op: Callable, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return op(q, k, v, slots, starts, counts, head_dim**-0.5)

        k, v = make(*cache), make(*cache)
        for slot, end in zip(slots.tolist(), (starts + counts).tolist(), strict=True):
            k[slot, :, end:], v[slot, :, end:] = torch.nan, torch.nan
        return Example((make(rows, tokens, heads, head_dim, spread=1.5), k, v), call, length)
    if name in ("linear_cross_entropy", "losses"):
        rows, vocab, cols = shape.values()
        targets = integers(vocab, rows)
        targets[1::3] = IGNORE_INDEX
        tensors = make(rows, cols), make(vocab, cols, mean=0.1, spread=2 * cols**-0.5)
        reduction = "none" if name == "losses" else "mean"
        return Example(tensors, lambda op, x, w: op(x, w, targets, reduction), cols)
    assert name == "sample"
    rows, vocab = shape.values()

    def column(*values: float) -> Tensor:
        return torch.tensor(values, device=device).repeat(rows)[:rows]

    seen = integers(2, rows, vocab).bool()
    columns = {
        "temperature": column(0.8, 0.0, 1.3, 0.6),
        "top_k": column(50, 0, 0),
        "top_p": column(0.9, 1.0, 0.5, 1.0, 0.7).double(),
        "min_p": column(0.0, 0.05),
        "repetition_penalty": column(1.2, 1.0, 0.8),
        "seeds": torch.arange(rows, device=device) + 2**40,
        "positions": torch.arange(rows, device=device) * 3,
    }
    return Example((make(rows, vocab, spread=2.0),), lambda op, x: op(x, seen, **columns))


def run(name: str, op: Callable, given: Example, dtype: torch.dtype, exact: bool = False) -> dict:
    """Outputs and, where there are any, gradients; ``exact``: in fp64."""
    leaves = [t.to(torch.float64 if exact else dtype) for t in given.tensors]

    def call() -> tuple[Tensor, ...]:
        outs = given.call(op, *leaves)
        return outs if isinstance(outs, tuple) else (outs,)

    with torch.no_grad():
        named = {f"out {i}": out for i, out in enumerate(call())}
    if name in NOT_DIFFERENTIABLE:
        return named
    leaves = [leaf.requires_grad_() for leaf in leaves]
    outs = call()
    waves = [torch.arange(out.numel(), device=out.device).double().sin() + 0.2 for out in outs]
    douts = [wave.view(out.shape).to(dtype).to(out) for wave, out in zip(waves, outs, strict=True)]
    gradients = torch.autograd.grad(outs, leaves, douts)
    named |= {f"recorded out {i}": out.detach() for i, out in enumerate(outs)}
    return named | {f"gradient {i}": gradient for i, gradient in enumerate(gradients)}


def wrong(name: str, op: Callable, shape: Shape, dtype: torch.dtype, device: str) -> Iterator[str]:
    """What is further from fp64 than twice (forward) or three times (backward) PyTorch's error."""
    given = example(name, shape, dtype, device)
    ours = run(name, op, given, dtype)
    reference = run(name, REFERENCES[name], given, dtype)
    # A sum of products walks at random, a step of fp32 each; a library may add in a better order.
    floor = torch.finfo(dtype).eps + given.terms**0.5 * torch.finfo(torch.float32).eps
    for key, truth in run(name, REFERENCES[name], given, dtype, exact=True).items():
        scale = truth.norm()
        scale = torch.where(scale > 1e-9, scale, 1.0)  # what is 0 is measured by 1
        error, allowed = (
            ((got[key].double() - truth).norm() / scale).item() for got in (ours, reference)
        )
        if not error <= (3 if "gradient" in key else 2) * allowed + floor:
            yield f"{name} {dict(shape)} {key}: {error:.2e}, and PyTorch's is {allowed:.2e}"


def changing(name: str, op: Callable, given: Example, dtype: torch.dtype, runs: int) -> set[str]:
    """What does not have the same bits in every run."""
    first, changed = run(name, op, given, dtype), set()
    for _ in range(runs - 1):
        again = run(name, op, given, dtype)
        changed |= {key for key, tensor in first.items() if not torch.equal(tensor, again[key])}
    return changed


def inexact(name: str, given: Example, dtype: torch.dtype) -> float:
    """The share of the output that is further from fp64 than half a unit in the last place, and
    what fp32 has rounded before."""
    got = run(name, OURS[name], given, dtype)["out 0"].double()
    truth = run(name, REFERENCES[name], given, dtype, exact=True)["out 0"]
    unit = torch.exp2(truth.abs().clamp(min=1e-4).log2().floor()) * torch.finfo(dtype).eps
    return ((got - truth).abs() > unit / 2 + 2e-5).double().mean().item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "sample"])
def test_values_against_fp64(
    device: str, cases: Callable, room: Callable, name: str, dtype: torch.dtype
) -> None:
    room(GIGABYTES)
    shapes = [*cases(FILES[name]).values()]
    if FILES[name] is linear:  # few rows go to other kernels
        shapes += [{**shapes[0], "rows": rows} for rows in (1, 16, 17)]
    seen = [fault for shape in shapes for fault in wrong(name, OURS[name], shape, dtype, device)]
    assert seen == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_samples_are_those_of_the_reference(
    device: str, cases: Callable, dtype: torch.dtype
) -> None:
    for shape in cases(sampling).values():
        given = example("sample", {**shape, "rows": 12}, dtype, device)
        ids, logprobs = run("sample", OURS["sample"], given, dtype).values()
        assert torch.equal(ids, run("sample", REFERENCES["sample"], given, dtype)["out 0"])
        truth = given.tensors[0].log_softmax(-1).gather(1, ids.unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(logprobs.double(), truth, rtol=1e-6, atol=5e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_ten_runs_give_the_same_bits(
    device: str, cases: Callable, room: Callable, name: str, dtype: torch.dtype
) -> None:
    room(GIGABYTES)
    if device == "cpu" and dtype != torch.float16:
        pytest.skip("in the interpreter one dtype is enough")
    for shape in cases(FILES[name]).values():
        given = example(name, shape, dtype, device)
        assert not changing(name, OURS[name], given, dtype, 10 if device == "cuda" else 2), shape


def test_wrong_values_and_changing_bits_are_seen(device: str) -> None:
    name, shape, dtype = "layer_norm", {"rows": 4, "cols": 40}, torch.float32
    faults: dict[str, Callable] = {
        "epsilon": lambda op, x, w, b, eps: op(x, w, b, 1e-3),
        "no bias": lambda op, x, w, b, eps: op(x, w, b * 0, eps),
        "half of dx": lambda op, x, w, b, eps: op((x + x.detach()) / 2, w, b, eps),
        "half of dbias": lambda op, x, w, b, eps: op(x, w, (b + b.detach()) / 2, eps),
        "16 bits": lambda op, x, w, b, eps: op(x.half().float(), w, b, eps),
        "NaN": lambda op, x, w, b, eps: op(x, w, b * torch.nan, eps),
        "none": lambda op, *arguments: op(*arguments),
    }
    seen = {
        fault: any(wrong(name, lambda *a, f=call: f(OURS[name], *a), shape, dtype, device))
        for fault, call in faults.items()
    }
    assert seen == {fault: fault != "none" for fault in faults}

    def noisy(x: Tensor, *rest: object) -> Tensor:
        return OURS[name](x, *rest) + torch.rand((), device=x.device) * 1e-3

    given = example(name, shape, dtype, device)
    assert changing(name, noisy, given, dtype, 3) == {"out 0", "recorded out 0"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stores_round_to_the_nearest(device: str, dtype: torch.dtype) -> None:
    """The interpreter does not: it truncates to bf16, which shows that the check would see it."""
    for name, shape in (
        ("layer_norm", {"rows": 50, "cols": 768}),
        ("linear_residual", {"rows": 64, "in": 96, "out": 130}),
        ("small_linear", {"few": 1, "in": 96, "out": 130, "residual": True}),
    ):
        share = inexact(name, example(name, shape, dtype, device), dtype)
        truncates = device == "cpu" and dtype == torch.bfloat16
        assert share > 0.3 if truncates else share == 0, name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ties_round_to_even(device: str, dtype: torch.dtype) -> None:
    """Case: 1 and half a unit in the last place more, and so on, appended to a cache."""
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter truncates to bf16")
    shape = {"rows": 2, "tokens": 40, "heads": 4, "head_dim": 64, "max_len": 40}
    given = example("kv_append", shape, dtype, device)
    qkv, bias = given.tensors
    qkv[:, 0] = 1.0
    bias.view(3, -1)[:, :64] = torch.arange(64, device=device) * torch.finfo(dtype).eps / 2
    rounded = (qkv.float() + bias.float()).to(dtype).unflatten(2, (3, 4, 64)).unbind(2)
    q, k, v = run("kv_append", OURS["kv_append"], given, dtype).values()
    assert torch.equal(q, rounded[0])
    for cache, expected in ((k, rounded[1]), (v, rounded[2])):
        # Slots are in reverse, and slot 0 is nobody's.
        assert torch.equal(cache[1:, :, :40].flip(0).transpose(1, 2), expected)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_on_a_device_that_is_not_current(gpu: str, name: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert torch.cuda.current_device() == 0
    shape, dtype, device = [*FILES[name].CASES.values()][-1], torch.float16, "cuda:1"
    if name == "sample":
        given = example(name, shape, dtype, device)
        ids, expected = (run(name, ops[name], given, dtype)["out 0"] for ops in (OURS, REFERENCES))
        assert torch.equal(ids, expected)
    else:
        assert [*wrong(name, OURS[name], shape, dtype, device)] == []


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", NAMES)
def test_nothing_waits_for_the_gpu(gpu: str, name: str) -> None:
    for shape in FILES[name].CASES.values():
        given = example(name, shape, torch.bfloat16, gpu)
        run(name, OURS[name], given, torch.bfloat16)  # compiled, and its libraries loaded
        with waiting_is_an_error():
            run(name, OURS[name], given, torch.bfloat16)


def test_waiting_is_seen(gpu: str) -> None:
    """Case: the reference, which reads the lengths of the rows on the host."""
    shape = {"rows": 1, "tokens": 1, "heads": 2, "head_dim": 8, "max_len": 9}
    given = example("kv_append", shape, torch.bfloat16, gpu)
    with waiting_is_an_error(), pytest.raises(RuntimeError, match="synchroniz"):
        run("kv_append", REFERENCES["kv_append"], given, torch.bfloat16)
