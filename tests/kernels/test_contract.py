"""What every kernel file promises, checked on every kernel file."""

from collections.abc import Iterator

import pytest
import torch

from gptile.bench.traffic import count_traffic
from gptile.kernels.catalog import OPERATIONS
from gptile.kernels.launch import Shape

# What the interpreter runs in seconds; block edges and ragged sizes stay as they are.
MOST = {"rows": 3, "tokens": 70, "vocab": 300, "heads": 2, "in": 900, "out": 300}


def small(shape: Shape) -> Shape:
    """A case cut down for the interpreter."""
    return {name: min(size, MOST[name]) if name in MOST else size for name, size in shape.items()}


# Beyond a block, a tile and a program's run, in what the cases cut down do not reach.
BEYOND: dict[str, Shape] = {
    "layer_norm": {"rows": 600, "cols": 8},
    "attention": {"rows": 1, "tokens": 300, "heads": 1, "head_dim": 16},
    "linear": {"rows": 300, "in": 20, "out": 150, "activation": "gelu"},
    "linear_cross_entropy": {"rows": 2, "vocab": 8200},
    "sampling": {"rows": 1, "vocab": 2100},
}


def launches() -> Iterator[tuple[str, str, str]]:
    for operation, module in OPERATIONS.items():
        for direction in module.PASSES:
            for case in (*module.CASES, *(["beyond"] if operation in BEYOND else [])):
                yield operation, direction, case


@pytest.mark.parametrize(("operation", "direction", "case"), [*launches()])
def test_traffic_is_the_formula(operation: str, direction: str, case: str) -> None:
    """The bytes that the interpreter sees moved are those the file states."""
    module = OPERATIONS[operation]
    shape = BEYOND[operation] if case == "beyond" else small(module.CASES[case])
    dtype = torch.float16
    with count_traffic() as traffic:
        module.PASSES[direction].launch(shape, dtype, "cpu")
    work = module.PASSES[direction].work(shape, dtype)
    counted = (traffic.loaded, traffic.stored, traffic.distinct)
    assert counted == (work.loaded, work.stored, work.distinct)
