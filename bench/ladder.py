"""Progressive optimisation: one job, one change at a time, each on top of the ones before.

The job is a set of prompts of different lengths, each continued greedily by the same number of
tokens. The first rung is transformers with eager attention as a student writes it: one prompt at a
time, the whole sequence computed anew for every token, logits for all of it. The second is that
loop on our model with PyTorch's operations, and from there on only ours is changed. All rungs are
driven by one loop, :class:`~gptile.bench.decoding.Loop`, so that nothing else differs.

A rung is right if its logits, on the ids that the first rung chose, are within the policy of
:mod:`gptile.bench.parity`: their error against transformers in fp64 is at most ALLOWED_RATIO times
that of transformers in the rung's batches and dtype, plus half a step of it. In fp32 it must also
choose the first rung's ids when left to itself; in 16 bits two right implementations may part, and
the share of equal ids is stated. A speed-up stands only between rungs that are right.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from gptile.bench.checkpoints import checkpoint_directory, random_checkpoint
from gptile.bench.decoding import Ids, Loop, Setup, padded
from gptile.bench.environment import NO_GPU
from gptile.bench.evaluation import missing_compiler, slowdown
from gptile.bench.huggingface import load_reference
from gptile.bench.matrix import (
    INTERPRETED,
    ON_GPU,
    TINY,
    measure_matrix,
    relative_error,
)
from gptile.bench.parity import allowed_error
from gptile.bench.result import Result
from gptile.bench.timing import Timing, interleave, peak_memory, speedup
from gptile.bench.workloads import called_operations, with_ops
from gptile.kernels import Ops
from gptile.kernels.launch import interpreting
from gptile.model.config import GPT2Config
from gptile.model.errors import UserError
from gptile.model.gpt2 import default_ops
from gptile.weights import open_checkpoint
from gptile.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class Job:
    """What every rung does.

    Attributes:
        n_prompts: how many; their lengths are spread evenly from ``shortest`` to ``longest``.
        n_new: tokens after each.
        batch: prompts at a time, from the rung of bigger batches on.
    """

    n_prompts: int
    shortest: int
    longest: int
    n_new: int
    batch: int

    def within(self, n_positions: int) -> "Job":
        """The job with prompts that leave room for the new tokens.

        Raises:
            UserError: where the context has no room for even the shortest.
        """
        room = n_positions - self.n_new
        if room < self.shortest:
            raise UserError(
                f"a context of {n_positions} is too short: the ladder's shortest prompt and its "
                f"new tokens need {self.shortest + self.n_new}"
            )
        return replace(self, longest=min(self.longest, room))

    def prompts(self, n_vocab: int, seed: int) -> Ids:
        """Random ids, in a random order of lengths."""
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.linspace(self.shortest, self.longest, self.n_prompts).round().long()
        return [
            torch.randint(n_vocab, (int(length),), generator=generator).tolist()
            for length in lengths[torch.randperm(self.n_prompts, generator=generator)]
        ]


FULL, QUICK = Job(16, 8, 128, 32, 8), Job(8, 4, 32, 4, 4)


@dataclass(frozen=True)
class Rung:
    """One row.

    Attributes:
        change: in words, against the rung before.
        changes: the fields of :class:`Setup` that change.
        skipped: why it is not climbed; empty if it is.
    """

    name: str
    change: str
    changes: dict[str, Any]
    skipped: str = ""


def plan(job: Job, device: torch.device) -> list[Rung]:
    """The rungs up to torch.compile, those that this machine cannot climb with the reason."""
    dtype, too_slow = short_dtype(device)
    return [
        Rung("naive loop", "transformers, eager: one prompt at a time, everything anew", {}),
        Rung("our model", "the same loop on our model, PyTorch's operations", {"ours": True}),
        Rung("bigger batches", f"{job.batch} prompts at a time, padded", {"batch": job.batch}),
        Rung("length buckets", "prompts of similar length share a batch", {"bucketed": True}),
        Rung("16-bit weights", f"{_name(dtype)}, activations too", {"dtype": dtype}, too_slow),
        Rung("last logits", "logits of each row's last token only", {"last_only": True}),
        Rung("cache reuse", "keys and values kept, each token computed once", {"cached": True}),
        Rung("torch.compile", "Inductor", {"compiled": True}, missing_compiler(device)),
    ]


def plan_kernels(called: list[str], ours: Ops) -> list[Rung]:
    """A rung for each of our kernels that the job calls, in the order of Ops."""
    if ours == Ops.torch():
        why = NO_GPU if not torch.cuda.is_available() else "the kernels cannot run this here"
        return [Rung("our kernels", "Triton's, one at a time", {}, why)]
    rungs, ops = [], Ops.torch()
    for name in called:
        ops = ops.replace(**{name: getattr(ours, name)})
        rungs.append(Rung(name, "Triton's in place of PyTorch's", {"ops": ops}))
    return rungs


def short_dtype(device: torch.device) -> tuple[torch.dtype, str]:
    """The 16-bit type to use, and why not to use it: empty where its products are not slower."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16, ""
    ratio = slowdown(torch.bfloat16, device)
    slower = f"a matrix product in bfloat16 takes {ratio:.1f} times as long as in float32 here"
    return torch.bfloat16, slower if ratio > 1 else ""


def benchmark(
    source: str,
    *,
    quick: bool,
    only_matrix: bool,
    rounds: int,
    device: torch.device,
    seed: int = 0,
    report: Callable[[str], object] = lambda _: None,
) -> Result:
    """The ladder on :data:`FULL` and the on/off matrix, or only the ladder on :data:`QUICK`, or
    only the matrix.

    Args:
        source: a checkpoint, see :func:`~gptile.bench.checkpoints.checkpoint_directory`.
        rounds: samples of everything that is timed.
        device: where all of it runs.
        seed: of prompts and order.
        report: is told what is being done.

    Raises:
        UserError: if there is no such checkpoint, or its context is too short.
    """
    measuring: dict[str, Any] = {"rounds": rounds, "seed": seed, "report": report}
    result = Result("ladder", {"model": source, "rounds": rounds}, [], [], device.type, seed)
    with checkpoint_directory(source) as directory:
        config = open_checkpoint(directory).config
        if not only_matrix:
            job = (QUICK if quick else FULL).within(config.n_positions)
            result.settings["job"] = vars(job)
            result.notes.append("ladder: random prompts; rungs are timed in turn")
            result.rows += measure_ladder(directory, job, device=device, **measuring)
        if only_matrix or not quick:
            result.notes.append("matrix: training without dropout, at learning rate 0")
            _add_matrix(result, directory, config, device, measuring)
    return result


def _add_matrix(
    result: Result,
    directory: Path,
    config: GPT2Config,
    device: torch.device,
    measuring: dict[str, Any],
) -> None:
    on_gpu = device.type == "cuda"
    dtype = short_dtype(device)[0] if on_gpu else torch.float32
    if on_gpu and default_ops(config, device, dtype) == Ops.triton():
        sizes = ON_GPU._replace(tokens=min(ON_GPU.tokens, config.n_positions - ON_GPU.steps))
        result.rows += measure_matrix(directory, sizes, dtype=dtype, device=device, **measuring)
    elif interpreting():
        sizes, cpu = INTERPRETED, torch.device("cpu")
        result.notes.append("matrix: a tiny random model in Triton's interpreter")
        with random_checkpoint(TINY) as tiny:
            result.rows += measure_matrix(tiny, sizes, dtype=dtype, device=cpu, **measuring)
    else:
        why = f"{NO_GPU} to run the kernels; TRITON_INTERPRET=1 checks them without"
        result.rows.append({"subject": {"matrix": "all tasks"}, "skipped": why})
        return
    result.settings["matrix"] = {**sizes._asdict(), "dtype": _name(dtype)}


def measure_ladder(
    directory: Path,
    job: Job,
    *,
    device: torch.device,
    rounds: int,
    seed: int,
    report: Callable[[str], object],
) -> list[dict[str, Any]]:
    """A row for each rung; all that are climbed are timed in turn, see :mod:`gptile.bench.timing`.

    ``peak_memory`` is the weights and the most of other tensors there was at a time, in bytes;
    ``tokens_per_second`` counts new tokens.

    Args:
        directory: of a checkpoint.
        device: where all of it runs, transformers too.
        rounds: samples a rung.
        seed: of prompts and order.
        report: is told what is being done.
    """
    checkpoint = open_checkpoint(directory)
    report("running transformers in fp64")
    climb = _Climb(checkpoint, job, device, seed)
    # Every rung's model lives to the end, and compiles its prefill and its steps for itself.
    with torch._dynamo.config.patch(recompile_limit=64, allow_unspec_int_on_nn_module=True):
        for rung in plan(job, device):
            report(f"checking {rung.name}")
            climb.add(rung)
        ours = default_ops(checkpoint.config, device, climb.setup.dtype)
        for rung in plan_kernels(climb.called(), ours):
            report(f"checking {rung.name}")
            climb.add(rung)
        timings = interleave(
            climb.calls,
            rounds=rounds,
            warmup=0,  # checking was that
            device=device,
            seed=seed,
            on_round=lambda done: report(f"round {done} of {rounds}"),
        )
    climbed = [row for row in climb.rows if "skipped" not in row]
    for before, row in zip([None, *climbed], climbed, strict=False):
        timing = timings[row["subject"]["rung"]]
        row["seconds"] = timing.samples
        row["tokens_per_second"] = job.n_prompts * job.n_new / timing.median
        row["speedup"] = _speedup(climbed[0], row, timings) if before else None
        row["speedup_step"] = _speedup(before, row, timings) if before else None
    return climb.rows


def _speedup(
    before: dict[str, Any], row: dict[str, Any], timings: dict[str, Timing]
) -> dict[str, float] | None:
    if not (before["ok"] and row["ok"]):
        return None
    return speedup(*(timings[r["subject"]["rung"]] for r in (before, row)))._asdict()


class _Climb:
    """The rungs so far: their rows, checked but not timed, and what to call to time them."""

    def __init__(self, checkpoint: Checkpoint, job: Job, device: torch.device, seed: int) -> None:
        self.setup = Setup()
        self.rows: list[dict[str, Any]] = []
        self.calls: dict[str, Callable[[], Ids]] = {}
        self._n_new, self._device = job.n_new, device
        self._prompts = job.prompts(checkpoint.config.vocab_size, seed)
        self._directory = checkpoint.files.directory
        self._weights = functools.cache(
            lambda dtype: checkpoint.load_model(dtype=dtype, device=device, ops=Ops.torch())
        )
        self._reference = functools.cache(
            lambda dtype: load_reference(self._directory, dtype, device=device)
        )
        self._forced = self._loop(self.setup).greedy_ids()
        self._truth = self._reference_logits(Setup(dtype=torch.float64))
        self._reference_error = functools.cache(
            lambda setup: relative_error(self._reference_logits(setup), self._truth)
        )

    def add(self, rung: Rung) -> None:
        """Climb a rung, or say why not."""
        row: dict[str, Any] = {"subject": {"rung": rung.name}, "change": rung.change}
        self.rows.append(row)
        if rung.skipped:
            row["skipped"] = rung.skipped
            return
        setup = replace(self.setup, **rung.changes)
        loop = self._loop(setup)
        try:
            row |= self._check(loop)
        except BackendCompilerFailed as error:
            row["skipped"] = f"torch.compile failed: {' '.join(str(error).split())[:200]}"
            return
        self.setup = setup
        self.calls[rung.name] = loop.greedy_ids

    def _check(self, loop: Loop) -> dict[str, Any]:
        setup = loop.setup
        error = relative_error(loop.forced_logits(self._forced), self._truth)
        reference_error = self._reference_error(
            Setup(batch=setup.batch, bucketed=setup.bucketed, dtype=setup.dtype)
        )
        allowed = allowed_error(reference_error, setup.dtype)
        equal = _share_equal(loop.greedy_ids(), self._forced)
        weights = sum(weight.nbytes for weight in loop.model.parameters())
        return {
            "dtype": _name(setup.dtype),
            "error": error,
            "reference_error": reference_error,
            "allowed": allowed,
            "equal_ids": equal,
            "ok": error <= allowed and (setup.dtype != torch.float32 or equal == 1),
            "peak_memory": weights + peak_memory(loop.greedy_ids, self._device),
        }

    def called(self) -> list[str]:
        """The operations of ours that the last rung calls."""
        loop = self._loop(replace(self.setup, compiled=False))
        return called_operations(loop.model, loop.greedy_ids)

    def _loop(self, setup: Setup) -> Loop:
        if not setup.ours:
            return Loop(setup, self._reference(setup.dtype), self._prompts, self._n_new)
        model = with_ops(self._weights(setup.dtype), setup.ops)
        if setup.compiled:
            model.compile()
        return Loop(setup, model, self._prompts, self._n_new)

    @torch.inference_mode()
    def _reference_logits(self, setup: Setup) -> Tensor:
        """Transformers' for :meth:`Loop.forced_logits`, each sequence computed at once, in the
        batches and dtype of a setup: products of other sizes round otherwise."""
        model = load_reference(self._directory, setup.dtype, device=self._device)
        found = [torch.empty(0)] * len(self._prompts)
        for batch in Loop(setup, model, self._prompts, self._n_new).batches():
            rows = [self._prompts[prompt] + self._forced[prompt][:-1] for prompt in batch]
            logits = model(padded(rows, self._device)[0], use_cache=False).logits
            for prompt, row, row_logits in zip(batch, rows, logits, strict=True):
                found[prompt] = row_logits[len(row) - self._n_new : len(row)].clone()
        return torch.stack(found)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _share_equal(ids: Ids, expected: Ids) -> float:
    return float((torch.tensor(ids) == torch.tensor(expected)).double().mean())
