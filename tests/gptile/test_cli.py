"""The command line as a user meets it: what it prints, and its exit code."""

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pytest

from gptile.cli import cli, main
from gptile.weights import open_checkpoint
from gptile.weights.files import DEMO

Command: TypeAlias = Callable[..., "Run"]
ROMEO = ("generate", "ROMEO:", "--max-new-tokens", "20", "--seed", "1")


@dataclass
class Run:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def gptile(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., Run]:
    """Run the command in this process, with its arguments, standard streams and exit code."""

    def run(*args: str, stdin: str | bytes = "") -> Run:
        raw = stdin if isinstance(stdin, bytes) else stdin.encode()
        monkeypatch.setattr(sys, "argv", ["gptile", *args])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
        with pytest.raises(SystemExit) as exit:
            main()
        return Run(exit.value.code or 0, *capsys.readouterr())

    return run


def gptile_process(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "gptile", *args]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def fails(run: Run, *words: str, code: int = 2) -> None:
    """One line on stderr that says all of ``words``, nothing on stdout, the exit code."""
    assert run.returncode == code, (run.returncode, run.stderr)
    assert run.stdout == ""
    lines = run.stderr.strip().splitlines()
    assert len(lines) == 1, run.stderr
    assert lines[0].startswith("gptile: error: ")
    for word in words:
        assert word in lines[0], f"{word!r} not in {lines[0]!r}"


class TestGenerate:
    def test_the_same_text_twice_with_the_prompt_before_it(self) -> None:
        first, second = gptile_process(*ROMEO), gptile_process(*ROMEO)
        assert first.returncode == 0, first.stderr
        assert first.stdout == second.stdout
        assert first.stdout.startswith("ROMEO:")
        assert first.stdout.endswith("\n")
        assert len(first.stdout) > 30
        assert first.stderr == ""

    def test_json_says_what_the_text_mode_shows(self, gptile: Command) -> None:
        record = json.loads(gptile(*ROMEO, "--json").stdout)
        (completion,) = record["completions"]
        assert gptile(*ROMEO).stdout == record["prompt"] + completion["text"] + "\n"
        assert completion["n_new_tokens"] == len(completion["ids"]) == 20
        assert len(completion["logprobs"]) == 20
        assert completion["finish_reason"] == "length"
        assert completion["seed"] == 1
        assert completion["n_prompt_tokens"] > 0

    def test_prompt_from_argument_stdin_and_file(self, gptile: Command, tmp_path: Path) -> None:
        path = tmp_path / "prompt.txt"
        path.write_text("ROMEO:")
        rest = ROMEO[2:]
        expected = gptile(*ROMEO).stdout
        assert gptile("generate", *rest, stdin="ROMEO:").stdout == expected
        assert gptile("generate", "-", *rest, stdin="ROMEO:").stdout == expected
        assert gptile("generate", "--file", str(path), *rest).stdout == expected
        # The argument wins over a stdin that happens to be there.
        assert gptile(*ROMEO, stdin="ignored").stdout == expected

    def test_a_final_newline_is_part_of_the_prompt(self, gptile: Command) -> None:
        record = json.loads(
            gptile("generate", "--json", "--max-new-tokens", "2", stdin="ROMEO:\n").stdout
        )
        assert record["prompt"] == "ROMEO:\n"

    def test_an_empty_prompt_starts_from_bos(self, gptile: Command) -> None:
        run = gptile("generate", "--max-new-tokens", "5", "--json")
        assert run.returncode == 0, run.stderr
        assert json.loads(run.stdout)["completions"][0]["n_prompt_tokens"] == 1

    def test_ids_in_ids_out(self, gptile: Command) -> None:
        args = ("--seed", "1", "--max-new-tokens", "8")
        record = json.loads(gptile("generate", "ROMEO:", "--json", *args).stdout)
        ids = open_checkpoint("demo").load_tokenizer().encode("ROMEO:")
        for text in (" ".join(map(str, ids)), ",".join(map(str, ids))):
            out = gptile("generate", "--ids", text, *args).stdout
            assert [int(word) for word in out.split()] == record["completions"][0]["ids"]

    def test_several_samples(self, gptile: Command) -> None:
        run = gptile(*ROMEO, "--n", "3")
        assert run.stdout.count("--- sample ") == 3
        texts = {
            completion["text"]
            for completion in json.loads(gptile(*ROMEO, "--n", "3", "--json").stdout)["completions"]
        }
        assert len(texts) == 3

    def test_stop(self, gptile: Command) -> None:
        record = json.loads(gptile(*ROMEO, "--stop", "\n", "--json").stdout)
        (completion,) = record["completions"]
        assert completion["finish_reason"] == "stop"
        assert "\n" not in completion["text"]

    def test_triton_kernels_write_the_same_text(self, gptile: Command) -> None:
        greedy = ("generate", "ROMEO:", "--max-new-tokens", "8", "--temperature", "0")
        expected = gptile(*greedy, "--kernels", "torch")
        assert gptile(*greedy, "--kernels", "triton") == expected
        assert expected.returncode == 0

    def test_triton_kernels_need_a_gpu_or_the_interpreter(
        self, gptile: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("triton.knobs.runtime.interpret", False)
        run = gptile("generate", "ROMEO:", "--kernels", "triton", "--device", "cpu")
        assert run.returncode == 2
        assert "TRITON_INTERPRET=1" in run.stderr
        assert len(run.stderr.splitlines()) == 1

    def test_a_reader_that_leaves_is_no_error(self) -> None:
        command = f"{sys.executable} -m gptile generate hi --seed 1 | head -c 4"
        run = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        assert run.stderr == ""

    def test_a_directory_without_a_tokeniser_runs_on_ids(
        self, gptile: Command, tmp_path: Path
    ) -> None:
        shutil.copytree(DEMO, tmp_path / "bare")
        (tmp_path / "bare" / "vocab.json").unlink()
        model = ("--model", str(tmp_path / "bare"))
        fails(gptile("generate", "hi", *model), "token ids, not on text")
        run = gptile("generate", "--ids", "1 2 3", "--max-new-tokens", "3", *model)
        assert len(run.stdout.split()) == 3
        record = json.loads(
            gptile("generate", "--ids", "1 2", "--json", "--max-new-tokens", "2", *model).stdout
        )
        assert record["prompt"] == [1, 2]
        assert record["completions"][0]["text"] is None


class TestWrongInput:
    @pytest.mark.parametrize(
        ("args", "words"),
        [
            (["--temperature", "-1"], ["temperature", "-1"]),
            (["--temperature", "nan"], ["temperature", "nan"]),
            (["--temperature", "warm"], ["--temperature", "warm"]),
            (["--top-p", "1.5"], ["top_p", "1.5"]),
            (["--top-k", "-3"], ["top_k", "-3"]),
            (["--n", "0"], ["n must be"]),
            (["--seed", "-1"], ["seed"]),
            (["--max-new-tokens", "0"], ["max_new_tokens"]),
            (["--max-new-tokens", "5000"], ["5000", "256", "at most"]),
            (["--dtype", "int8"], ["--dtype", "int8", "float32"]),
            (["--device", "tpu"], ["--device", "tpu"]),
            (["--device", "cuda:99"], ["cuda:99", "doctor"]),
            (["--no-such-option"], ["--no-such-option"]),
            (["--stop", ""], ["stop"]),
            (["--model", "./nowhere"], ["./nowhere", "no such"]),
            (["--ids"], ["--ids", "'ROMEO:'"]),
            (["--revision", "v1"], ["revision"]),
        ],
    )
    def test_one_line_and_exit_code_2(
        self, gptile: Command, args: list[str], words: list[str]
    ) -> None:
        fails(gptile("generate", "ROMEO:", *args), *words)

    def test_a_prompt_that_is_too_long(self, gptile: Command) -> None:
        fails(gptile("generate", "word " * 5000), "tokens", "context of 256")

    def test_a_prompt_file_that_is_not_there(self, gptile: Command) -> None:
        run = gptile("generate", "--file", "/nowhere/prompt.txt")
        fails(run, "/nowhere/prompt.txt", code=1)

    def test_a_prompt_that_is_not_utf8(self, gptile: Command) -> None:
        fails(gptile("generate", stdin=b"caf\xe9"), "UTF-8")

    def test_ids_out_of_range(self, gptile: Command) -> None:
        fails(gptile("generate", "--ids", "5 999999"), "999999", "2047")

    def test_html_instead_of_weights(self, gptile: Command, tmp_path: Path) -> None:
        shutil.copytree(DEMO, tmp_path / "model")
        (tmp_path / "model" / "model.safetensors").write_text("<html>")
        fails(gptile("generate", "hi", "--model", str(tmp_path / "model")), "HTML")

    def test_ids_are_digits(self, gptile: Command) -> None:
        for text in ("1_0", "-1", "1.5", "\uff11"):
            fails(gptile("generate", "--ids", "--", text), "--ids")

    def test_too_much_for_the_memory(
        self, gptile: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*args: object, **kwargs: object) -> None:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")

        monkeypatch.setattr("gptile.model.kv_cache.torch.empty", full)
        run = gptile("generate", "hi", "--temperature", "0", "--json")
        fails(run, "not enough memory", code=1)

    def test_other_runtime_errors_are_shown_whole(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*args: object, **kwargs: object) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr("gptile.model.kv_cache.torch.empty", broken)
        monkeypatch.setattr(sys, "argv", ["gptile", "generate", "--ids", "1"])
        with pytest.raises(RuntimeError, match="illegal memory access"):
            main()

    @pytest.mark.parametrize("closed", ["<&-", ">&-"])
    def test_closed_streams(self, closed: str) -> None:
        command = f"{sys.executable} -m gptile generate --max-new-tokens 2 --seed 1 {closed}"
        run = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        assert "Traceback" not in run.stderr

    def test_an_unknown_command(self, gptile: Command) -> None:
        fails(gptile("dance"), "dance")

    def test_no_command_shows_help(self, gptile: Command) -> None:
        run = gptile()
        assert run.returncode == 2
        assert "Usage: gptile" in run.stdout + run.stderr


@pytest.mark.parametrize("command", ["", *cli.commands])
def test_every_command_has_help_with_an_example(gptile: Command, command: str) -> None:
    run = gptile(*command.split(), "--help")
    assert run.returncode == 0
    assert "Examples:" in run.stdout
    assert "  gptile " in run.stdout


def test_help_does_not_wait_for_pytorch() -> None:
    program = (
        "import sys; from click.testing import CliRunner; from gptile.cli import cli;"
        "assert CliRunner().invoke(cli, ['train', '--help']).exit_code == 0;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


class TestInfo:
    def test_table_and_json_agree(self, gptile: Command) -> None:
        record = json.loads(gptile("info", "--json").stdout)
        assert record["head_dim"] == 64
        assert record["parameters"] > 1_000_000
        table = gptile("info", "demo").stdout
        for key in ("layers", "context", "vocabulary", "parameters"):
            assert str(record[key]) in table

    def test_a_misfit_is_found_without_reading_weights(
        self, gptile: Command, tmp_path: Path
    ) -> None:
        shutil.copytree(DEMO, tmp_path / "model")
        path = tmp_path / "model" / "config.json"
        path.write_text(path.read_text().replace('"n_positions": 256', '"n_positions": 128'))
        fails(gptile("info", str(tmp_path / "model")), "wpe.weight", "[256, 256]", "[128, 256]")


class TestConvert:
    def test_to_another_dtype(self, gptile: Command, tmp_path: Path) -> None:
        run = gptile("convert", str(DEMO), str(tmp_path / "out"), "--dtype", "bfloat16")
        assert run.returncode == 0, run.stderr
        assert "bfloat16" in run.stdout
        args = ("--temperature", "0", "--max-new-tokens", "5")
        assert gptile("generate", "a", "--model", str(tmp_path / "out"), *args).returncode == 0

    def test_wrong_inputs(self, gptile: Command, tmp_path: Path) -> None:
        fails(gptile("convert", "/nowhere", str(tmp_path / "out")), "/nowhere")
        fails(gptile("convert", str(DEMO), str(tmp_path)), "exists already")
        (tmp_path / "x.bin").write_bytes(b"<html>")
        fails(gptile("convert", str(tmp_path / "x.bin"), str(tmp_path / "out")), "x.bin")
        assert not (tmp_path / "out").exists()

    def test_a_target_that_cannot_be_written(self, gptile: Command) -> None:
        fails(gptile("convert", str(DEMO), "/dev/null/out"), "/dev/null", code=1)


class TestDoctor:
    def test_findings_and_plan(self, gptile: Command) -> None:
        run = gptile("doctor")
        assert run.returncode == 0, run.stdout
        for word in ("Python", "PyTorch", "CUDA", "Triton", "memory", "forward pass", "runs where"):
            assert word in run.stdout

    def test_json(self, gptile: Command) -> None:
        checks = json.loads(gptile("doctor", "--json").stdout)["checks"]
        assert {check["status"] for check in checks} <= {"ok", "note"}
        assert all(check["next_step"] for check in checks if check["status"] != "ok")
