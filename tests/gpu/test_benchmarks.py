"""What the ladder, the on/off matrix and the profile can show only on a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gptile.bench.checkpoints import random_checkpoint
from gptile.bench.ladder import Job, measure_ladder
from gptile.bench.matrix import TINY, Sizes, measure_matrix
from gptile.bench.profiling import profile_task
from gptile.weights import open_checkpoint


@pytest.fixture
def directory() -> Any:
    with random_checkpoint(TINY) as found:
        yield found


def measuring(gpu: str) -> dict[str, Any]:
    return {"device": torch.device(gpu), "rounds": 3, "seed": 0, "report": print}


def test_every_kernel_is_a_rung(gpu: str, directory: Path) -> None:
    rows = measure_ladder(directory, Job(4, 2, 9, 3, 2), **measuring(gpu))
    names = [row["subject"]["rung"] for row in rows]
    assert names[-2:] == ["kv_append", "decode_attention"]
    for row in rows:
        assert row["ok"], row
        assert len(row["seconds"]) == 3
        assert row["peak_memory"] > 0


def test_the_matrix_has_times(gpu: str, directory: Path) -> None:
    rows = measure_matrix(directory, Sizes(2, 11, 3), dtype=torch.bfloat16, **measuring(gpu))
    for row in rows:
        assert row["ok"], row
        assert len(row["seconds"]) == 3


def test_a_profile_sees_the_gpus_kernels_memory_and_load(
    gpu: str, directory: Path, tmp_path: Path
) -> None:
    model = open_checkpoint(directory).load_model(device=gpu)
    trace = tmp_path / "trace.json"
    rows = profile_task(model, "train", rows=2, tokens=9, steps=3, seed=0, trace=trace)
    operations = [row["subject"]["operation"] for row in rows if "operation" in row["subject"]]
    assert any("attention" in name for name in operations)
    assert all(row["total_seconds"] > 0 for row in rows if "range" in row["subject"])
    timelines = {row["subject"]["timeline"]: row for row in rows if "timeline" in row["subject"]}
    assert max(timelines["cuda memory"]["bytes"]) > 0
    assert "times" in timelines["gpu"] or "NVML" in timelines["gpu"]["skipped"]
    assert trace.exists()
