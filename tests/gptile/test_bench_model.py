"""``gptile bench model`` as a user meets it: what it prints, what it writes, and its exit code."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptile.bench import model_benchmark, model_plan
from gptile.bench.engines import ENGINES, TASKS
from gptile.bench.result import Result, load_record
from gptile.cli import main
from gptile.model.gpt2 import GPT2
from gptile.weights import save_checkpoint

SMALL = (
    "--task prefill --task decode --batch 2 --prompt-tokens 6 --new-tokens 20 "
    "--rounds 2 --threads 1"
).split()


@pytest.fixture
def bench(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process, 80 columns wide: exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gptile", "bench", "model", *args])
        with pytest.raises(SystemExit) as exit:
            main()
        return (exit.value.code or 0, *capsys.readouterr())

    return run


def row(engine: str, task: str = "decode", **measures: Any) -> dict[str, Any]:
    subject = {"engine": engine, "precision": "float32", "task": task}
    subject |= {"batch": 1, "prompt_tokens": 32, "new_tokens": 16}
    return {
        "subject": subject,
        "seconds": [0.02, 0.021, 0.022],
        "p20": 0.0204,
        "p50": 0.021,
        "p80": 0.0216,
        "tokens_per_second": 47.6,
        "memory": 700e6,
        "peak_memory": 812e6,
        "bandwidth": 0.75,
        "error": 5.2e-7,
        "reference_error": 5e-7,
        "allowed": 8e-7,
        "equal_top1": 1.0,
        "equal_ids": 1.0,
        "ok": True,
        **measures,
    }


FASTER = {"speedup": {"ratio": 1.5, "low": 1.4, "high": 1.6}}
LEVEL = {"speedup": {"ratio": 1.02, "low": 0.9, "high": 1.1}}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[model_plan.Plan]]:
    """In place of the benchmark: the rows it is said to find. Returns the plans it was asked."""

    def say(*rows: dict[str, Any]) -> list[model_plan.Plan]:
        plans: list[model_plan.Plan] = []

        def found(source: str, plan: model_plan.Plan, say: Callable) -> Result:
            plans.append(plan)
            settings = {
                "model": source,
                "parameters": 124439808,
                "threads": 2,
                "rounds": 3,
                "tasks": ["decode"],
                "baseline": "transformers-sdpa float32",
                "peaks": {"read": 25e9},
            }
            return Result("model", settings, list(rows), ["a note"])

        monkeypatch.setattr(model_benchmark, "benchmark", found)
        return plans

    return say


def test_the_real_thing(bench: Callable, small_model: Callable[..., GPT2], tmp_path: Path) -> None:
    """Two engines in processes of their own, and everything that can be written."""
    save_checkpoint(small_model(), tmp_path / "model")
    result, plot = tmp_path / "result.json", tmp_path / "plot.svg"
    wanted = ["--engine", "gptile", *SMALL, "-o", str(result), "--plot", str(plot), "--json"]
    code, out, err = bench(str(tmp_path / "model"), *wanted)
    assert (code, err) == (0, "")
    record = json.loads(out.splitlines()[-1])
    assert record == load_record(result)
    assert [(r["subject"]["engine"], r["subject"]["task"]) for r in record["rows"]] == [
        ("gptile", "prefill"),
        ("transformers-sdpa", "prefill"),
        ("gptile", "decode"),
        ("transformers-sdpa", "decode"),
    ]
    for found in record["rows"]:
        if found.get("skipped", "").startswith("too noisy"):
            continue  # what the machine does meanwhile is no fault of the command
        assert found["ok"], found
        assert len(found["seconds"]) == 2
        assert found["equal_ids"] == 1
        if sys.platform == "linux":
            assert found["peak_memory"] > 100e6  # PyTorch alone
    assert record["settings"]["threads"] == 1
    assert record["environment"]["versions"]["transformers"]
    assert plot.read_text(encoding="utf-8").startswith("<?xml")


def test_the_table_shows_what_was_found(bench: Callable, asked: Callable) -> None:
    asked(
        row("transformers-sdpa"),
        row("gptile", **FASTER),
        row("transformers-eager", **LEVEL),
        {"subject": {"engine": "openvino", "precision": "int8"}, "ok": None, "skipped": "not here"},
    )
    code, out, _ = bench()
    assert code == 0
    lines = out.splitlines()
    assert max(len(line) for line in lines if not line.startswith("Note")) <= 80
    assert lines[:2] == [
        "random:gpt2, 124.4 M parameters",
        "2 threads an engine, 3 rounds, read bandwidth 25 GB/s",
    ]
    speeds = {line.split("  ")[1]: line.split() for line in lines if " 6% " in line}
    assert speeds["transformers-sdpa fp32"][2:] == "21.0 6% 47.6 1 812 75%".split()
    assert speeds["gptile fp32"][2:] == "21.0 6% 47.6 1.50x 1.40-1.60 812 75%".split()
    assert speeds["transformers-eager fp32"][2:] == "21.0 6% 47.6 within noise 812 75%".split()
    assert next(iter(speeds)) == "transformers-sdpa fp32"
    assert "decode, batch 1, 32 tokens: time per output token, 16 new" in lines
    assert "Note: openvino int8: not here" in lines
    assert "Note: a note" in lines


def test_ours_wrong_is_exit_1_without_a_speedup(bench: Callable, asked: Callable) -> None:
    asked(row("transformers-sdpa"), row("gptile", ok=False, note="its ids differ", **FASTER))
    code, out, _ = bench()
    assert code == 1
    assert "1.50x" not in out
    assert out.count("RED") == 3  # its check, its speed, and why
    assert "RED, its ids differ" in out


def test_others_wrong_is_no_failure_of_ours(bench: Callable, asked: Callable) -> None:
    asked(row("transformers-sdpa"), row("gptile", **FASTER), row("llama.cpp", ok=False))
    assert bench()[0] == 0


def test_ours_that_could_not_run_is_exit_1(bench: Callable, asked: Callable) -> None:
    subject = {"engine": "gptile", "precision": "float32"}
    asked({"subject": subject, "ok": False, "skipped": "the process died"})
    code, out, _ = bench()
    assert code == 1
    assert "gptile float32: RED, the process died" in out


def test_what_is_asked_is_planned(bench: Callable, asked: Callable) -> None:
    plans = asked(row("transformers-sdpa"))
    bench("--quick", "--device", "cpu")
    bench("--device", "cpu", "--threads", "3")
    bench("--quick", "--rounds", "9", "--batch", "5", "--engine", "llama.cpp", "--dtype", "int8")
    bench("--peers", "--device", "cpu")
    quick, full, mixed, peers = plans
    assert [choice.engine for choice in quick.choices] == [
        "gptile",
        "transformers-sdpa",
    ]
    assert (quick.batches, quick.prompt_tokens, quick.new_tokens, quick.rounds) == (
        (1, 4),
        (32,),
        8,
        6,
    )
    assert quick.tasks == ("prefill", "decode", "train")
    assert (full.tasks, full.batches, full.prompt_tokens, full.rounds) == (TASKS, (1, 8), (), 7)
    assert full.threads == 3
    assert [str(choice) for choice in mixed.choices] == [
        "llama.cpp int8",
        "transformers-sdpa float32",
    ]
    assert (mixed.rounds, mixed.batches) == (9, (5,))
    assert {choice.engine for choice in peers.choices} == {*ENGINES} - {"gptile-torch"}


WRONG = {
    "engine": (["--engine", "vllm"], ["unknown engine 'vllm'", *ENGINES]),
    "task": (["--task", "chat"], ["unknown task 'chat'", *TASKS]),
    "dtype": (["--dtype", "int4"], ["int4", "int8", "bfloat16"]),
    "precision it has not": (
        ["--engine", "openvino", "--dtype", "fp16"],
        ["none of the engines has float16"],
    ),
    "device": (["--device", "tpu"], ["tpu", "cpu"]),
    "no such GPU": (["--device", "cuda:9"], ["cuda:9", "CUDA devices here"]),
    "too long": (["demo", "--prompt-tokens", "250", "--new-tokens", "16"], ["250", "16", "256"]),
    "one new token": (["--new-tokens", "1"], ["--new-tokens"]),
    "no rounds": (["--rounds", "0"], ["--rounds"]),
    "no model": (["no/such/model"], ["no/such/model"]),
    "random size": (["random:gpt5"], ["random:gpt5", "random:gpt2-xl"]),
    "output": (["-o", "no/such/result.json"], ["no/such/result.json"]),
    "plot": (["--plot", "plot.jpeg"], ["plot.jpeg", ".svg"]),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_request_is_one_line(bench: Callable, what: str) -> None:
    args, words = WRONG[what]
    code, out, err = bench(*args)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    for word in words:
        assert word in err


def test_help_has_examples(bench: Callable) -> None:
    code, out, _ = bench("--help")
    assert code == 0
    for word in ("--peers", "gptile bench model --quick", "random:gpt2", "Exit code 1"):
        assert word in " ".join(out.split())
