"""The model on a GPU: parity with transformers, greedy text, and torch.compile with Inductor."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gptile.bench.huggingface import import_transformers
from gptile.bench.parity import compare, first_red
from gptile.kernels import Ops
from gptile.kernels.layer_norm import layer_norm_triton
from gptile.model.generation import generate
from gptile.model.gpt2 import GPT2, GPT2Output
from gptile.model.sampling import SamplingParams
from gptile.weights.files import DEMO


@pytest.fixture
def source(device: str, tmp_path: Path) -> Path:
    """The demo; for the interpreter a small random model."""
    if device == "cuda":
        return DEMO
    transformers = import_transformers()
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 61, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, initializer_range=0.2, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_parity_with_transformers(device: str, source: Path, dtype: torch.dtype) -> None:
    """transformers on the same device; only the truth is computed on the CPU."""
    found = compare(source, kernels={"triton": Ops.triton()}, device=device, dtypes=[dtype])
    assert [str(line) for line in found.lines if not line.ok] == []


def test_parity_sees_a_wrong_kernel(device: str, source: Path) -> None:
    wrong = Ops.triton().replace(
        layer_norm=lambda x, weight, bias, eps: layer_norm_triton(x, weight, bias, 1e-3)
    )
    found = compare(source, n_tokens=8, n_greedy=1, kernels={"wrong": wrong}, device=device)
    red = first_red(found.lines)
    assert red is not None
    assert str(red).startswith("layer 0, ln_1 (forward, kernel layer_norm)")


@pytest.fixture
def twins(device: str, demo: tuple, small_model: Callable[..., GPT2]) -> list[GPT2]:
    """The demo, or a small model for the interpreter, on Triton's kernels and on PyTorch's."""
    model = demo[0] if device == "cuda" else small_model(n_layer=1)
    twins = [GPT2(model.config, ops).eval() for ops in (Ops.triton(), Ops.torch())]
    for twin in twins:
        twin.load_state_dict(model.state_dict())
    return [twin.to(device) for twin in twins]


def test_greedy_text_is_that_of_the_reference(twins: list[GPT2]) -> None:
    prompts = [[5, 9, 2, 40], [7], [*range(1, 20)]]
    params = SamplingParams(max_new_tokens=10, temperature=0, stop_token_ids=())
    ours, reference = ([c.ids for c in generate(m, prompts, params)] for m in twins)
    assert ours == reference


def test_the_compiled_model_is_the_eager_one(device: str, twins: list[GPT2]) -> None:
    """On a GPU by Inductor, which fuses what stands between the operations."""
    model = twins[0]
    compiled = torch.compile(
        model, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager"
    )
    ids = torch.randint(61, (2, 17), device=device)
    results: list[list[torch.Tensor]] = []
    for call in (model, compiled):
        output: GPT2Output = call(ids[:, :-1], ids[:, 1:])
        model.zero_grad()
        output.loss.backward()
        results.append([output.loss, output.logits, *(p.grad for p in model.parameters())])
    for eager, other in zip(*results, strict=True):
        assert (other - eager).norm() <= 1e-5 * eager.norm()
