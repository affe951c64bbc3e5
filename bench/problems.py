"""What a run of ``gptile bench kernels`` is asked for, and the arguments it is done on."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from gptile.bench.correctness import as_tuple, output_gradients
from gptile.bench.operations import OPERATIONS, Arguments, Operation, nbytes
from gptile.kernels.launch import Shape
from gptile.kernels.small_linear import MAX_ROWS
from gptile.model.errors import UserError

DIRECTIONS = ("forward", "backward", "both")
PASSES = (*DIRECTIONS, "overhead")

_MIB = 2**20


class Limit(NamedTuple):
    """The largest case that is run: FLOPs of the forward pass and bytes of the arguments."""

    flops: float
    nbytes: float


_CPU_LIMIT = Limit(2e11, 2048 * _MIB)
_QUICK_LIMIT = Limit(5e9, 256 * _MIB)


@dataclass(frozen=True)
class Request:
    """What to run; of ``cases``, None is all of them.

    Attributes:
        passes: of :data:`PASSES`.
        quick: of each operation only the largest case within :data:`_QUICK_LIMIT`, which takes two
            CPU cores some tens of milliseconds.
    """

    operations: tuple[str, ...]
    cases: tuple[str, ...] | None
    passes: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    providers: tuple[str, ...]
    rounds: int
    quick: bool
    device: torch.device
    seed: int = 0

    @property
    def n_steps(self) -> int:
        """Of the progress: the peaks, each problem, each operation's overhead."""
        overheads = len(self.operations) if "overhead" in self.passes else 0
        return 1 + len(self.problems()) + overheads

    def problems(self) -> list["Problem"]:
        """Each operation on each case in each dtype.

        Raises:
            UserError: for a case that none of the operations has.
        """
        known = {case: None for name in self.operations for case in OPERATIONS[name].cases}
        for case in self.cases or ():
            if case not in known:
                raise UserError(f"unknown case {case!r}; one of {', '.join(known)}")
        return [
            Problem(name, case, OPERATIONS[name].cases[case], dtype)
            for name in self.operations
            for case in self._chosen(OPERATIONS[name])
            for dtype in self.dtypes
        ]

    def _chosen(self, operation: Operation) -> list[str]:
        if self.cases is not None:
            return [case for case in operation.cases if case in self.cases]
        if not self.quick:
            return [*operation.cases]
        sizes = {case: _size(operation, shape) for case, shape in operation.cases.items()}
        fitting = [case for case in sizes if _fits(sizes[case], _QUICK_LIMIT)]
        return [max(fitting, key=lambda case: sizes[case])]


@dataclass(frozen=True)
class Problem:
    """An operation on one of its cases."""

    name: str
    case: str
    shape: Shape
    dtype: torch.dtype

    @property
    def operation(self) -> Operation:
        """By its name."""
        return OPERATIONS[self.name]

    def subject(self, direction: str, provider: str) -> dict[str, str]:
        """Of a row."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {
            "operation": self.name,
            "case": self.case,
            "pass": direction,
            "dtype": dtype,
            "provider": provider,
        }

    def too_large(self, device: torch.device) -> str | None:
        """Why it is not for this device, if so."""
        flops, size = _size(self.operation, self.shape)
        if device.type == "cuda" or _fits((flops, size), _CPU_LIMIT):
            return None
        return (
            f"{flops / 1e9:.0f} GFLOP and {size / _MIB:.0f} MiB of arguments: too large for a CPU"
        )


def _size(operation: Operation, shape: Shape) -> tuple[int, int]:
    given = operation.inputs(shape, torch.float32, "meta")
    return operation.flops(shape), nbytes(given.values())


def _fits(size: tuple[int, int], limit: Limit) -> bool:
    return size[0] <= limit.flops and size[1] <= limit.nbytes


def tiny(name: str, dtype: torch.dtype) -> Problem:
    """An operation whose work takes next to no time: its first case with every size cut down, but
    to one row more than the kernels for few rows take."""
    case = next(iter(OPERATIONS[name].cases.values()))
    shape = {
        size: min(value, MAX_ROWS + 1) if type(value) is int else value
        for size, value in case.items()
    }
    return Problem(name, "tiny", shape, dtype)


class Copies:
    """A problem's arguments as often as they are needed, each made when it first is.

    Attributes:
        outputs: of the reference on the first of them.
    """

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self._problem, self._device = problem, device
        self._arguments: list[Arguments] = []
        self._gradients: list[list[torch.Tensor]] = []
        with torch.no_grad():
            self.outputs = as_tuple(problem.operation.reference(**self.first))

    @property
    def first(self) -> Arguments:
        """One is always there."""
        return self.arguments(1)[0]

    def arguments(self, n: int) -> list[Arguments]:
        """``n`` of them, in which what has a gradient asks for it."""
        operation = self._problem.operation
        of = operation.backward.of if operation.backward else ()
        while len(self._arguments) < n:
            given = operation.inputs(self._problem.shape, self._problem.dtype, self._device)
            for name in of:
                given[name] = given[name].detach().requires_grad_()
            self._arguments.append(given)
        return self._arguments[:n]

    def gradients(self, n: int) -> list[list[torch.Tensor]]:
        """What ``n`` backward passes start from."""
        while len(self._gradients) < n:
            self._gradients.append(output_gradients(self.outputs, self._problem.dtype))
        return self._gradients[:n]
