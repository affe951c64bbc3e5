"""``gptile evaluate`` as a user meets it: what it prints, and its exit code."""

import io
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gptile import scoring
from gptile.bench import evaluation, evaluation_ladder
from gptile.bench.result import load_record
from gptile.cli import main

TEXT = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n" * 6
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Command:
    """Run the command in this process: exit code, stdout, stderr."""

    def run(*args: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gptile", "evaluate", *args])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as exit:
            main()
        return (exit.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode())
    return str(path)


@pytest.fixture
def jsonl(tmp_path: Path) -> str:
    path = tmp_path / "documents.jsonl"
    rows = [TEXT, "", "a", "hear me speak"]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return str(path)


def record(run: tuple[int, str, str]) -> dict:
    code, out, err = run
    assert code == 0, err
    (line,) = out.splitlines()
    return json.loads(line)


class TestText:
    def test_table_json_and_file_agree(self, evaluate: Command, text: str, tmp_path: Path) -> None:
        saved = tmp_path / "score.json"
        found = record(evaluate(text, "--json", "-o", str(saved)))
        assert load_record(saved) == found
        (row,) = found["rows"]
        code, table, err = evaluate(text)
        assert (code, err) == (0, "")
        for shown in (f"{row['tokens']:,}", f"{row['nll']:.6f}", f"{row['perplexity']:.4f}"):
            assert shown in table
        assert f"{row['loop_perplexity']:.4f}" in table
        assert row["perplexity"] == pytest.approx(math.exp(row["nll"]))
        bits = row["nll"] * row["tokens"] / math.log(2) / row["bytes"]
        assert row["bits_per_byte"] == pytest.approx(bits)
        assert found["kind"] == "evaluation"
        assert found["settings"]["window"] == found["settings"]["stride"] == 256

    def test_standard_input_is_a_text_like_any(self, evaluate: Command, text: str) -> None:
        a = record(evaluate(text, "--json"))["rows"][0]
        b = record(evaluate("-", "--json", stdin=TEXT.encode()))["rows"][0]
        assert a["nll"] == b["nll"]

    def test_more_context_scores_better(self, evaluate: Command, text: str) -> None:
        scores = [
            record(evaluate(text, "--window", "32", "--stride", stride, "--json"))["rows"][0]
            for stride in ("32", "8")
        ]
        assert scores[0]["tokens"] == scores[1]["tokens"]
        assert scores[1]["nll"] < scores[0]["nll"]

    def test_newlines_are_scored_as_they_are(self, evaluate: Command) -> None:
        def row(raw: bytes) -> dict:
            return record(evaluate("-", "--json", stdin=raw))["rows"][0]

        assert row(b"one\ntwo\n")["bytes"] + 2 == row(b"one\r\ntwo\r\n")["bytes"]
        assert row(b"one\ntwo\n")["bytes"] + 1 == row(b"one\ntwo\n\n")["bytes"]

    def test_a_byte_order_mark_is_noted_and_not_scored(self, evaluate: Command) -> None:
        plain = record(evaluate("-", "--json", stdin=b"hear me speak"))
        marked = record(evaluate("-", "--json", stdin=b"\xef\xbb\xbfhear me speak"))
        assert marked["rows"][0]["nll"] == plain["rows"][0]["nll"]
        assert "byte order mark" in marked["notes"][0]
        assert "byte order mark" in evaluate("-", stdin=b"\xef\xbb\xbfhear me speak")[1]

    def test_special_tokens_are_text_unless_asked_for(self, evaluate: Command) -> None:
        raw = b"hear<|endoftext|>me"
        plain = record(evaluate("-", "--json", stdin=raw))["rows"][0]
        special = record(evaluate("-", "--json", "--special-tokens", stdin=raw))["rows"][0]
        assert special["tokens"] < plain["tokens"]

    def test_bos_scores_the_first_token_too(self, evaluate: Command, text: str) -> None:
        plain = record(evaluate(text, "--json"))["rows"][0]
        whole = record(evaluate(text, "--json", "--bos"))["rows"][0]
        assert whole["tokens"] == plain["tokens"] + 1
        assert whole["bytes"] == len(TEXT)

    def test_the_limit_is_stated(self, evaluate: Command, text: str) -> None:
        found = record(evaluate(text, "--json", "--limit", "20"))
        assert found["rows"][0]["tokens"] == 19
        assert "the first 20 tokens only" in found["notes"][0]
        assert record(evaluate(text, "--json", "--limit", "20000"))["notes"] == []


class TestDocuments:
    def test_each_has_its_own_score(self, evaluate: Command, jsonl: str) -> None:
        (row,) = record(evaluate(jsonl, "--json"))["rows"]
        assert [d["tokens"] > 0 for d in row["documents"]] == [True, False, False, True]
        total = math.fsum(d["nll"] for d in row["documents"])
        assert row["nll"] == pytest.approx(total / row["tokens"], rel=1e-15)
        assert "loop_perplexity" not in row
        assert "2 with a token to score, of 4" in evaluate(jsonl)[1]

    def test_batches_and_buckets_change_nothing(self, evaluate: Command, jsonl: str) -> None:
        rows = [
            record(evaluate(jsonl, "--json", "--batch-size", size, "--bucket", bucket))["rows"][0]
            for size, bucket in (("1", "64"), ("4", "1"), ("4", "256"))
        ]
        for row in rows[1:]:
            assert row["tokens"] == rows[0]["tokens"]
            assert row["nll"] == pytest.approx(rows[0]["nll"], rel=1e-6)

    def test_by_another_name_and_field(self, evaluate: Command) -> None:
        raw = b'{"body": "hear me speak"}\n{"body": "speak"}'
        args = ("-", "--documents", "--field", "body", "--json")
        assert len(record(evaluate(*args, stdin=raw))["rows"][0]["documents"]) == 2


class TestHow:
    def test_16_bits_on_a_slow_machine_are_noted(
        self, evaluate: Command, text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        exact = record(evaluate(text, "--json"))["rows"][0]
        monkeypatch.setattr(evaluation, "slowdown", lambda dtype, device: 31.0)
        for args in (("--autocast", "bfloat16"), ("--dtype", "bfloat16")):
            found = record(evaluate(text, "--json", "--limit", "60", *args))
            assert any("31.0 times as long" in note for note in found["notes"])
        monkeypatch.setattr(evaluation, "slowdown", lambda dtype, device: 0.5)
        found = record(evaluate(text, "--json", "--autocast", "bfloat16"))
        assert found["notes"] == []
        assert found["rows"][0]["nll"] == pytest.approx(exact["nll"], rel=2**-8)

    def test_compiled_by_request(
        self, evaluate: Command, text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        exact = record(evaluate(text, "--json"))["rows"][0]
        asked = []
        monkeypatch.setattr("torch.compile", lambda model: asked.append(model) or model)
        found = record(evaluate(text, "--json", "--compile"))
        assert found["rows"][0]["nll"] == exact["nll"]
        assert found["notes"] == ["the time includes compilation"]
        assert len(asked) == 1
        monkeypatch.setenv("CXX", "/nowhere/c++")
        code, _, err = evaluate(text, "--compile")
        assert code == 2
        assert "C++ compiler" in err


class TestWrongInput:
    @pytest.mark.parametrize(
        ("args", "words"),
        [
            (["--stride", "300"], ["stride", "256", "300"]),
            (["--stride", "0"], ["--stride", "0"]),
            (["--window", "257"], ["--window 257", "256"]),
            (["--batch-size", "0"], ["--batch-size"]),
            (["--bucket", "0"], ["--bucket"]),
            (["--limit", "1"], ["--limit"]),
            (["--documents"], ["text.txt:1", "not JSON"]),
            (["--model", "./nowhere"], ["./nowhere"]),
            (["--device", "cuda:77"], ["cuda:77"]),
            (["--quick"], ["--quick", "--ladder"]),
            (["--autocast", "bfloat16", "--kernels", "triton"], ["--autocast", "--dtype"]),
            (["--autocast", "bfloat16", "--dtype", "float16"], ["--autocast", "float16"]),
            (["--autocast", "float32"], ["--autocast", "float32"]),
            (["--ladder", "--compile"], ["--ladder", "--compile"]),
            (["-o", "/nowhere/score.json"], ["/nowhere/score.json"]),
        ],
    )
    def test_one_line_and_exit_code_2(
        self, evaluate: Command, text: str, args: list[str], words: list[str]
    ) -> None:
        code, out, err = evaluate(text, *args)
        assert (code, out) == (2, "")
        assert len(err.splitlines()) == 1
        assert all(word in err for word in words), err

    @pytest.mark.parametrize(
        ("raw", "words"),
        [
            (b"", "no text"),
            (b"\xef\xbb\xbf", "no text"),
            (b"a", "nothing to score"),
            (b"\xe9", "UTF-8"),
        ],
    )
    def test_a_text_with_nothing_to_score(self, evaluate: Command, raw: bytes, words: str) -> None:
        code, out, err = evaluate("-", stdin=raw)
        assert (code, out) == (2, "")
        assert words in err

    def test_a_file_that_is_not_there(self, evaluate: Command, tmp_path: Path) -> None:
        for path in (tmp_path / "none.txt", tmp_path):
            code, _, err = evaluate(str(path))
            assert code == 2
            assert str(path) in err

    def test_several_processes_take_a_file_and_no_ladder(
        self, evaluate: Command, text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        for args in (("-",), (text, "--ladder")):
            code, _, err = evaluate(*args)
            assert code == 2
            assert "torchrun" in err

    def test_more_processes_than_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
        monkeypatch.setattr("torch.cuda.set_device", lambda index: None)
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert scoring._own_device("auto", 2) == torch.device("cuda:1")
        assert scoring._own_device("cpu", 2) == torch.device("cpu")
        assert scoring._own_device("cuda:0", 1) == torch.device("cuda:0")
        monkeypatch.setenv("LOCAL_RANK", "2")
        with pytest.raises(Exception, match="2 GPUs here, too few"):
            scoring._own_device("auto", 3)
        with pytest.raises(Exception, match="its own GPU"):
            scoring._own_device("cuda:0", 2)


class TestLadder:
    @pytest.fixture(autouse=True)
    def bare(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(evaluation_ladder, "missing_compiler", lambda device: "no compiler")
        monkeypatch.setattr(evaluation_ladder, "slowdown", lambda dtype, device: 70.0)

    def test_a_row_for_each_optimisation(self, evaluate: Command, jsonl: str) -> None:
        args = (jsonl, "--ladder", "--quick", "--limit", "171", "--batch-size", "2")
        code, out, _ = evaluate(*args)
        assert code == 0
        for words in ("eager", "sdpa", "batches of 2", "length buckets", "not run", "no GPU here"):
            assert words in out
        assert "the first 171 tokens only" in out
        found = record(evaluate(*args, "--json"))
        assert len(found["rows"]) == 11
        assert [len(row["seconds"]) for row in found["rows"] if "seconds" in row] == [3] * 6

    def test_a_red_row_ends_in_exit_code_1_and_shows_no_speed_up(
        self, evaluate: Command, text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(evaluation_ladder, "bound", lambda dtype: -1.0)
        code, out, _ = evaluate(text, "--ladder", "--quick", "--limit", "30")
        assert code == 1
        assert "FAIL" in out
        assert "withheld" in out


def test_help_does_not_wait_for_pytorch() -> None:
    program = (
        "import sys; from click.testing import CliRunner; from gptile.cli import cli;"
        "assert CliRunner().invoke(cli, ['evaluate', '--help']).exit_code == 0;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
