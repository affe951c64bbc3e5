"""What every operation computed, in our model and in transformers', under the same names.

Ours is seen through the model's ``Ops``, whose operations are called in a fixed order:
:func:`forward_calls` and :func:`cached_calls` are the two lists of those calls. Theirs is seen
through hooks on the modules. With each result goes the gradient of the loss with respect to it.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from gptile.kernels import Ops


class Place(NamedTuple):
    """An operation of a layer, and what it returns. It bears transformers' name where it has a
    module there. Layers count from 0; outside the blocks ``layer`` is None."""

    layer: int | None
    operation: str

    def __str__(self) -> str:
        return self.operation if self.layer is None else f"layer {self.layer}, {self.operation}"


LN_1, C_ATTN, KV_APPEND, ATTENTION = "ln_1", "attn.c_attn", "kv_append", "attention"
ATTN_PROJ, ATTN_SUM, LN_2 = "attn.c_proj", "attn residual", "ln_2"
C_FC, MLP_PROJ, MLP_SUM = "mlp.c_fc + activation", "mlp.c_proj", "mlp residual"
EMBEDDING, LN_F = Place(None, "embedding"), Place(None, "ln_f")
LOGITS, LOSS = Place(None, "lm_head"), Place(None, "loss")
HEAD = Place(None, "head")
"""The head's weight, of which only the gradient is kept: a tied head's own share."""


class Call(NamedTuple):
    """A call of one of ``Ops``, by the field's name, and the places of its results."""

    kernel: str
    results: tuple[Place, ...]


def forward_calls(n_layer: int) -> list[Call]:
    """The calls of ``GPT2.forward`` with targets and without a cache, in order."""
    calls = [Call("embedding", (EMBEDDING,))]
    for layer in range(n_layer):
        at = partial(Place, layer)
        calls += [
            Call("add_layer_norm", (Place(layer - 1, MLP_SUM), at(LN_1)))
            if layer
            else Call("layer_norm", (at(LN_1),)),
            Call("linear", (at(C_ATTN),)),
            Call("attention", (at(ATTENTION),)),
            Call("linear", (at(ATTN_PROJ),)),
            Call("add_layer_norm", (at(ATTN_SUM), at(LN_2))),
            Call("linear_activation", (at(C_FC),)),
            Call("linear", (at(MLP_PROJ),)),
        ]
    return [
        *calls,
        Call("add_layer_norm", (Place(n_layer - 1, MLP_SUM), LN_F)),
        Call("linear_cross_entropy", (LOSS,)),
        Call("linear", (LOGITS,)),
    ]


def cached_calls(n_layer: int) -> list[Call]:
    """The calls of ``GPT2.forward`` with a cache and without targets, in order."""
    calls = [Call("embedding", (EMBEDDING,))]
    for layer in range(n_layer):
        at = partial(Place, layer)
        calls += [
            Call("layer_norm_linear", (at(C_ATTN),)),
            Call("kv_append", (at(KV_APPEND),)),
            Call("decode_attention", (at(ATTENTION),)),
            Call("linear_residual", (at(ATTN_SUM),)),
            Call("layer_norm_linear", (at(C_FC),)),
            Call("linear_residual", (at(MLP_SUM),)),
        ]
    return [*calls, Call("layer_norm", (LN_F,)), Call("linear", (LOGITS,))]


def backward_steps(n_layer: int) -> list[tuple[Place, list[Place]]]:
    """The operations in the order in which the backward pass reaches them, each with the places of
    its inputs, whose gradients it gives.

    In layer 0 both ln_1 and the residual stream take the embedding: its gradient counts as ln_1's.
    """
    last = partial(Place, n_layer - 1)
    steps = [(LOSS, [LN_F, HEAD]), (LN_F, [last(MLP_PROJ), last(ATTN_SUM)])]
    for layer in reversed(range(n_layer)):
        at, below = partial(Place, layer), partial(Place, layer - 1)
        steps += [
            (at(MLP_PROJ), [at(C_FC)]),
            (at(C_FC), [at(LN_2)]),
            (at(LN_2), [at(ATTN_PROJ), below(MLP_SUM)] if layer else [at(ATTN_PROJ)]),
            (at(ATTN_PROJ), [at(ATTENTION)]),
            (at(ATTENTION), [at(C_ATTN)]),
            (at(C_ATTN), [at(LN_1)]),
            (at(LN_1), [below(MLP_PROJ), below(ATTN_SUM)] if layer else [EMBEDDING]),
        ]
    return [*steps, (EMBEDDING, [])]


def parameter_place(name: str) -> Place:
    """The operation whose backward pass gives a parameter's gradient last."""
    parts = name.split(".")
    if parts[0] != "h":
        return {"ln_f": LN_F, "lm_head": LOSS}.get(parts[0], EMBEDDING)
    operation = ".".join(parts[2:-1])
    return Place(int(parts[1]), C_FC if operation == "mlp.c_fc" else operation)


@dataclass
class Trace:
    """Results of one pass, and after its backward pass the gradients of the loss.

    The gradient at a residual sum is what comes back through the next addition, without the share
    of the LayerNorm between: an addition gives both of its inputs the gradient of their sum.
    """

    values: dict[Place, Tensor] = field(default_factory=dict)
    gradients: dict[Place, Tensor] = field(default_factory=dict)

    def note(self, place: Place, tensor: Tensor) -> None:
        self.values[place] = tensor.detach()
        self.note_gradient(place, tensor)

    def note_gradient(self, place: Place, tensor: Tensor) -> None:
        if tensor.requires_grad:
            tensor.register_hook(partial(self.gradients.__setitem__, place))


class Recorder:
    """Operations that can be listened to.

    Attributes:
        ops: for a model; they compute what the given ones do.
    """

    def __init__(self, ops: Ops) -> None:
        self.ops = Ops(
            **{
                one.name: partial(self._call, one.name, getattr(ops, one.name))
                for one in dataclasses.fields(Ops)
            }
        )
        self._trace: Trace | None = None
        self._expected: Iterator[Call] = iter(())

    @contextmanager
    def recording(self, calls: list[Call]) -> Iterator[Trace]:
        """The trace of one forward pass, which makes these calls.

        Raises:
            RuntimeError: if it makes others: then the lists above are not the model's any more.
        """
        self._trace, self._expected = Trace(), iter(calls)
        try:
            yield self._trace
            if (missing := next(self._expected, None)) is not None:
                raise RuntimeError(f"the model did not call {missing.kernel}")
        finally:
            self._trace = None

    def _call(self, kernel: str, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        trace = self._trace
        if trace is None:
            return operation(*args, **kwargs)
        call = next(self._expected, None)
        if call is None or call.kernel != kernel:
            raise RuntimeError(f"the model called {kernel} where {call} was expected")
        if kernel == "linear_cross_entropy":
            x, weight, *rest = args
            weight = weight.view_as(weight)  # a tensor of its own, so that it has its own gradient
            trace.note_gradient(HEAD, weight)
            args = (x, weight, *rest)
        results = operation(*args, **kwargs)
        if kernel == "kv_append":
            qkv, bias, *cache = args
            product = Place(call.results[0].layer, C_ATTN)
            trace.values[product] = qkv.double() + bias.double()  # transformers' has it in itself
            trace.values[call.results[0]] = _appended(results, *cache)
            return results
        # Views, because a result may have uses within the operation, which do not count here.
        single = isinstance(results, Tensor)
        views = [result.view_as(result) for result in ((results,) if single else results)]
        for place, view in zip(call.results, views, strict=True):
            trace.note(place, view)
        return views[0] if single else tuple(views)


def _appended(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, starts: Tensor, counts: Tensor
) -> Tensor:
    """Q as returned and K and V as they lie in the cache, ``[B, T, 3 * H * D]``; 0 for padding."""
    qkv = q.new_zeros(*q.shape[:2], 3, *q.shape[2:])
    qkv[:, :, 0] = q
    rows = zip(slots.tolist(), starts.tolist(), counts.tolist(), strict=True)
    for row, (slot, start, count) in enumerate(rows):
        for part, cache in ((1, k_cache), (2, v_cache)):
            qkv[row, :count, part] = cache[slot, :, start : start + count].transpose(0, 1)
    return qkv.flatten(2)


@contextmanager
def recording_reference(model: Any) -> Iterator[Trace]:
    """The trace of what transformers' GPT2LMHeadModel computes meanwhile, all but the loss."""
    trace, handles = Trace(), []

    def watch(
        module: Any, taken: Place | None, given: Place, gradient: Place | None = None
    ) -> None:
        """Note what a module takes and gives, the gradient of the former perhaps elsewhere."""

        def note(module: Any, args: tuple[Tensor, ...], result: Tensor) -> None:
            if taken:
                trace.values[taken] = args[0].detach()
            if gradient:
                trace.note_gradient(gradient, args[0])
            trace.note(given, result)

        handles.append(module.register_forward_hook(note))

    def note_head(module: Any, args: tuple[Tensor, ...], logits: Tensor) -> None:
        trace.note(LOGITS, logits)
        x = args[0].detach().flatten(0, 1)

        def share(gradient: Tensor) -> None:
            trace.gradients[HEAD] = gradient.flatten(0, 1).t() @ x

        if logits.requires_grad:
            logits.register_hook(share)

    total, stream = EMBEDDING, EMBEDDING
    for layer, block in enumerate(model.transformer.h):
        at = partial(Place, layer)
        watch(block.ln_1, total, at(LN_1), stream)
        watch(block.attn.c_attn, None, at(C_ATTN))
        watch(block.attn.c_proj, at(ATTENTION), at(ATTN_PROJ), at(ATTENTION))
        watch(block.ln_2, at(ATTN_SUM), at(LN_2), total if layer else None)
        watch(block.mlp.c_proj, at(C_FC), at(MLP_PROJ), at(C_FC))
        total, stream = at(MLP_SUM), at(ATTN_SUM)
    watch(model.transformer.ln_f, total, LN_F, stream)
    handles.append(model.lm_head.register_forward_hook(note_head))
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()
