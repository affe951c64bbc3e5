"""The set of operations a model runs on."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import device as Device  # the class has a method of the name torch
from torch import dtype as Dtype

from gptile.kernels.attention import MAX_HEAD_DIM, attention_reference, attention_triton
from gptile.kernels.decode_attention import decode_attention_reference, decode_attention_triton
from gptile.kernels.embedding import embedding_reference, embedding_triton
from gptile.kernels.jit import HAS_TRITON
from gptile.kernels.kv_append import kv_append_reference, kv_append_triton
from gptile.kernels.launch import DTYPES
from gptile.kernels.layer_norm import (
    MAX_COLUMNS,
    add_layer_norm_reference,
    add_layer_norm_triton,
    layer_norm_reference,
    layer_norm_triton,
)
from gptile.kernels.linear import (
    layer_norm_linear_reference,
    layer_norm_linear_triton,
    linear_activation_reference,
    linear_activation_triton,
    linear_reference,
    linear_residual_reference,
    linear_residual_triton,
    linear_triton,
)
from gptile.kernels.linear_cross_entropy import (
    linear_cross_entropy_reference,
    linear_cross_entropy_triton,
)
from gptile.kernels.sampling import sample_reference, sample_triton

MIN_CAPABILITY = (8, 0)
"""Of an NVIDIA GPU: below it Triton has no tensor cores to multiply tiles with (measured for sm_75:
the same attention kernel compiles to kilobytes of stack a thread)."""


def kernels_take(width: int, head_dim: int) -> bool:
    """Whether Triton's kernels take a model of these sizes."""
    return width <= MAX_COLUMNS and head_dim <= MAX_HEAD_DIM


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
    linear_residual: Callable[..., Tensor]
    layer_norm_linear: Callable[..., Tensor]
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
            linear_residual=linear_residual_reference,
            layer_norm_linear=layer_norm_linear_reference,
            attention=attention_reference,
            kv_append=kv_append_reference,
            decode_attention=decode_attention_reference,
            linear_cross_entropy=linear_cross_entropy_reference,
            sample=sample_reference,
        )

    @classmethod
    def triton(cls) -> "Ops":
        """Our kernels: for a GPU, or for CPU tensors under TRITON_INTERPRET=1."""
        return cls(
            embedding=embedding_triton,
            layer_norm=layer_norm_triton,
            add_layer_norm=add_layer_norm_triton,
            linear=linear_triton,
            linear_activation=linear_activation_triton,
            linear_residual=linear_residual_triton,
            layer_norm_linear=layer_norm_linear_triton,
            attention=attention_triton,
            kv_append=kv_append_triton,
            decode_attention=decode_attention_triton,
            linear_cross_entropy=linear_cross_entropy_triton,
            sample=sample_triton,
        )

    @classmethod
    def default(
        cls, device: Device, dtype: Dtype = DTYPES[0], *, width: int = 1, head_dim: int = 1
    ) -> "Ops":
        """Triton's for a model of that width and head_dim that they take (:func:`kernels_take`), on
        a GPU that can run them (:data:`MIN_CAPABILITY`); PyTorch's elsewhere."""
        if device.type != "cuda" or not HAS_TRITON:
            return cls.torch()
        if dtype not in DTYPES or not kernels_take(width, head_dim):
            return cls.torch()
        if torch.version.hip or torch.cuda.get_device_capability(device) >= MIN_CAPABILITY:
            return cls.triton()
        return cls.torch()

    def replace(self, **operations: Callable) -> "Ops":
        """A copy with some operations swapped; an unknown name raises TypeError."""
        return dataclasses.replace(self, **operations)
