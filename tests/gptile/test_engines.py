"""``gptile generate --engine``: the same text from compiled steps, and clear words where not."""

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from gptile import decoding
from gptile.cli import main
from gptile.kernels import Ops
from gptile.model import cpu_decoder
from gptile.model.gpt2 import GPT2

Run = Callable[..., tuple[int, str, str]]
GREEDY = ("ROMEO:", "--max-new-tokens", "30", "--temperature", "0")


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Run:
    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gptile", "generate", *args])
        with pytest.raises(SystemExit) as exit:
            main()
        return exit.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Precision and threads of each decoder that is made."""
    found: list[tuple[str, int]] = []

    class Watched(cpu_decoder.CPUDecoder):
        def __init__(self, model: GPT2, precision: str = "float32") -> None:
            super().__init__(model, precision)
            found.append((precision, cpu_decoder.numba.get_num_threads()))

    monkeypatch.setattr(cpu_decoder, "CPUDecoder", Watched)
    return found


def test_both_engines_write_the_same(generate: Run, packed: list) -> None:
    code, plain, _ = generate(*GREEDY, "--engine", "plain")
    assert code == 0
    assert packed == []
    assert generate(*GREEDY, "--engine", "fast") == (0, plain, "")
    assert packed == [("float32", 1)]
    sampled = ("--n", "2", "--seed", "3", "--max-new-tokens", "20", "ROMEO:", "--json")
    texts = [json.loads(generate(*sampled, "--engine", e)[1]) for e in ("plain", "fast")]
    assert [c["text"] for c in texts[0]["completions"]] == [
        c["text"] for c in texts[1]["completions"]
    ]


def test_small_weights_need_no_other_word(generate: Run, packed: list) -> None:
    for weights in ("bfloat16", "int8"):
        code, out, _ = generate(*GREEDY, "--weights", weights, "--threads", "2")
        assert code == 0
        assert out.startswith("ROMEO:")
    assert [precision for precision, _ in packed] == ["bfloat16", "int8"]


def test_auto_is_fast_for_a_large_model_that_can(
    generate: Run, packed: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert generate(*GREEDY)[0] == 0
    assert packed == []  # the demo is small
    monkeypatch.setattr(decoding, "SMALL", 1)
    assert generate(*GREEDY)[0] == 0
    assert len(packed) == 1
    assert generate(*GREEDY, "--dtype", "bfloat16")[0] == 0
    assert generate(*GREEDY, "--kernels", "torch")[0] == 0
    assert len(packed) == 1


def test_without_numba(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "gptile.model.cpu_decoder")
    monkeypatch.delattr("gptile.model.cpu_decoder")
    monkeypatch.setattr(decoding, "SMALL", 1)
    assert generate(*GREEDY)[0] == 0
    code, out, err = generate(*GREEDY, "--engine", "fast")
    assert (code, out) == (2, "")
    assert "pip install '.[fast]'" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--engine", "plain", "--weights", "int8"], ["--weights int8", "--engine fast"]),
        (["--engine", "fast", "--dtype", "bfloat16"], ["float32", "bfloat16"]),
        (["--engine", "fast", "--kernels", "attention"], ["--engine fast", "--kernels attention"]),
        (["--engine", "quick"], ["quick", "plain", "fast"]),
        (["--threads", "0"], ["--threads"]),
    ],
)
def test_what_does_not_go_together(
    generate: Run, monkeypatch: pytest.MonkeyPatch, args: list[str], words: list[str]
) -> None:
    monkeypatch.setattr("gptile.cli.parse_kernels", lambda *_: Ops.torch())
    code, out, err = generate(*GREEDY, *args)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    for word in words:
        assert word in err


def test_a_row_of_options_has_help(generate: Run) -> None:
    code, out, _ = generate("--help")
    assert code == 0
    words: Any = ("--engine", "--weights", "--threads", "int8")
    assert all(word in out for word in words)
