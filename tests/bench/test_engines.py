"""Our model and transformers' as engines: what they return, beside an independent calculation."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gptile.bench.engines import (
    BASELINE,
    ENGINES,
    PRECISIONS,
    REFERENCE,
    TASKS,
    Choice,
    Setup,
    default_engines,
    load_class,
    missing,
)
from gptile.bench.huggingface import load_reference
from gptile.bench.torch_engines import LEARNING_RATE
from gptile.weights.files import DEMO

OURS_AND_TRANSFORMERS = [name for name in default_engines("cuda", False) if "compile" not in name]
IDS = np.random.default_rng(0).integers(2048, size=(2, 12)).tolist()


@pytest.fixture
def engine(tmp_path: Path) -> Callable[..., Any]:
    """Loads an engine on the demo."""

    def load(name: str, precision: str = "float32", **settings: Any) -> Any:
        entry = ENGINES[name]
        setup = Setup(DEMO, tmp_path, precision, "cpu", torch.get_num_threads())
        return load_class(entry.made_by)(setup, **entry.settings, **settings)

    return load


@pytest.fixture(scope="module")
def truth() -> Any:
    return load_reference(DEMO, torch.float64)


@pytest.mark.parametrize("name", OURS_AND_TRANSFORMERS)
def test_an_engine_computes_the_model(engine: Callable, truth: Any, name: str) -> None:
    found, ids = engine(name), torch.tensor(IDS)
    logits = truth(ids).logits.detach()
    np.testing.assert_allclose(found.logits(IDS), logits, rtol=0, atol=1e-4)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    if "score" in ENGINES[name].tasks:
        assert found.score(IDS) == pytest.approx(float(loss), rel=1e-6)


@pytest.mark.parametrize("name", OURS_AND_TRANSFORMERS)
def test_an_engine_decodes_the_likeliest_ids(engine: Callable, truth: Any, name: str) -> None:
    ids = torch.tensor(IDS)
    for _ in range(5):  # without a cache, in fp64
        ids = torch.cat([ids, truth(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    assert engine(name).generate(IDS, 5) == ids[:, 12:].tolist()


def test_no_id_ends_a_row(engine: Callable) -> None:
    """The end of text is made an id that comes soon."""
    ours, theirs = engine("gptile"), engine(BASELINE)
    ids = ours.generate(IDS[:1], 20)
    ours.model.config = dataclasses.replace(ours.model.config, eos_token_id=ids[0][3])
    theirs.model.generation_config.eos_token_id = ids[0][3]
    assert ours.generate(IDS[:1], 20) == theirs.generate(IDS[:1], 20) == ids


@pytest.mark.parametrize(
    "name", [name for name in OURS_AND_TRANSFORMERS if "train" in ENGINES[name].tasks]
)
def test_a_step_is_one_of_adamw(engine: Callable, truth: Any, name: str) -> None:
    trainer = engine(name, training=True)
    model = load_reference(DEMO, torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    ids = torch.tensor(IDS)
    for _ in range(3):
        optimizer.zero_grad()
        logits = model(ids).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        assert trainer.step(IDS) == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("name", ["gptile", BASELINE])
def test_16_bit_training_keeps_its_weights_in_fp32(engine: Callable, name: str) -> None:
    trainer = engine(name, "bfloat16", training=True)
    losses = [trainer.step(IDS) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    exact = engine(name, training=True).step(IDS)
    assert losses[0] != exact  # it did compute in 16 bits
    assert losses[0] == pytest.approx(exact, rel=1e-2)


def test_the_catalogue_is_complete() -> None:
    assert {BASELINE, REFERENCE} <= {*ENGINES}
    for entry in ENGINES.values():
        assert {*entry.precisions} <= {*PRECISIONS}
        assert {*entry.tasks} <= {*TASKS}
        assert entry.why_not or entry.tasks == TASKS
        assert hasattr(load_class(entry.made_by), "convert") == entry.peer
    assert Choice("gptile", "float32").ours
    assert not Choice(BASELINE, "float32").ours
    assert "gptile-torch" not in default_engines("cpu", quick=False)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if "onnx" in name else 1)
    assert missing(Choice("onnxruntime", "int8")) == ["onnxruntime", "onnx", "onnxscript"]
    assert missing(Choice("ctranslate2", "int8")) == []
    assert missing(Choice("gptile", "float32")) == []


def test_a_peers_process_does_not_load_pytorch() -> None:
    code = (
        "import sys, gptile.bench.workers, gptile.bench.peers; "
        "print([name for name in ('torch', 'transformers', 'triton') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
