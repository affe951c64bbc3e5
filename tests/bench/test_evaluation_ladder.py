"""The ladder's rows score the same text; one that does not loses its speed-up; one that cannot run
says why."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gptile.bench import evaluation_ladder
from gptile.bench.corpus import Corpus
from gptile.bench.evaluation import window_sums, without_full_logits
from gptile.bench.evaluation_ladder import Rung, Skipped, bound, climb, naive_loop, rungs
from gptile.bench.huggingface import load_reference
from gptile.bench.result import Result
from gptile.bench.workloads import with_ops
from gptile.kernels import Ops
from gptile.model.gpt2 import GPT2
from gptile.weights import open_checkpoint, save_checkpoint
from gptile.weights.checkpoint import Checkpoint

CPU = torch.device("cpu")
DOCUMENTS = [[(7 * i + j * j) % 61 for j in range(n)] for i, n in enumerate((30, 3, 12, 2, 40, 9))]


@pytest.fixture
def checkpoint(model: GPT2, tmp_path: Path) -> Checkpoint:
    save_checkpoint(model, tmp_path / "model")
    return open_checkpoint(tmp_path / "model")


@pytest.fixture(autouse=True)
def slow_and_bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler whose 16-bit products are slow."""
    monkeypatch.setattr(evaluation_ladder, "missing_compiler", lambda device: "no compiler")
    monkeypatch.setattr(evaluation_ladder, "slowdown", lambda dtype, device: 70.0)


def build(checkpoint: Checkpoint, documents: Sequence[Sequence[int]] = DOCUMENTS) -> list:
    corpus = Corpus(documents, 32, 16)
    return list(rungs(checkpoint, corpus, batch_size=3, bucket=8, device=CPU))


def climbed(steps: list) -> dict[str, dict[str, Any]]:
    rows = climb(steps, rounds=2, device=CPU)
    return {row["subject"]["rung"]: row for row in rows}


def test_every_row_scores_what_the_naive_loop_scores(checkpoint: Checkpoint) -> None:
    rows = climbed(build(checkpoint))
    ran = [row for row in rows.values() if "skipped" not in row]
    assert len(ran) == 6
    assert next(iter(rows)) == "transformers eager, batch 1"
    for row in ran:
        assert row["ok"]
        assert row["error"] <= 1e-6
        assert row["memory"] > 0
        assert len(row["seconds"]) == 2
        assert row["speedup"]["low"] <= row["speedup"]["ratio"] <= row["speedup"]["high"]
    assert rows["no full logits"]["memory"] <= rows["length buckets 8 wide"]["memory"]
    Result("evaluation", {}, list(rows.values())).record()


def test_the_naive_loop_is_the_mean_over_all_tokens(model: GPT2, checkpoint: Checkpoint) -> None:
    reference = load_reference(checkpoint.files.directory, torch.float32)
    corpus = Corpus(DOCUMENTS, 32, 16)
    sums = window_sums([model], corpus, [[i] for i in range(len(corpus.windows))], devices=[CPU])
    expected = float(sums[0].sum()) / sum(n - 1 for n in map(len, DOCUMENTS))
    for attention in ("eager", "sdpa"):
        assert naive_loop(reference, attention, corpus) == pytest.approx(expected, rel=1e-6)


def test_what_cannot_run_says_why(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    skipped = {step.name: step.why for step in build(checkpoint) if isinstance(step, Skipped)}
    assert skipped == {
        "bfloat16 autocast": "a bfloat16 product took 70.0 times as long as fp32 here",
        "reuse of keys and values": "for generation: one pass has every past in it",
        "torch.compile": "no compiler",
        "Triton kernels, bfloat16": "no GPU here",
        "data parallel": "no GPU here; for CPUs see gptile evaluate --help",
    }
    steps = build(checkpoint, [list(range(50))])
    skipped = {step.name: step.why for step in steps if isinstance(step, Skipped)}
    assert "equally long" in skipped["length buckets 8 wide"]


def test_16_bits_run_where_they_are_fast(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation_ladder, "slowdown", lambda dtype, device: 0.4)
    row = climbed(build(checkpoint))["bfloat16 autocast"]
    assert row["ok"]
    assert row["error"] > 1e-7
    assert row["bound"] == bound(torch.bfloat16) == 2**-8


def test_a_wrong_row_has_no_speed_up(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: a loss that is 0.01 % off from one rung on."""

    def faulty(ops: Ops) -> Ops:
        right = without_full_logits(ops).linear_cross_entropy

        def wrong(*args: Any) -> torch.Tensor:
            return right(*args) * 1.0001

        return ops.replace(linear_cross_entropy=wrong)

    monkeypatch.setattr(evaluation_ladder, "without_full_logits", faulty)
    rows = climbed(build(checkpoint))
    wrong = rows.pop("no full logits")
    assert not wrong["ok"]
    assert wrong["error"] == pytest.approx(1e-4, rel=1e-2)
    assert wrong["speedup"] is None
    assert all(row.get("ok", True) for row in rows.values())


def test_nan_is_not_right() -> None:
    def step(name: str, nll: float) -> Rung:
        def run() -> float:
            torch.zeros(9)
            return nll

        return Rung(name, run)

    rows = climbed([step("first", 3.0), step("other", float("nan"))])
    assert rows["first"]["ok"]
    assert not rows["other"]["ok"]
    assert rows["other"]["speedup"] is None


def test_a_rung_of_other_operations_shares_the_weights(
    small_model: Callable[..., GPT2],
) -> None:
    model = small_model()
    other = with_ops(model, Ops.triton())
    assert other.ops == Ops.triton()
    assert not other.training
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert ours.data_ptr() == theirs.data_ptr()
