"""The ladder on a tiny model: every way of doing the job does the same job, a wrong one is red and
earns no speed-up, and what cannot run says why."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from gptile.bench import ladder
from gptile.bench.checkpoints import random_checkpoint
from gptile.bench.decoding import Loop, Setup
from gptile.bench.huggingface import load_reference
from gptile.bench.ladder import FULL, QUICK, Job, Rung, measure_ladder, plan, plan_kernels
from gptile.bench.matrix import TINY
from gptile.kernels import Ops
from gptile.kernels.embedding import embedding_reference
from gptile.model.errors import UserError
from gptile.weights import open_checkpoint

CPU = torch.device("cpu")
JOB = Job(n_prompts=5, shortest=1, longest=9, n_new=4, batch=2)
OURS = Setup(ours=True)
SETUPS = {
    "naive": Setup(),
    "ours": OURS,
    "batches": replace(OURS, batch=3),
    "buckets": replace(OURS, batch=2, bucketed=True),
    "last logits": replace(OURS, batch=2, bucketed=True, last_only=True),
    "cache": replace(OURS, batch=2, bucketed=True, last_only=True, cached=True),
    "cache, ragged": replace(OURS, batch=5, last_only=True, cached=True),
}


@pytest.fixture(scope="module")
def directory() -> Any:
    with random_checkpoint(TINY) as found:
        yield found


@pytest.fixture
def climb(monkeypatch: pytest.MonkeyPatch, directory: Path) -> Any:
    """Climb on the tiny model; without torch.compile, which takes half a minute."""
    monkeypatch.setattr(ladder, "missing_compiler", lambda device: "no compiler in this test")
    monkeypatch.setattr(ladder, "slowdown", lambda dtype, device: 0.5)

    def run() -> dict[str, dict[str, Any]]:
        rows = measure_ladder(
            directory, JOB, device=CPU, rounds=2, seed=0, report=lambda message: None
        )
        return {row["subject"]["rung"]: row for row in rows}

    return run


def make_loop(directory: Path, setup: Setup, ops: Ops | None = None) -> Loop:
    model: Any = load_reference(directory, torch.float32)
    if setup.ours:
        model = open_checkpoint(directory).load_model(ops=ops or Ops.torch())
    return Loop(setup, model, JOB.prompts(TINY.vocab_size, 0), JOB.n_new)


@pytest.mark.parametrize("name", SETUPS)
def test_every_way_gives_transformers_own_greedy_text(directory: Path, name: str) -> None:
    loop = make_loop(directory, SETUPS[name])
    reference = load_reference(directory, torch.float32)
    for prompt, ids in zip(loop.prompts, loop.greedy_ids(), strict=True):
        expected = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=JOB.n_new,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        assert ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", SETUPS)
def test_forced_logits_are_those_of_the_forced_ids(directory: Path, name: str) -> None:
    loop = make_loop(directory, SETUPS[name])
    forced = [[(7 * i + j) % TINY.vocab_size for j in range(JOB.n_new)] for i in range(5)]
    exact = load_reference(directory, torch.float64)
    for prompt, ids, logits in zip(loop.prompts, forced, loop.forced_logits(forced), strict=True):
        truth = exact(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        assert logits.shape == (JOB.n_new, TINY.vocab_size)
        assert (logits - truth).abs().max() < 1e-4


def test_the_prompts_have_all_lengths_and_are_not_sorted() -> None:
    prompts = JOB.prompts(TINY.vocab_size, 0)
    lengths = [len(prompt) for prompt in prompts]
    assert sorted(lengths) == [1, 3, 5, 7, 9]
    assert lengths != sorted(lengths)
    assert JOB.prompts(TINY.vocab_size, 0) == prompts
    assert JOB.prompts(TINY.vocab_size, 1) != prompts


def test_buckets_compute_less_padding(directory: Path) -> None:
    def computed(setup: Setup) -> int:
        loop = make_loop(directory, setup)
        return sum(
            len(batch) * max(len(loop.prompts[prompt]) for prompt in batch)
            for batch in loop.batches()
        )

    plain, bucketed = SETUPS["batches"], replace(SETUPS["batches"], bucketed=True)
    assert computed(bucketed) < computed(plain)


def test_a_job_keeps_within_the_context() -> None:
    assert FULL.within(1024) == FULL
    assert QUICK.within(32).longest == 32 - QUICK.n_new
    with pytest.raises(UserError, match=r"context of 7 is too short.* 8"):
        QUICK.within(7)


def test_the_rungs_are_right_timed_and_compared(climb: Any, directory: Path) -> None:
    rows = climb()
    assert [*rows][:5] == [
        *("naive loop", "our model", "bigger batches", "length buckets", "16-bit weights")
    ]
    assert rows["torch.compile"]["skipped"] == "no compiler in this test"
    assert rows["our kernels"]["skipped"] == "no GPU here"
    for name, row in rows.items():
        assert row["change"]
        if "skipped" in row:
            assert "seconds" not in row
            continue
        assert row["ok"], row
        assert row["error"] <= row["allowed"]
        assert len(row["seconds"]) == 2
        assert row["dtype"] == ("bfloat16" if row["error"] > 1e-4 else "float32")
        assert (row["speedup"] is None) == (name == "naive loop")
    naive, ours = rows["naive loop"], rows["our model"]
    ratios = sorted(a / b for a, b in zip(naive["seconds"], ours["seconds"], strict=True))
    assert ours["speedup"] == ours["speedup_step"]
    assert ours["speedup"]["low"] == pytest.approx(ratios[0])
    assert ours["speedup"]["high"] == pytest.approx(ratios[1])
    weights = sum(p.nbytes for p in open_checkpoint(directory).load_model().parameters())
    assert weights < ours["peak_memory"] < 2 * weights
    assert rows["16-bit weights"]["peak_memory"] < rows["length buckets"]["peak_memory"]


def test_one_rung_changes_one_thing() -> None:
    setup, seen = Setup(), set()
    for rung in plan(JOB, CPU)[1:]:
        assert len(rung.changes) == 1
        (field,) = rung.changes
        assert field not in seen
        seen.add(field)
        assert getattr(setup, field) != rung.changes[field]
    assert plan(JOB, CPU)[0].changes == {}


def shifted(ids, positions, wte, wpe, dropout_p=0.0):
    return embedding_reference(ids, (positions + 1).clamp(max=len(wpe) - 1), wte, wpe, dropout_p)


def plant(monkeypatch: pytest.MonkeyPatch, at: str, **wrong: Any) -> None:
    """A rung that brings a fault along with what it is about."""

    def faulty(job: Job, device: torch.device) -> list[Rung]:
        return [
            replace(rung, changes={**rung.changes, "ops": Ops.torch().replace(**wrong)})
            if rung.name == at
            else rung
            for rung in plan(job, device)
        ]

    monkeypatch.setattr(ladder, "plan", faulty)


def test_a_wrong_rung_is_red_and_earns_no_speed_up(
    monkeypatch: pytest.MonkeyPatch, climb: Any
) -> None:
    plant(monkeypatch, "length buckets", embedding=shifted)
    rows = climb()
    names = [name for name, row in rows.items() if "skipped" not in row]
    at = names.index("length buckets")
    for name in names[:at]:
        assert rows[name]["ok"]
    for name in names[at:]:
        assert not rows[name]["ok"]
        assert rows[name]["speedup"] is None
        assert rows[name]["speedup_step"] is None
        assert rows[name]["seconds"]
    assert rows["bigger batches"]["speedup"] is not None


def test_a_cache_that_is_slightly_off_is_red(monkeypatch: pytest.MonkeyPatch, climb: Any) -> None:
    def scaled(*args):
        *rest, scale = args
        return Ops.torch().decode_attention(*rest, scale * 1.3)

    monkeypatch.setattr(ladder, "slowdown", lambda dtype, device: 2.0)  # fp32 to the end
    plant(monkeypatch, "cache reuse", decode_attention=scaled)
    rows = climb()
    assert rows["last logits"]["ok"]
    assert not rows["cache reuse"]["ok"]


def test_other_text_in_fp32_is_red_though_the_logits_are_right(
    monkeypatch: pytest.MonkeyPatch, climb: Any
) -> None:
    greedy = Loop.greedy_ids

    def wrong(loop: Loop) -> list[list[int]]:
        ids = greedy(loop)
        if loop.setup.bucketed:
            ids[2][1] += 1
        return ids

    monkeypatch.setattr(Loop, "greedy_ids", wrong)
    rows = climb()
    assert rows["bigger batches"]["ok"]
    assert not rows["length buckets"]["ok"]
    assert rows["length buckets"]["equal_ids"] == pytest.approx(1 - 1 / 20)
    assert rows["16-bit weights"]["ok"]  # there it is stated and no more


def test_slow_16_bit_products_are_skipped_and_said(
    monkeypatch: pytest.MonkeyPatch, climb: Any
) -> None:
    monkeypatch.setattr(ladder, "slowdown", lambda dtype, device: 87.3)
    rows = climb()
    assert "87.3 times as long as in float32" in rows["16-bit weights"]["skipped"]
    assert rows["cache reuse"]["dtype"] == "float32"


def test_kernels_come_one_at_a_time_on_top_of_each_other() -> None:
    ours = Ops.triton()
    rungs = plan_kernels(["linear", "attention"], ours)
    assert [rung.name for rung in rungs] == ["linear", "attention"]
    first, second = (rung.changes["ops"] for rung in rungs)
    assert first == Ops.torch().replace(linear=ours.linear)
    assert second == first.replace(attention=ours.attention)


def test_the_kernels_climb_too(monkeypatch: pytest.MonkeyPatch, climb: Any) -> None:
    """As on a GPU, in the interpreter: one rung for each operation that the job calls."""
    called = []

    def stand_ins(names: list[str], ours: Ops) -> list[Rung]:
        called.extend(names)
        return plan_kernels(["layer_norm", "linear"], Ops.triton())

    monkeypatch.setattr(ladder, "plan_kernels", stand_ins)
    monkeypatch.setattr(ladder, "slowdown", lambda dtype, device: 2.0)
    rows = climb()
    assert called == [
        *("embedding", "layer_norm", "linear", "linear_residual", "layer_norm_linear"),
        *("kv_append", "decode_attention"),
    ]
    assert rows["layer_norm"]["ok"]
    assert rows["linear"]["ok"]
    assert rows["linear"]["speedup_step"] is not None


def test_a_compiler_that_fails_costs_its_rung_only(
    monkeypatch: pytest.MonkeyPatch, climb: Any
) -> None:
    def compile_badly(self: torch.nn.Module) -> None:
        def broken(*args: Any, **kwargs: Any) -> None:
            raise BackendCompilerFailed(compile_badly, RuntimeError("no\nspace left"), None)

        self.forward = broken

    monkeypatch.setattr(ladder, "missing_compiler", lambda device: "")
    monkeypatch.setattr(torch.nn.Module, "compile", compile_badly)
    rows = climb()
    assert "torch.compile failed" in rows["torch.compile"]["skipped"]
    assert "no space left" in rows["torch.compile"]["skipped"]
    assert rows["cache reuse"]["ok"]
    assert rows["cache reuse"]["seconds"]


def test_a_compiled_loop_gives_the_same_text(directory: Path) -> None:
    """In eager graphs: what Dynamo makes of the loop, without the seconds that Inductor takes."""
    eager = make_loop(directory, SETUPS["cache"])
    eager = replace(eager, prompts=eager.prompts[:2], n_new=3)
    compiled = replace(eager, setup=replace(eager.setup, compiled=True))
    expected = eager.greedy_ids()
    with torch._dynamo.config.patch(recompile_limit=64, allow_unspec_int_on_nn_module=True):
        compiled.model.compile(backend="eager")
        assert compiled.greedy_ids() == expected
