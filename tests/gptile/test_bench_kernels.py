"""``gptile bench kernels`` as a user meets it: tables, JSON, files and exit codes."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gptile.bench import kernel_benchmark
from gptile.bench.operations import OPERATIONS
from gptile.bench.peaks import Peaks
from gptile.bench.problems import PASSES
from gptile.bench.providers import OURS, PROVIDERS, Provider
from gptile.bench.result import load_record
from gptile.cli import main
from gptile.kernels.layer_norm import layer_norm_reference

ODD = ("layer_norm", "--case", "odd", "--rounds", "3", "--provider", "eager")


@pytest.fixture
def kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process, 120 columns wide: exit code, stdout, stderr."""
    peaks = Peaks(copy=8e9, read=1.25e10, matmul={torch.float32: 1e11})
    monkeypatch.setattr(kernel_benchmark, "measure_peaks", lambda device, dtypes: peaks)
    monkeypatch.setitem(kernel_benchmark._ROTATED, "cpu", 1 << 16)
    monkeypatch.setenv("COLUMNS", "120")

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gptile", "bench", "kernels", *args])
        with pytest.raises(SystemExit) as exit:
            main()
        return (exit.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A stand-in for our kernels that runs on a CPU, and is wrong by a factor."""

    def put(factor: float) -> None:
        def layer_norm(x: Tensor, *others: Any, **more: Any) -> Tensor:
            return layer_norm_reference(x, *others, **more) * factor

        monkeypatch.setitem(PROVIDERS, OURS, Provider(lambda: {"layer_norm": layer_norm}))

    return put


def test_tables_have_times_rates_and_the_reason_for_what_is_missing(kernels: Callable) -> None:
    code, out, err = kernels(*ODD, "--provider", "gptile")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == (
        "Peaks, measured in this run: copy 8 GB/s, read 12.5 GB/s, "
        "matrix product 100 GFLOP/s in float32"
    )
    assert "layer_norm, odd, float32" in lines
    for direction in ("forward", "backward", "both"):
        assert any(line.strip().startswith(f"{direction} eager") for line in lines)
    assert "Time of the host a call, median, on tiny cases" in lines
    overhead = next(line for line in lines if line.strip().startswith("layer_norm "))
    assert overhead.count("µs") == 2  # ours too: its wrapper needs no GPU
    assert "Note: no GPU here: gptile not timed" in lines
    assert max(map(len, lines[:12])) <= 120


def test_json_is_the_last_line_and_the_file_is_the_same(kernels: Callable, tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    code, out, _ = kernels(*ODD, "--pass", "forward", "--json", "-o", str(path))
    assert code == 0
    record = json.loads(out.splitlines()[-1])
    assert record == load_record(path)
    (row,) = record["rows"]
    assert row["subject"] == {
        **{"operation": "layer_norm", "case": "odd", "pass": "forward"},
        **{"dtype": "float32", "provider": "eager"},
    }
    assert len(row["seconds"]) == record["settings"]["rounds"] == 3
    assert record["environment"]["command"].startswith("gptile bench kernels layer_norm")


def test_wrong_kernels_of_ours_are_loud_and_exit_1(kernels: Callable, ours: Callable) -> None:
    ours(1.0)
    code, out, _ = kernels(*ODD, "--provider", "gptile", "--pass", "forward")
    assert code == 0
    assert "RED" not in out
    assert "over best other" in " ".join(out.split())
    ours(1.001)
    code, out, _ = kernels(*ODD, "--provider", "gptile", "--pass", "forward")
    assert code == 1
    (line,) = (line for line in out.splitlines() if "forward gptile" in line)
    assert "RED: output 0" in line
    assert "x (" not in line
    assert kernels(*ODD, "--provider", "gptile", "--pass", "forward", "--json")[0] == 1


def test_a_wrong_library_is_red_but_no_failure_of_ours(
    kernels: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(x: Tensor, *others: Any, **more: Any) -> Tensor:
        return layer_norm_reference(x, *others, **more) * 1.001

    monkeypatch.setitem(PROVIDERS, "xformers", Provider(lambda: {"layer_norm": wrong}))
    code, out, _ = kernels(*ODD, "--provider", "xformers", "--pass", "forward")
    assert code == 0
    assert "RED: output 0" in out


def test_what_is_skipped_is_told_with_its_reason(
    kernels: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(**given: Any) -> Tensor:
        raise RuntimeError("no kernel for 17 columns")

    monkeypatch.setitem(PROVIDERS, "xformers", Provider(lambda: {"layer_norm": fails}))
    _, out, _ = kernels(*ODD, "--provider", "xformers", "--pass", "forward")
    assert "forward, xformers skipped: RuntimeError: no kernel for 17 columns" in out
    _, out, _ = kernels("linear_cross_entropy", "--case", "gpt2-xl-train", "--pass", "forward")
    assert "too large for a CPU" in out


def test_the_roofline_is_drawn(kernels: Callable, tmp_path: Path) -> None:
    path = tmp_path / "roofline.svg"
    code, _, err = kernels(*ODD, "--pass", "forward", "--plot", str(path))
    assert (code, err) == (0, "")
    assert "measured peaks" in path.read_text()


WRONG = {
    "operation": (["nothing"], ["'nothing'", *OPERATIONS]),
    "case": (["layer_norm", "--case", "none"], ["'none'", *OPERATIONS["layer_norm"].cases]),
    "pass": (["layer_norm", "--pass", "none"], ["'none'", *PASSES]),
    "provider": (["--provider", "none"], ["'none'", *PROVIDERS]),
    "dtype": (["--dtype", "int8"], ["int8", "bf16", "float32"]),
    "rounds": (["--rounds", "0"], ["--rounds"]),
    "device": (["--device", "tpu"], ["tpu"]),
    "plot": (["--plot", "plot.txt"], ["plot.txt", ".svg"]),
    "directory": (["-o", "/nowhere/result.json"], ["/nowhere/result.json"]),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_request_is_one_line_with_the_choices(kernels: Callable, what: str) -> None:
    args, words = WRONG[what]
    code, out, err = kernels(*args)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    for word in words:
        assert word in err


def test_help_has_examples_and_the_profiler_is_silent() -> None:
    command = [sys.executable, "-m", "gptile", "bench", "kernels"]
    help = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert "gptile bench kernels --quick" in help.stdout
    run = subprocess.run([*command, *ODD, "--json"], capture_output=True, text=True, check=True)
    assert run.stderr == ""
    assert json.loads(run.stdout.splitlines()[-1])["kind"] == "kernels"
