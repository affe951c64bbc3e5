"""Every kernel at full size on a GPU: that it launches, that Triton compiles one variant of it and
no more, and that it finds rows beyond 2^31 elements."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gptile.kernels import (
    attention,
    decode_attention,
    embedding,
    kv_append,
    layer_norm,
    linear,
    linear_cross_entropy,
    philox,
    sampling,
)
from gptile.kernels.catalog import OPERATIONS
from gptile.kernels.jit import triton

EVERY_PASS = [(name, direction) for name, file in OPERATIONS.items() for direction in file.PASSES]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("operation", "direction"), EVERY_PASS)
def test_every_case_launches(
    device: str, cases: Callable, operation: str, direction: str, dtype: torch.dtype
) -> None:
    file = OPERATIONS[operation]
    for shape in cases(file).values():
        file.PASSES[direction].launch(shape, dtype, device)
        if device == "cuda":
            torch.cuda.synchronize()


def test_the_dropout_mask_is_philox(device: str) -> None:
    tokens, cols, p = 50, 257, 0.3
    ones, seed = torch.ones(tokens, cols, device=device), torch.tensor([2**40 + 9], device=device)
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    kept = embedding.launch_forward(ids, ids[0], ones, ones, p, seed)[0] != 0
    counters = torch.arange(tokens * triton.cdiv(cols, 4), device=device)
    zero = torch.zeros_like(counters)
    key = (zero + (seed & 0xFFFFFFFF), zero + (seed >> 32))
    words = torch.stack(philox.philox4x32((counters, zero, zero, zero), key), -1)
    words = words.view(tokens, -1)[:, :cols]
    assert torch.equal(kept, (words & 0x7FFFFFFF) >= round(p * 2**31))


def compilations(launch: Callable[[], Any]) -> tuple[list[str], list[str]]:
    """The kernels that Triton compiles, or takes from disk, in a first call and in a second."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("gptile.kernels"):
            for kernel in vars(module).values():
                if isinstance(kernel, triton.JITFunction):
                    kernel.device_caches.clear()
    first: list[str] = []
    second: list[str] = []
    before = triton.knobs.runtime.jit_cache_hook
    try:
        for names in (first, second):

            def hook(*, fn: Any, names: list[str] = names, **_: Any) -> None:
                names.append(fn.name)  # what it returns must be false: true would forbid compiling

            triton.knobs.runtime.jit_cache_hook = hook
            launch()
    finally:
        triton.knobs.runtime.jit_cache_hook = before
    return first, second


def compiled_once(first: list[str], second: list[str]) -> bool:
    return 0 < len(first) == len({*first}) and not second


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("operation", "direction"), EVERY_PASS)
def test_one_variant_is_compiled_and_only_once(
    gpu: str,
    operation: str,
    direction: str,
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """With an empty cache on disk; how long the first call takes goes into the report."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    file = OPERATIONS[operation]
    shape = next(iter(file.CASES.values()))
    seconds = []

    def launch() -> None:
        start = time.perf_counter()
        file.PASSES[direction].launch(shape, dtype, gpu)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)

    assert compiled_once(*compilations(launch))
    record_property("first_call_seconds", seconds[0])


# Without a GPU Triton only compiles, and not in a process that interprets.
PROGRAM = """
import importlib.util, sys

spec = importlib.util.spec_from_file_location("checks", sys.argv[1])
checks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(checks)
from gptile.bench.compiler import compile_launches
from gptile.kernels import layer_norm

def launch():
    compile_launches("sm_80", lambda: layer_norm.PASSES["backward"].launch(
        {"rows": 9, "cols": 30}, checks.torch.float16, "meta"))

def tuned(*args, **options):
    for warps in (1, 2):
        right(*args, **{**options, "num_warps": warps})

def forgetful(kernel, *args, **options):
    kernel.device_caches.clear()
    right(kernel, *args, **options)

right = layer_norm.launch
for layer_norm.launch in (right, tuned, forgetful):
    print(checks.compiled_once(*checks.compilations(launch)))
"""


def test_tuning_and_compiling_again_are_seen() -> None:
    printed = subprocess.run(
        [sys.executable, "-c", PROGRAM, __file__],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed.split() == ["True", "False", "False"]


# Each computes every row of what it returns from that row of x alone, and from the last one.


def norms(x: Tensor) -> tuple[Tensor, ...]:
    _, y, mean, rstd = layer_norm.launch_forward(x, None, x[-1], x[-1], 1e-5)
    return y, layer_norm.launch_backward(x, None, x, x[-1], mean, rstd)[0]


def attentions(x: Tensor) -> tuple[Tensor, ...]:
    out, lse = attention.launch_forward(x, x, x, 0.1)
    return out, *attention.launch_backward(out, x, x, x, out, lse, 0.1)


def embeddings(table: Tensor) -> tuple[Tensor, ...]:
    ids = torch.arange(len(table), device=table.device).unsqueeze(0)
    positions, wpe = ids[0] % 64, table[-1:].expand(64, -1)
    out = embedding.launch_forward(ids, positions, table, wpe, 0.0, None)
    gradients = embedding.launch_backward(out, ids, positions, len(table), 64, 0.0, None)
    return out[0], gradients[0]


def linears(x: Tensor) -> tuple[Tensor, ...]:
    narrow, weight = x[:, :64], x[-1].view(-1, 64)
    weight = weight.repeat(x.shape[1] // len(weight), 1)
    out, argument = linear.launch_forward(narrow, weight, x[-1], "gelu_new", None, True)
    added, _ = linear.launch_forward(narrow, weight, x[-1], None, x, False)
    return out, argument, added, linear.launch_slope(out, argument, "gelu_new")[0]


def caches(k: Tensor) -> tuple[Tensor, ...]:
    n_slots, heads, _, head_dim = k.shape
    v = k.clone()
    span = torch.tensor([[n_slots - 1], [50], [3]], dtype=torch.int32, device=k.device).unbind()
    qkv = torch.linspace(-1, 2, 9 * heads * head_dim, device=k.device).view(1, 3, -1).to(k)
    q = kv_append.launch_append(qkv, qkv[0, 0], k, v, *span)
    return k, v, decode_attention.launch_forward(q, k, v, *span, 0.1)


def losses(x: Tensor) -> tuple[Tensor, ...]:
    logits, targets = x.clone()[:, :-15], torch.zeros(len(x), dtype=torch.int64, device=x.device)
    loss, maximum, total, factor = torch.ones(4, len(x), device=x.device)
    linear_cross_entropy.launch_loss(logits, targets, loss, maximum, total)
    linear_cross_entropy.launch_gradient(logits, targets, maximum, total, factor)
    return loss, logits


def samples(logits: Tensor) -> tuple[Tensor, ...]:
    # Temperature, top-k, top-p, min-p, penalty, seed and position.
    values = 0.8, 50, 0.9, 0.01, 1.2, 2**40, 7
    columns = [torch.tensor([value], device=logits.device).expand(len(logits)) for value in values]
    return sampling.launch_sample(logits, logits > 0, *columns)


# With the size of a row, of one cut down, and how many tensors of the size of x there are.
GIANTS: dict[str, tuple[Callable, tuple[int, ...], tuple[int, ...], int]] = {
    "layer_norm": (norms, (1024,), (1024,), 4),
    "attention": (attentions, (512, 4, 128), (20, 2, 16), 6),
    "embedding": (embeddings, (1024,), (1024,), 4),
    "linear": (linears, (4096,), (256,), 6),
    "cache": (caches, (16, 128, 64), (2, 128, 64), 3),
    "linear_cross_entropy": (losses, (50272,), (512,), 3),
    "sample": (samples, (50257,), (500,), 3),
}


def last_row_differs(function: Callable, n_rows: int, row: tuple[int, ...], device: str) -> bool:
    """Whether the last of many rows does not come out as it does alone."""
    x = torch.zeros(n_rows, *row, dtype=torch.bfloat16, device=device)
    x[-1] = torch.randn(row, device=device) + 0.3
    alone = x[-1:].clone()  # first, as one of the functions writes into its argument
    pairs = zip(function(x), function(alone), strict=True)
    return not all(torch.allclose(a[-1].float(), b[-1].float(), 0.03, 1e-2) for a, b in pairs)


@pytest.mark.parametrize("name", GIANTS)
def test_rows_beyond_2_to_the_31_elements(device: str, room: Callable, name: str) -> None:
    function, row, small, tensors = GIANTS[name]
    room(tensors * 4.5)
    if device == "cuda":
        n_rows = 2**31 // torch.Size(row).numel() + 2
        assert not last_row_differs(function, n_rows, row, device)
    else:
        assert not last_row_differs(function, 3, small, device)


def test_a_row_that_went_elsewhere_is_seen(device: str) -> None:
    def shifted(x: Tensor) -> tuple[Tensor, ...]:
        y, dx = norms(x)
        return y, dx.roll(1, 0)

    assert last_row_differs(shifted, 3, (64,), device)
