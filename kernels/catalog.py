"""Every kernel file that the tests, the compile check, the benchmarks and ``gptile inspect`` read.

Each has ``CASES`` (shapes by name) and ``PASSES`` (:class:`~gptile.kernels.launch.Pass` by name).
"""

from types import ModuleType

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

OPERATIONS: dict[str, ModuleType] = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        layer_norm,
        attention,
        decode_attention,
        embedding,
        kv_append,
        linear,
        linear_cross_entropy,
        sampling,
        small_linear,
    )
}
