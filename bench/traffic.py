"""Count the bytes that kernels really load and store, in Triton's interpreter."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np

from gptile.kernels.launch import interpreting
from gptile.model.errors import UserError


@dataclass
class Traffic:
    """Bytes of unmasked lanes: ``loaded`` and ``stored`` with re-reads, ``distinct`` once for each
    kernel, address and direction."""

    loaded: int = 0
    stored: int = 0
    distinct: int = 0


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count what kernels launched in the block move.

    Raises:
        UserError: without TRITON_INTERPRET=1: real loads cannot be watched.
    """
    if not interpreting():
        raise UserError("counting bytes needs TRITON_INTERPRET=1 before Python starts")
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    traffic = Traffic()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    run = GridExecutor.__call__
    # Addresses of the kernel that runs, by direction and bytes of an element.
    touched: dict[tuple[str, int], list[np.ndarray]] = {}

    def touch(direction: str, pointers: Any, mask: Any) -> int:
        addresses = pointers.data[mask.data.astype(bool)]
        size = pointers.get_element_ty().primitive_bitwidth // 8
        touched.setdefault((direction, size), []).append(np.unique(addresses))
        return addresses.size * size

    def counting_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        traffic.loaded += touch("load", pointers, mask)
        return load(self, pointers, mask, *rest)

    def counting_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        traffic.stored += touch("store", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def counting_run(self: Any, *args: Any, **options: Any) -> None:
        touched.clear()
        run(self, *args, **options)
        for (_, size), addresses in touched.items():
            traffic.distinct += np.unique(np.concatenate(addresses)).size * size

    with ExitStack() as patches:
        for where, name, counting in (
            (InterpreterBuilder, "create_masked_load", counting_load),
            (InterpreterBuilder, "create_masked_store", counting_store),
            (GridExecutor, "__call__", counting_run),
        ):
            patches.enter_context(patch.object(where, name, counting))
        yield traffic
