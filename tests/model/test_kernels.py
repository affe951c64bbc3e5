"""The whole model on Triton's kernels, in the interpreter, beside the same model on PyTorch's."""

import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gptile.kernels import IGNORE_INDEX, Ops
from gptile.model.generation import generate
from gptile.model.gpt2 import GPT2
from gptile.model.kv_cache import KVCache
from gptile.model.sampling import SamplingParams
from gptile.train.config import TrainConfig
from gptile.train.optimizer import build_optimizer

CUDA = torch.device("cuda")


@pytest.fixture
def twins(small_model: Callable[..., GPT2]) -> Callable[..., tuple[GPT2, GPT2]]:
    """Makes one model twice: on Triton's kernels and on PyTorch's."""

    def make(**fields: object) -> tuple[GPT2, GPT2]:
        reference = small_model(**fields)
        ours = GPT2(reference.config, Ops.triton()).eval()
        ours.load_state_dict(reference.state_dict())
        return ours, reference

    return make


def batch(rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(61, (rows, tokens + 1))
    targets = ids[:, 1:].clone()
    targets[0, -3:] = IGNORE_INDEX
    return ids[:, :-1], targets


def test_ten_training_steps_follow_the_same_loss_curve(twins: Callable) -> None:
    config = TrainConfig(learning_rate=3e-3)
    models = [model.train() for model in twins(embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)]
    optimizers = [build_optimizer(model, config) for model in models]
    losses: tuple[list[float], list[float]] = ([], [])
    for _ in range(10):
        ids, targets = batch(2, 15)
        for model, optimizer, curve in zip(models, optimizers, losses, strict=True):
            loss = model(ids, targets, logits_for="none").loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=2e-5)
    assert max(losses[1]) - min(losses[1]) > 0.1, "nothing was learned, so nothing was compared"


def test_training_with_dropout_repeats_with_the_seed(twins: Callable) -> None:
    model, _ = twins(n_layer=1, embd_pdrop=0.3, attn_pdrop=0.2, resid_pdrop=0.1)
    model.train()
    ids, targets = batch(2, 9)
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        loss = model(ids, targets, logits_for="none").loss
        losses.append(loss.item())
        loss.backward()
    assert losses[0] == losses[1] != losses[2]
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_compiled_model_is_the_eager_one(twins: Callable, backend: str) -> None:
    if backend == "inductor" and not shutil.which("g++"):
        pytest.skip("Inductor needs g++ to compile for the CPU")
    model, _ = twins(n_layer=2)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    ids, targets = batch(2, 12)
    gradients = []
    for run in (compiled, model):
        output = run(ids, targets, logits_for="last")
        model.zero_grad()
        output.loss.backward()
        gradients.append([output.loss, output.logits, *(p.grad for p in model.parameters())])
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(
            got, expected, rtol=0, atol=0 if backend == "aot_eager" else 1e-6
        )


def test_ragged_prompts_drawn_with_every_filter_give_the_same_ids(twins: Callable) -> None:
    models = twins(n_positions=64, n_layer=2)
    prompts = [[1], torch.randint(61, (20,)).tolist(), [5, 6, 7]]
    params = [
        SamplingParams(max_new_tokens=6, temperature=0.9, top_k=20, seed=3),
        SamplingParams(max_new_tokens=4, temperature=1.1, top_p=0.8, seed=4, n=2),
        SamplingParams(max_new_tokens=5, min_p=0.05, repetition_penalty=1.3, seed=5),
    ]
    ours, reference = (generate(model, prompts, params) for model in models)
    assert [c.ids for c in ours] == [c.ids for c in reference]
    for completion, expected in zip(ours, reference, strict=True):
        assert completion.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_what_lies_beyond_a_rows_length_is_never_read(twins: Callable) -> None:
    """A prompt in any pieces, in a cache whose tail holds NaN."""
    model, _ = twins(n_layer=2)
    ids = torch.randint(61, (1, 12))
    expected = model(ids).logits
    for pieces in ([12], [1] * 12, [5, 7], [11, 1]):
        cache = KVCache(model.config, n_slots=2, max_len=30)
        cache.k.fill_(torch.nan)
        cache.v.fill_(torch.nan)
        with torch.no_grad():
            got = [
                model(piece, cache=cache, slots=torch.tensor([1])).logits
                for piece in ids.split(pieces, dim=1)
            ]
        assert (torch.cat(got, 1) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("capability", "hip", "expected"),
    [
        ((9, 0), None, "triton"),
        ((8, 0), None, "triton"),
        ((7, 5), None, "torch"),
        ((9, 0), "6.3", "triton"),
    ],
)
def test_the_default_is_triton_on_a_gpu_that_can_run_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple, hip: str | None, expected: str
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    monkeypatch.setattr("torch.version.hip", hip)
    assert Ops.default(CUDA) == getattr(Ops, expected)()
    assert Ops.default(torch.device("cpu")) == Ops.torch()
    for beyond in ({"dtype": torch.float64}, {"head_dim": 129}, {"width": 16385}):
        assert Ops.default(CUDA, **beyond) == Ops.torch()
    monkeypatch.setattr("gptile.kernels.ops.HAS_TRITON", False)
    assert Ops.default(CUDA) == Ops.torch()


def test_every_operation_refuses_cpu_tensors_outside_the_interpreter(
    twins: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = twins(n_layer=1)
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    with pytest.raises(TypeError, match="TRITON_INTERPRET=1"):
        model(torch.tensor([[1, 2]]))
    one, zero = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    columns = {"temperature": one, "top_k": zero, "top_p": one, "min_p": one}
    with pytest.raises(TypeError, match="TRITON_INTERPRET=1"):
        Ops.triton().sample(
            *(torch.randn(1, 8), None),
            **columns,
            repetition_penalty=one,
            seeds=zero,
            positions=zero,
        )
