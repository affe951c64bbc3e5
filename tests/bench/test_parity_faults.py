"""Each fault planted in one operation, weight or constant of one layer is named as what it is."""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gptile.bench.huggingface import import_transformers
from gptile.bench.parity import Line, Parity, compare, first_red
from gptile.bench.trace import (
    ATTENTION,
    ATTN_PROJ,
    ATTN_SUM,
    C_ATTN,
    C_FC,
    EMBEDDING,
    KV_APPEND,
    LN_1,
    LN_2,
    LN_F,
    LOGITS,
    LOSS,
    MLP_PROJ,
    MLP_SUM,
    Place,
    Recorder,
    backward_steps,
    cached_calls,
    forward_calls,
)
from gptile.kernels import Ops
from gptile.model.gpt2 import GPT2
from gptile.weights.checkpoint import Checkpoint

N_LAYER = 3
SIZES = {"n_layer": N_LAYER, "n_embd": 48, "n_head": 3, "vocab_size": 101, "n_positions": 64}
REFERENCE = Ops.torch()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, biases and LayerNorms too, or a mistake with them would not show."""
    transformers = import_transformers()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        **SIZES, initializer_range=0.15, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    return directory


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / 2


def halved(kernel: str, index: int) -> Callable:
    """The operation with half the gradient of its argument of that index."""

    def wrong(*args: Any) -> Any:
        given = [_Halved.apply(arg) if i == index else arg for i, arg in enumerate(args)]
        return getattr(REFERENCE, kernel)(*given)

    return wrong


def planted(kernel: str, wrong: Callable, faulty: Callable[[int], bool]) -> Ops:
    """The reference, but for those calls of a kernel."""
    calls, right = itertools.count(), getattr(REFERENCE, kernel)

    def call(*args: Any, **kwargs: Any) -> Any:
        return (wrong if faulty(next(calls)) else right)(*args, **kwargs)

    return REFERENCE.replace(**{kernel: call})


def nth(n: int) -> Callable[[int], bool]:
    return lambda call: call == n


def every(period: int, n: int) -> Callable[[int], bool]:
    """The same call of each pass with a cache."""
    return lambda call: call % period == n


def off_by_one(ids, positions, wte, wpe, dropout_p=0.0):
    return REFERENCE.embedding(ids, (positions + 1).clamp(max=len(wpe) - 1), wte, wpe, dropout_p)


def leaky(q, k, v, scale, dropout_p=0.0):
    """Each query sees one key of its future."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril(1)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.transpose(1, 2).flatten(2)


def head_zero_for_all(q, k, v, scale, dropout_p=0.0):
    return REFERENCE.attention(
        q, k[:, :, :1].expand_as(k), v[:, :, :1].expand_as(v), scale, dropout_p
    )


def wrong_sum(x, delta, weight, bias, eps):
    total, normed = REFERENCE.add_layer_norm(x, delta, weight, bias, eps)
    return total + 1e-4 * delta, normed


def stored_one_late(qkv, bias, k_cache, v_cache, slots, starts, counts):
    late = (starts + 1).clamp(max=k_cache.shape[2] - counts.max())
    return REFERENCE.kv_append(qkv, bias, k_cache, v_cache, slots, late, counts)


def stale(q, k_cache, v_cache, slots, starts, counts, scale):
    starts = starts - (starts > 0).to(starts)
    return REFERENCE.decode_attention(q, k_cache, v_cache, slots, starts, counts, scale)


def epsilon(kernel: str) -> Callable:
    """Twice the epsilon."""

    def wrong(*args: Any) -> Any:
        given = [2 * arg if isinstance(arg, float) else arg for arg in args]
        return getattr(REFERENCE, kernel)(*given)

    return wrong


def scaled(kernel: str, factor: float = 1.001) -> Callable:
    return lambda *args: factor * getattr(REFERENCE, kernel)(*args)


def erf_gelu(x, weight, bias, activation):
    return REFERENCE.linear_activation(x, weight, bias, "gelu")


# By the call's number within a forward pass: linear has three a layer (c_attn, attention's c_proj,
# mlp's), add_layer_norm two (ln_2, then the next layer's ln_1).
FORWARD: dict[str, tuple[Ops, Place]] = {
    "a position off by one": (planted("embedding", off_by_one, nth(0)), EMBEDDING),
    "epsilon of the first": (planted("layer_norm", epsilon("layer_norm"), nth(0)), Place(0, LN_1)),
    "a sum": (planted("add_layer_norm", wrong_sum, nth(1)), Place(0, MLP_SUM)),
    "a sum within": (planted("add_layer_norm", wrong_sum, nth(2)), Place(1, ATTN_SUM)),
    "epsilon": (planted("add_layer_norm", epsilon("add_layer_norm"), nth(4)), Place(2, LN_2)),
    "the last epsilon": (planted("add_layer_norm", epsilon("add_layer_norm"), nth(5)), LN_F),
    "qkv": (planted("linear", scaled("linear"), nth(3)), Place(1, C_ATTN)),
    "projection": (planted("linear", scaled("linear"), nth(7)), Place(2, ATTN_PROJ)),
    "down": (planted("linear", scaled("linear"), nth(2)), Place(0, MLP_PROJ)),
    "head": (planted("linear", scaled("linear"), nth(9)), LOGITS),
    "a glimpse of the future": (planted("attention", leaky, nth(2)), Place(2, ATTENTION)),
    "head 0 for every head": (planted("attention", head_zero_for_all, nth(1)), Place(1, ATTENTION)),
    "erf for tanh": (planted("linear_activation", erf_gelu, nth(1)), Place(1, C_FC)),
    "loss": (planted("linear_cross_entropy", scaled("linear_cross_entropy"), nth(0)), LOSS),
}
_BACKWARD: list[tuple[str, int, int, Place]] = [  # kernel, call, argument, operation
    ("linear_cross_entropy", 0, 0, LOSS),
    ("linear_cross_entropy", 0, 1, LOSS),
    ("add_layer_norm", 5, 0, LN_F),
    ("add_layer_norm", 5, 2, LN_F),
    ("linear", 8, 0, Place(2, MLP_PROJ)),
    ("linear", 5, 1, Place(1, MLP_PROJ)),
    ("linear", 2, 2, Place(0, MLP_PROJ)),
    ("linear_activation", 1, 0, Place(1, C_FC)),
    ("linear_activation", 2, 2, Place(2, C_FC)),
    ("add_layer_norm", 2, 0, Place(1, LN_2)),
    ("add_layer_norm", 4, 1, Place(2, LN_2)),
    ("add_layer_norm", 0, 3, Place(0, LN_2)),
    ("linear", 4, 0, Place(1, ATTN_PROJ)),
    ("attention", 0, 0, Place(0, ATTENTION)),
    ("attention", 1, 1, Place(1, ATTENTION)),
    ("attention", 2, 2, Place(2, ATTENTION)),
    ("linear", 6, 0, Place(2, C_ATTN)),
    ("linear", 3, 1, Place(1, C_ATTN)),
    ("add_layer_norm", 3, 0, Place(2, LN_1)),
    ("add_layer_norm", 1, 1, Place(1, LN_1)),
    ("layer_norm", 0, 0, Place(0, LN_1)),
    ("layer_norm", 0, 1, Place(0, LN_1)),
    ("embedding", 0, 2, EMBEDDING),
    ("embedding", 0, 3, EMBEDDING),
]
BACKWARD: dict[str, tuple[Ops, Place]] = {
    f"argument {index} of {kernel} {call}": (
        planted(kernel, halved(kernel, index), nth(call)),
        place,
    )
    for kernel, call, index, place in _BACKWARD
}
# layer_norm_linear and linear_residual have two calls a layer; layer_norm is also the first of the
# forward pass, and linear its first ten.
CACHED: dict[str, tuple[Ops, Place]] = {
    "qkv": (
        planted("layer_norm_linear", epsilon("layer_norm_linear"), every(6, 2)),
        Place(1, C_ATTN),
    ),
    "up": (planted("layer_norm_linear", epsilon("layer_norm_linear"), every(6, 5)), Place(2, C_FC)),
    "keys one late": (planted("kv_append", stored_one_late, every(3, 1)), Place(1, KV_APPEND)),
    "stale keys": (planted("decode_attention", stale, every(3, 2)), Place(2, ATTENTION)),
    "projection": (
        planted("linear_residual", scaled("linear_residual"), every(6, 0)),
        Place(0, ATTN_SUM),
    ),
    "down": (planted("linear_residual", scaled("linear_residual"), every(6, 3)), Place(1, MLP_SUM)),
    "the last norm": (planted("layer_norm", scaled("layer_norm"), lambda call: call > 0), LN_F),
    "head": (planted("linear", scaled("linear"), lambda call: call > 9), LOGITS),
}
SECTIONS = {"forward": FORWARD, "backward": BACKWARD, "cached": CACHED}


@pytest.fixture(scope="module")
def found(directory: Path) -> Parity:
    """Every fault against the one truth."""
    kernels: dict[str, Ops | None] = {"right": None}
    for section, faults in SECTIONS.items():
        kernels |= {f"{section}: {name}": ops for name, (ops, _) in faults.items()}
    return compare(directory, kernels=kernels, n_tokens=12, n_greedy=2)


def lines_of(found: Parity, kernels: str) -> list[Line]:
    return [line for line in found.lines if line.kernels == kernels]


@pytest.mark.parametrize(
    ("section", "fault"),
    [(section, fault) for section, faults in SECTIONS.items() for fault in faults],
)
def test_the_operation_is_named(found: Parity, section: str, fault: str) -> None:
    lines = lines_of(found, f"{section}: {fault}")
    assert first_red(lines_of(found, "right")) is None
    red = first_red(lines)
    assert red is not None, "not seen"
    _, place = SECTIONS[section][fault]
    assert (red.subject.section, red.subject.layer, red.subject.operation) == (section, *place)


def shift(path: str, by: float) -> Callable[[GPT2], None]:
    """Add to one element of a parameter."""

    def tamper(model: GPT2) -> None:
        with torch.no_grad():
            model.get_parameter(path).view(-1)[5] += by

    return tamper


def set_epsilon(model: GPT2) -> None:
    model.h[1].ln_2.eps *= 2


def set_scale(model: GPT2) -> None:
    model.h[2].attn.scale *= 1.0001


@pytest.mark.parametrize(
    ("tamper", "place"),
    [
        (set_epsilon, Place(1, LN_2)),
        (set_scale, Place(2, ATTENTION)),
        (shift("h.0.mlp.c_fc.bias", 1e-3), Place(0, C_FC)),
        (shift("h.1.attn.c_attn.weight", 1e-3), Place(1, C_ATTN)),
        (shift("h.2.attn.c_proj.weight", 1e-3), Place(2, ATTN_PROJ)),
        (shift("ln_f.weight", 1e-3), LN_F),
        (shift("wpe.weight", 1e-3), EMBEDDING),
    ],
)
def test_a_wrong_weight_or_constant_is_named_by_what_uses_it(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    tamper: Callable[[GPT2], None],
    place: Place,
) -> None:
    right = Checkpoint.load_model

    def load_wrong(self: Checkpoint, **kwargs: Any) -> GPT2:
        model = right(self, **kwargs)
        tamper(model)
        return model

    monkeypatch.setattr(Checkpoint, "load_model", load_wrong)
    red = first_red(compare(directory, n_tokens=12, n_greedy=0).lines)
    assert red is not None
    assert (red.subject.layer, red.subject.operation) == place


def test_a_leak_between_the_rows_of_a_batch_is_seen(directory: Path) -> None:
    """Keys beyond a row's own, which only shorter rows have beside them."""

    def reads_on(q, k_cache, v_cache, slots, starts, counts, scale):
        out = REFERENCE.decode_attention(q, k_cache, v_cache, slots, starts, counts, scale)
        return out + 1e-3 * (counts.max() - counts)[:, None, None]

    wrong = REFERENCE.replace(decode_attention=reads_on)
    lines = compare(directory, n_tokens=12, n_greedy=0, kernels={"": wrong}).lines
    red = [line.subject.quantity for line in lines if not line.ok]
    assert red == ["ragged batch logits", "ragged batch against alone"]


def test_a_greedy_text_that_differs_is_seen(directory: Path) -> None:
    def second_best(logits: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        best = logits.argmax(-1, keepdim=True)
        return REFERENCE.sample(logits.scatter(-1, best, -torch.inf), **kwargs)

    wrong = REFERENCE.replace(sample=second_best)
    lines = compare(directory, n_tokens=6, n_greedy=4, kernels={"": wrong}).lines
    (red,) = [line for line in lines if not line.ok]
    assert red.subject.section == "greedy"
    assert red.error.relative > 0.5


def test_the_line_says_where_and_by_how_much(found: Parity) -> None:
    red = first_red(lines_of(found, "forward: a glimpse of the future"))
    assert str(red).startswith("layer 2, attention (forward): error ")
    red = first_red(lines_of(found, "forward: erf for tanh"))
    assert str(red).startswith("layer 1, mlp.c_fc + activation (forward, kernel linear_activation)")


def test_every_operation_but_sampling_is_recorded() -> None:
    kernels = {call.kernel for call in (*forward_calls(2), *cached_calls(2))}
    assert kernels | {"sample"} == set(vars(REFERENCE))


def test_every_operation_s_backward_pass_is_compared() -> None:
    outputs = [place for call in forward_calls(2) for place in call.results]
    sums = [place for place in outputs if "residual" in place.operation]
    named = [operation for operation, _ in backward_steps(2)]
    assert set(named) == set(outputs) - set(sums) - {LOGITS}
    given = [place for _, places in backward_steps(2) for place in places]
    assert len(set(given)) == len(given)


def test_a_model_that_calls_otherwise_is_not_compared(small_model: Callable[..., GPT2]) -> None:
    recorder = Recorder(REFERENCE)
    model = GPT2(small_model(n_layer=2).config, recorder.ops).eval()
    ids = torch.tensor([[1, 2, 3]])
    for calls, targets in ((forward_calls(3), ids), (forward_calls(1), ids), ([], None)):
        with pytest.raises(RuntimeError, match="called"), recorder.recording(calls):
            model(ids, targets)
    fewer = pytest.raises(RuntimeError, match="did not call linear")
    with fewer, recorder.recording(forward_calls(2)):
        model(ids, ids, logits_for="none")


def test_recording_changes_nothing(small_model: Callable[..., GPT2]) -> None:
    """Results and gradients are those of the operations themselves."""
    model = small_model(n_layer=2)
    recorder = Recorder(REFERENCE)
    recorded = GPT2(model.config, recorder.ops).eval()
    recorded.load_state_dict(model.state_dict())
    ids = torch.randint(61, (2, 9))
    for one, context in ((model, None), (recorded, partial(recorder.recording, forward_calls(2)))):
        if context is None:
            one(ids, ids).loss.backward()
        else:
            with context() as trace:
                output = one(ids, ids)
            output.loss.backward()
    for ours, theirs in zip(model.parameters(), recorded.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert set(trace.gradients) >= {place for _, places in backward_steps(2) for place in places}
