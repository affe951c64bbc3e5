"""Triton where there is one, so that kernel files import anywhere.

Without it the decorator leaves a kernel alone, and launching one fails; only asking for Triton's
operations does that.
"""

from types import SimpleNamespace
from typing import Any

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False
    triton: Any = SimpleNamespace(jit=lambda kernel: kernel)  # type: ignore[no-redef]
    tl: Any = SimpleNamespace(constexpr=object)  # type: ignore[no-redef]

__all__ = ["HAS_TRITON", "tl", "triton"]
