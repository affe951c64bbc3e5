"""Count the bytes that kernels really load and store, in Triton's interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from gptile.model.errors import UserError


@dataclass
class Traffic:
    """Bytes of unmasked lanes, re-reads included."""

    loaded: int = 0
    stored: int = 0


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count what kernels launched in the block move.

    Raises:
        UserError: without TRITON_INTERPRET=1: real loads cannot be watched.
    """
    import triton
    from triton.runtime.interpreter import InterpreterBuilder

    if not triton.knobs.runtime.interpret:
        raise UserError("counting bytes needs TRITON_INTERPRET=1 before Python starts")
    traffic = Traffic()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def bytes_of(pointers: Any, mask: Any) -> int:
        return int(np.count_nonzero(mask.data)) * pointers.get_element_ty().primitive_bitwidth // 8

    def counting_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        traffic.loaded += bytes_of(pointers, mask)
        return load(self, pointers, mask, *rest)

    def counting_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        traffic.stored += bytes_of(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    InterpreterBuilder.create_masked_load = counting_load
    InterpreterBuilder.create_masked_store = counting_store
    try:
        yield traffic
    finally:
        InterpreterBuilder.create_masked_load = load
        InterpreterBuilder.create_masked_store = store
