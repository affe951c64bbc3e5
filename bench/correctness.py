"""Is a provider's result right? Judged against the reference in fp64, on the same numbers.

The error of an output or gradient is ``||x - truth|| / ||truth||``; of indices, the share that
differs. It may be at most :data:`ALLOWED_RATIO` times that of eager PyTorch in the same dtype, plus
one step of that dtype: no tolerance is picked by hand.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptile.bench.operations import Arguments, Operation

ALLOWED_RATIO = {"output": 2.0, "gradient": 3.0}


class Verdict(NamedTuple):
    """On the quantity that uses up most of what it is allowed.

    Attributes:
        quantity: an output, an argument written to, or the gradient of an argument.
        error: of the provider.
        reference_error: of eager PyTorch.
        allowed: by the rule above.
    """

    quantity: str
    error: float
    reference_error: float
    allowed: float

    @property
    def ok(self) -> bool:
        """Written so that NaN is not ok."""
        return self.error <= self.allowed


class Check:
    """The truth about an operation on some arguments, and eager PyTorch's error.

    Args:
        dtype: of the arguments.
    """

    def __init__(self, operation: Operation, given: Arguments, dtype: torch.dtype) -> None:
        self.operation, self.given, self.dtype = operation, given, dtype
        self._known: dict[bool, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}

    def judge(self, function: Callable[..., Any], direction: str) -> Verdict:
        """A function in one direction: ``forward``, its outputs without autograd; ``backward``,
        its gradients; ``both``, outputs and gradients."""
        recorded = direction != "forward"
        if recorded not in self._known:
            exact = {name: _fp64(value) for name, value in self.given.items()}
            reference = self.operation.reference
            self._known[recorded] = (
                self._results(reference, exact, recorded),
                self._results(reference, self.given, recorded),
            )
        truth, eager = self._known[recorded]
        found = self._results(function, self.given, recorded)
        return max(
            (
                self._compare(name, found[name], eager[name], truth[name])
                for name in truth
                if direction != "backward" or name.startswith("gradient")
            ),
            key=_strain,
        )

    def _results(
        self, function: Callable[..., Any], given: Arguments, recorded: bool
    ) -> dict[str, Tensor]:
        given = dict(given)
        for name in self.operation.written:
            given[name] = torch.zeros_like(given[name])  # what an earlier call wrote is gone
        with torch.set_grad_enabled(recorded):
            outputs = as_tuple(function(**given))
        results = {f"output {index}": output.detach() for index, output in enumerate(outputs)}
        results |= {f"output {name}": given[name] for name in self.operation.written}
        if recorded and self.operation.backward:
            of = self.operation.backward.of
            gradients = differentiate(outputs, given, of, output_gradients(outputs, self.dtype))
            results |= {f"gradient of {n}": g for n, g in zip(of, gradients, strict=True)}
        return results

    def _compare(self, name: str, found: Tensor, eager: Tensor, truth: Tensor) -> Verdict:
        error, reference_error = _error(found, truth), _error(eager, truth)
        step = torch.finfo(self.dtype).eps if truth.is_floating_point() else 0.0
        allowed = ALLOWED_RATIO[name.partition(" ")[0]] * reference_error + step
        return Verdict(name, error, reference_error, allowed)


def _strain(verdict: Verdict) -> float:
    if not verdict.ok:
        return math.inf
    return verdict.error / verdict.allowed if verdict.allowed else 0.0


def _error(found: Tensor, truth: Tensor) -> float:
    if found.shape != truth.shape:
        return math.nan
    if not truth.is_floating_point():
        return float((found != truth).double().mean())
    scale = float(truth.norm()) or 1.0
    return float((found.double() - truth).norm()) / scale


def _fp64(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_fp64, value))
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    """An operation's result, be it one tensor or several."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


def output_gradients(outputs: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    """What a backward pass starts from: the same numbers, exact in ``dtype``, for every provider;
    1 for a loss."""
    gradients = []
    for index, output in enumerate(outputs):
        generator = torch.Generator(output.device).manual_seed(index)
        normal = torch.randn(output.shape, generator=generator, device=output.device)
        values = normal.to(dtype) if output.dim() else torch.ones_like(normal)
        gradients.append(values.to(output.dtype))
    return gradients


def differentiate(
    outputs: tuple[Tensor, ...],
    given: Arguments,
    of: tuple[str, ...],
    gradients: list[Tensor],
    *,
    keep: bool = False,
) -> tuple[Tensor, ...]:
    """The gradients of some arguments; ``keep`` leaves the graph for another time."""
    wanted = [given[name] for name in of]
    return torch.autograd.grad(outputs, wanted, gradients, retain_graph=keep)
