"""What each kernel earns, end to end: alone on top of PyTorch's operations, and left out of ours.

One model runs every combination in turn, on the same ids, through prefill, decoding and a training
step, each with the kernels that it calls. Every combination is held to the policy of
:mod:`gptile.bench.parity`, on whatever comes out of the task, gradients included: its error against
transformers in fp64 may be at most ALLOWED_RATIO times that of transformers in the same dtype, plus
half a step of it. Times need a GPU. Without one, kernels run in Triton's interpreter, which proves
them right or wrong on a model of :data:`TINY` size, and says nothing about time.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gptile.bench.environment import NO_GPU
from gptile.bench.huggingface import load_reference
from gptile.bench.parity import allowed_error
from gptile.bench.timing import Timing, interleave, speedup
from gptile.bench.workloads import (
    TASKS,
    Outcome,
    called_operations,
    reference_outcomes,
    use_ops,
    workload,
)
from gptile.kernels import Ops
from gptile.model.config import GPT2Config
from gptile.model.gpt2 import GPT2
from gptile.weights import open_checkpoint

T = TypeVar("T")

TINY = GPT2Config(
    vocab_size=67,
    n_positions=32,
    n_embd=48,
    n_layer=2,
    n_head=3,
    initializer_range=0.15,
    bos_token_id=0,
    eos_token_id=0,
)
PLAIN, OURS = "all PyTorch", "all Triton"
NO_TIMES = f"{NO_GPU}: no times"


class Sizes(NamedTuple):
    """Rows, tokens a prompt, and decode steps after it."""

    rows: int
    tokens: int
    steps: int


ON_GPU, INTERPRETED = Sizes(4, 512, 32), Sizes(2, 11, 3)


def combinations(operations: list[str], ours: Ops) -> dict[str, Ops]:
    """Each of ``operations`` alone on top of PyTorch's, and each left out of ``ours``."""
    plain = Ops.torch()
    alone = {f"PyTorch + {n}": plain.replace(**{n: getattr(ours, n)}) for n in operations}
    left_out = {f"Triton without {n}": ours.replace(**{n: getattr(plain, n)}) for n in operations}
    return {PLAIN: plain, **alone, OURS: ours, **left_out}


def measure_matrix(
    directory: Path,
    sizes: Sizes,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ours: Ops | None = None,
    rounds: int,
    seed: int,
    report: Callable[[str], object],
) -> list[dict[str, Any]]:
    """A row for each task and combination, see :func:`combinations`; its speed-ups, over
    PyTorch's operations and over all of ours, are where both ends are green.

    Args:
        directory: of a checkpoint.
        dtype, device: of the model; on a CPU nothing is timed.
        ours: the kernels; default Triton's.
        rounds, seed: of the timing, and of the random ids.
        report: is told what is being done.
    """
    generator = torch.Generator().manual_seed(seed)
    model = open_checkpoint(directory).load_model(dtype=dtype, device=device, ops=Ops.torch())
    shape = (sizes.rows, sizes.tokens + sizes.steps)
    ids = torch.randint(model.config.vocab_size, shape, generator=generator).to(device)
    report("running transformers")
    truth = _reference(directory, torch.float64, ids, sizes)
    reference = _reference(directory, dtype, ids, sizes)
    rows = []
    for task in TASKS:
        use_ops(model, lambda _: Ops.torch())  # also what fills the cache that decoding starts from
        work = workload(model, task, ids, sizes.steps)
        called = called_operations(model, work.run)
        variants = combinations(called, ours or Ops.triton())
        found = {}
        for name, ops in variants.items():
            report(f"{task}: checking {name}")
            outcome = _with_ops(model, ops, work.outcome)()
            found[name] = _judge(outcome, reference[task], truth[task], dtype)
        timings = {}
        if device.type == "cuda":
            timings = interleave(
                {name: _with_ops(model, ops, work.run) for name, ops in variants.items()},
                rounds=rounds,
                device=device,
                seed=seed,
                on_round=partial(_report_round, report, task),
            )
        rows += [_row(task, name, found, timings) for name in variants]
    return rows


def _report_round(report: Callable[[str], object], task: str, done: int) -> None:
    report(f"{task}: timed {done} times")


def _row(
    task: str, name: str, found: dict[str, dict[str, Any]], timings: dict[str, Timing]
) -> dict[str, Any]:
    row = {"subject": {"matrix": task, "kernels": name}, **found[name]}
    if not timings:
        return {**row, "note": NO_TIMES}
    row["seconds"] = timings[name].samples
    for key, baseline in (("speedup", PLAIN), ("speedup_over_all", OURS)):
        green = found[name]["ok"] and found[baseline]["ok"]
        ratio = speedup(timings[baseline], timings[name])._asdict() if green else None
        row[key] = None if name == baseline else ratio
    return row


def _reference(
    directory: Path, dtype: torch.dtype, ids: Tensor, sizes: Sizes
) -> dict[str, Outcome]:
    return reference_outcomes(load_reference(directory, dtype, device=ids.device), ids, sizes.steps)


def _judge(
    outcome: Outcome, reference: Outcome, truth: Outcome, dtype: torch.dtype
) -> dict[str, Any]:
    """Every quantity within its bound, and the one that comes nearest to it or passes it most."""
    judged = []
    for name, exact in truth.items():
        error, own = relative_error(outcome[name], exact), relative_error(reference[name], exact)
        allowed = allowed_error(own, dtype)
        judged.append((name, error, own, allowed, error / allowed))
    name, error, own, allowed, _ = max(
        judged, key=lambda j: math.inf if math.isnan(j[-1]) else j[-1]
    )
    return {
        "error": error,
        "reference_error": own,
        "allowed": allowed,
        "worst": name,
        "ok": all(share <= 1 for *_, share in judged),
    }


def relative_error(value: Tensor, truth: Tensor) -> float:
    """``||value - truth|| / ||truth||``, in fp64."""
    scale = float(truth.double().norm()) or 1.0
    return float((value.double() - truth.double()).norm()) / scale


def _with_ops(model: GPT2, ops: Ops, run: Callable[[], T]) -> Callable[[], T]:
    def call() -> T:
        use_ops(model, lambda _: ops)  # some microseconds, for every combination alike
        return run()

    return call
