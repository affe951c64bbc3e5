"""Which engines of a benchmark compute the right thing: the gate in front of every speed-up.

The truth is transformers in fp64 with eager attention, on the same device. Our logits may be as far
from it as :mod:`gptile.bench.parity` allows, the other engines' as :data:`BOUNDS` does. In fp32 the
ids decoded while the clock runs must equal those of transformers in fp32. A loss may differ from
transformers' by what the largest errors of both engines' logits can change it. Training is judged
by the losses of :data:`TRAINED` steps, as parity would.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from gptile.bench.engines import REFERENCE, Choice, Ids, Setup
from gptile.bench.parity import allowed_error
from gptile.bench.workers import Worker, WorkerError
from gptile.model.errors import UserError

CHECKED = (2, 64)
"""Rows and tokens whose logits are compared."""
TRAINED = 3
"""Steps whose losses are compared."""
BOUNDS = {
    "float32": (1e-3, 0.98),
    "float16": (1e-2, 0.9),
    "bfloat16": (5e-2, 0.8),
    "int8": (1e-1, 0.8),
}
"""By precision: how far the logits of an engine that is not ours may be off, relative to fp64's,
and the least share of positions whose likeliest token is fp64's. Rounding costs a GPT-2 about 5e-7,
1e-3, 8e-3 and 2e-2; a forgotten bias, mask or position costs more than the bound. That of fp32
leaves room for llama.cpp, whose GELU reads a 16-bit table (3e-4)."""

_FP32_BYTES = 4
_LIBRARIES = 10**9
"""Bytes, roughly, of a process with PyTorch and transformers and no model."""

Size = tuple[int, int]


class Check(NamedTuple):
    """An engine's logits or losses beside fp64's.

    Attributes:
        error: relative, ``||x - truth|| / ||truth||``.
        reference_error: of transformers in that dtype; None for int8.
        allowed: the bound on ``error``.
        largest: absolute error of a logit.
        equal_top1: share of positions with the same likeliest token; None for losses.
        ok: the verdict.
    """

    error: float
    reference_error: float | None
    allowed: float
    largest: float
    equal_top1: float | None
    ok: bool


def no_room(n_bytes: float) -> str:
    """Why a process that holds so much, and its libraries, had better not start; or nothing."""
    n_bytes += _LIBRARIES
    free = psutil.virtual_memory().available
    if n_bytes <= free:
        return ""
    return f"needs about {n_bytes / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"


class References:
    """What transformers computes: in fp64, and in the precisions that are compared.

    Attributes:
        ids: that fp32 decodes, by size of the prompts.
        losses: of fp32, by size.
        checked: the ids whose logits are compared.
    """

    def __init__(
        self,
        source: Path,
        work: Path,
        checked: Ids,
        *,
        n_parameters: int,
        device: str,
        threads: int,
        say: Callable[[str], object],
    ) -> None:
        self.source, self.work, self.checked = source, work, checked
        self.fp32_bytes = _FP32_BYTES * n_parameters
        self.device, self.threads, self.say = device, threads, say
        self.ids: dict[Size, Ids] = {}
        self.losses: dict[Size, float] = {}
        self._logits: Any = None
        self._errors: dict[str, tuple[float, float]] = {}
        self._trained: Any = None
        self._trained_errors: dict[str, float] = {}

    def infer(
        self,
        precisions: Iterable[str],
        prompts: Mapping[Size, Ids],
        n_new: int,
        scored: Mapping[Size, Ids],
    ) -> None:
        """Compute the logits in fp64 and each of ``precisions``, and in fp32 what the calls that
        will be timed ought to return.

        Raises:
            UserError: if transformers cannot do it here.
        """
        self._logits = self._with("float64", 2, self.read_logits)
        for precision in dict.fromkeys(["float32", *precisions]):

            def work(worker: Worker, precision: str = precision) -> Any:
                logits = self.read_logits(worker)
                if precision == "float32":
                    for size, ids in prompts.items():
                        self.ids[size] = worker.call("generate", ids, n_new)["value"]
                    for size, ids in scored.items():
                        self.losses[size] = worker.call("score", ids)["value"]
                return logits

            logits = self._with(precision, 1, work)
            self._errors[precision] = (self._error(logits), self._largest(logits))

    def train(self, precisions: Iterable[str]) -> None:
        """Take steps of training in fp64 and each of ``precisions``.

        Raises:
            UserError: if transformers cannot do it here.
        """
        self._trained = np.array(self._with("float64", 8, self.read_losses, training=True))
        for precision in precisions:
            losses = self._with(precision, 4, self.read_losses, training=True)
            self._trained_errors[precision] = self._loss_error(losses)

    def read_logits(self, worker: Worker) -> Any:
        """The logits of a worker's engine on ``checked``."""
        path = self.work / "logits.npy"
        worker.call("logits", self.checked, save=path)
        logits = np.load(path)
        path.unlink()
        return logits

    def read_losses(self, worker: Worker) -> list[float]:
        """The losses of a worker's trainer, a step each."""
        return [worker.call("step", self.checked)["value"] for _ in range(TRAINED)]

    def check_logits(self, choice: Choice, logits: Any) -> Check:
        """The verdict on an engine's logits."""
        error, largest = self._error(logits), self._largest(logits)
        same = float(np.mean(logits.argmax(-1) == self._logits.argmax(-1)))
        reference_error = self._errors.get(choice.precision, (None,))[0]
        if choice.ours and reference_error is not None:
            allowed, least = allowed_error(reference_error, _dtype(choice)), 0.0
        else:
            allowed, least = BOUNDS[choice.precision]
        # Written so that NaN is not ok.
        ok = error <= allowed and same >= least
        return Check(error, reference_error, allowed, largest, same, ok)

    def check_losses(self, choice: Choice, losses: list[float]) -> Check:
        """The verdict on an engine's training."""
        error = self._loss_error(losses)
        reference_error = self._trained_errors[choice.precision]
        # How much less than a step a few numbers are off is luck.
        dtype = _dtype(choice)
        allowed = allowed_error(max(reference_error, torch.finfo(dtype).eps), dtype)
        return Check(error, reference_error, allowed, 0.0, None, error <= allowed)

    def loss_bound(self, check: Check) -> float:
        """How far two losses may be apart: logits off by at most e move the logarithm of their
        summed exponentials, and the target's own logit, by at most e each."""
        return 2 * (check.largest + self._errors["float32"][1])

    def _error(self, logits: Any) -> float:
        return float(np.linalg.norm(logits - self._logits) / np.linalg.norm(self._logits))

    def _largest(self, logits: Any) -> float:
        return float(np.abs(logits - self._logits).max())

    def _loss_error(self, losses: list[float]) -> float:
        difference = np.array(losses) - self._trained
        return float(np.linalg.norm(difference) / np.linalg.norm(self._trained))

    def _with(
        self, precision: str, size: float, work: Callable[[Worker], Any], training: bool = False
    ) -> Any:
        """What ``work`` makes of transformers in a process that takes ``size`` times the weights in
        fp32."""
        what = f"the reference, transformers in {precision}"
        self.say(what)
        short = no_room(size * self.fp32_bytes) if self.device == "cpu" else ""
        if short:
            raise UserError(f"{what}, {short}: take a smaller model or a machine with more")
        setup = Setup(self.source, self.work, precision, self.device, self.threads)
        entry = Choice(REFERENCE, precision).entry
        try:
            with Worker(self.threads) as worker:
                worker.open(entry.made_by, setup, training=training, **entry.settings)
                return work(worker)
        except WorkerError as error:
            raise UserError(f"{what}, failed: {error}") from None


def _dtype(choice: Choice) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, choice.precision)
    return dtype
