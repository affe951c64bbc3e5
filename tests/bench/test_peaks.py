"""Rates by hand from times that are given, and once from this machine."""

import math

import pytest
import torch

from gptile.bench import peaks
from gptile.bench.peaks import Peaks, measure_peaks
from gptile.bench.timing import Timing

PEAKS = Peaks(copy=8e9, read=10e9, matmul={torch.float32: 1e11, torch.bfloat16: 4e11})


def test_the_roofline_is_whichever_takes_longer() -> None:
    assert PEAKS.bandwidth == 10e9
    assert PEAKS.roofline(10**9, 10**9, torch.float32) == (0.1, "memory")
    assert PEAKS.roofline(10**6, 10**11, torch.float32) == (1.0, "compute")
    assert PEAKS.roofline(10**6, 10**11, torch.bfloat16) == (0.25, "compute")


def test_the_record_names_dtypes() -> None:
    assert PEAKS.record() == {
        "copy": 8e9,
        "read": 10e9,
        "matmul": {"float32": 1e11, "bfloat16": 4e11},
    }


def test_rates_are_those_of_the_shortest_time_of_the_best_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([(3.0, 2.0), (1.0,), (8.0, 4.0), (4.0,), (0.1,), (0.4,)])
    called: list[torch.Size] = []

    def clock(variants: dict, **_: object) -> dict[str, Timing]:
        result = variants[""]()
        called.append(result.shape)
        return {"": Timing(next(times))}

    monkeypatch.setattr(peaks, "interleave", clock)
    monkeypatch.setitem(peaks._BUFFER_BYTES, "cpu", (400, 1600))
    monkeypatch.setitem(peaks._PRODUCT_SIZES, "cpu", (8, 32, 64))
    found = measure_peaks("cpu", [torch.float32])
    assert found.copy == max(2 * 400 / 2, 2 * 1600 / 4)
    assert found.read == max(400 / 1, 1600 / 4)
    # The second product took long, so that there is no third.
    assert found.matmul == {torch.float32: max(2 * 8**3 / 0.1, 2 * 32**3 / 0.4)}
    assert called == [(100,), (), (400,), (), (8, 8), (32, 32)]


def test_this_machine_has_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peaks._BUFFER_BYTES, "cpu", (2**20,))
    monkeypatch.setitem(peaks._PRODUCT_SIZES, "cpu", (64,))
    found = measure_peaks("cpu", [torch.float32, torch.float16])
    rates = [found.copy, found.read, *found.matmul.values()]
    assert all(0 < rate < math.inf for rate in rates)
    assert [*found.matmul] == [torch.float32, torch.float16]
