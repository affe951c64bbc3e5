"""What a GPT-2 is run for, prefill, decoding and training, as calls to time, check or profile."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from gptile.kernels import Ops
from gptile.model.gpt2 import GPT2, Block
from gptile.model.kv_cache import KVCache
from gptile.model.sampling import SamplingBatch, SamplingParams
from gptile.train.optimizer import decay_groups
from gptile.weights.names import canonical_name
from gptile.weights.save import hugging_face_tensors

Outcome: TypeAlias = dict[str, Tensor]

TASKS = ("prefill", "decode", "train")


@dataclass(frozen=True)
class Workload:
    """One task of a model.

    Attributes:
        run: does it once; repeating it repeats the same work.
        outcome: does it once and returns what came out, by name.
    """

    run: Callable[[], object]
    outcome: Callable[[], Outcome]


def workload(model: GPT2, task: str, ids: Tensor, n_steps: int) -> Workload:
    """A task on ``ids``, ``[B, T + n_steps]``, the first T of them being the prompts.

    ``prefill`` computes the prompts into an empty cache and the logits after them. ``decode`` feeds
    the other ids one a row and step, whatever the model would have chosen, which it does choose
    (greedily) at each step. ``train`` is a step of AdamW on the prompts: forward, backward and
    update, without dropout, and at learning rate 0 so that each step is the same.

    The model has to be in evaluation mode.
    """
    prompts, continuation = ids[:, : ids.shape[1] - n_steps], ids[:, ids.shape[1] - n_steps :]
    if task == "prefill":
        return _prefill(model, prompts)
    if task == "decode":
        return _decode(model, prompts, continuation)
    return _train(model, prompts)


def _prefill(model: GPT2, prompts: Tensor) -> Workload:
    cache = _cache(model, *prompts.shape)

    @torch.inference_mode()
    def run() -> Outcome:
        cache.reset()
        return {"logits": _last_logits(model, prompts, cache)}

    return Workload(run, run)


def _decode(model: GPT2, prompts: Tensor, continuation: Tensor) -> Workload:
    n_rows, n_prompt = prompts.shape
    cache = _cache(model, n_rows, n_prompt + continuation.shape[1])
    with torch.inference_mode():
        _last_logits(model, prompts, cache)
    greedy, n_vocab = SamplingParams(temperature=0), model.config.vocab_size
    batch = SamplingBatch.build([greedy] * n_rows, [0] * n_rows, [], n_vocab, prompts.device)
    positions = torch.zeros(n_rows, dtype=torch.int64, device=prompts.device)  # fixes no draw here

    @torch.inference_mode()
    def run() -> list[tuple[Tensor, Tensor, Tensor]]:
        cache.lengths.fill_(n_prompt)
        steps = []
        for ids in continuation.split(1, dim=1):
            logits = _last_logits(model, ids, cache)
            steps.append((logits, *model.ops.sample(logits, positions=positions, **vars(batch))))
        return steps

    def outcome() -> Outcome:
        logits, chosen, logprobs = (torch.stack(part, 1) for part in zip(*run(), strict=True))
        of_chosen = logits.double().log_softmax(-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        return {"logits": logits, "logprobs": logprobs, "logprobs of the chosen ids": of_chosen}

    return Workload(run, outcome)


def _train(model: GPT2, prompts: Tensor) -> Workload:
    inputs, targets = prompts[:, :-1], prompts[:, 1:]
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=0.0)

    def run() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = model(inputs, targets, logits_for="none").loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    def outcome() -> Outcome:
        loss = run()
        gradients = hugging_face_tensors(model, gradients=True)
        return {"loss": loss} | {f"grad {canonical_name(n)}": g for n, g in gradients.items()}

    return Workload(run, outcome)


def reference_outcomes(reference: Any, ids: Tensor, n_steps: int) -> dict[str, Outcome]:
    """What transformers gets for every task of :func:`workload`, without a cache."""
    n_prompt = ids.shape[1] - n_steps
    with torch.inference_mode():
        logits = reference(ids, use_cache=False).logits
    likeliest = logits[:, n_prompt:].double().log_softmax(-1).amax(-1)
    decode = {"logits": logits[:, n_prompt:], "logprobs": likeliest}
    prompts = ids[:, :n_prompt]
    trained = reference(prompts[:, :-1], use_cache=False).logits.flatten(0, 1)
    exact = torch.promote_types(trained.dtype, torch.float32)  # as transformers' own loss
    loss = torch.nn.functional.cross_entropy(trained.to(exact), prompts[:, 1:].flatten())
    loss.backward()
    gradients = {f"grad {canonical_name(n)}": p.grad for n, p in reference.named_parameters()}
    return {
        "prefill": {"logits": logits[:, n_prompt - 1]},
        "decode": {**decode, "logprobs of the chosen ids": likeliest},
        "train": {"loss": loss.detach(), **gradients},
    }


def _cache(model: GPT2, n_rows: int, length: int) -> KVCache:
    weight = model.wte.weight
    return KVCache(model.config, n_rows, length, dtype=weight.dtype, device=weight.device)


def _last_logits(model: GPT2, ids: Tensor, cache: KVCache) -> Tensor:
    logits = model(ids, cache=cache, logits_for="last").logits
    assert logits is not None
    return logits[:, 0]


def use_ops(model: GPT2, ops: Callable[[int | None], Ops]) -> None:
    """Give every part of a model its operations: ``ops(layer)``, None being outside the blocks."""
    model.ops = ops(None)
    for layer, module in enumerate(model.h):
        block = cast(Block, module)
        block.ops = block.attn.ops = block.mlp.ops = ops(layer)


def with_ops(model: GPT2, ops: Ops) -> GPT2:
    """A model in evaluation mode on the same parameters, not copied, under other operations."""
    with torch.device("meta"):
        other = GPT2(model.config, ops)
    other.load_state_dict(model.state_dict(), assign=True)
    return other.eval()


def wrap_ops(ops: Ops, wrap: Callable[[str, Callable], Callable]) -> Ops:
    """Every operation replaced by ``wrap(name, operation)``."""
    names = [field.name for field in dataclasses.fields(ops)]
    return Ops(**{name: wrap(name, getattr(ops, name)) for name in names})


def called_operations(model: GPT2, run: Callable[[], object]) -> list[str]:
    """The operations that ``run`` calls on the model, in the order of Ops."""
    called, before = set(), model.ops

    def noting(name: str, operation: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return operation(*args, **kwargs)

        return call

    noted = wrap_ops(before, noting)
    use_ops(model, lambda _: noted)
    run()
    use_ops(model, lambda _: before)
    return [field.name for field in dataclasses.fields(Ops) if field.name in called]
