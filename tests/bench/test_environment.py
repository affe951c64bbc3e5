"""What a result says about its machine is so, and what cannot be known is left open."""

import datetime
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from gptile.bench import environment as module
from gptile.bench.environment import environment


def test_it_is_this_machine_and_this_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/opt/bin/gptile", "bench", "model", "my model"])
    found = environment("cpu", seed=7)
    json.dumps(found, allow_nan=False)
    assert found["command"] == "gptile bench model 'my model'"
    assert found["seed"] == 7
    assert found["device"] == "cpu"
    assert "gpu" not in found
    assert found["cpu"]["threads"] == torch.get_num_threads()
    assert found["cpu"]["logical_cores"] == psutil.cpu_count()
    assert found["cpu"]["name"]
    assert found["cpu"]["memory"] > 0
    assert found["versions"]["torch"] == torch.__version__
    when = datetime.datetime.fromisoformat(found["date"])
    assert abs(datetime.datetime.now(datetime.timezone.utc) - when).total_seconds() < 60


def test_versions_are_only_of_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKAGES", ("torch", "no-such-package-anywhere"))
    assert [*environment()["versions"]] == ["torch"]


def git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    command = ["git", "-C", str(directory), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A repository that the module lies in."""
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "environment.py").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "bench" / "environment.py"))
    return tmp_path


def test_the_commit_is_the_checkouts_and_marked_where_files_differ(checkout: Path) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    assert environment()["commit"] == commit
    (checkout / "new.py").write_text("")
    assert environment()["commit"] == f"{commit}+"


def test_outside_a_checkout_there_is_no_commit(
    monkeypatch: pytest.MonkeyPatch, checkout: Path
) -> None:
    monkeypatch.setenv("PATH", "")  # no git
    assert environment()["commit"] is None
    monkeypatch.undo()
    monkeypatch.setattr(module, "__file__", "/nowhere/bench/environment.py")
    assert environment()["commit"] is None


class NVMLError(Exception):
    pass


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A GPU, and a driver that answers for it."""
    properties = types.SimpleNamespace(
        name="GPU X", major=9, minor=0, multi_processor_count=132, total_memory=10**9, uuid="1-2"
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    nvml: Any = types.ModuleType("pynvml")
    nvml.NVMLError = NVMLError
    nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM = "sm", "memory"
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    nvml.nvmlSystemGetDriverVersion = lambda: "555.1"
    nvml.nvmlDeviceGetClockInfo = lambda handle, clock: {"sm": 1500, "memory": 2600}[clock]
    nvml.nvmlDeviceGetMaxClockInfo = lambda handle, clock: 1980
    nvml.nvmlDeviceGetEnforcedPowerLimit = lambda handle: 700_000
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml


def test_of_a_gpu_it_says_driver_clocks_and_power(gpu: types.ModuleType) -> None:
    found = environment("cuda")
    assert found["device"] == "cuda"
    assert found["gpu"] == {
        "name": "GPU X",
        "capability": "9.0",
        "multiprocessors": 132,
        "memory": 10**9,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "driver": "555.1",
        "clock": 1500,
        "clock_limit": 1980,
        "memory_clock": 2600,
        "power_limit": 700.0,
    }


def test_a_gpu_whose_driver_does_not_answer_says_why(
    monkeypatch: pytest.MonkeyPatch, gpu: Any
) -> None:
    def fails(*_: object) -> None:
        raise NVMLError("Not Supported")

    gpu.nvmlDeviceGetClockInfo = fails
    found = environment("cuda")["gpu"]
    assert found["name"] == "GPU X"
    assert found["driver"] is None
    assert found["why"] == "Not Supported"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py is not installed" in environment("cuda")["gpu"]["why"]
