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
from gptile.kernels.layer_norm import CASES, launch_backward, launch_forward

target, names, dtype = sys.argv[1], sys.argv[2].split(","), getattr(torch, sys.argv[3])

def tensor(*shape, dtype=dtype):
    return torch.empty(shape, dtype=dtype, device="meta")

def launches():
    for name in names:
        rows, cols = CASES[name]["rows"], CASES[name]["cols"]
        x, weight = tensor(rows, cols), tensor(cols)
        mean = tensor(rows, dtype=torch.float32)
        for delta in (None, x):
            launch_forward(x, delta, weight, weight, 1e-5)
            launch_backward(x, delta, x, weight, mean, mean)

print(json.dumps([dataclasses.asdict(c) for c in compile_launches(target, launches)]))
"""


def compile_cases(target: str, names: list[str], dtype: str) -> list[dict]:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, target, ",".join(names), dtype],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("target", TARGETS)
def test_layer_norm_compiles_without_spilling(target: str) -> None:
    names = ["gpt2-prefill", "gpt2-xl-prefill", "odd"]
    compiled = compile_cases(target, names, "bfloat16")
    assert len(compiled) == len(names) * 2 * 3
    for kernel in compiled:
        assert kernel["spilled"] == 0, kernel
        assert kernel["shared"] <= TARGETS[target].shared_limit, kernel
        assert 0 < kernel["registers"] <= 255, kernel


def test_targets_do_not_share_a_cache() -> None:
    """One process may compile for several targets in turn."""
    program = PROGRAM.replace(
        "print(",
        "first = compile_launches('gfx942', launches)\n"
        "assert first != compile_launches('sm_90', launches)\nprint(",
    )
    arguments = ["sm_90", "gpt2-prefill", "float32"]
    run = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
