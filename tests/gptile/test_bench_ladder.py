"""``gptile bench ladder``, ``profile`` and ``compare`` as a user meets them: what they print, what
they write, and their exit codes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptile.bench import ladder, matrix
from gptile.bench.ladder import Job
from gptile.bench.result import Result, load_record, save_record
from gptile.cli import main
from gptile.kernels import Ops

Bench = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> Bench:
    """Run a command in this process, on a small job: exit code, stdout, stderr."""
    monkeypatch.setattr(ladder, "QUICK", Job(3, 2, 6, 2, 2))
    monkeypatch.setattr(ladder, "FULL", Job(4, 2, 6, 2, 2))
    monkeypatch.setattr(ladder, "missing_compiler", lambda device: "no compiler in this test")
    monkeypatch.setenv("COLUMNS", "160")

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gptile", "bench", *args])
        with pytest.raises(SystemExit) as exit:
            main()
        out, err = capfd.readouterr()
        # Where the profiler does not heed KINETO_LOG_LEVEL, set too late in this process.
        return (
            exit.value.code or 0,
            out,
            "".join(line for line in err.splitlines(keepends=True) if not line.startswith("USDT:")),
        )

    return run


def fails(run: tuple[int, str, str], *words: str) -> None:
    code, out, err = run
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    for word in words:
        assert word in err


def torch_as_triton(monkeypatch: pytest.MonkeyPatch, **wrong: Any) -> None:
    """PyTorch's operations for ours: the interpreter's seconds are spent in tests/bench."""
    ours = Ops.torch().replace(**wrong)
    monkeypatch.setattr(matrix.Ops, "triton", lambda: ours)


class TestLadder:
    def test_every_rung_is_printed_with_its_check(self, bench: Bench) -> None:
        code, out, err = bench("ladder", "demo", "--quick", "--rounds", "2")
        assert code == 0, err
        for words in (
            "naive loop",
            "length buckets",
            "cache reuse",
            "over first",
            "over previous",
            "equal ids",
        ):
            assert words in out
        assert "torch.compile: skipped: no compiler in this test" in out
        assert "our kernels: skipped: no GPU here" in out
        assert "RED" not in out
        assert "matrix" not in out

    def test_json_output_and_plot_are_one_record(self, bench: Bench, tmp_path: Path) -> None:
        path, plot = tmp_path / "ladder.json", tmp_path / "ladder.svg"
        args = ("demo", "--quick", "--rounds", "2", "--json")
        code, out, err = bench("ladder", *args, "-o", str(path), "--plot", str(plot))
        assert (code, err) == (0, "")
        record = json.loads(out.splitlines()[-1])
        assert record == load_record(path)
        assert record["kind"] == "ladder"
        assert record["settings"]["model"] == "demo"
        assert record["settings"]["job"]["n_prompts"] == 3
        assert record["environment"]["versions"]["torch"]
        assert "naive loop" in plot.read_text()

    def test_a_wrong_rung_is_red_and_the_exit_code_1(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ladder, "allowed_error", lambda error, dtype: error * 0.99)
        code, out, _ = bench("ladder", "demo", "--quick", "--rounds", "1")
        assert code == 1
        assert "RED" in out

    def test_the_full_run_has_the_matrix_too(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        torch_as_triton(monkeypatch)
        code, out, err = bench("ladder", "demo", "--rounds", "1")
        assert code == 0, err
        assert "naive loop" in out
        for task in ("prefill", "decode", "train"):
            assert f"\n{task}, no GPU here: no times" in out
        assert "Triton without attention" in out
        assert "a tiny random model in Triton's interpreter" in out

    def test_a_wrong_kernel_turns_the_matrix_red(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def unscaled(q, k, v, scale, dropout_p=0.0):
            return Ops.torch().attention(q, k, v, 1.0, dropout_p)

        torch_as_triton(monkeypatch, attention=unscaled)
        code, out, _ = bench("ladder", "--matrix", "--json")
        assert code == 1
        rows = json.loads(out.splitlines()[-1])["rows"]
        red = {row["subject"]["kernels"] for row in rows if row["ok"] is False}
        assert "PyTorch + attention" in red
        assert "Triton without attention" not in red
        assert all(row["subject"]["matrix"] == "train" for row in rows if not row["ok"])

    def test_without_gpu_and_interpreter_the_matrix_says_so(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ladder, "interpreting", lambda: False)
        code, out, _ = bench("ladder", "demo", "--matrix")
        assert code == 0
        assert "no GPU here" in out
        assert "TRITON_INTERPRET=1" in out

    def test_wrong_requests_are_one_line(self, bench: Bench, tmp_path: Path) -> None:
        fails(bench("ladder", "random:gpt9"), "random:gpt9", "random:gpt2-xl")
        fails(bench("ladder", "no-such-model-here"), "no-such-model-here")
        fails(bench("ladder", "--plot", "x.bmp"), "x.bmp", ".svg")
        fails(bench("ladder", "--matrix", "--plot", "x.svg"), "--plot", "--matrix")
        fails(bench("ladder", "-o", str(tmp_path / "no" / "x.json")), "no such directory")
        fails(bench("ladder", "--rounds", "0"), "--rounds")
        fails(bench("ladder", "--device", "cuda:9"), "cuda:9")


class TestProfile:
    def test_operations_ranges_and_memory_are_printed(self, bench: Bench) -> None:
        code, out, _ = bench("profile", "--steps", "2", "--tokens", "8")
        assert code == 0
        for words in ("aten::", "layer 0/", "cpu memory: peak", "gpu load: no GPU here"):
            assert words in out

    def test_a_directory_is_written_and_never_over_another(
        self, bench: Bench, tmp_path: Path
    ) -> None:
        args = ("profile", "--what", "train", "--steps", "1", "--tokens", "8", "--json")
        output = tmp_path / "out"
        code, out, _ = bench(*args, "-o", str(output))
        assert code == 0
        assert json.loads(out.splitlines()[-1]) == load_record(output / "profile.json")
        names = sorted(path.name for path in output.iterdir())
        assert names == ["profile.json", "profile.png", "trace.json.gz"]
        fails(bench(*args, "-o", str(output)), "exists already")

    def test_wrong_requests_are_one_line(self, bench: Bench) -> None:
        fails(bench("profile", "--what", "sleep"), "sleep", "prefill", "train")
        fails(bench("profile", "--tokens", "300"), "256")
        fails(bench("profile", "--tokens", "250", "--steps", "10"), "256")
        fails(bench("profile", "--steps", "0"), "--steps")


class TestCompare:
    @staticmethod
    def save(path: Path, factor: float = 1.0, **measures: Any) -> str:
        seconds = [factor * (1 + i / 100) for i in range(7)]
        row = {"subject": {"rung": "x"}, "seconds": seconds, **measures}
        save_record(Result("ladder", {}, [row]).record(), path)
        return str(path)

    def test_a_faster_branch(self, bench: Bench, tmp_path: Path) -> None:
        a, b = self.save(tmp_path / "a.json"), self.save(tmp_path / "b.json", 0.5)
        code, out, _ = bench("compare", a, b, "--fail-if-slower")
        assert code == 0
        assert "faster" in out
        assert "0.500" in out
        assert "One run a side" in out
        found = json.loads(bench("compare", a, b, "--json")[1])
        assert found["rows"][0]["verdict"] == "faster"

    @pytest.mark.parametrize("worse", [{"factor": 2.0}, {"ok": False}])
    def test_a_slower_or_red_branch_fails_where_asked(
        self, bench: Bench, tmp_path: Path, worse: dict[str, Any]
    ) -> None:
        a, b = self.save(tmp_path / "a.json"), self.save(tmp_path / "b.json", **worse)
        assert bench("compare", a, b)[0] == 0
        code, out, _ = bench("compare", a, b, "--fail-if-slower")
        assert code == 1
        assert ("slower" if "factor" in worse else "RED in B") in out
        assert bench("compare", b, b, "--fail-if-slower")[0] == 0

    def test_directories_of_runs(self, bench: Bench, tmp_path: Path) -> None:
        for side, factor in (("a", 1.0), ("b", 3.0)):
            (tmp_path / side).mkdir()
            for run in range(5):
                self.save(tmp_path / side / f"{run}.json", factor + run / 1000)
        code, out, _ = bench("compare", str(tmp_path / "a"), str(tmp_path / "b"))
        assert code == 0
        assert "5 runs of A and 5 of B" in out
        assert "slower" in out

    def test_too_few_samples_and_another_machine_are_said(
        self, bench: Bench, tmp_path: Path
    ) -> None:
        a, b = tmp_path / "a.json", tmp_path / "b.json"
        self.save(a)
        record = load_record(a)
        record["rows"][0]["seconds"] = [9.0]
        record["environment"]["cpu"]["name"] = "another"
        record["rows"].append({"subject": {"rung": "new"}})
        save_record(record, b)
        _, out, _ = bench("compare", str(a), str(b))
        for words in ("too few samples", "The machines differ", "another", f"Only in {b}: new"):
            assert words in out

    def test_rows_with_nothing_to_compare_are_only_counted(
        self, bench: Bench, tmp_path: Path
    ) -> None:
        rows = [{"subject": {"operation": f"operation {i}"}, "calls": 3} for i in range(40)]
        save_record(Result("profile", {}, rows).record(), tmp_path / "a.json")
        _, out, _ = bench("compare", str(tmp_path / "a.json"), str(tmp_path / "a.json"))
        assert "neither times nor errors: 40" in out
        assert "operation 7" not in out

    def test_wrong_requests_are_one_line(self, bench: Bench, tmp_path: Path) -> None:
        a = self.save(tmp_path / "a.json")
        fails(bench("compare", a, str(tmp_path / "b.json")), "b.json", "no such file")
        fails(bench("compare", a, a, "--alpha", "1"), "--alpha")
        fails(bench("compare", a), "B")
        (tmp_path / "b.json").write_text("{}")
        fails(bench("compare", a, str(tmp_path / "b.json")), "b.json", "not a result")


@pytest.mark.parametrize("command", ["ladder", "profile", "compare"])
def test_help_has_examples_and_imports_no_pytorch(command: str) -> None:
    code = (
        "import sys; from gptile.cli import cli\n"
        f"try: cli(['bench', '{command}', '--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'scipy' not in sys.modules"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}
    )
    assert run.returncode == 0, run.stderr
    assert "Examples:" in run.stdout
    assert f"gptile bench {command}" in run.stdout
