"""Decode steps on a CPU by the compiled network of :mod:`gptile.kernels.cpu_decode`."""

from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from gptile.kernels.activations import ACTIVATIONS
from gptile.model.errors import UserError
from gptile.model.gpt2 import GPT2, Block
from gptile.model.kv_cache import KVCache

try:
    import numba

    from gptile.kernels.cpu_decode import (
        FUNCTIONS,
        PRECISIONS,
        Packed,
        PackedBlocks,
        PackedModel,
        PackedNorm,
        decode_step,
        pack,
    )
except ImportError:
    raise UserError(
        "numba compiles the fast decode step: in the repository, pip install '.[fast]'"
    ) from None
except RuntimeError as error:  # Numba's, where it can keep compiled code nowhere
    raise UserError(f"{error}; set NUMBA_CACHE_DIR to a directory that can be written") from None


def set_threads(n: int) -> None:
    """Of PyTorch and of Numba: they work in turn, so both may have every core."""
    torch.set_num_threads(n)
    numba.set_num_threads(min(n, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]


class CPUDecoder:
    """One token a row and step, everything else left to the model.

    It packs the weights once: a later change of the model's parameters may or may not be seen.
    """

    def __init__(self, model: GPT2, precision: str = "float32") -> None:
        """Pack the weights.

        Args:
            model: float32, on the CPU, in evaluation mode.
            precision: of the weight matrices, one of PRECISIONS.

        Raises:
            UserError: for another model or precision.
        """
        weight = model.wte.weight
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            raise UserError(
                f"the fast decode step takes a float32 model on a CPU, not {weight.dtype} on "
                f"{weight.device}"
            )
        if precision not in PRECISIONS:
            raise UserError(f"weights are {', '.join(PRECISIONS)}, not {precision!r}")
        self.config = model.config
        wte = pack(model.wte.weight, None, precision)
        tied = model.config.tie_word_embeddings
        self.packed = PackedModel(
            wte=wte,
            wpe=model.wpe.weight.detach().numpy(),
            blocks=_pack_blocks(model, precision),
            function=FUNCTIONS[ACTIVATIONS[model.config.activation_function]],
            ln_f=PackedNorm(
                model.ln_f.weight.detach().numpy(), model.ln_f.bias.detach().numpy(), model.ln_f.eps
            ),
            head=wte if tied else pack(model.head_weight, None, precision),
        )

    def compile(self) -> None:
        """Compile now rather than in the first step: seconds at the first use on a machine, then
        the code is read from disk."""
        config = self.config
        cache = KVCache(config, 1, 1)
        self(torch.zeros(1, dtype=torch.int64), cache, torch.zeros(1, dtype=torch.int64))

    def __call__(self, ids: Tensor, cache: KVCache, slots: Tensor) -> Tensor:
        """``[B, V]`` logits after one more token a row, which the cache then holds.

        Args:
            ids: ``[B]`` the tokens.
            cache: float32, on the CPU.
            slots: ``[B]`` distinct cache slots of the rows.

        Raises:
            ContextLengthError: if a sequence is at the end of the cache.
            ValueError: for ids that are none, or a cache of another shape or dtype: compiled code
                checks no index.
        """
        config = self.config
        shape = (config.n_layer, len(cache.lengths), config.n_head, cache.max_len, config.head_dim)
        if cache.k.shape != shape or cache.k.dtype != torch.float32:
            raise ValueError(
                f"a float32 cache of {shape} is needed, not {cache.k.dtype} of "
                f"{tuple(cache.k.shape)}"
            )
        if not (len(ids) and int(ids.min()) >= 0 and int(ids.max()) < config.vocab_size):
            raise ValueError(f"ids must be from 0 to {config.vocab_size - 1}, got {ids.tolist()}")
        span = cache.append(slots, torch.ones_like(slots))
        logits = np.empty((len(ids), config.vocab_size), np.float32)
        rows = ids.long().contiguous().numpy(), cache.k.numpy(), cache.v.numpy()
        decode_step(self.packed, *rows, span.slots.numpy(), span.starts.numpy(), logits)
        return torch.from_numpy(logits)


def _pack_blocks(model: GPT2, precision: str) -> PackedBlocks:
    blocks = [cast(Block, block) for block in model.h]
    return PackedBlocks(
        ln_1=_pack_norms([block.ln_1 for block in blocks]),
        c_attn=_pack_linears([block.attn.c_attn for block in blocks], precision),
        scales=np.array([block.attn.scale for block in blocks], np.float32),
        attn_proj=_pack_linears([block.attn.c_proj for block in blocks], precision),
        ln_2=_pack_norms([block.ln_2 for block in blocks]),
        c_fc=_pack_linears([block.mlp.c_fc for block in blocks], precision),
        mlp_proj=_pack_linears([block.mlp.c_proj for block in blocks], precision),
    )


def _pack_linears(linears: list[nn.Linear], precision: str) -> Packed:
    """One array of all layers' matrices. Those of float32 are moved, not copied: the model's
    parameters become views of that array."""
    packed = [pack(linear.weight, linear.bias, precision) for linear in linears]
    stacked = Packed(*map(np.stack, zip(*packed, strict=True)))
    if precision == "float32":
        for linear, weight in zip(linears, stacked.weight, strict=True):
            linear.weight.data = torch.from_numpy(weight)
    return stacked


def _pack_norms(norms: list[nn.LayerNorm]) -> PackedNorm:
    weights, biases = (
        np.stack([getattr(norm, name).detach().numpy() for norm in norms])
        for name in ("weight", "bias")
    )
    return PackedNorm(weights, biases, norms[0].eps)
