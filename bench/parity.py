"""Is it the same model? Every number of ours beside transformers', each against the truth.

The truth is transformers in fp64 with eager attention. An error is ``||x - truth|| / ||truth||``.
Ours may be at most :data:`ALLOWED_RATIO` times that of transformers in the same dtype, plus half a
step of that dtype, the error of rounding once: no tolerance is picked by hand.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptile.bench.huggingface import load_reference
from gptile.kernels import Ops
from gptile.model.generation import generate
from gptile.model.gpt2 import GPT2
from gptile.model.kv_cache import KVCache
from gptile.model.sampling import SamplingParams
from gptile.weights import open_checkpoint
from gptile.weights.names import canonical_name
from gptile.weights.save import hugging_face_tensors

ALLOWED_RATIO = 1.5


@dataclass(frozen=True)
class Comparison:
    """One quantity.

    Attributes:
        error: of ours, relative to the truth.
        reference_error: of transformers in the same dtype.
        max_abs: largest absolute difference between ours and the truth.
        ok: whether ours is within the bound.
    """

    name: str
    error: float
    reference_error: float
    max_abs: float
    ok: bool


def compare(
    source: str | Path,
    *,
    n_rows: int = 2,
    n_tokens: int = 64,
    n_greedy: int = 24,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    ops: Ops | None = None,
    seed: int = 0,
) -> list[Comparison]:
    """Compare a checkpoint in both implementations on random ids.

    Covers every hidden state, the logits, the loss, the gradient of every parameter, the logits of
    the same ids fed to a cache in uneven pieces and, in fp32,
    the greedy continuation with a cache (its error is the share of ids that differ): in 16 bits two
    right implementations may differ in a token.

    Args:
        source: a checkpoint that both can read, see ``find_checkpoint``.
        n_rows, n_tokens: of the input; no longer than half the context.
        n_greedy: new tokens to generate.
        dtype: of the implementations compared.
        device: of our model; transformers stays on the CPU.
        ops: of our model.
        seed: of the ids.
    """
    checkpoint = open_checkpoint(source)
    directory = checkpoint.files.directory
    config = checkpoint.config
    n_tokens = min(n_tokens, config.n_positions // 2)
    n_greedy = min(n_greedy, config.n_positions - n_tokens)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size, (n_rows, n_tokens + 1), generator=generator)
    inputs, targets = ids[:, :-1], ids[:, 1:]

    truth = _run_reference(load_reference(directory, torch.float64), inputs, targets)
    reference_model = load_reference(directory, dtype)
    reference = _run_reference(reference_model, inputs, targets)
    model = checkpoint.load_model(dtype=dtype, device=device, ops=ops)
    ours = _run_ours(model, inputs.to(device), targets.to(device))
    half_step = torch.finfo(dtype).eps / 2
    results = [_judge(name, ours[name], reference[name], truth[name], half_step) for name in truth]
    cached = _cached_logits(model, inputs.to(device)).double().cpu()
    results.append(_judge("cached logits", cached, reference["logits"], truth["logits"], half_step))
    if dtype == torch.float32:
        results.append(_compare_greedy(model, reference_model, inputs, n_greedy))
    return results


@torch.inference_mode()
def _cached_logits(model: GPT2, inputs: Tensor) -> Tensor:
    """Logits of every position, computed a piece at a time over cache slots in reverse order: a
    chunk of prefill, single tokens, another chunk."""
    n_rows, n_tokens = inputs.shape
    weight = model.wte.weight
    cache = KVCache(model.config, n_rows, n_tokens, dtype=weight.dtype, device=weight.device)
    slots = torch.arange(n_rows, device=inputs.device).flip(0)
    third = n_tokens // 3
    pieces = [third + 1, *[1] * third, n_tokens - 2 * third - 1]
    parts = []
    for piece in inputs.split([size for size in pieces if size], dim=1):
        logits = model(piece, cache=cache, slots=slots).logits
        assert logits is not None
        parts.append(logits)
    return torch.cat(parts, 1)


def _compare_greedy(model: GPT2, reference: Any, prompts: Tensor, n_new: int) -> Comparison:
    expected = reference.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=n_new,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )[:, prompts.shape[1] :]
    greedy = SamplingParams(max_new_tokens=n_new, temperature=0, stop_token_ids=())
    produced = torch.tensor([c.ids for c in generate(model, prompts.tolist(), greedy)])
    differing = float((produced != expected).double().mean())
    return Comparison("greedy ids", differing, 0.0, differing, differing == 0)


def _run_reference(model: Any, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    output = model(inputs, output_hidden_states=True, use_cache=False)
    loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return _named(output.hidden_states, output.logits, loss, gradients)


def _run_ours(model: GPT2, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    output = model(inputs, targets, output_hidden_states=True)
    assert output.hidden_states is not None
    assert output.logits is not None
    assert output.loss is not None
    output.loss.backward()
    gradients = hugging_face_tensors(model, gradients=True)
    return _named(output.hidden_states, output.logits, output.loss, gradients)


def _named(
    hidden_states: Iterable[Tensor], logits: Tensor, loss: Tensor, gradients: dict[str, Tensor]
) -> dict[str, Tensor]:
    tensors = {f"hidden state {i}": state for i, state in enumerate(hidden_states)}
    tensors |= {"logits": logits, "loss": loss}
    tensors |= {f"grad {canonical_name(name)}": grad for name, grad in gradients.items()}
    return {name: tensor.detach().double().cpu() for name, tensor in tensors.items()}


def _judge(name: str, ours: Tensor, reference: Tensor, truth: Tensor, floor: float) -> Comparison:
    scale = float(truth.norm()) or 1.0
    error = float((ours - truth).norm()) / scale
    reference_error = float((reference - truth).norm()) / scale
    return Comparison(
        name,
        error,
        reference_error,
        float((ours - truth).abs().max()),
        # Written so that NaN is not ok.
        ok=error <= ALLOWED_RATIO * reference_error + floor,
    )
