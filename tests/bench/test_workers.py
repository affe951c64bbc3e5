"""Processes that serve an engine: what they measure, what they shield it from, and how they die."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from gptile.bench.engines import Setup
from gptile.bench.workers import SETTLE, THREAD_VARIABLES, Worker, WorkerError

ENGINE = """
import ctypes, os, subprocess, sys, time
import numpy as np

class Engine:
    weight_bytes = 2

    def __init__(self, setup, *, factor=1):
        print("a library says hello")
        subprocess.run(["echo", "so does its child"])
        self.setup, self.cache_bytes, self.name = setup, 4 * factor, "not a number"
        self.kept = None

    @staticmethod
    def convert(setup):
        setup.converted.write_text(setup.precision)

    def echo(self, value):
        print("noise", flush=True)
        return value

    def environment(self, names):
        return [os.environ.get(name) for name in names]

    def path(self):
        return sys.path

    def sleep(self, seconds):
        time.sleep(seconds)

    def allocate(self, n_bytes):
        np.ones(n_bytes // 8)

    def keep(self, n_bytes):
        self.kept = np.ones(n_bytes // 8)

    def array(self):
        return np.arange(6).reshape(2, 3)

    def fail(self):
        raise ValueError("the first line\\nthe second")

    def crash(self):
        sys.stderr.write("double free\\n\\n")
        sys.stderr.flush()
        os.abort()

    def leave(self):
        os._exit(3)
"""
MADE_BY = "fake_engine:Engine"
MB = 10**6


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    (tmp_path / "fake_engine.py").write_text(ENGINE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return Setup(tmp_path / "source", tmp_path / "converted", "int8", "cpu", 3)


@pytest.fixture
def worker(setup: Setup) -> Iterator[Worker]:
    with Worker(3) as worker:
        worker.open(MADE_BY, setup)
        yield worker


def test_the_engine_is_made_as_asked(setup: Setup) -> None:
    with Worker(1) as worker:
        numbers = worker.open(MADE_BY, setup, factor=2)
        assert numbers == {"weight_bytes": 2, "cache_bytes": 8}


def test_conversion_gets_the_setup(setup: Setup) -> None:
    with Worker(1) as worker:
        worker.convert(MADE_BY, setup)
    assert setup.converted.read_text() == "int8"


def test_what_libraries_print_does_not_disturb(worker: Worker) -> None:
    for value in (1, "a\nline", [[1, 2]], None):
        assert worker.call("echo", value)["value"] == value


def test_an_array_is_saved(worker: Worker, tmp_path: Path) -> None:
    found = worker.call("array", save=tmp_path / "array.npy")
    assert "value" not in found
    assert np.load(tmp_path / "array.npy").tolist() == [[0, 1, 2], [3, 4, 5]]


def test_threads_are_set_before_anything_is_imported(worker: Worker) -> None:
    assert worker.call("environment", THREAD_VARIABLES)["value"] == ["3"] * len(THREAD_VARIABLES)


def test_kernels_are_never_interpreted(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with Worker(1) as worker:
        worker.open(MADE_BY, setup)
        assert worker.call("environment", ["TRITON_INTERPRET"])["value"] == [None]


def test_the_time_is_that_of_the_call(worker: Worker) -> None:
    started = time.perf_counter()
    found = worker.call("sleep", 0.5)["seconds"]
    assert 0.5 <= found <= time.perf_counter() - started - SETTLE


def test_peak_memory_is_that_of_the_call(worker: Worker) -> None:
    large = worker.call("allocate", 200 * MB)
    small = worker.call("allocate", 1 * MB)
    assert large["peak_memory"] - large["memory"] > 190 * MB
    assert small["peak_memory"] - small["memory"] < 50 * MB
    worker.call("keep", 200 * MB)
    assert worker.call("allocate", 1 * MB)["memory"] - small["memory"] > 180 * MB


def test_an_idle_worker_uses_no_cpu(worker: Worker) -> None:
    worker.call("allocate", 1 * MB)
    time.sleep(SETTLE)
    process = psutil.Process(worker.process.pid)
    before = process.cpu_times()
    time.sleep(0.5)
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.02


def test_an_error_is_told_and_survived(worker: Worker) -> None:
    with pytest.raises(WorkerError, match=r"^ValueError: the first line$"):
        worker.call("fail")
    with pytest.raises(WorkerError, match="no attribute 'nothing'"):
        worker.call("nothing")
    assert worker.call("echo", 1)["value"] == 1


def test_a_death_is_told_with_the_last_words(worker: Worker) -> None:
    with pytest.raises(WorkerError, match=r"died \(signal SIGABRT\): double free$"):
        worker.call("crash")
    with pytest.raises(WorkerError, match="died"):
        worker.call("echo", 1)


def test_a_silent_exit_is_told(setup: Setup) -> None:
    with Worker(1) as worker:
        worker.open(MADE_BY, setup)
        with pytest.raises(WorkerError, match=r"died \(exit code 3\)"):
            worker.call("leave")


def test_an_engine_that_is_not_there_is_told(setup: Setup) -> None:
    with Worker(1) as worker, pytest.raises(WorkerError, match="ModuleNotFoundError"):
        worker.open("no_such_module:Engine", setup)


def test_leaving_ends_a_busy_process(setup: Setup) -> None:
    with Worker(1) as worker:
        worker.open(MADE_BY, setup)
        request = '{"do": "call", "method": "sleep", "arguments": [60], "save": null}\n'
        assert worker.process.stdin is not None
        worker.process.stdin.write(request)
        worker.process.stdin.flush()
        started = time.perf_counter()
    assert time.perf_counter() - started < 5
    assert not psutil.pid_exists(worker.process.pid)


def test_a_worker_ends_with_its_parent(setup: Setup) -> None:
    with Worker(1) as worker:
        worker.open(MADE_BY, setup)
        assert worker.process.stdin is not None
        worker.process.stdin.close()  # as the system does for a parent that is gone
        assert worker.process.wait(timeout=5) == 0
