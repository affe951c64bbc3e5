"""Kernels compile for GPUs that are not here, within their budget of registers."""

import json
import os
import subprocess
import sys

import pytest

from gptile.bench.compiler import TARGETS

# The interpreter, in which these tests run, compiles nothing: hence a process of its own.
PROGRAM = """
import dataclasses, json, sys
import torch
from gptile.bench.compiler import compile_launches
from gptile.kernels import attention, layer_norm

def tensor(*shape, dtype):
    return torch.empty(shape, dtype=dtype, device="meta")

def layer_norms(name, dtype):
    rows, cols = layer_norm.CASES[name].values()
    x, weight = tensor(rows, cols, dtype=dtype), tensor(cols, dtype=dtype)
    mean = tensor(rows, dtype=torch.float32)
    for delta in (None, x):
        layer_norm.launch_forward(x, delta, weight, weight, 1e-5)
        layer_norm.launch_backward(x, delta, x, weight, mean, mean)

def attentions(name, dtype):
    rows, tokens, heads, head_dim = attention.CASES[name].values()
    qkv = tensor(rows, tokens, 3 * heads * head_dim, dtype=dtype)
    q, k, v = qkv.unflatten(2, (3, heads, head_dim)).unbind(2)
    out, lse = attention.launch_forward(q, k, v, 0.125)
    attention.launch_backward(torch.empty_like(out), q, k, v, out, lse, 0.125)

records = {}
for target in sys.argv[1].split(","):
    for launches, name, dtype in json.loads(sys.argv[2]):
        launch = lambda: globals()[launches](name, getattr(torch, dtype))
        for compiled in compile_launches(target, launch):
            key = f"{target} {launches} {name} {dtype}"
            records.setdefault(key, []).append(dataclasses.asdict(compiled))
print(json.dumps(records))
"""
LAUNCHES = [
    ("layer_norms", "gpt2-prefill", "bfloat16"),
    ("layer_norms", "gpt2-xl-prefill", "float32"),
    ("layer_norms", "odd", "float16"),
    ("attentions", "gpt2-train", "bfloat16"),
    ("attentions", "gpt2-train", "float32"),
    ("attentions", "head_dim 128", "bfloat16"),
    ("attentions", "head_dim 8", "float16"),
]


def compile_all(targets: str, launches: list[tuple[str, str, str]]) -> dict[str, list[dict]]:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, targets, json.dumps(launches)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_without_spilling(target: str) -> None:
    records = compile_all(target, LAUNCHES)
    assert len(records) == len(LAUNCHES)
    for key, kernels in records.items():
        # LayerNorm: forward, backward and reduction, with and without the addition.
        assert len(kernels) == (6 if "layer_norms" in key else 4), key
        for kernel in kernels:
            assert kernel["spilled"] == 0, (key, kernel)
            assert kernel["shared"] <= TARGETS[target].shared_limit, (key, kernel)
            assert 0 < kernel["registers"] <= 512, (key, kernel)
            multiplies = "attentions" in key and kernel["kernel"] != "_delta_kernel"
            if multiplies and "float32" not in key:
                assert kernel["tensor_cores"], (key, kernel)


def test_targets_do_not_share_a_cache() -> None:
    """One process may compile for several targets in turn, in any order."""
    launches = [("layer_norms", "gpt2-prefill", "bfloat16")]
    together = compile_all("sm_90,gfx942,sm_80", launches)
    for target in ("sm_80", "gfx942"):
        for key, kernels in compile_all(target, launches).items():
            assert together[key] == kernels
