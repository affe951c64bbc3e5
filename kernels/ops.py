"""The set of operations a model runs on."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gptile.kernels.attention import attention_reference
from gptile.kernels.decode_attention import decode_attention_reference
from gptile.kernels.embedding import embedding_reference
from gptile.kernels.kv_append import kv_append_reference
from gptile.kernels.layer_norm import add_layer_norm_reference, layer_norm_reference
from gptile.kernels.linear import linear_activation_reference, linear_reference
from gptile.kernels.linear_cross_entropy import linear_cross_entropy_reference
from gptile.kernels.sampling import sample_reference


@dataclass(frozen=True)
class Ops:
    """One implementation per operation; each field's contract is its reference's docstring.

    A model holds one ``Ops``. ``Ops.torch().replace(attention=mine)`` swaps a single operation.
    """

    embedding: Callable[..., Tensor]
    layer_norm: Callable[..., Tensor]
    add_layer_norm: Callable[..., tuple[Tensor, Tensor]]
    linear: Callable[..., Tensor]
    linear_activation: Callable[..., Tensor]
    attention: Callable[..., Tensor]
    kv_append: Callable[..., Tensor]
    decode_attention: Callable[..., Tensor]
    linear_cross_entropy: Callable[..., Tensor]
    sample: Callable[..., tuple[Tensor, Tensor]]

    @classmethod
    def torch(cls) -> "Ops":
        """The plain PyTorch reference of every operation; runs on any device."""
        return cls(
            embedding=embedding_reference,
            layer_norm=layer_norm_reference,
            add_layer_norm=add_layer_norm_reference,
            linear=linear_reference,
            linear_activation=linear_activation_reference,
            attention=attention_reference,
            kv_append=kv_append_reference,
            decode_attention=decode_attention_reference,
            linear_cross_entropy=linear_cross_entropy_reference,
            sample=sample_reference,
        )

    def replace(self, **operations: Callable) -> "Ops":
        """A copy with some operations swapped; an unknown name raises TypeError."""
        return dataclasses.replace(self, **operations)
