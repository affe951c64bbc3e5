"""The on/off matrix: what each combination is, that it sees a fault in just the combinations that
have it, and that there are no times without a GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gptile.bench import matrix
from gptile.bench.checkpoints import random_checkpoint
from gptile.bench.huggingface import load_reference
from gptile.bench.matrix import (
    NO_TIMES,
    OURS,
    PLAIN,
    TINY,
    Sizes,
    combinations,
    measure_matrix,
)
from gptile.bench.timing import Timing
from gptile.bench.workloads import TASKS, called_operations, reference_outcomes, use_ops, workload
from gptile.kernels import Ops
from gptile.model.gpt2 import GPT2
from gptile.weights import open_checkpoint

SIZES = Sizes(rows=2, tokens=5, steps=2)
CACHED = ["embedding", "layer_norm", "linear", "linear_residual", "layer_norm_linear"]
CACHED += ["kv_append", "decode_attention"]
CALLED = {
    "prefill": CACHED,
    "decode": [*CACHED, "sample"],
    "train": [
        *("embedding", "layer_norm", "add_layer_norm", "linear", "linear_activation", "attention"),
        "linear_cross_entropy",
    ],
}


@pytest.fixture(scope="module")
def directory() -> Any:
    with random_checkpoint(TINY) as found:
        yield found


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(TINY.vocab_size, (SIZES.rows, SIZES.tokens + 2), generator=generator)


def measure(directory: Path, ours: Ops | None, **options: Any) -> dict[tuple[str, str], dict]:
    given = {"dtype": torch.float32, "device": torch.device("cpu"), "rounds": 1, "seed": 0}
    given |= {"report": lambda message: None, **options}
    rows = measure_matrix(directory, SIZES, ours=ours, **given)
    return {(row["subject"]["matrix"], row["subject"]["kernels"]): row for row in rows}


@pytest.mark.parametrize("task", TASKS)
def test_a_task_calls_these_operations(directory: Path, ids: torch.Tensor, task: str) -> None:
    model = open_checkpoint(directory).load_model(ops=Ops.torch())
    assert called_operations(model, workload(model, task, ids, 2).run) == CALLED[task]
    assert model.ops == model.h[0].attn.ops == Ops.torch()  # all as before


@pytest.mark.parametrize("task", TASKS)
def test_a_task_repeats_itself_and_is_transformers(
    directory: Path, ids: torch.Tensor, task: str
) -> None:
    model = open_checkpoint(directory).load_model(ops=Ops.torch())
    work = workload(model, task, ids, 2)
    first = {name: value.clone() for name, value in work.outcome().items()}
    work.run()
    again = work.outcome()
    truth = reference_outcomes(load_reference(directory, torch.float64), ids, 2)[task]
    assert [*first] == [*again]
    assert {*first} == {*truth}
    for name, value in first.items():
        assert torch.equal(value, again[name]), name
        assert value.shape == truth[name].shape, name
        torch.testing.assert_close(value.double(), truth[name].double(), rtol=1e-4, atol=1e-4)


def test_each_kernel_alone_and_each_left_out() -> None:
    plain, ours = Ops.torch(), Ops.triton()
    found = combinations(["linear", "sample"], ours)
    assert found == {
        PLAIN: plain,
        "PyTorch + linear": plain.replace(linear=ours.linear),
        "PyTorch + sample": plain.replace(sample=ours.sample),
        OURS: ours,
        "Triton without linear": ours.replace(linear=plain.linear),
        "Triton without sample": ours.replace(sample=plain.sample),
    }


def test_every_combination_of_every_task_is_there_right_and_without_times(directory: Path) -> None:
    rows = measure(directory, Ops.torch())
    expected = [(task, name) for task in TASKS for name in combinations(CALLED[task], Ops.torch())]
    assert [*rows] == expected
    for row in rows.values():
        assert row["ok"]
        assert row["error"] <= row["allowed"]
        assert row["note"] == NO_TIMES
        assert "seconds" not in row
        assert "speedup" not in row


def test_the_kernels_are_right_in_the_interpreter(directory: Path) -> None:
    """Those of the cached path: tests/bench/test_parity.py has them all together."""
    ours = Ops.torch().replace(
        **{name: getattr(Ops.triton(), name) for name in ("kv_append", "decode_attention")}
    )
    assert all(row["ok"] for row in measure(directory, ours).values())


def off_by_one(ids, positions, wte, wpe, dropout_p=0.0):
    return Ops.torch().embedding(ids, (positions + 1).clamp(max=len(wpe) - 1), wte, wpe, dropout_p)


def unscaled(q, k, v, scale, dropout_p=0.0):
    return Ops.torch().attention(q, k, v, 1.0, dropout_p)


def stale(q, k_cache, v_cache, slots, starts, counts, scale):
    """In decoding, each query misses the token before its own."""
    return Ops.torch().decode_attention(
        q, k_cache, v_cache, slots, starts - (starts > 0).to(starts), counts, scale
    )


def second_best(logits, seen, **options):
    _, logprobs = Ops.torch().sample(logits, seen, **options)
    return logits.topk(2).indices[:, 1], logprobs


class _HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


def wrong_gradient(x, weight, bias, activation):
    return _HalfGradient.apply(Ops.torch().linear_activation(x, weight, bias, activation))


FAULTS: dict[str, tuple[Callable, set[str]]] = {
    "embedding": (off_by_one, {"prefill", "decode", "train"}),
    "attention": (unscaled, {"train"}),
    "linear_activation": (wrong_gradient, {"train"}),
    "decode_attention": (stale, {"decode"}),
    "sample": (second_best, {"decode"}),
}


@pytest.mark.parametrize("operation", FAULTS)
def test_a_fault_in_one_kernel_turns_just_its_rows_red(directory: Path, operation: str) -> None:
    wrong, tasks = FAULTS[operation]
    rows = measure(directory, Ops.torch().replace(**{operation: wrong}))
    red = {subject for subject, row in rows.items() if not row["ok"]}
    expected = {
        (task, name)
        for task in tasks
        for name in combinations(CALLED[task], Ops.torch())
        if name in (OURS, f"PyTorch + {operation}")
        or (name.startswith("Triton without") and not name.endswith(f" {operation}"))
    }
    assert red == expected


def test_a_wrong_gradient_is_named(directory: Path) -> None:
    rows = measure(directory, Ops.torch().replace(linear_activation=wrong_gradient))
    assert "grad h." in rows["train", "PyTorch + linear_activation"]["worst"]


def test_nan_is_red(directory: Path) -> None:
    def broken(*args):
        return Ops.torch().linear(*args) * torch.nan

    row = measure(directory, Ops.torch().replace(linear=broken))["prefill", "PyTorch + linear"]
    assert row["ok"] is False
    assert row["worst"] == "logits"


def test_speed_ups_stand_only_between_green_rows() -> None:
    """What a GPU's rows are made of, from times and verdicts given here."""
    fast, slow = Timing((1.0, 1.0)), Timing((2.0, 2.0))
    timings = {PLAIN: slow, "PyTorch + linear": fast, "PyTorch + sample": fast, OURS: fast}
    found = {name: {"ok": name != "PyTorch + sample"} for name in timings}
    rows = {name: matrix._row("decode", name, found, timings) for name in timings}
    assert rows[PLAIN]["speedup"] is None
    assert rows[PLAIN]["speedup_over_all"] == {"ratio": 0.5, "low": 0.5, "high": 0.5}
    assert rows["PyTorch + linear"]["speedup"] == {"ratio": 2.0, "low": 2.0, "high": 2.0}
    assert rows["PyTorch + sample"]["speedup"] is None
    assert rows["PyTorch + sample"]["seconds"] == (1.0, 1.0)
    assert rows[OURS]["speedup_over_all"] is None
    found[PLAIN] = {"ok": False}
    assert matrix._row("decode", OURS, found, timings)["speedup"] is None


def test_each_part_of_a_model_gets_its_operations(small_model: Callable[..., GPT2]) -> None:
    model = small_model(n_layer=2)
    given = {layer: Ops.torch().replace(sample=layer) for layer in (None, 0, 1)}
    use_ops(model, given.__getitem__)
    assert model.ops == given[None]
    for layer, block in enumerate(model.h):
        assert block.ops == block.attn.ops == block.mlp.ops == given[layer]
