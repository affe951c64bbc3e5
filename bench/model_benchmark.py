"""What a whole model costs in each engine: prefill, decoding, scoring and training.

Every engine is a resident process (:mod:`gptile.bench.workers`) on the same number of threads. In
each round each does the same work once, in an order shuffled anew. What is counted:

- prefill: the time to the first token, which is a call that generates one.
- decode: the time per output token, (t(n) - t(1)) / (n - 1) of two calls in the same round: greedy,
  and n tokens whatever they are.
- score: the mean negative log-likelihood of a batch.
- train: forward, backward and AdamW, without dropout, in 16 bits under autocast.

Bandwidth is what a decoding step has to read, weights and cache, by its time, as a share of what a
sum reads on the same device, before or after, whichever was faster.

No speed-up stands beside a wrong result: :mod:`gptile.bench.model_checks`.
"""

import os
import random
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gptile.bench.checkpoints import RANDOM, checkpoint_directory
from gptile.bench.engines import GENERATION, Choice, Ids, Setup, missing
from gptile.bench.environment import NO_GPU
from gptile.bench.model_checks import CHECKED, Check, References, Size, no_room
from gptile.bench.model_plan import Plan, fit
from gptile.bench.peaks import Peaks, measure_peaks
from gptile.bench.result import Result
from gptile.bench.timing import Timing, speedup
from gptile.bench.workers import SETTLE, Worker, WorkerError
from gptile.model.config import GPT2Config
from gptile.model.gpt2 import GPT2
from gptile.weights import open_checkpoint

SEED = 0


def benchmark(source: str, plan: Plan, say: Callable[[str], object] = lambda _: None) -> Result:
    """Measure what ``plan`` asks for on a checkpoint, ``random:gpt2`` or one that
    :func:`~gptile.weights.open_checkpoint` finds.

    Args:
        say: is told what is being done.

    Raises:
        UserError: if the sizes exceed the context, or the reference cannot run here.
    """
    with (
        checkpoint_directory(source) as directory,
        tempfile.TemporaryDirectory(prefix="gptile-") as work,
    ):
        notes = _notes(source, plan)  # before the machine is busy with this
        config = open_checkpoint(directory).config
        plan = fit(plan, config)
        say("measuring the device's peaks")
        before = _measure_peaks(plan)
        run = _Run(directory, Path(work), config, plan, say)
        inference = [task for task in plan.tasks if task != "train"]
        if inference:
            run.measure(inference)
        if "train" in plan.tasks:
            run.measure(["train"])
        say("measuring the device's peaks again")
        peaks = max(before, _measure_peaks(plan), key=lambda found: found.read)
    for row in run.rows:
        if "bytes" in row:
            row["bandwidth"] = row["bytes"] / row["p50"] / peaks.read
    settings = {
        "model": source,
        "parameters": run.n_parameters,
        "engines": [str(choice) for choice in plan.choices],
        "baseline": str(plan.baseline),
        "tasks": plan.tasks,
        "batches": plan.batches,
        "prompt_tokens": plan.prompt_tokens,
        "new_tokens": plan.new_tokens,
        "threads": plan.threads,
        "rounds": plan.rounds,
        "settle_seconds": SETTLE,
        "peaks": peaks.record(),
    }
    return Result("model", settings, run.rows, notes, plan.device, SEED)


def _measure_peaks(plan: Plan) -> Peaks:
    threads = torch.get_num_threads()
    torch.set_num_threads(plan.threads)
    try:
        return measure_peaks(plan.device, [torch.float32])
    finally:
        torch.set_num_threads(threads)


def _notes(source: str, plan: Plan) -> list[str]:
    notes = [
        "memory on a CPU is what an engine's process has resident, libraries included; on a GPU, "
        "the tensors of PyTorch's allocator"
    ]
    if source.startswith(RANDOM):
        notes.append(f"{source} has random weights: its speed is GPT-2's, its text is noise")
    if plan.device == "cpu":
        notes.append(f"{NO_GPU}: gptile runs on PyTorch's operations, as gptile-torch does")
    load = os.getloadavg()[0]
    if load > 0.5:
        notes.append(
            f"other processes were busy: a load average of {load:.1f} in the minute before, on "
            f"{os.cpu_count()} cores"
        )
    if any(choice.entry.settings.get("compiled") for choice in plan.choices):
        notes.append("compilation is not counted: it happens before the first round of a size")
    return notes


@dataclass
class _Resident:
    """An engine that was loaded and checked; ``numbers`` are its attributes."""

    choice: Choice
    worker: Worker
    check: Check
    numbers: dict[str, float]


@dataclass
class _Samples:
    """What the calls of one engine on one size returned; those of one token by themselves."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    firsts: list[dict[str, Any]] = field(default_factory=list)

    def seconds(self, task: str, n_new: int) -> list[float]:
        if task == "prefill":
            return [first["seconds"] for first in self.firsts]
        whole = [call["seconds"] for call in self.calls]
        if task != "decode":
            return whole
        firsts = [first["seconds"] for first in self.firsts]
        return [(t - t1) / (n_new - 1) for t, t1 in zip(whole, firsts, strict=True)]


class _Run:
    """One benchmark; ``rows`` is what it found."""

    def __init__(
        self,
        source: Path,
        work: Path,
        config: GPT2Config,
        plan: Plan,
        say: Callable[[str], object],
    ) -> None:
        self.source, self.work, self.config, self.plan = source, work, config, plan
        self.say = say
        self.rows: list[dict[str, Any]] = []
        self.order = random.Random(SEED)
        self.generator = np.random.default_rng(SEED)
        with torch.device("meta"):
            model = GPT2(config)
        self.n_parameters = model.num_parameters()
        # A step looks up single rows of the positions, and of an embedding that is not the head.
        looked_up = model.wpe.weight.numel()
        looked_up += 0 if config.tie_word_embeddings else model.wte.weight.numel()
        self.n_read = self.n_parameters - looked_up
        n_rows, n_tokens = CHECKED
        self.references = References(
            source,
            work,
            self._ids((n_rows, min(n_tokens, config.n_positions))),
            n_parameters=self.n_parameters,
            device=plan.device,
            threads=plan.threads,
            say=say,
        )

    def _ids(self, size: Size) -> Ids:
        ids: Ids = self.generator.integers(self.config.vocab_size, size=size).tolist()
        return ids

    def measure(self, tasks: list[str]) -> None:
        """Load every engine, and time its tasks; all of them train, or none does."""
        training = tasks == ["train"]
        inputs = {size: self._ids(size) for size in self.plan.sizes()}
        precisions = [c.precision for c in self.plan.choices if c.precision != "int8"]
        if training:
            self.references.train(dict.fromkeys(precisions))
        else:
            prompts = inputs if set(tasks) & set(GENERATION) else {}
            scored = inputs if "score" in tasks else {}
            self.references.infer(precisions, prompts, self.plan.new_tokens, scored)
        self._add_lacking(tasks)
        with ExitStack() as stack:
            residents = []
            for choice in self.plan.choices:
                if not set(tasks) & set(choice.entry.tasks):
                    continue
                try:
                    residents.append(self._load(choice, training, stack))
                except WorkerError as error:
                    self._fail(choice, {}, str(error))
            for size, ids in inputs.items():
                for kind in _kinds(tasks):
                    self._measure_size(kind, size, ids, residents)

    def _add_lacking(self, tasks: list[str]) -> None:
        """A row for each task that an engine does not have."""
        for engine, entry in {c.engine: c.entry for c in self.plan.choices}.items():
            for task in tasks:
                if task not in entry.tasks:
                    subject = {"engine": engine, "task": task}
                    self.rows.append({"subject": subject, "skipped": entry.why_not})

    def _fail(self, choice: Choice, about: dict[str, Any], why: str) -> None:
        """A row that says why there is no measurement; ours is red."""
        subject = {"engine": choice.engine, "precision": choice.precision, **about}
        self.rows.append({"subject": subject, "ok": False if choice.ours else None, "skipped": why})

    def _load(self, choice: Choice, training: bool, stack: ExitStack) -> _Resident:
        absent = missing(choice)
        if absent:
            raise WorkerError(f"{', '.join(absent)} not installed: pip install '.[peers]'")
        plan, entry = self.plan, choice.entry
        weights = 4 * self.n_parameters
        if plan.device == "cpu":
            # Converting holds the weights a few times over, training gradients and two moments.
            short = no_room((4 if entry.peer or training else 1.5) * weights)
            if short:
                raise WorkerError(f"{short} beside the engines already loaded; name fewer")
        setup = Setup(
            self.source,
            self.work / f"{choice.engine}-{choice.precision}",
            choice.precision,
            plan.device,
            plan.threads,
        )
        if entry.peer:
            self.say(f"converting for {choice}")
            with Worker(plan.threads) as worker:
                worker.convert(entry.made_by, setup)
        self.say(f"loading {choice}")
        worker = stack.enter_context(Worker(plan.threads))
        settings = dict(entry.settings) | ({"training": True} if training else {})
        numbers = worker.open(entry.made_by, setup, **settings)
        if training:
            losses = self.references.read_losses(worker)
            check = self.references.check_losses(choice, losses)
        else:
            logits = self.references.read_logits(worker)
            check = self.references.check_logits(choice, logits)
        return _Resident(choice, worker, check, numbers)

    def _measure_size(
        self, kind: tuple[str, ...], size: Size, ids: Ids, residents: list[_Resident]
    ) -> None:
        """Time the tasks of one kind, whose calls are the same, on one size."""
        samples: dict[Choice, _Samples] = {}
        failed: dict[Choice, str] = {}
        able = [r for r in residents if set(kind) <= set(r.choice.entry.tasks)]

        def turn(resident: _Resident, kept: _Samples, anew: bool = False) -> None:
            try:
                if anew:
                    resident.worker.call("reset")
                self._call(kind, ids, resident, kept)
            except WorkerError as error:
                failed[resident.choice] = str(error)

        words = f"{' and '.join(kind)}, batch {size[0]}, {size[1]} tokens"
        for resident in able:
            self.say(f"{words}: {resident.choice} warms up")
            samples[resident.choice] = _Samples()
            turn(resident, _Samples(), anew=bool(resident.choice.entry.settings.get("compiled")))
        for done in range(self.plan.rounds):
            self.say(f"{words}: round {done + 1} of {self.plan.rounds}")
            self.order.shuffle(able)
            for resident in able:
                if resident.choice not in failed:
                    turn(resident, samples[resident.choice])
        for task in kind:
            self._add_rows(task, size, residents, samples, failed)

    def _call(self, kind: tuple[str, ...], ids: Ids, resident: _Resident, kept: _Samples) -> None:
        call = resident.worker.call
        if kind[0] in GENERATION:
            # The longer one first: it sets the size of a static cache.
            if "decode" in kind:
                kept.calls.append(call("generate", ids, self.plan.new_tokens))
            kept.firsts.append(call("generate", ids, 1))
        else:
            kept.calls.append(call("step" if kind[0] == "train" else "score", ids))

    def _add_rows(
        self,
        task: str,
        size: Size,
        residents: list[_Resident],
        samples: dict[Choice, _Samples],
        failed: dict[Choice, str],
    ) -> None:
        about: dict[str, Any] = {"task": task, "batch": size[0], "prompt_tokens": size[1]}
        n_new = {"prefill": 1, "decode": self.plan.new_tokens}.get(task, 0)
        about["new_tokens"] = n_new
        rows: dict[Choice, dict[str, Any]] = {}
        for resident in residents:
            choice = resident.choice
            if choice in failed:
                self._fail(choice, about, failed[choice])
            elif choice in samples:
                subject = {"engine": choice.engine, "precision": choice.precision, **about}
                row = self._row(task, size, n_new, resident, samples[choice])
                rows[choice] = {"subject": subject, **row}
        base = rows.get(self.plan.baseline)
        for choice, row in rows.items():
            if choice != self.plan.baseline and base and base["ok"] and row["ok"]:
                timings = (Timing(tuple(r["seconds"])) for r in (base, row))
                row["speedup"] = speedup(*timings)._asdict()
            self.rows.append(row)

    def _row(
        self, task: str, size: Size, n_new: int, resident: _Resident, samples: _Samples
    ) -> dict[str, Any]:
        n_rows, n_tokens = size
        seconds = samples.seconds(task, n_new)
        calls = samples.firsts if task == "prefill" else samples.calls
        if min(seconds) <= 0:
            return {
                "ok": None,
                "skipped": "too noisy: one token took as long as all; raise --new-tokens",
            }
        timing = Timing(tuple(seconds))
        tokens = n_rows if task == "decode" else n_rows * n_tokens
        row: dict[str, Any] = {
            "seconds": seconds,
            "p20": timing.quantile(20),
            "p50": timing.median,
            "p80": timing.quantile(80),
            "tokens_per_second": tokens / timing.median,
            "memory": calls[0]["memory"],
            "peak_memory": _most(call["peak_memory"] for call in calls),
        }
        if task == "decode":
            row["bytes"] = self._step_bytes(size, n_new, resident)
        return {**row, **self._verdict(task, size, n_new, resident, calls)}

    def _step_bytes(self, size: Size, n_new: int, resident: _Resident) -> float:
        """Of the weights, and of K and V of the tokens so far, on average over the steps."""
        n_rows, n_tokens = size
        held = n_rows * (n_tokens + n_new / 2)
        cache = 2 * self.config.n_layer * self.config.n_embd * held
        numbers = resident.numbers
        return numbers["weight_bytes"] * self.n_read + numbers["cache_bytes"] * cache

    def _verdict(
        self,
        task: str,
        size: Size,
        n_new: int,
        resident: _Resident,
        calls: list[dict[str, Any]],
    ) -> dict[str, Any]:
        """The engine's check, and what its timed calls returned."""
        check = resident.check
        found: dict[str, Any] = {
            "error": check.error,
            "reference_error": check.reference_error,
            "allowed": check.allowed,
            "equal_top1": check.equal_top1,
            "ok": check.ok,
        }
        if not check.ok:
            found["note"] = "its logits are off" if task != "train" else "its losses are off"
        values = [call["value"] for call in calls]
        if task in GENERATION:
            expected = np.array(self.references.ids[size])[:, :n_new]
            equal = min(_share_equal(value, expected) for value in values)
            found["equal_ids"] = equal
            if resident.choice.precision == "float32" and equal < 1:
                found |= {"ok": False, "note": "its ids are not those of transformers"}
        elif task == "score":
            loss = self.references.losses[size]
            worst = max(abs(value - loss) for value in values)
            allowed = self.references.loss_bound(check)
            found |= {"error": worst / loss, "allowed": allowed / loss}
            if not worst <= allowed:  # NaN is not
                found |= {"ok": False, "note": "its loss is not that of transformers"}
        elif not np.isfinite(values).all():
            found |= {"ok": False, "note": "its loss is not finite"}
        return found


def _kinds(tasks: list[str]) -> list[tuple[str, ...]]:
    """Tasks whose calls are the same, together."""
    generation = tuple(task for task in GENERATION if task in tasks)
    others = [(task,) for task in tasks if task not in GENERATION]
    return [generation, *others] if generation else [*others]


def _share_equal(ids: Ids, expected: Any) -> float:
    found = np.array(ids)
    return float((found == expected).mean()) if found.shape == expected.shape else 0.0


def _most(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known, default=None)
