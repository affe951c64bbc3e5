"""``gptile parity`` as a user meets it: what it prints, writes and refuses, and its exit code."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import torch

from gptile.bench.result import load_record
from gptile.cli import main
from gptile.console import parse_kernels
from gptile.kernels import Ops
from gptile.model.config import GPT2Config
from gptile.weights.checkpoint import Checkpoint
from gptile.weights.files import DEMO


@pytest.fixture
def parity(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process: exit code, stdout, stderr."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gptile", "parity", *args])
        with pytest.raises(SystemExit) as exit:
            main()
        return (exit.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer 2 of every model that is loaded attends a little too sharply."""
    right = Checkpoint.load_model

    def load_wrong(self, **kwargs):
        model = right(self, **kwargs)
        model.h[2].attn.scale *= 1.01
        return model

    monkeypatch.setattr(Checkpoint, "load_model", load_wrong)


def test_the_demo_is_green_and_everything_is_said(parity: Callable, tmp_path: Path) -> None:
    saved, drawn = tmp_path / "parity.json", tmp_path / "growth.svg"
    code, out, _ = parity("--tokens", "8", "-o", str(saved), "--plot", str(drawn))
    assert code == 0, out
    for words in ("forward, layer 5", "backward, layer 0", "cached, layer 3", "grad wte.weight"):
        assert words in out
    lines = out.splitlines()
    assert lines[-1].endswith("within 1.5 x transformers' own error, each against fp64")
    assert sum(line.startswith("greedy text: ") for line in lines) == 2
    assert max(len(line) for line in lines if not line.startswith("greedy text: ")) <= 90

    record = load_record(saved)
    assert record["kind"] == "parity"
    assert record["settings"]["tokens"] == [8, 8]
    assert record["environment"]["seed"] == 0
    assert all(row["ok"] for row in record["rows"])
    row = record["rows"][10]
    assert row["subject"] == {
        "dtype": "float32",
        "kernels": "auto",
        "section": "forward",
        "quantity": "output",
        "layer": 1,
        "operation": "ln_1",
        "kernel": "add_layer_norm",
    }
    assert row["allowed"] == pytest.approx(1.5 * max(row["eager"], row["sdpa"]) + 2**-24)
    assert record["rows"][-1]["text"], "the greedy text"
    assert "<svg" in drawn.read_text()


def test_a_wrong_layer_is_named_and_the_exit_code_is_1(
    parity: Callable, wrong_scale: None, tmp_path: Path
) -> None:
    code, out, _ = parity("--tokens", "8", "-o", str(tmp_path / "red.json"))
    assert code == 1
    assert out.splitlines()[-1].startswith("FAIL first in layer 2, attention (forward): error ")
    assert "FAIL   forward, layer 2 (attention)" in out
    assert "ok     forward, layer 1 " in out
    assert not all(row["ok"] for row in load_record(tmp_path / "red.json")["rows"])


def test_all_lines_in_every_dtype(parity: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    code, out, _ = parity("--tokens", "4", "--dtype", "float32", "--dtype", "float16", "--all")
    assert code == 0, out
    assert "Every error, float16" in out
    assert out.count("forward: layer 3, attn.c_attn") == 2
    assert "backward: layer 4, attention: gradient at attn.c_attn" in out


def test_json_is_the_last_line(parity: Callable) -> None:
    code, out, _ = parity("--tokens", "4", "--json", "--seed", "3")
    assert code == 0
    (line,) = out.splitlines()
    record = json.loads(line, parse_constant=pytest.fail)
    assert record["environment"]["seed"] == 3


def test_nan_is_red_and_null(parity: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Checkpoint.load_model

    def load_nan(self, **kwargs):
        model = right(self, **kwargs)
        with torch.no_grad():
            model.h[1].ln_2.bias[0] = torch.nan
        return model

    monkeypatch.setattr(Checkpoint, "load_model", load_nan)
    code, out, _ = parity("--tokens", "4", "--json")
    assert code == 1
    red = [row for row in json.loads(out, parse_constant=pytest.fail)["rows"] if not row["ok"]]
    assert (red[0]["subject"]["layer"], red[0]["subject"]["operation"]) == (1, "ln_2")
    assert red[0]["error"] is None


class TestPrompts:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Callable[[str | bytes], str]:
        def write(content: str | bytes, name: str = "prompts.txt") -> str:
            raw = content if isinstance(content, bytes) else content.encode()
            (tmp_path / name).write_bytes(raw)
            return str(tmp_path / name)

        return write

    def test_one_a_line(self, parity: Callable, file: Callable) -> None:
        code, out, _ = parity("--prompts", file("ROMEO:\n\nTo be, or not\r\n"), "--json")
        assert code == 0
        record = json.loads(out)
        first, second = record["settings"]["tokens"]
        assert 1 <= first < second
        text = record["rows"][-1]["text"]
        assert len(text) == 2
        assert "\n" in text[0]

    def test_jsonl(self, parity: Callable, file: Callable) -> None:
        lines = '{"prompt": "ROMEO:\\n"}\n{"prompt": "JULIET:\\nO"}\n'
        code, out, _ = parity("--prompts", file(lines, "prompts.jsonl"), "--json")
        assert code == 0
        assert len(json.loads(out)["settings"]["tokens"]) == 2

    @pytest.mark.parametrize(
        ("content", "name", "words"),
        [
            (b"", "prompts.txt", "no text"),
            (b"\n \n", "prompts.txt", "no prompt"),
            (b"\xff\xfe", "prompts.txt", "not UTF-8"),
            (b"a " * 400, "prompts.txt", "prompt 1 has"),
            (b'{"prompt": 3}\n', "prompts.jsonl", "prompts.jsonl:1"),
            (b"ROMEO\n", "prompts.jsonl", "prompts.jsonl:1"),
            (b"a\nb\n", "prompts.txt", "two tokens"),
        ],
    )
    def test_a_file_that_holds_none_is_refused(
        self, parity: Callable, file: Callable, content: bytes, name: str, words: str
    ) -> None:
        code, out, err = parity("--prompts", file(content, name))
        assert (code, out) == (2, "")
        assert words in err
        assert len(err.splitlines()) == 1

    def test_a_model_without_a_tokeniser_takes_none(
        self, parity: Callable, file: Callable, tmp_path: Path
    ) -> None:
        shutil.copytree(DEMO, tmp_path / "model")
        for name in ("vocab.json", "merges.txt", "tokenizer.json"):
            (tmp_path / "model" / name).unlink(missing_ok=True)
        code, _, err = parity(str(tmp_path / "model"), "--prompts", file("a"))
        assert code == 2
        assert "tokenizer.json" in err or "vocab.json" in err
        code, out, _ = parity(str(tmp_path / "model"), "--tokens", "4")
        assert code == 0
        assert "greedy text: '" in out, "ids, where there is no text"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("./nowhere",), "./nowhere"),
        (("random:gpt3",), "random:gpt2"),
        (("--tokens", "1"), "--tokens"),
        (("--tokens", "300"), "300 tokens exceed the context of 256"),
        (("--tokens", "4", "--prompts", __file__), "not both"),
        (("--prompts", "/nowhere/prompts.txt"), "/nowhere/prompts.txt"),
        (("--plot", "growth.gif"), ".svg"),
        (("-o", "/nowhere/parity.json"), "/nowhere/parity.json"),
        (("--dtype", "float8"), "float8"),
        (("--kernels", "attention,softmax"), "no operation 'softmax'; there are embedding, "),
        (("--device", "tpu"), "tpu"),
    ],
)
def test_wrong_inputs_are_refused_in_one_line(parity: Callable, args: tuple, words: str) -> None:
    code, out, err = parity(*args)
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1


def test_triton_on_a_cpu_needs_the_interpreter() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "gptile", "parity", "--device", "cpu", "--kernels", "attention"],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2
    assert "--kernels attention needs a GPU" in run.stderr
    assert "TRITON_INTERPRET=1" in run.stderr


def test_kernels_by_name_are_triton_s_and_the_others_pytorch_s() -> None:
    def parse(name: str) -> Ops | None:
        return parse_kernels(name, torch.device("cpu"), GPT2Config())

    assert parse("auto") is None
    assert parse("torch") == Ops.torch()
    assert parse("triton") == Ops.triton()
    some = Ops.torch().replace(attention=Ops.triton().attention, linear=Ops.triton().linear)
    assert parse("attention, linear") == some
    with pytest.raises(click.UsageError, match="exceeds what the kernels hold"):
        parse_kernels("linear", torch.device("cpu"), GPT2Config(n_embd=2**16, n_head=2))


def test_each_kernel_has_its_own_verdict(parity: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """With PyTorch's operations for Triton's, one of them wrong: the interpreter takes minutes."""
    right = Ops.torch()

    def wrong(*args):
        return 1.001 * right.attention(*args)

    monkeypatch.setattr(Ops, "triton", classmethod(lambda cls: right.replace(attention=wrong)))
    code, out, _ = parity("--tokens", "4", "--kernels", "each")
    assert code == 1
    lines = out.splitlines()
    for operation in vars(right):
        assert any(line.startswith(f"float32, kernels {operation}: ") for line in lines)
    red = [line for line in lines if line.startswith("FAIL")]
    assert len(red) == 1
    assert red[0].startswith("FAIL first in layer 0, attention (forward)")


def test_random_weights_of_a_published_size(
    parity: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=97, n_positions=32)
    monkeypatch.setattr("gptile.bench.checkpoints.PRESETS", {"gpt2": small})
    code, out, _ = parity("random:gpt2", "--tokens", "8")
    assert code == 0, out
    assert "greedy text: '" in out
