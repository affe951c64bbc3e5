"""The operations that ``gptile bench kernels`` times, and the least that each must do.

An operation is one that a model calls (:class:`~gptile.kernels.ops.Ops`), on the cases of its
kernel file, whose arguments the kernel file makes. Bytes and FLOPs are counted from the algorithm,
not from anybody's kernel, so that rates of different providers can be compared: see
:func:`least_work`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

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
    sampling,
    small_linear,
)
from gptile.kernels.launch import Shape

Arguments: TypeAlias = dict[str, Any]
"""Of an operation, by name."""


class Backward(NamedTuple):
    """An operation's backward pass.

    Attributes:
        of: the arguments that get a gradient.
        reads: the arguments it cannot do without.
        flops: as a multiple of the forward pass's.
    """

    of: tuple[str, ...]
    reads: tuple[str, ...]
    flops: float


def _all(given: Arguments) -> int:
    return nbytes(given.values())


@dataclass(frozen=True)
class Operation:
    """What is timed.

    Attributes:
        module: the kernel file, whose CASES these are.
        inputs: makes the arguments of a case.
        reference: in plain PyTorch; in fp64, the truth.
        ours: in Triton.
        flops: of the forward pass on a case, a multiply-add being two.
        backward: None where nothing is differentiated.
        moved: bytes that the forward pass cannot but read of its arguments, or write to them.
        written: the arguments it writes to.
        takes: which of the cases are its.
    """

    module: ModuleType
    inputs: Callable[[Shape, torch.dtype, torch.device | str], Arguments]
    reference: Callable[..., Any]
    ours: Callable[..., Any]
    flops: Callable[[Shape], int]
    backward: Backward | None = None
    moved: Callable[[Arguments], int] = _all
    written: tuple[str, ...] = ()
    takes: Callable[[Shape], bool] = lambda shape: True

    @property
    def cases(self) -> dict[str, Shape]:
        """By name."""
        return {name: shape for name, shape in self.module.CASES.items() if self.takes(shape)}


def nbytes(values: Iterable[Any]) -> int:
    """Of the tensors among ``values`` and in their tuples."""
    total = 0
    for value in values:
        if isinstance(value, Tensor):
            total += value.numel() * value.itemsize
        elif isinstance(value, tuple):
            total += nbytes(value)
    return total


def _looked_up(given: Arguments) -> int:
    """Of the tables, only the rows that are looked up."""
    ids, positions, wte, wpe = given.values()
    rows = ids.unique().numel() + positions.unique().numel()
    return nbytes((ids, positions)) + rows * wpe.shape[1] * wte.itemsize


def _attended(given: Arguments) -> int:
    """Of the cache, only what is in use."""
    others = (value for name, value in given.items() if not name.endswith("_cache"))
    return nbytes(others) + _in_cache(given, given["starts"] + given["counts"])


def _appended(given: Arguments) -> int:
    """Of the cache, only what is written."""
    others = (value for name, value in given.items() if not name.endswith("_cache"))
    return nbytes(others) + _in_cache(given, given["counts"])


def _in_cache(given: Arguments, tokens: Tensor) -> int:
    cache = given["k_cache"]
    return 2 * int(tokens.sum()) * cache.shape[1] * cache.shape[3] * cache.itemsize


def _elements(shape: Shape) -> int:
    return shape["rows"] * shape["cols"]


def _product_flops(shape: Shape) -> int:
    rows = shape["rows"] if "rows" in shape else shape["few"]
    return 2 * rows * shape["in"] * shape["out"]


def _attention_flops(shape: Shape, start: int = 0) -> int:
    tokens = shape["tokens"]
    pairs = tokens * start + tokens * (tokens + 1) // 2
    return 4 * shape["rows"] * shape["heads"] * pairs * shape["head_dim"]


def _decode_flops(shape: Shape) -> int:
    return _attention_flops(shape, shape["length"] - shape["tokens"])


def _append_flops(shape: Shape) -> int:
    return 3 * shape["rows"] * shape["tokens"] * shape["heads"] * shape["head_dim"]


def _head_flops(shape: Shape) -> int:
    return 2 * shape["rows"] * shape["vocab"] * shape["cols"]


def _sampling(temperature: float, filters: bool) -> Operation:
    return Operation(
        sampling,
        partial(sampling.inputs, temperature=temperature, filters=filters),
        sampling.sample_reference,
        sampling.sample_triton,
        # The log-sum-exp; whatever else it takes is not what any implementation must do.
        flops=lambda shape: 4 * shape["rows"] * shape["vocab"],
    )


OPERATIONS: dict[str, Operation] = {
    "embedding": Operation(
        embedding,
        embedding.inputs,
        embedding.embedding_reference,
        embedding.embedding_triton,
        flops=lambda shape: shape["tokens"] * _elements(shape),
        backward=Backward(of=("wte", "wpe"), reads=("ids", "positions"), flops=2),
        moved=_looked_up,
    ),
    "layer_norm": Operation(
        layer_norm,
        partial(layer_norm.inputs, add=False),
        layer_norm.layer_norm_reference,
        layer_norm.layer_norm_triton,
        flops=lambda shape: 8 * _elements(shape),
        backward=Backward(of=("x", "weight", "bias"), reads=("x", "weight"), flops=1.5),
    ),
    "add_layer_norm": Operation(
        layer_norm,
        partial(layer_norm.inputs, add=True),
        layer_norm.add_layer_norm_reference,
        layer_norm.add_layer_norm_triton,
        flops=lambda shape: 9 * _elements(shape),
        backward=Backward(of=("x", "delta", "weight", "bias"), reads=("x", "weight"), flops=1.5),
    ),
    "linear_activation": Operation(
        linear,
        linear.inputs,
        linear.linear_activation_reference,
        linear.linear_activation_triton,
        flops=_product_flops,
        backward=Backward(of=("x", "weight", "bias"), reads=("x", "weight"), flops=2),
        takes=lambda shape: "activation" in shape,
    ),
    "linear_residual": Operation(
        linear,
        linear.inputs,
        linear.linear_residual_reference,
        linear.linear_residual_triton,
        flops=_product_flops,
        backward=Backward(of=("x", "weight", "bias", "residual"), reads=("x", "weight"), flops=2),
        takes=lambda shape: "activation" not in shape,
    ),
    "small_linear": Operation(
        small_linear,
        small_linear.inputs,
        small_linear.small_linear_reference,
        small_linear.small_linear_triton,
        flops=_product_flops,
    ),
    "attention": Operation(
        attention,
        attention.inputs,
        attention.attention_reference,
        attention.attention_triton,
        flops=_attention_flops,
        # The scores again, and two products for each of the forward pass's two.
        backward=Backward(of=("q", "k", "v"), reads=("q", "k", "v"), flops=2.5),
    ),
    "cached_attention": Operation(
        attention,
        attention.cached_inputs,
        decode_attention.decode_attention_reference,
        decode_attention.decode_attention_triton,
        flops=lambda shape: _attention_flops(shape, shape["tokens"]),
        moved=_attended,
    ),
    "decode_attention": Operation(
        decode_attention,
        decode_attention.inputs,
        decode_attention.decode_attention_reference,
        decode_attention.decode_attention_triton,
        flops=_decode_flops,
        moved=_attended,
    ),
    "kv_append": Operation(
        kv_append,
        kv_append.inputs,
        kv_append.kv_append_reference,
        kv_append.kv_append_triton,
        flops=_append_flops,
        moved=_appended,
        written=("k_cache", "v_cache"),
    ),
    "linear_cross_entropy": Operation(
        linear_cross_entropy,
        linear_cross_entropy.inputs,
        linear_cross_entropy.linear_cross_entropy_reference,
        linear_cross_entropy.linear_cross_entropy_triton,
        flops=_head_flops,
        backward=Backward(of=("x", "weight"), reads=("x", "weight", "targets"), flops=2),
    ),
    "sample_greedy": _sampling(0.0, filters=False),
    "sample_temperature": _sampling(0.8, filters=False),
    "sample_filters": _sampling(0.8, filters=True),
}
"""By name. ``linear`` and ``layer_norm_linear`` of a model are PyTorch's product and layer_norm for
many rows, and small_linear's kernels for few."""


def least_work(
    operation: Operation, shape: Shape, given: Arguments, outputs: Iterable[Any], direction: str
) -> tuple[int, int]:
    """Bytes and FLOPs that no implementation of a pass does without, the same for every provider.

    Bytes: the forward pass reads its arguments once and writes its outputs once; the backward pass
    reads the outputs' gradients and what it needs of the arguments, and writes their gradients;
    both together read the arguments once.
    """
    forward, results = operation.flops(shape), nbytes(outputs)
    if direction == "forward":
        return operation.moved(given) + results, forward
    assert operation.backward is not None
    gradients = nbytes(given[name] for name in operation.backward.of)
    backward = int(operation.backward.flops * forward)
    if direction == "backward":
        reads = nbytes(given[name] for name in operation.backward.reads)
        return reads + results + gradients, backward
    return operation.moved(given) + 2 * results + gradients, forward + backward
