"""The profile of a tiny model: ranges and operations are those that ran, memory over time is that
of the tensors, and a directory of results is complete or not there."""

import gzip
import json
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gptile.bench import profiling
from gptile.bench.profiling import profile_model, profile_task, ranged, thinned
from gptile.bench.result import load_record
from gptile.kernels import Ops
from gptile.model.errors import UserError
from gptile.model.gpt2 import GPT2
from gptile.weights.errors import CheckpointError

PER_LAYER = {
    "prefill": {
        "layer_norm_linear": 2,
        "kv_append": 1,
        "decode_attention": 1,
        "linear_residual": 2,
    },
    "train": {"linear": 3, "attention": 1, "linear_activation": 1},
}
STEPS = 3


def profile(model: GPT2, task: str, trace: Path | None = None, **options: Any) -> list[dict]:
    given = {"rows": 2, "tokens": 7, "steps": STEPS, "seed": 0, **options}
    return profile_task(model, task, trace=trace, **given)


def about(rows: list[dict], kind: str) -> dict[str, dict]:
    return {row["subject"][kind]: row for row in rows if kind in row["subject"]}


@pytest.mark.parametrize("task", ["prefill", "decode", "train"])
def test_every_operation_of_every_layer_has_its_range(model: GPT2, task: str) -> None:
    ranges = about(profile(model, task), "range")
    for layer in range(model.config.n_layer):
        for name, calls in PER_LAYER["train" if task == "train" else "prefill"].items():
            row = ranges[f"layer {layer}/{name}"]
            assert row["calls"] == STEPS * calls
            assert row["total_seconds"] > 0
    assert ranges["model/embedding"]["calls"] == STEPS
    assert ("model/sample" in ranges) == (task == "decode")
    assert ("model/linear_cross_entropy" in ranges) == (task == "train")


def test_operations_are_sorted_and_share_all_of_the_time(model: GPT2) -> None:
    operations = about(profile(model, "prefill"), "operation")
    assert "aten::addmm" in operations
    assert not any(name.startswith(("layer", "model", "[")) for name in operations)
    times = [row["self_seconds"] for row in operations.values()]
    assert times == sorted(times, reverse=True)
    assert sum(row["share"] for row in operations.values()) == pytest.approx(1)
    # c_attn in a layer, without bias as kv_append adds it, is mm; the other three are addmm.
    assert operations["aten::addmm"]["calls"] == STEPS * 3 * model.config.n_layer


def test_the_memory_over_time_is_that_of_the_tensors(model: GPT2) -> None:
    """A known allocation, held for a while: in the operation of one layer."""
    n_bytes = 64_000_000

    def hungry(*args: Any) -> torch.Tensor:
        held = torch.empty(n_bytes, dtype=torch.uint8)
        out = Ops.torch().kv_append(*args)
        del held
        return out

    model.ops = Ops.torch()
    quiet = about(profile(model, "prefill"), "timeline")["cpu memory"]
    assert max(quiet["bytes"]) < 1_000_000
    model.ops = Ops.torch().replace(kv_append=hungry)
    loud = about(profile(model, "prefill"), "timeline")["cpu memory"]
    assert n_bytes <= max(loud["bytes"]) < n_bytes + 1_000_000
    assert min(loud["bytes"]) >= 0
    assert loud["times"] == sorted(loud["times"])
    peaks = sum(
        before < n_bytes <= after
        for before, after in zip(loud["bytes"], loud["bytes"][1:], strict=False)
    )
    assert peaks == STEPS * model.config.n_layer


def test_gradients_count_as_memory_in_training(model: GPT2) -> None:
    timeline = about(profile(model, "train"), "timeline")["cpu memory"]
    n_bytes = sum(p.nbytes for p in model.parameters())
    assert max(timeline["bytes"]) >= n_bytes
    freed = [held for held in timeline["bytes"] if held < n_bytes / 10]
    assert len(freed) >= STEPS  # before each step's backward


def test_a_long_timeline_is_thinned_and_keeps_its_peaks() -> None:
    points = [(float(i), (i * 7919) % 5000) for i in range(4321)]
    points[1234] = (1234.0, 10**9)
    found = thinned(points)
    assert len(found) <= 1000
    assert (1234.0, 10**9) in found
    assert [when for when, _ in found] == sorted(when for when, _ in found)
    assert thinned(points[:1000]) == points[:1000]


def test_the_chrome_trace_has_the_ranges_and_the_shapes(model: GPT2, tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    profile(model, "decode", trace=path)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"layer 0/decode_attention", "model/sample", "aten::addmm"} <= names
    assert any("Input Dims" in event.get("args", {}) for event in events)


def test_a_wrapped_operation_is_the_operation(model: GPT2) -> None:
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        expected = model(ids).logits
        profiling.use_ops(model, lambda layer: ranged(Ops.torch(), layer, torch.device("cpu")))
        assert torch.equal(model(ids).logits, expected)


def test_on_a_gpu_the_ranges_are_nvtxs_too(monkeypatch: pytest.MonkeyPatch, model: GPT2) -> None:
    pushed = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", pushed.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: pushed.append("pop"))
    profiling.use_ops(model, lambda layer: ranged(Ops.torch(), layer, torch.device("cuda")))
    with torch.inference_mode():
        model(torch.tensor([[1, 2, 3]]))
    assert pushed[:4] == ["model/embedding", "pop", "layer 0/layer_norm", "pop"]
    assert pushed[-2:] == ["model/linear", "pop"]


def test_without_a_gpu_its_load_says_so(model: GPT2) -> None:
    assert about(profile(model, "prefill"), "timeline")["gpu"]["skipped"] == "no GPU here"


def fake_nvml(monkeypatch: pytest.MonkeyPatch, load: Callable[[Any], Any]) -> type[Exception]:
    """A driver that answers ``load``, and a GPU for it to be asked about."""

    class NVMLError(Exception):
        pass

    module = types.ModuleType("pynvml")
    module.NVMLError = NVMLError
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    module.nvmlDeviceGetUtilizationRates = load
    module.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(used=5_000_000)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="7-7")
    )
    return NVMLError


def test_nvml_is_sampled_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(handle: str) -> types.SimpleNamespace:
        asked.append(handle)
        return types.SimpleNamespace(gpu=73)

    fake_nvml(monkeypatch, load)
    with profiling._watching(torch.device("cuda")) as row:
        while len(row["times"]) < 3:
            pass
    assert row["times"] == sorted(row["times"])
    assert {*row["utilisation"]} == {73}
    assert {*row["used"]} == {5_000_000}
    assert {*asked} == {"GPU-7-7"}
    after = len(row["times"])
    assert len(row["times"]) == after  # the thread has ended


def test_an_nvml_that_fails_or_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(handle: str) -> None:
        raise error("Not Supported")

    error = fake_nvml(monkeypatch, fails)
    with profiling._watching(torch.device("cuda")) as row:
        assert row["skipped"] == "NVML: Not Supported"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with profiling._watching(torch.device("cuda")) as row:
        assert re.search("nvidia-ml-py is needed.*bench", row["skipped"])


def profile_demo(output: Path | None, **options: Any) -> dict[str, Any]:
    given = {"rows": 1, "tokens": 8, "steps": 2, "dtype": torch.float32, **options}
    return profile_model(
        "demo",
        "decode",
        device=torch.device("cpu"),
        choose_ops=lambda _: None,
        output=output,
        **given,
    )


def test_a_directory_holds_the_record_the_trace_and_the_plot(tmp_path: Path) -> None:
    output = tmp_path / "profiles" / "decode"
    record = profile_demo(output)
    assert load_record(output / "profile.json") == json.loads(json.dumps(record))
    assert (output / "profile.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(gzip.decompress((output / "trace.json.gz").read_bytes()))["traceEvents"]
    assert [path.name for path in tmp_path.iterdir()] == ["profiles"]
    assert record["settings"]["task"] == "decode"


def test_nothing_is_left_of_a_profile_that_fails(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="context"):
        profile_demo(tmp_path / "out", tokens=10_000)
    assert [*tmp_path.iterdir()] == []


def test_a_directory_that_is_there_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(profiling, "open_checkpoint", None)
    with pytest.raises(CheckpointError, match="exists already"):
        profile_demo(tmp_path)
