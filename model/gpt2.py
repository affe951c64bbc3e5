"""GPT-2: a decoder-only transformer with pre-layer normalisation and learned positions.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". Parameters bear Hugging
Face's names and are stored as ``nn.Linear`` keeps them, ``[out, in]``; `weights/` transposes.
Modules hold the parameters; the arithmetic is in the model's :class:`~gptile.kernels.Ops`.
"""

import math
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptile.kernels import Ops
from gptile.model.config import GPT2Config
from gptile.model.kv_cache import ContextLengthError, KVCache, KVSpan


@dataclass
class GPT2Output:
    """What a forward pass returns; what was not asked for is None.

    Attributes:
        logits: ``[B, n, V]``, for the n positions asked for.
        loss: cross-entropy in nats, reduced as asked: a scalar, or ``[B, T]`` for "none".
        hidden_states: ``n_layer + 1`` tensors ``[B, T, C]``: the embedding, the output of each
            block, the last one after the final LayerNorm (transformers' convention).
    """

    logits: Tensor | None = None
    loss: Tensor | None = None
    hidden_states: list[Tensor] | None = None


def default_ops(
    config: GPT2Config, device: torch.device, dtype: torch.dtype = torch.float32
) -> Ops:
    """What a model of that config runs on by default: see :meth:`Ops.default`."""
    return Ops.default(device, dtype, width=config.n_embd, head_dim=config.head_dim)


class Attention(nn.Module):
    """Multi-head causal self-attention."""

    def __init__(self, config: GPT2Config, ops: Ops, layer: int) -> None:
        super().__init__()
        self.ops = ops
        self.n_head = config.n_head
        self.scale = config.attention_scale(layer)
        self.attn_pdrop = config.attn_pdrop
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.ops.linear(x, self.c_attn.weight, self.c_attn.bias)
        q, k, v = qkv.unflatten(2, (3, self.n_head, -1)).unbind(2)
        dropout_p = self.attn_pdrop if self.training else 0.0
        out = self.ops.attention(q, k, v, self.scale, dropout_p)
        return self.ops.linear(out, self.c_proj.weight, self.c_proj.bias)


class MLP(nn.Module):
    """Two linear maps around the activation."""

    def __init__(self, config: GPT2Config, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.activation = config.activation_function
        self.c_fc = nn.Linear(config.n_embd, config.inner_dim)
        self.c_proj = nn.Linear(config.inner_dim, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.ops.linear_activation(x, self.c_fc.weight, self.c_fc.bias, self.activation)
        return self.ops.linear(hidden, self.c_proj.weight, self.c_proj.bias)


class Block(nn.Module):
    """``x + attn(ln_1(x))``, then ``x + mlp(ln_2(x))``, fused in two ways.

    In training dropout stands before each addition, so that the addition is fused with the
    LayerNorm after it: :meth:`forward` takes and returns the residual stream as a pair, the sum so
    far and the ``delta`` that the next LayerNorm adds to it. Against a cache there is no dropout,
    and often a single row: :meth:`step` fuses the addition with the projection before it, and the
    LayerNorm with the projection after it.
    """

    def __init__(self, config: GPT2Config, ops: Ops, layer: int) -> None:
        super().__init__()
        self.ops = ops
        self.layer = layer
        self.resid_pdrop = config.resid_pdrop
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config, ops, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config, ops)

    def forward(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        x, h = add_norm(self.ops, x, delta, self.ln_1)
        delta = F.dropout(self.attn(h), self.resid_pdrop, self.training)
        x, h = add_norm(self.ops, x, delta, self.ln_2)
        return x, F.dropout(self.mlp(h), self.resid_pdrop, self.training)

    def step(self, x: Tensor, cache: KVCache, span: KVSpan) -> Tensor:
        """The block for tokens that continue the cache's sequences; appends their K and V."""
        ops, attn, mlp = self.ops, self.attn, self.mlp
        caches = (cache.k[self.layer], cache.v[self.layer])
        where = (span.slots, span.starts, span.counts)
        qkv = ops.layer_norm_linear(x, *_parameters(self.ln_1), attn.c_attn.weight)
        q = ops.kv_append(qkv, attn.c_attn.bias, *caches, *where)
        out = ops.decode_attention(q, *caches, *where, attn.scale)
        x = ops.linear_residual(out, attn.c_proj.weight, attn.c_proj.bias, x)
        hidden = ops.layer_norm_linear(
            x, *_parameters(self.ln_2), mlp.c_fc.weight, mlp.c_fc.bias, mlp.activation
        )
        return ops.linear_residual(hidden, mlp.c_proj.weight, mlp.c_proj.bias, x)


def _parameters(ln: nn.LayerNorm) -> tuple[Tensor, Tensor, float]:
    return ln.weight, ln.bias, ln.eps


def add_norm(ops: Ops, x: Tensor, delta: Tensor | None, ln: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """``(x + delta, ln(x + delta))``; before the first block there is no delta."""
    if delta is None:
        return x, ops.layer_norm(x, *_parameters(ln))
    return ops.add_layer_norm(x, delta, *_parameters(ln))


def _embedding(n_rows: int, n_columns: int) -> nn.Embedding:
    # The constructor would draw values, which on the meta device (where the loader learns the
    # shapes) costs a second and 150 MB of imports.
    return nn.Embedding.from_pretrained(torch.empty(n_rows, n_columns), freeze=False)


def _check_lengths(lengths: Tensor, n_tokens: int) -> None:
    if torch.compiler.is_compiling():
        return  # a graph cannot branch on values
    if not ((lengths >= 1) & (lengths <= n_tokens)).all():
        raise ValueError(f"lengths must be from 1 to {n_tokens}, got {lengths.tolist()}")


class GPT2(nn.Module):
    """The whole model. ``GPT2(config)`` is initialised as GPT-2 was and in training mode."""

    def __init__(self, config: GPT2Config, ops: Ops | None = None) -> None:
        super().__init__()
        self.config = config
        self.ops = ops or Ops.torch()
        self.wte = _embedding(config.vocab_size, config.n_embd)
        self.wpe = _embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(Block(config, self.ops, layer) for layer in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if not self.wte.weight.is_meta:
            self.init_weights()

    @property
    def head_weight(self) -> Tensor:
        """``[V, C]``: the token embedding itself when tied."""
        return self.wte.weight if self.config.tie_word_embeddings else self.lm_head.weight

    @torch.no_grad()
    def init_weights(self) -> None:
        """Normal weights, zero biases; the two projections into the residual stream are scaled down
        by ``sqrt(2 * n_layer)``, the number of additions it sees (GPT-2 paper, section 2.3)."""
        std = self.config.initializer_range
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif ".ln_" in name or name.startswith("ln_f"):
                parameter.fill_(1.0)
            elif name.endswith("c_proj.weight"):
                parameter.normal_(0.0, std / math.sqrt(2 * self.config.n_layer))
            else:
                parameter.normal_(0.0, std)

    def num_parameters(self) -> int:
        """Number of weights, a tied head counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        *,
        logits_for: Literal["all", "last", "none"] | Tensor = "all",
        lengths: Tensor | None = None,
        cache: KVCache | None = None,
        slots: Tensor | None = None,
        output_hidden_states: bool = False,
        reduction: Literal["mean", "sum", "none"] = "mean",
    ) -> GPT2Output:
        """Run the network.

        Args:
            ids: ``[B, T]`` token ids; ragged rows are padded on the right with any valid id.
            targets: ``[B, T]``, what should follow each id: already shifted, IGNORE_INDEX (-100)
                where there is nothing to predict. Gives ``loss``.
            logits_for: the positions whose logits to compute: all, the last real one of each row,
                none, or ``[B, n]`` indices into T.
            lengths: ``[B]`` number of real tokens of each row; default T.
            cache: continue the sequences it holds and append the new tokens to it.
            slots: ``[B]`` distinct cache slots of the rows; default 0, 1, ...
            output_hidden_states: also return them.
            reduction: of the loss: its mean over the targets that count, their sum, or each one's.

        Raises:
            ContextLengthError: if a sequence would pass ``n_positions`` or the end of the cache.
            ValueError: for lengths or slots out of range, or a cache while gradients are recorded.
        """
        n_rows, n_tokens = ids.shape
        if lengths is None:
            lengths = torch.full((n_rows,), n_tokens, device=ids.device)
        else:
            _check_lengths(lengths, n_tokens)
        positions = torch.arange(n_tokens, device=ids.device)
        span = None
        if cache is not None:
            if torch.is_grad_enabled():
                raise ValueError("a cache is for inference; run under torch.no_grad()")
            if slots is None:
                slots = torch.arange(n_rows, device=ids.device)
            span = cache.append(slots, lengths)
            # Padding may point past the end; its position does not matter, only that it exists.
            last = self.config.n_positions - 1
            positions = (span.starts.unsqueeze(1) + positions).clamp(max=last)
        elif n_tokens > self.config.n_positions:
            raise ContextLengthError(
                f"{n_tokens} tokens exceed the context of {self.config.n_positions}"
            )

        dropout_p = self.config.embd_pdrop if self.training else 0.0
        x = self.ops.embedding(ids, positions, self.wte.weight, self.wpe.weight, dropout_p)
        delta: Tensor | None = None
        hidden_states: list[Tensor] = []
        for module in self.h:
            block = cast(Block, module)
            if output_hidden_states:
                hidden_states.append(x if delta is None else x + delta)
            if cache is None or span is None:
                x, delta = block(x, delta)
            else:
                x = block.step(x, cache, span)
        _, x = add_norm(self.ops, x, delta, self.ln_f)
        if output_hidden_states:
            hidden_states.append(x)

        output = GPT2Output(hidden_states=hidden_states if output_hidden_states else None)
        if targets is not None:
            output.loss = self.ops.linear_cross_entropy(x, self.head_weight, targets, reduction)
        if isinstance(logits_for, Tensor):
            x = x.take_along_dim(logits_for.long().unsqueeze(-1), dim=1)
        elif logits_for == "last":
            x = x.take_along_dim((lengths.long() - 1).view(-1, 1, 1), dim=1)
        elif logits_for == "none":
            return output
        elif logits_for != "all":
            raise ValueError(f"logits_for is {logits_for!r}, not all, last, none or positions")
        output.logits = self.ops.linear(x, self.head_weight)
        return output
