"""``gptile generate --draft``: the same text, counts of what was drafted, clear words where not."""

import inspect
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gptile import decoding
from gptile.cli import main
from gptile.model import cpu_decoder
from gptile.model.drafting import DraftModel, PromptLookup
from gptile.model.gpt2 import GPT2
from gptile.weights.files import DEMO

Run = Callable[..., tuple[int, str, str]]
ROMEO = ("ROMEO:", "--max-new-tokens", "31", "--seed", "1")


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Run:
    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gptile", "generate", *args])
        with pytest.raises(SystemExit) as exit:
            main()
        return exit.value.code or 0, *capsys.readouterr()

    return run


@pytest.mark.parametrize("form", [[], ["--n", "2"], ["--ids"]])
def test_the_text_is_the_plain_one_and_the_counts_follow_it(generate: Run, form: list[str]) -> None:
    asked = ("5 6", *ROMEO[1:]) if form == ["--ids"] else ROMEO
    code, plain, silence = generate(*asked, *form)
    assert (code, silence) == (0, "")
    for draft in (["demo"], ["demo", "--draft-tokens", "2"], ["lookup"]):
        code, out, err = generate(*asked, *form, "--draft", *draft)
        assert (code, out) == (0, plain)
        assert err.endswith("tokens a step\n")
        assert len(err.splitlines()) == 1
    # Thirty tokens a sample, in threes: two drafted and one drawn.
    n = 2 if "--n" in form else 1
    line = f"{20 * n} of {20 * n} drafted tokens accepted (100%); 3.00 tokens a step\n"
    assert generate(*asked, *form, "--draft", "demo", "--draft-tokens", "2")[2] == line


def test_json_has_the_counts(generate: Run) -> None:
    plain = json.loads(generate(*ROMEO, "--json")[1])
    code, out, err = generate(*ROMEO, "--json", "--draft", "demo")
    assert (code, err) == (0, "")
    record = json.loads(out)
    assert record.pop("speculation") == {
        "steps": 6,
        "tokens": 30,
        "drafted": 24,
        "accepted": 24,
        "acceptance_rate": 1.0,
        "tokens_per_step": 5.0,
    }
    for found, expected in zip(record["completions"], plain["completions"], strict=True):
        assert found.pop("logprobs") == pytest.approx(expected.pop("logprobs"), abs=1e-4)
    assert record == plain


def test_the_draft_of_a_large_model_takes_compiled_steps(
    generate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    class Watched(cpu_decoder.CPUDecoder):
        def __init__(self, model: GPT2, precision: str) -> None:
            super().__init__(model, precision)
            made.append(precision)

    monkeypatch.setattr(cpu_decoder, "CPUDecoder", Watched)
    plain = generate(*ROMEO)[1]
    monkeypatch.setattr(decoding, "SMALL", 1)
    assert generate(*ROMEO, "--draft", "demo")[:2] == (0, plain)
    assert made == ["float32"]
    assert generate(*ROMEO, "--draft", "demo", "--engine", "plain")[:2] == (0, plain)
    assert made == ["float32"]


def test_another_vocabulary_is_named_before_anything_is_loaded(
    generate: Run, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(DEMO, other)
    vocab = (other / "vocab.json").read_text(encoding="utf-8")
    (other / "vocab.json").write_text(vocab.replace("<|endoftext|>", "<|end|>"), encoding="utf-8")
    (other / "model.safetensors").write_text("never read")
    code, out, err = generate(*ROMEO, "--draft", str(other))
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    for word in (f"--draft {other}", "--model demo", "id 2047", "<|end|>", "<|endoftext|>"):
        assert word in err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--draft-tokens", "3"], ["--draft-tokens", "--draft", "lookup"]),
        (["--draft", "lookup", "--draft-tokens", "0"], ["--draft-tokens", "0"]),
        (["--draft", "lookup", "--engine", "fast"], ["--draft lookup", "fast engine"]),
        (["--draft", "demo", "--weights", "int8"], ["--draft demo", "fast engine"]),
        (["--draft", "./nowhere"], ["./nowhere", "no such"]),
    ],
)
def test_what_does_not_go_together(generate: Run, args: list[str], words: list[str]) -> None:
    code, out, err = generate(*ROMEO, *args)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    for word in words:
        assert word in err


def test_help_says_the_defaults(generate: Run) -> None:
    def default(kind: type) -> int:
        return inspect.signature(kind).parameters["n_tokens"].default

    text = " ".join(generate("--help")[1].split())
    assert "--draft MODEL|lookup" in text
    assert f"[default: {default(DraftModel)} with a model, {default(PromptLookup)} with" in text
