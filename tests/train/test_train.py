"""The trainer: exact on resume, honest about validation, and clear about bad input."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gptile.kernels import IGNORE_INDEX
from gptile.model.config import PRESETS
from gptile.model.errors import UserError
from gptile.model.gpt2 import GPT2
from gptile.model.tokenizer import Tokenizer
from gptile.train import loop
from gptile.train.config import TrainConfig
from gptile.train.data import (
    Dataset,
    encode_dataset,
    split_text,
    training_batch,
    validation_batches,
)
from gptile.train.loop import train, validation_loss
from gptile.train.optimizer import build_optimizer, decay_groups, learning_rate
from gptile.weights import load
from gptile.weights.files import DEMO

TINY = TrainConfig(
    steps=6,
    batch_size=4,
    block_size=16,
    n_layer=2,
    n_head=2,
    n_embd=32,
    vocab_size=300,
    dropout=0.1,
    warmup_steps=2,
    eval_interval=3,
    learning_rate=1e-2,
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    words = "the cat sat on the mat and the dog ran to the hat with a rat".split()
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(words), (3000,), generator=generator).tolist()
    path.write_text(" ".join(words[i] for i in picks) + " café\n", encoding="utf-8")
    return path


class TestResume:
    @pytest.mark.parametrize("stop_at", [1, 3, 5])
    def test_k_steps_and_then_the_rest_are_all_the_steps(
        self, text: Path, tmp_path: Path, stop_at: int
    ) -> None:
        whole = train(text, tmp_path / "whole", TINY)
        train(text, tmp_path / "parts", TINY, stop_at=stop_at)
        torch.manual_seed(12345)  # another process would not have our random state either
        parts = train(text, tmp_path / "parts", TINY, resume=True)
        for file in ("model.safetensors", "optimizer.safetensors"):
            a, b = ((tmp_path / run / "last" / file).read_bytes() for run in ("whole", "parts"))
            assert a == b, file
        assert parts.step == whole.step == 6
        logs = []
        for run in ("whole", "parts"):
            lines = (tmp_path / run / "log.jsonl").read_text().splitlines()
            logs.append([{**json.loads(line), "seconds": 0} for line in lines])
        assert logs[0] == logs[1]
        assert [record["step"] for record in logs[0]] == [3, 6]
        best = [tmp_path / run / "best" / "model.safetensors" for run in ("whole", "parts")]
        assert best[0].read_bytes() == best[1].read_bytes()

    def test_only_the_same_run_is_resumed(self, text: Path, tmp_path: Path) -> None:
        train(text, tmp_path / "run", TINY, stop_at=1)
        other = dataclasses.replace(TINY, learning_rate=1e-3)
        with pytest.raises(UserError, match=r"learning_rate was 0\.01, now 0\.001"):
            train(text, tmp_path / "run", other, resume=True)
        text.write_text(text.read_text() + "more")
        with pytest.raises(UserError, match="data file is not the one"):
            train(text, tmp_path / "run", TINY, resume=True)
        with pytest.raises(UserError, match="no run was saved there"):
            train(text, tmp_path / "none", TINY, resume=True)
        with pytest.raises(UserError, match="exists already"):
            train(text, tmp_path / "run", TINY)

    def test_interrupted_while_saving_keeps_the_last_state(
        self, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        train(text, tmp_path / "run", TINY, stop_at=3)
        before = (tmp_path / "run" / "last" / "model.safetensors").read_bytes()

        def full_disk(*args: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("gptile.train.checkpoint.write_json", full_disk)
        with pytest.raises(OSError, match="No space"):
            train(text, tmp_path / "run", TINY, resume=True)
        assert (tmp_path / "run" / "last" / "model.safetensors").read_bytes() == before
        assert not [p for p in (tmp_path / "run").iterdir() if p.name.startswith(".")]


def test_the_result_is_a_checkpoint_that_learned(text: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, steps=60, eval_interval=20, dropout=0.0)
    state = train(text, tmp_path / "run", config)
    first, last = state.log[0], state.log[-1]
    assert last["train_loss"] < first["train_loss"]
    assert last["val_loss"] < 0.8 * math.log(300)
    model, tokenizer = load(tmp_path / "run" / "best")
    dataset = encode_dataset(text.read_text(), tokenizer, config)
    assert validation_loss(model, dataset.val, config) == pytest.approx(
        state.best_val_loss, abs=1e-5
    )
    assert tokenizer.special_tokens == {"<|endoftext|>": tokenizer.n_vocab - 1}
    assert model.config.bos_token_id == tokenizer.encode("\n")[0]
    assert model.config.eos_token_id == tokenizer.n_vocab - 1


def test_bits_per_byte_do_not_depend_on_the_tokeniser(model: GPT2) -> None:
    model = GPT2(dataclasses.replace(model.config, vocab_size=256))
    with torch.no_grad():
        model.wte.weight.zero_()  # uniform over 256 ids
    dataset = Dataset(torch.zeros(1), torch.randint(256, (101,)), val_bytes=100)
    config = dataclasses.replace(TINY, block_size=32)
    state = loop.TrainState(config, "", pending_losses=[1.0, 2.0])
    record = loop._evaluate(model, dataset, state, 1.0)
    assert record["train_loss"] == 1.5
    assert record["val_loss"] == pytest.approx(math.log(256), abs=1e-5)
    assert record["val_bits_per_byte"] == pytest.approx(8, abs=1e-5)


class TestData:
    def test_split_is_the_end_and_loses_nothing(self) -> None:
        head, tail = split_text("abcdefghij", 0.3)
        assert (head, tail) == ("abcdefg", "hij")

    def test_targets_are_one_ahead(self) -> None:
        ids = torch.arange(1000)
        inputs, targets = training_batch(ids, TINY, step=3)
        assert inputs.shape == targets.shape == (4, 16)
        assert torch.equal(targets, inputs + 1)

    def test_batches_are_a_function_of_seed_and_step(self) -> None:
        ids = torch.arange(1000)
        again = training_batch(ids, TINY, 3)[0]
        assert torch.equal(training_batch(ids, TINY, 3)[0], again)
        assert not torch.equal(training_batch(ids, TINY, 4)[0], again)
        other = dataclasses.replace(TINY, seed=1)
        assert not torch.equal(training_batch(ids, other, 3)[0], again)

    def test_every_window_can_be_drawn(self) -> None:
        ids = torch.arange(18)  # windows of 17 at 0 and 1
        starts = {
            int(training_batch(ids, TINY, step)[0][row, 0]) for step in range(9) for row in range(4)
        }
        assert starts == {0, 1}

    @pytest.mark.parametrize("n", [17, 64, 65, 66, 130])
    def test_validation_scores_every_id_but_the_first_once(self, n: int) -> None:
        ids = torch.arange(n) + 5
        scored = []
        for inputs, targets in validation_batches(ids, TINY):
            counted = targets != IGNORE_INDEX
            assert torch.equal(targets[counted], inputs[counted] + 1)
            scored += targets[counted].tolist()
        assert scored == ids[1:].tolist()

    def test_validation_loss_is_the_mean_over_all_ids(self, model: GPT2) -> None:
        ids = torch.randint(61, (70,))
        total = 0.0
        for start in range(0, 69, 16):
            window = ids[start : start + 17]
            logprobs = model(window[None, :-1]).logits[0].double().log_softmax(-1)
            total -= float(logprobs.gather(1, window[1:, None]).sum().detach())
        assert validation_loss(model, ids, TINY) == pytest.approx(total / 69, rel=1e-5)


class TestOptimizer:
    def test_gpt2s_parameters_are_each_in_one_group(self) -> None:
        with torch.device("meta"):
            model = GPT2(PRESETS["gpt2"])
        decayed, plain = (group["params"] for group in decay_groups(model, 0.1))
        assert sum(p.numel() for p in decayed + plain) == 124_439_808
        assert len({id(p) for p in decayed + plain}) == len(decayed + plain)
        assert all(p.dim() == 2 for p in decayed)
        assert all(p.dim() == 1 for p in plain)
        assert sum(p is model.wte.weight for p in decayed) == 1

    def test_biases_and_norms_do_not_decay(self, model: GPT2) -> None:
        config = dataclasses.replace(TINY, weight_decay=0.5)
        optimizer = build_optimizer(model, config)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for name, parameter in model.named_parameters():
            factor = 1 - config.learning_rate * 0.5 if parameter.dim() == 2 else 1
            torch.testing.assert_close(parameter.detach(), before[name] * factor)

    def test_gradients_are_clipped(self, model: GPT2, monkeypatch: pytest.MonkeyPatch) -> None:
        norms = []
        step = torch.optim.AdamW.step

        def watched(self: torch.optim.AdamW) -> None:
            grads = [p.grad for group in self.param_groups for p in group["params"]]
            norms.append(torch.stack([g.norm() for g in grads]).norm().item())
            step(self)

        monkeypatch.setattr(torch.optim.AdamW, "step", watched)
        ids = torch.randint(61, (200,))
        for clip in (0.0, 0.5):
            config = dataclasses.replace(TINY, grad_clip=clip)
            loop._train_step(model, build_optimizer(model, config), ids, config, 0)
        assert norms[0] > 0.6
        assert norms[1] == pytest.approx(0.5, rel=1e-3)

    def test_schedule(self) -> None:
        config = TrainConfig(steps=111, warmup_steps=10, learning_rate=1.0, min_learning_rate=0.1)
        assert [learning_rate(s, config) for s in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
        assert learning_rate(10, config) == 1.0
        assert learning_rate(60, config) == pytest.approx(0.55)
        assert learning_rate(110, config) == pytest.approx(0.1)
        one_step = TrainConfig(steps=1, warmup_steps=0, learning_rate=0.5)
        assert learning_rate(0, one_step) == 0.5


class TestBadInput:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("steps", 0),
            ("batch_size", 0),
            ("eval_interval", 0),
            ("learning_rate", 0.0),
            ("learning_rate", float("nan")),
            ("val_fraction", 0.0),
            ("val_fraction", 1.0),
            ("vocab_size", 256),
            ("weight_decay", -1.0),
            ("beta2", 1.0),
            ("seed", -1),
            ("seed", 2**63),
            ("min_learning_rate", 0.5),
            ("vocab_size", 10**22),
        ],
    )
    def test_hyperparameters_are_named(self, field: str, value: float) -> None:
        with pytest.raises(UserError, match=field):
            dataclasses.replace(TINY, **{field: value})

    def test_text(self, tmp_path: Path) -> None:
        path = tmp_path / "text.txt"
        with pytest.raises(UserError, match=str(path)):
            train(path, tmp_path / "run", TINY)
        path.write_bytes(b"")
        with pytest.raises(UserError, match="empty"):
            train(path, tmp_path / "run", TINY)
        path.write_bytes(b"\xff\xfe")
        with pytest.raises(UserError, match="UTF-8"):
            train(path, tmp_path / "run", TINY)
        assert not (tmp_path / "run").exists()
        path.write_text("short")
        with pytest.raises(UserError, match="too few"):
            train(path, tmp_path / "run", TINY)

    def test_what_does_not_go_together(self, text: Path, tmp_path: Path) -> None:
        for stop_at in (0, -3):
            with pytest.raises(UserError, match="stop_at"):
                train(text, tmp_path / "run", TINY, stop_at=stop_at)
        with pytest.raises(UserError, match="nowhere"):
            train(text, tmp_path / "run", TINY, tokenizer_from=tmp_path / "nowhere")
        assert not (tmp_path / "run").exists()
        train(text, tmp_path / "run", TINY, stop_at=1)
        with pytest.raises(UserError, match="tokenizer_from"):
            train(text, tmp_path / "run", TINY, resume=True, tokenizer_from=DEMO)

    def test_a_damaged_state(self, text: Path, tmp_path: Path) -> None:
        train(text, tmp_path / "run", TINY, stop_at=1)
        path = tmp_path / "run" / "last" / "trainer_state.json"
        state = json.loads(path.read_text())
        for change in ({"step": "2"}, {"config": {"steps": 1, "x": 2}}, {"extra": 1}):
            path.write_text(json.dumps({**state, **change}))
            with pytest.raises(UserError, match=r"trainer_state\.json"):
                train(text, tmp_path / "run", TINY, resume=True)

    def test_a_loss_that_is_not_finite_stops_the_run(self, text: Path, tmp_path: Path) -> None:
        wild = dataclasses.replace(TINY, learning_rate=1e30, warmup_steps=0, grad_clip=0.0)
        with pytest.raises(UserError, match="lower the learning rate"):
            train(text, tmp_path / "run", wild)


def test_the_command_line_trains_and_resumes(text: Path, tmp_path: Path) -> None:
    small = ["--steps", "2", "--block-size", "8", "--n-layer", "1", "--n-head", "1"]
    small += ["--n-embd", "8", "--vocab-size", "260", "--batch-size", "2", "--eval-interval", "2"]
    command = [sys.executable, "-m", "gptile", "train", str(text), "--out", str(tmp_path / "run")]
    first = subprocess.run([*command, *small, "--stop-at", "1"], capture_output=True, text=True)
    assert "step 1," in first.stdout, first.stderr
    assert "training" in first.stderr
    again = subprocess.run([*command, *small, "--resume"], capture_output=True, text=True)
    assert "step 2, best validation loss" in again.stdout, again.stderr
    refused = subprocess.run([*command, *small], capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stderr.startswith("gptile: error:")


class TestDemo:
    def test_it_is_small_and_whole(self) -> None:
        sizes = {path.name: path.stat().st_size for path in DEMO.iterdir()}
        assert sum(sizes.values()) <= 12_000_000
        assert {
            "config.json",
            "generation_config.json",
            "merges.txt",
            "model.safetensors",
            "vocab.json",
            "README.md",
        } <= sizes.keys()

    def test_its_validation_loss_is_the_one_on_its_card(
        self, demo: tuple[GPT2, Tokenizer], shakespeare: Path
    ) -> None:
        model, tokenizer = demo
        config = TrainConfig()
        dataset = encode_dataset(shakespeare.read_text(), tokenizer, config)
        loss = validation_loss(model, dataset.val, config)
        bits = loss * (len(dataset.val) - 1) / dataset.val_bytes / math.log(2)
        card = (DEMO / "README.md").read_text()
        assert f"| {loss:.3f} nats per token |" in card
        assert f"| {bits:.3f} bits per byte |" in card
