"""What is timed is what models call; the least work is counted by hand; and every provider computes
the same: ours in Triton's interpreter, libraries that are not here as fakes of their documented
functions."""

import sys
from collections.abc import Callable
from dataclasses import fields
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gptile.bench.correctness import Check
from gptile.bench.operations import OPERATIONS, least_work
from gptile.bench.problems import DIRECTIONS, Copies, Problem, tiny
from gptile.bench.providers import BASELINE, OURS, PROVIDERS
from gptile.kernels import Ops, catalog, layer_norm
from gptile.kernels.launch import Shape, check_inputs, host_only, launch

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def problem(name: str, shape: Shape, dtype: torch.dtype = torch.float32) -> Problem:
    return Problem(name, "", shape, dtype)


def directions(name: str) -> tuple[str, ...]:
    return DIRECTIONS if OPERATIONS[name].backward else ("forward",)


def wrong(function: Callable, name: str, dtype: torch.dtype = torch.float32) -> list[str]:
    """The passes of a tiny case in which a function is not right."""
    copies = Copies(tiny(name, dtype), CPU)
    check = Check(OPERATIONS[name], copies.first, dtype)
    return [d for d in directions(name) if not check.judge(function, d).ok]


def test_every_kernel_file_and_each_of_its_cases_is_timed() -> None:
    assert {operation.module for operation in OPERATIONS.values()} == {*catalog.OPERATIONS.values()}
    for module in catalog.OPERATIONS.values():
        taken = [o.cases for o in OPERATIONS.values() if o.module is module]
        assert {case for cases in taken for case in cases} == {*module.CASES}


def test_every_operation_of_a_model_is_timed_but_those_made_of_others() -> None:
    timed = {operation.ours for operation in OPERATIONS.values()}
    missing = {f.name for f in fields(Ops) if getattr(Ops.triton(), f.name) not in timed}
    assert missing == {"linear", "layer_norm_linear"}
    assert all(
        operation.reference is not operation.ours and callable(operation.reference)
        for operation in OPERATIONS.values()
    )


@pytest.mark.parametrize("name", OPERATIONS)
def test_ours_in_the_interpreter_is_right_by_the_benchmarks_own_check(name: str) -> None:
    assert wrong(OPERATIONS[name].ours, name) == []


# Bytes of fp32 inputs, outputs and gradients, each moved once, by hand.
LEAST: dict[str, tuple[str, Shape, dict[str, tuple[int, int]]]] = {
    "layer_norm": (
        "layer_norm",
        {"rows": 3, "cols": 5},
        {  # x, weight, bias; y; dy; dx, dweight, dbias
            "forward": (4 * (15 + 10 + 15), 8 * 15),
            "backward": (4 * (15 + 5 + 15 + 15 + 10), 12 * 15),
            "both": (4 * (15 + 10 + 15 + 15 + 15 + 10), 20 * 15),
        },
    ),
    "add_layer_norm": (
        "add_layer_norm",
        {"rows": 3, "cols": 5},
        {"forward": (4 * (2 * 15 + 10 + 2 * 15), 9 * 15)},
    ),
    "linear_activation": (
        "linear_activation",
        {"rows": 4, "in": 3, "out": 2, "activation": "gelu"},
        {
            "forward": (4 * (12 + 6 + 2 + 8), 2 * 24),
            "backward": (4 * (12 + 6 + 8 + 12 + 6 + 2), 2 * 48),
        },
    ),
    "attention": (
        "attention",
        {"rows": 2, "tokens": 3, "heads": 2, "head_dim": 4},
        {  # 6 pairs of a query and a key
            "forward": (4 * 4 * 48, 4 * 2 * 2 * 6 * 4),
            "backward": (4 * 7 * 48, 10 * 2 * 2 * 6 * 4),
        },
    ),
    "head": (
        "linear_cross_entropy",
        {"rows": 4, "vocab": 7, "cols": 3},
        {"forward": (4 * (12 + 21) + 8 * 4 + 4, 2 * 4 * 7 * 3)},
    ),
    "lookups of one row twice": (
        "embedding",
        {"rows": 2, "tokens": 3, "cols": 5, "vocab": 4},
        {  # ids and positions, 4 + 3 rows, out; nothing is read of a table backward
            "forward": (8 * 9 + 4 * (7 * 5 + 30), 30),
            "backward": (8 * 9 + 4 * (30 + 7 * 5), 60),
        },
    ),
    "a cache in use up to 10": (
        "decode_attention",
        {"rows": 2, "tokens": 1, "heads": 3, "head_dim": 4, "length": 10},
        {"forward": (4 * (24 + 24 + 2 * 2 * 10 * 12) + 4 * 6, 4 * 2 * 3 * 10 * 4)},
    ),
    "a second chunk": (
        "cached_attention",
        {"rows": 1, "tokens": 3, "heads": 2, "head_dim": 4},
        {"forward": (4 * (24 + 24 + 2 * 6 * 8) + 4 * 3, 4 * 2 * (9 + 6) * 4)},
    ),
    "two tokens of a longer cache": (
        "kv_append",
        {"rows": 1, "tokens": 2, "heads": 3, "head_dim": 4, "max_len": 99},
        {"forward": (4 * (3 * 24 + 36 + 24 + 2 * 24) + 4 * 3, 3 * 24)},
    ),
    "int8 weights": (
        "small_linear",
        {"few": 2, "in": 8, "out": 4, "int8": True, "residual": True},
        {"forward": (4 * 16 + 32 + 4 * (4 + 4 + 8 + 8), 2 * 64)},
    ),
    "sampling": (
        "sample_filters",
        {"rows": 2, "vocab": 9},
        {"forward": (4 * 18 + 18 + 2 * 44 + 2 * 12, 4 * 18)},
    ),
}


@pytest.mark.parametrize("what", LEAST)
def test_the_least_work_is_counted_by_hand(what: str) -> None:
    name, shape, expected = LEAST[what]
    copies = Copies(problem(name, shape), CPU)
    for direction, work in expected.items():
        found = least_work(OPERATIONS[name], shape, copies.first, copies.outputs, direction)
        assert found == work, direction


# Operations whose kernels' own count has nothing but the algorithm in it.
SAME_FLOPS = {
    "embedding": "forward",
    "layer_norm": "forward",
    "add_layer_norm": "add forward",
    "linear_activation": "forward",
    "linear_residual": "forward",
    "small_linear": "forward",
    "attention": "forward",
    "cached_attention": "cached",
    "kv_append": "forward",
    "sample_greedy": "greedy",
}


@pytest.mark.parametrize("name", SAME_FLOPS)
def test_flops_are_those_the_kernel_file_counts(name: str) -> None:
    operation = OPERATIONS[name]
    count = operation.module.PASSES[SAME_FLOPS[name]].work
    for shape in operation.cases.values():
        assert operation.flops(shape) == count(shape, torch.float32).flops


def test_a_provider_that_cannot_run_here_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (OURS, "liger-kernel", "flash-attn", "xformers", "flag-gems"):
        assert PROVIDERS[name].missing(CPU) == "no GPU here"
    for name in (BASELINE, "batched", "compile"):
        assert PROVIDERS[name].missing(CPU) is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert PROVIDERS["xformers"].missing(GPU) == "xformers is not installed"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert PROVIDERS["xformers"].missing(GPU) is None
    assert "interpreter" in str(PROVIDERS[OURS].missing(GPU))  # the tests run in it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batched_is_right(dtype: torch.dtype) -> None:
    functions = PROVIDERS["batched"].load()
    assert len(functions) == 3
    for name, function in functions.items():
        assert wrong(function, name, dtype) == []
        cases = {c: s for c, s in OPERATIONS[name].cases.items() if not c.startswith("gpt2")}
        for shape in cases.values():
            copies = Copies(problem(name, shape, dtype), CPU)
            assert Check(OPERATIONS[name], copies.first, dtype).judge(function, "forward").ok


def test_compiled_code_is_right_and_can_go_backward_twice() -> None:
    function = PROVIDERS["compile"].load()["layer_norm"]
    assert wrong(function, "layer_norm") == []
    given = Copies(tiny("layer_norm", torch.float32), CPU).first
    out = function(**given)
    first, second = (
        torch.autograd.grad(out, given["x"], torch.ones_like(out), retain_graph=True)
        for _ in range(2)
    )
    assert torch.equal(first[0], second[0])


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    """A module of that name, and the packages it is in."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if path not in sys.modules:
            monkeypatch.setitem(sys.modules, path, ModuleType(path))
    for attribute, function in functions.items():
        monkeypatch.setattr(sys.modules[name], attribute, function, raising=False)


def fake_layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
) -> Any:
    total = x if residual is None else x + residual
    y = F.layer_norm(total, weight.shape, weight, bias, eps)
    return (y, total) if prenorm else y


def fake_flash(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False
) -> Tensor:
    """``[B, T, H, D]``; the mask is aligned to the last query and key."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    mask = mask if causal else torch.ones_like(mask)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale)
    return out.transpose(1, 2)


def fake_flash_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    cache_batch_idx: Tensor,
    softmax_scale: float,
    causal: bool,
) -> Tensor:
    """``[n_slots, max_len, H, D]``, of which each row has so many tokens in use."""
    assert cache_seqlens.dtype == cache_batch_idx.dtype == torch.int32
    assert k_cache.stride(-1) == v_cache.stride(-1) == 1
    rows = zip(q, cache_batch_idx.tolist(), cache_seqlens.tolist(), strict=True)
    outs = [
        fake_flash(
            row[None], k_cache[slot, None, :n], v_cache[slot, None, :n], softmax_scale, causal
        )
        for row, slot, n in rows
    ]
    return torch.cat(outs)


def install_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every library that may be absent."""
    fake(
        monkeypatch,
        "liger_kernel.transformers.functional",
        liger_layer_norm=lambda x, w, b, eps: F.layer_norm(x, w.shape, w, b, eps),
        liger_fused_linear_cross_entropy=lambda x, w, t: F.cross_entropy(F.linear(x, w), t),
    )
    fake(
        monkeypatch,
        "flash_attn",
        flash_attn_func=fake_flash,
        flash_attn_with_kvcache=fake_flash_cache,
    )
    fake(monkeypatch, "flash_attn.ops.triton.layer_norm", layer_norm_fn=fake_layer_norm_fn)

    class Triangle:
        pass

    def attend(q: Tensor, k: Tensor, v: Tensor, attn_bias: Any, scale: float) -> Tensor:
        return fake_flash(q, k, v, scale, isinstance(attn_bias, Triangle))

    fake(
        monkeypatch,
        "xformers.ops",
        memory_efficient_attention=attend,
        LowerTriangularMask=Triangle,
    )

    def norm(x: Tensor, shape: torch.Size, w: Tensor, b: Tensor, eps: float) -> tuple:
        return F.layer_norm(x, shape, w, b, eps), None, None

    fake(
        monkeypatch,
        "flag_gems",
        layer_norm=norm,
        scaled_dot_product_attention=F.scaled_dot_product_attention,
    )


HAS = {
    "liger-kernel": {"layer_norm", "linear_cross_entropy"},
    "flash-attn": {
        *("attention", "cached_attention", "decode_attention"),
        *("layer_norm", "add_layer_norm"),
    },
    "xformers": {"attention"},
    "flag-gems": {"attention", "layer_norm"},
}


@pytest.mark.parametrize("provider", HAS)
def test_a_librarys_functions_are_called_as_documented(
    monkeypatch: pytest.MonkeyPatch, provider: str
) -> None:
    install_fakes(monkeypatch)
    functions = PROVIDERS[provider].load()
    assert functions.keys() == HAS[provider]
    for name, function in functions.items():
        assert wrong(function, name) == []


def test_a_library_that_forgets_the_mask_or_the_scale_is_red(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_fakes(monkeypatch)
    for fault in ({"causal": False}, {"softmax_scale": 0.2}):

        def faulty(*args: Any, fault: dict = fault, **keywords: Any) -> Tensor:
            return fake_flash(*args, **{**keywords, **fault})

        fake(monkeypatch, "flash_attn", flash_attn_func=faulty)
        function = PROVIDERS["flash-attn"].load()["attention"]
        assert wrong(function, "attention") == ["forward", "backward", "both"]


def test_the_host_alone_launches_nothing_and_takes_tensors_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def explode(*args: Any) -> None:
        raise AssertionError("launched")

    class Kernel:
        def __getitem__(self, grid: tuple) -> Callable:
            return explode

    monkeypatch.setattr("gptile.kernels.launch.interpreting", lambda: False)
    x = torch.ones(2, 3)
    with host_only():
        check_inputs(x)
        launch(Kernel(), (1,), x)
        assert layer_norm.layer_norm_triton(x, x[0], x[0], 1e-5).shape == (2, 3)
    with pytest.raises(TypeError, match="CPU tensors"):
        check_inputs(x)
    with pytest.raises(AssertionError, match="launched"):
        launch(Kernel(), (1,), x)


def test_a_tiny_case_is_small_but_has_the_kernels_for_many_rows() -> None:
    assert tiny("linear_residual", torch.float32).shape == {"rows": 17, "in": 17, "out": 17}
    for name, operation in OPERATIONS.items():
        problem = tiny(name, torch.float32)
        copies = Copies(problem, CPU)
        work = least_work(operation, problem.shape, copies.first, copies.outputs, "forward")
        assert max(work) < 400_000
