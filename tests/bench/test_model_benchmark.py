"""The benchmark of the whole model: its arithmetic by hand, and a planted fault for every check.

Engines run in this process, in place of workers of their own, and take scripted times.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from gptile.bench import model_benchmark, model_checks
from gptile.bench.engines import BASELINE, PRECISIONS, REFERENCE, Choice, Setup, load_class
from gptile.bench.model_benchmark import benchmark
from gptile.bench.model_plan import Plan, make_plan
from gptile.bench.peaks import Peaks
from gptile.bench.torch_engines import Gptile, Transformers
from gptile.bench.workers import WorkerError
from gptile.model.errors import UserError
from gptile.model.gpt2 import GPT2
from gptile.weights import save_checkpoint

READ = 1e6  # bytes a second
LOADED: list["InProcess"] = []


class InProcess:
    """A worker without a process. Its n-th timed call takes ``pace * n`` seconds for every token
    generated, or for the call."""

    pace: ClassVar[dict[str, float]] = {}

    def __init__(self, threads: int) -> None:
        self.calls: list[str] = []
        self.closed = False

    def __enter__(self) -> "InProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def open(self, made_by: str, setup: Setup, **settings: Any) -> dict[str, Any]:
        self.engine = load_class(made_by)(setup, **settings)
        self.name = "gptile" if isinstance(self.engine, Gptile) else settings["attention"]
        LOADED.append(self)
        return {"weight_bytes": 4, "cache_bytes": 4}

    def convert(self, made_by: str, setup: Setup) -> None:
        raise WorkerError("no peer is converted here")

    def call(self, method: str, *arguments: Any, save: Path | None = None) -> dict[str, Any]:
        assert not self.closed
        self.calls.append(method)
        value = getattr(self.engine, method)(*arguments)
        seconds = self.pace.get(self.name, 1.0) * len(self.calls)
        seconds *= arguments[1] if method == "generate" else 1
        if save is not None:
            np.save(save, value)
            value = None
        return {"value": value, "seconds": seconds, "memory": 100, "peak_memory": 110}


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    LOADED.clear()
    monkeypatch.setattr(InProcess, "pace", {})
    for module in (model_benchmark, model_checks):
        monkeypatch.setattr(module, "Worker", InProcess)
    peaks = Peaks(2 * READ, READ, {torch.float32: 1e9})
    monkeypatch.setattr(model_benchmark, "measure_peaks", lambda device, dtypes: peaks)
    yield
    assert all(worker.closed for worker in LOADED)


@pytest.fixture(scope="session")
def write(
    small_model: Callable[..., GPT2], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., str]:
    """Writes a checkpoint; keywords are config fields."""

    def make(**fields: Any) -> str:
        directory = tmp_path_factory.mktemp("model") / "tiny"
        sizes = {"n_embd": 48, "n_layer": 2, "vocab_size": 211, "n_positions": 64}
        save_checkpoint(small_model(**{**sizes, **fields}), directory)
        return str(directory)

    return make


@pytest.fixture(scope="session")
def tiny(write: Callable[..., str]) -> str:
    return write()


def plan(*engines: str, precisions: tuple[str, ...] = (), **fields: Any) -> Plan:
    measured = {
        "tasks": ("decode",),
        "batches": (2,),
        "prompt_tokens": (5,),
        "new_tokens": 4,
        "threads": 1,
        "rounds": 2,
    }
    return make_plan(engines or ("gptile",), precisions, device="cpu", **{**measured, **fields})


def by_engine(rows: list[dict[str, Any]], task: str) -> dict[str, dict[str, Any]]:
    return {row["subject"]["engine"]: row for row in rows if row["subject"].get("task") == task}


def test_the_numbers_are_those_of_the_calls(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InProcess, "pace", {"gptile": 0.5})
    rows = benchmark(tiny, plan("gptile", tasks=("prefill", "decode"), rounds=2)).rows
    # Calls of an engine: logits, 4 tokens and 1 to warm up, then 4 and 1 in each round.
    first = by_engine(rows, "prefill")
    assert first[BASELINE]["seconds"] == [5, 7]
    assert first["gptile"]["seconds"] == [2.5, 3.5]
    assert first["gptile"]["tokens_per_second"] == pytest.approx(2 * 5 / 3)
    each = by_engine(rows, "decode")
    assert each[BASELINE]["seconds"] == pytest.approx([(4 * 4 - 5) / 3, (4 * 6 - 7) / 3])
    median = np.median(each["gptile"]["seconds"])
    assert each["gptile"]["p50"] == pytest.approx(median)
    assert each["gptile"]["tokens_per_second"] == pytest.approx(2 / median)
    assert each["gptile"]["speedup"] == pytest.approx({"ratio": 2, "low": 2, "high": 2})
    assert "speedup" not in each[BASELINE]
    assert each["gptile"]["subject"] == {
        "engine": "gptile",
        "precision": "float32",
        "task": "decode",
        "batch": 2,
        "prompt_tokens": 5,
        "new_tokens": 4,
    }
    assert (each["gptile"]["memory"], each["gptile"]["peak_memory"]) == (100, 110)


@pytest.mark.parametrize("tied", [True, False])
def test_bandwidth_is_of_weights_and_cache(write: Callable[..., str], tied: bool) -> None:
    (row, _) = benchmark(write(tie_word_embeddings=tied), plan()).rows
    # Of 2 layers: qkv, projection and MLP with biases, two LayerNorms; the last; the head.
    layer = 48 * 144 + 144 + 48 * 48 + 48 + 2 * 48 * 192 + 192 + 48 + 4 * 48
    weights = 2 * layer + 2 * 48 + 211 * 48
    # Each step reads K and V of 2 layers and 2 rows: 6, 7 and 8 tokens so far.
    cache = 2 * 2 * 48 * 2 * 7
    assert row["bytes"] == 4 * (weights + cache)
    assert row["bandwidth"] == pytest.approx(row["bytes"] / row["p50"] / READ)


def test_every_task_is_green_on_a_right_model(tiny: str) -> None:
    asked = plan("gptile", REFERENCE, tasks=("prefill", "decode", "score", "train"))
    result = benchmark(tiny, asked)
    assert len(result.rows) == 12
    for row in result.rows:
        assert row["ok"], row
        assert ("speedup" in row) == (row["subject"]["engine"] != BASELINE)
        assert row["error"] <= row["allowed"]
    record = result.record()
    json.dumps(record, allow_nan=False)
    assert record["settings"]["baseline"] == f"{BASELINE} float32"
    assert record["settings"]["peaks"]["read"] == READ


def test_16_bits_are_judged_by_transformers_own_error(tiny: str) -> None:
    rows = benchmark(tiny, plan(precisions=("bfloat16",), tasks=("decode", "train"))).rows
    for row in rows:
        assert row["ok"], row
        assert row["reference_error"] > 1e-4
        assert row["error"] > 1e-4


def test_rounds_are_shuffled_and_everyone_has_its_turn(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[str] = []
    call = InProcess.call

    def recorded(self: InProcess, method: str, *arguments: Any, **options: Any) -> Any:
        if method == "score":
            turns.append(self.name)
        return call(self, method, *arguments, **options)

    monkeypatch.setattr(InProcess, "call", recorded)
    benchmark(tiny, plan("gptile", REFERENCE, tasks=("score",), rounds=12))
    timed = turns[1 + 3 :]  # after the reference's own, and the warm-up
    rounds = [tuple(timed[start : start + 3]) for start in range(0, 36, 3)]
    assert all(sorted(found) == ["eager", "gptile", "sdpa"] for found in rounds)
    assert len(set(rounds)) > 2


def scaled(by: float) -> Callable[[Callable], Callable]:
    return lambda original: lambda *arguments: original(*arguments) * by


def another_last_id(original: Callable) -> Callable:
    def generate(self: Any, prompts: Any, n_new: int) -> Any:
        ids = original(self, prompts, n_new)
        ids[-1][-1] ^= 1
        return ids

    return generate


def too_few(original: Callable) -> Callable:
    return lambda self, prompts, n_new: [row[:-1] for row in original(self, prompts, n_new)]


def nothing_learned(original: Callable) -> Callable:
    def step(self: Any, ids: Any) -> float:
        self.optimizer.param_groups[0]["lr"] = 0.0
        return original(self, ids)

    return step


def one_bias_frozen(original: Callable) -> Callable:
    def step(self: Any, ids: Any) -> float:
        self.model.h[0].mlp.c_fc.bias.requires_grad_(False)
        return original(self, ids)

    return step


FAULTS = {
    "logits off by a thousandth": ("logits", scaled(1.001), "decode", "its logits are off"),
    "no logits": ("logits", scaled(float("nan")), "decode", "its logits are off"),
    "the last id of the last row": ("generate", another_last_id, "decode", "its ids"),
    "the first id": ("generate", another_last_id, "prefill", "its ids"),
    "an id too few": ("generate", too_few, "decode", "its ids"),
    "a loss off by a thousandth": ("score", scaled(1.001), "score", "its loss"),
    "a loss of nothing": ("score", scaled(float("nan")), "score", "its loss"),
    "no update": ("step", nothing_learned, "train", "its losses are off"),
    "a bias that does not learn": ("step", one_bias_frozen, "train", "its losses are off"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_red_and_has_no_speedup(
    tiny: str, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    method, wrong, task, note = FAULTS[fault]
    monkeypatch.setattr(Gptile, method, wrong(getattr(Gptile, method)))
    rows = by_engine(benchmark(tiny, plan("gptile", REFERENCE, tasks=(task,))).rows, task)
    assert rows["gptile"]["ok"] is False
    assert rows["gptile"]["note"].startswith(note)
    assert "speedup" not in rows["gptile"]
    assert rows[REFERENCE]["ok"]
    assert "speedup" in rows[REFERENCE]


def test_a_red_baseline_takes_every_speedup_away(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = Transformers.logits

    def wrong(self: Transformers, ids: Any) -> Any:
        return logits(self, ids) * (1.01 if self.attention == "sdpa" else 1)

    monkeypatch.setattr(Transformers, "logits", wrong)
    rows = by_engine(benchmark(tiny, plan()).rows, "decode")
    assert rows["gptile"]["ok"]
    assert "speedup" not in rows["gptile"]


def test_other_engines_have_the_documented_bounds() -> None:
    assert {*model_checks.BOUNDS} == {*PRECISIONS}
    references = model_checks.References(
        Path(), Path(), [[0]], n_parameters=0, device="cpu", threads=1, say=print
    )
    truth = np.ones((1, 50, 60)) + 1e-6 * np.eye(50, 60)
    references._logits, references._errors = truth, {"float32": (1e-7, 1e-6)}
    for precision, (bound, least) in model_checks.BOUNDS.items():
        peer = Choice("llama.cpp", precision)
        assert references.check_logits(peer, truth * (1 + 0.9 * bound)).ok
        assert not references.check_logits(peer, truth * (1 + 1.1 * bound)).ok
        most = round((1 - least) * 50)  # positions whose likeliest token may be another
        for n_moved in (most, most + 1):
            moved = truth.copy()
            moved[0, :n_moved, 59] += 2e-6
            found = references.check_logits(peer, moved)
            assert found.equal_top1 == pytest.approx(1 - n_moved / 50)
            assert found.ok == (n_moved == most)


@pytest.mark.parametrize("method", ["reset", "generate"])
def test_an_engine_that_fails_is_a_row(
    tiny: str, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    original = getattr(Transformers, method)

    def fail(self: Transformers, *arguments: Any) -> Any:
        if self.compiled:
            raise WorkerError("the process died (signal SIGKILL)")
        return original(self, *arguments)

    monkeypatch.setattr(Transformers, method, fail)
    rows = by_engine(benchmark(tiny, plan("gptile", "transformers-compile")).rows, "decode")
    assert rows["transformers-compile"]["skipped"] == "the process died (signal SIGKILL)"
    assert rows["transformers-compile"]["ok"] is None
    assert rows["gptile"]["speedup"]


def test_ours_failing_is_red(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Gptile, ids: Any) -> Any:
        raise WorkerError("RuntimeError: no")

    monkeypatch.setattr(Gptile, "logits", fail)
    rows = benchmark(tiny, plan()).rows
    assert rows[0] == {
        "subject": {"engine": "gptile", "precision": "float32"},
        "ok": False,
        "skipped": "RuntimeError: no",
    }


def test_a_peer_that_is_not_there_is_a_row(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        model_benchmark, "missing", lambda c: ["ctranslate2"] if c.entry.peer else []
    )
    rows = benchmark(tiny, plan("gptile", "ctranslate2", precisions=("float32", "int8"))).rows
    absent = [row for row in rows if row["subject"]["engine"] == "ctranslate2"]
    assert [row["subject"]["precision"] for row in absent] == ["float32", "int8"]
    for row in absent:
        assert row["skipped"] == "ctranslate2 not installed: pip install '.[peers]'"
        assert row["ok"] is None


def test_a_task_that_an_engine_lacks_is_a_row(tiny: str) -> None:
    rows = benchmark(tiny, plan("gptile", "gptile-compile")).rows
    lacking = [row for row in rows if row["subject"]["engine"] == "gptile-compile"]
    assert [row["subject"] for row in lacking] == [{"engine": "gptile-compile", "task": "decode"}]
    assert "graph would break" in lacking[0]["skipped"]


def test_engines_that_do_not_fit_are_left_out(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(n_bytes: float) -> str:
        return "needs about 9.0 GB of memory, 1.0 GB are free"

    monkeypatch.setattr(model_benchmark, "no_room", no_room)
    rows = benchmark(tiny, plan(REFERENCE)).rows
    assert {row["subject"]["engine"] for row in rows} == {REFERENCE, BASELINE}
    assert all("name fewer" in row["skipped"] for row in rows)
    monkeypatch.setattr(model_checks, "no_room", no_room)
    with pytest.raises(UserError, match=r"float64, needs about 9\.0 GB"):
        benchmark(tiny, plan(REFERENCE))


def test_a_time_that_is_all_noise_is_no_time(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = InProcess.call

    def still(self: InProcess, *arguments: Any, **options: Any) -> Any:
        return {**call(self, *arguments, **options), "seconds": 1.0}

    monkeypatch.setattr(InProcess, "call", still)
    rows = by_engine(benchmark(tiny, plan()).rows, "decode")
    assert "too noisy" in rows["gptile"]["skipped"]
    assert "seconds" not in rows["gptile"]


def test_a_failing_reference_is_one_clear_error(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Transformers, ids: Any) -> Any:
        raise WorkerError("RuntimeError: no memory")

    monkeypatch.setattr(Transformers, "logits", fail)
    with pytest.raises(UserError, match="transformers in float64, failed: RuntimeError: no memory"):
        benchmark(tiny, plan())


def test_sizes_must_fit_the_context(tiny: str) -> None:
    benchmark(tiny, plan(prompt_tokens=(60,), new_tokens=4, rounds=1))  # 64 positions
    with pytest.raises(UserError, match=r"61 prompt tokens and 4 new ones exceed .* 64"):
        benchmark(tiny, plan(prompt_tokens=(5, 61)))
    # What does not decode may fill the context.
    benchmark(tiny, plan(prompt_tokens=(64,), tasks=("score",), rounds=1))


def test_lengths_suit_the_context_by_default(tiny: str) -> None:
    result = benchmark(tiny, plan(prompt_tokens=(), rounds=1))
    assert result.settings["prompt_tokens"] == (32, 32)
    assert len(result.rows) == 2  # one size, though named twice


def test_a_plan_takes_the_precisions_that_there_are() -> None:
    found = plan("gptile", "ctranslate2", "openvino")
    assert [str(choice) for choice in found.choices] == [
        "gptile float32",
        "ctranslate2 float32",
        "ctranslate2 int8",
        "openvino float32",
        "openvino bfloat16",
        "openvino int8",
        "transformers-sdpa float32",
    ]
    found = plan("gptile", "ctranslate2", precisions=("int8", "bfloat16"))
    assert [str(choice) for choice in found.choices] == [
        "gptile bfloat16",
        "ctranslate2 int8",
        "transformers-sdpa bfloat16",
    ]
    with pytest.raises(UserError, match="none of the engines has float16"):
        plan("ctranslate2", precisions=("float16",))


def test_on_a_gpu_peers_are_refused() -> None:
    fields = {"tasks": ("decode",), "batches": (1,), "prompt_tokens": (4,), "new_tokens": 4}
    fields |= {"threads": 1, "rounds": 1}
    with pytest.raises(UserError, match="onnxruntime is measured on a CPU only"):
        make_plan(["onnxruntime"], (), device="cuda", **fields)
    found = make_plan(["gptile"], (), device="cuda", **fields)
    assert [str(choice) for choice in found.choices] == ["gptile bfloat16", f"{BASELINE} bfloat16"]
