"""What is red is seen and has no speed-up; what cannot run says why; rates follow from times."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gptile.bench import kernel_benchmark, problems, providers
from gptile.bench.correctness import ALLOWED_RATIO, Check, Verdict
from gptile.bench.kernel_benchmark import benchmark, last_cache
from gptile.bench.operations import OPERATIONS
from gptile.bench.peaks import Peaks
from gptile.bench.problems import DIRECTIONS, PASSES, Copies, Problem, Request
from gptile.bench.providers import BASELINE, OURS, PROVIDERS, Provider
from gptile.bench.result import load_record, save_record
from gptile.bench.timing import Timing
from gptile.kernels.layer_norm import add_layer_norm_reference, layer_norm_reference
from gptile.model.errors import UserError

CPU = torch.device("cpu")
PEAKS = Peaks(copy=1e9, read=2e9, matmul={torch.float32: 1e10, torch.bfloat16: 1e10})


@pytest.fixture(autouse=True)
def _little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known peaks, and few copies."""
    monkeypatch.setattr(kernel_benchmark, "measure_peaks", lambda device, dtypes: PEAKS)
    monkeypatch.setitem(kernel_benchmark._ROTATED, "cpu", 1 << 16)


@pytest.fixture
def provide(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a provider of some functions in the place of another."""

    def put(name: str, functions: dict[str, Callable], **fields: Any) -> None:
        monkeypatch.setitem(PROVIDERS, name, Provider(lambda: functions, **fields))

    return put


def ask(*operations: str, **fields: Any) -> Request:
    defaults: dict[str, Any] = {
        "operations": operations,
        "cases": ("odd",),
        "passes": ("forward",),
        "dtypes": (torch.float32,),
        "providers": (BASELINE, "batched"),
        "rounds": 2,
        "quick": False,
        "device": CPU,
    }
    return Request(**(defaults | fields))


def run(*operations: str, **fields: Any) -> dict[str, Any]:
    return benchmark(ask(*operations, **fields)).record()


def by_provider(record: dict[str, Any], direction: str = "forward") -> dict[str, dict[str, Any]]:
    rows = (row for row in record["rows"] if row["subject"]["pass"] == direction)
    return {row["subject"]["provider"]: row for row in rows}


def close(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Another order of the same sums."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def wrong(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return layer_norm_reference(x, weight, bias, eps) * (1 + 1e-5)


class WrongGradient(torch.autograd.Function):
    """Nothing is done to the value; of the gradient, a hundred-thousandth is added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (1 + 1e-5)


def wrong_gradient(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return layer_norm_reference(x, WrongGradient.apply(weight), bias, eps)


def nan(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    out = layer_norm_reference(x, weight, bias, eps).clone()
    out[0, 0] = float("nan")
    return out


def short(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return layer_norm_reference(x[:1], weight, bias, eps)


def judge(name: str, function: Callable, **shape: int) -> list[str]:
    """The passes in which it is red, and the quantities that say so."""
    copies = Copies(Problem(name, "", shape, torch.float32), CPU)
    check = Check(OPERATIONS[name], copies.first, torch.float32)
    found = {d: check.judge(function, d) for d in DIRECTIONS if OPERATIONS[name].backward}
    found = found or {"forward": check.judge(function, "forward")}
    return [f"{direction}: {v.quantity}" for direction, v in found.items() if not v.ok]


RED = {
    close: [],
    wrong: ["forward: output 0", "backward: gradient of x", "both: output 0"],
    wrong_gradient: ["backward: gradient of weight", "both: gradient of weight"],
    nan: ["forward: output 0", "backward: gradient of x", "both: output 0"],
}


@pytest.mark.parametrize("function", RED)
def test_a_fault_of_a_hundred_thousandth_is_red_where_it_is(function: Callable) -> None:
    assert judge("layer_norm", function, rows=64, cols=48) == RED[function]


def test_an_output_of_another_shape_is_red() -> None:
    copies = Copies(Problem("layer_norm", "", {"rows": 3, "cols": 4}, torch.float32), CPU)
    assert (
        not Check(OPERATIONS["layer_norm"], copies.first, torch.float32).judge(short, "forward").ok
    )


def test_the_second_output_counts_too() -> None:
    def unsummed(x: Tensor, delta: Tensor, *others: Any, **more: Any) -> tuple[Tensor, Tensor]:
        return x.clone(), add_layer_norm_reference(x, delta, *others, **more)[1]

    def unscaled(*args: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        total, y = add_layer_norm_reference(*args, **keywords)
        return total, y * 1.01

    assert judge("add_layer_norm", unsummed, rows=8, cols=16)[0] == "forward: output 0"
    assert judge("add_layer_norm", unscaled, rows=8, cols=16)[0] == "forward: output 1"


def test_what_is_written_in_place_is_checked_and_left_as_it_was() -> None:
    right = OPERATIONS["kv_append"].reference
    shape = {"rows": 2, "tokens": 3, "heads": 2, "head_dim": 4, "max_len": 9}

    def no_values(v_cache: Tensor, **given: Any) -> Tensor:
        return right(v_cache=v_cache.clone(), **given)

    def one_late(starts: Tensor, **given: Any) -> Tensor:
        return right(starts=starts + 1, **given)

    assert judge("kv_append", right, **shape) == []
    assert judge("kv_append", no_values, **shape) == ["forward: output v_cache"]
    assert judge("kv_append", one_late, **shape)[0].startswith("forward: output")
    copies = Copies(Problem("kv_append", "", shape, torch.float32), CPU)
    before = copies.first["k_cache"].clone()
    Check(OPERATIONS["kv_append"], copies.first, torch.float32).judge(one_late, "forward")
    assert torch.equal(copies.first["k_cache"], before)


def test_of_indices_none_may_differ_that_is_right_in_eager() -> None:
    def next_best(**given: Any) -> tuple[Tensor, Tensor]:
        ids, logprobs = OPERATIONS["sample_greedy"].reference(**given)
        ids[0] += 1
        return ids, logprobs

    assert judge("sample_greedy", next_best, rows=4, vocab=50) == ["forward: output 0"]


def test_the_allowance_is_a_multiple_of_eagers_error_plus_a_step() -> None:
    copies = Copies(Problem("layer_norm", "", {"rows": 64, "cols": 48}, torch.bfloat16), CPU)
    check = Check(OPERATIONS["layer_norm"], copies.first, torch.bfloat16)
    for direction, kind in (("forward", "output"), ("backward", "gradient")):
        verdict = check.judge(close, direction)
        step = torch.finfo(torch.bfloat16).eps
        assert 1e-4 < verdict.reference_error < 1e-2
        assert verdict.allowed == ALLOWED_RATIO[kind] * verdict.reference_error + step
    assert Verdict("", float("nan"), 0.0, 1.0).ok is False


def test_a_red_row_has_times_but_neither_rates_nor_a_speedup(provide: Callable) -> None:
    provide("batched", {"layer_norm": wrong})
    red = by_provider(run("layer_norm"))["batched"]
    assert red["ok"] is False
    assert red["error"] > red["allowed"]
    assert len(red["seconds"]) == 2
    assert not {"speedup", "speedup_over_best", "roofline", "bytes_per_second"} & red.keys()


def test_rates_follow_from_the_median_and_the_least_work(
    provide: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {BASELINE: (4e-3, 8e-3, 6e-3), "batched": (2e-3, 4e-3, 3e-3), "compile": (1e-3,) * 3}

    def clock(variants: dict[str, Callable], **_: Any) -> dict[str, Timing]:
        for call in variants.values():
            call()
        return {name: Timing(times[name]) for name in variants}

    monkeypatch.setattr(kernel_benchmark, "interleave", clock)
    provide("batched", {"layer_norm": close})
    provide("compile", {"layer_norm": wrong})  # the fastest, but red: nobody is measured by it
    record = run("layer_norm", providers=(BASELINE, "batched", "compile"))
    rows = by_provider(record)
    work = 4 * (2 * 300 * 17 + 2 * 17), 8 * 300 * 17  # the case "odd" is 300 x 17
    found = rows["batched"]
    assert found["seconds"] == [2e-3, 4e-3, 3e-3]
    assert [found[name] for name in ("p20", "p50", "p80")] == pytest.approx([2.4e-3, 3e-3, 3.6e-3])
    assert found["spread"] == pytest.approx(0.4)
    assert (found["bytes"], found["flops"]) == work
    assert found["bytes_per_second"] == pytest.approx(work[0] / 3e-3)
    assert found["flops_per_second"] == pytest.approx(work[1] / 3e-3)
    assert (found["roofline"], found["limit"]) == (pytest.approx(work[0] / 2e9 / 3e-3), "memory")
    assert found["speedup"] == {"ratio": 2.0, "low": 2.0, "high": 2.0, "resolved": True}
    assert found["best_other"] == BASELINE
    assert rows[BASELINE]["best_other"] == "batched"
    assert rows[BASELINE]["speedup_over_best"]["ratio"] == 0.5
    assert "speedup" not in rows[BASELINE]
    assert rows["compile"]["ok"] is False


def test_a_graph_of_all_copies_counts_as_so_many_calls(
    provide: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: what a graph holds, and that a provider that cannot be recorded says so."""
    recorded: list[int] = []

    def graphed(call: Callable, n: int) -> Callable:
        if recorded:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        recorded.append(n)
        return lambda: [call() for _ in range(n)]

    def clock(variants: dict[str, Callable], **_: Any) -> dict[str, Timing]:
        return {name: Timing((6e-3,)) for name in variants}

    monkeypatch.setattr(kernel_benchmark, "graphed", graphed)
    monkeypatch.setattr(kernel_benchmark, "_is_short", lambda call, device: True)
    monkeypatch.setattr(kernel_benchmark, "interleave", clock)
    provide("batched", {"layer_norm": close})
    rows = by_provider(run("layer_norm", passes=("forward", "both")))
    (copies,) = recorded
    assert copies > 1
    assert rows[BASELINE]["seconds"] == [6e-3 / copies]
    assert rows["batched"]["seconds"] == [6e-3]
    assert rows["batched"]["note"].startswith(
        "no CUDA graph: RuntimeError: operation not permitted"
    )
    assert "note" not in rows[BASELINE]


def test_every_pass_of_an_operation_that_has_it_is_a_row(provide: Callable) -> None:
    provide("batched", {"layer_norm": close})
    record = run("layer_norm", "kv_append", cases=("odd", "head_dim 1"), passes=PASSES)
    subjects = [tuple(row["subject"].values()) for row in record["rows"]]
    assert len(subjects) == len(set(subjects))
    for direction in DIRECTIONS:
        assert ("layer_norm", "odd", direction, "float32", "batched") in subjects
    assert ("kv_append", "head_dim 1", "forward", "float32", BASELINE) in subjects
    assert not any(name == "kv_append" and d == "backward" for name, _, d, *_ in subjects)
    assert ("kv_append", "tiny", "overhead", "float32", BASELINE) in subjects
    assert all(row["ok"] for row in record["rows"] if row["subject"]["pass"] != "overhead")
    assert all(row["peak_memory"] > 0 for row in record["rows"] if "peak_memory" in row)


def test_our_wrapper_is_timed_without_a_gpu_and_is_no_speed(provide: Callable) -> None:
    threads = torch.get_num_threads()
    record = run("layer_norm", passes=("overhead",), providers=(OURS, BASELINE))
    rows = by_provider(record, "overhead")
    assert {*rows} == {OURS, BASELINE}
    assert all(len(row["seconds"]) == 2 and row["ok"] is None for row in rows.values())
    assert not any("speedup" in row for row in record["rows"])
    assert any("without Triton's own part" in note for note in record["notes"])
    assert torch.get_num_threads() == threads


def test_who_fails_says_why_and_the_others_go_on(provide: Callable) -> None:
    def fails(**given: Any) -> Tensor:
        raise ValueError("no such width\nand more")

    provide("batched", {"layer_norm": fails})
    record = run("layer_norm", passes=("forward", "overhead"))
    assert by_provider(record)["batched"]["skipped"] == "ValueError: no such width"
    assert by_provider(record, "overhead")["batched"]["skipped"] == "ValueError: no such width"
    assert by_provider(record)[BASELINE]["ok"]
    provide(OURS, {"layer_norm": fails})
    with pytest.raises(ValueError, match="no such width"):
        run("layer_norm", providers=(OURS, BASELINE))


def test_a_library_without_a_backward_pass_is_skipped_there(provide: Callable) -> None:
    def detached(x: Tensor, *others: Any, **more: Any) -> Tensor:
        return layer_norm_reference(x.detach(), *others, **more).detach()

    provide("batched", {"layer_norm": detached})
    record = run("layer_norm", passes=DIRECTIONS)
    assert by_provider(record)["batched"]["ok"]
    assert "require grad" in by_provider(record, "backward")["batched"]["skipped"]


def test_what_is_not_here_is_told_once(provide: Callable) -> None:
    record = run("layer_norm", providers=(OURS, BASELINE, "xformers"))
    assert f"no GPU here: {OURS}, xformers not timed" in record["notes"]
    assert {*by_provider(record)} == {BASELINE}
    with pytest.raises(UserError, match="gptile: no GPU here"):
        run("layer_norm", providers=(OURS,))


def test_a_case_too_large_for_a_cpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "_CPU_LIMIT", problems.Limit(1e6, 1e9))
    record = run("layer_norm", cases=("gpt2-prefill", "odd"))
    large, *others = record["rows"]
    assert large["subject"]["case"] == "gpt2-prefill"
    assert "too large for a CPU" in large["skipped"]
    assert [row["subject"]["case"] for row in others] == ["odd"]
    problem = Problem("layer_norm", "", OPERATIONS["layer_norm"].cases["gpt2-train"], torch.float32)
    assert problem.too_large(torch.device("cuda")) is None


def test_quick_is_the_largest_case_of_each_that_is_not_too_large() -> None:
    chosen = {p.name: p for p in ask(*OPERATIONS, cases=None, quick=True).problems()}
    assert {*chosen} == {*OPERATIONS}
    assert chosen["layer_norm"].case == "gpt2-train"
    assert chosen["linear_cross_entropy"].case == "demo-train"
    for name, operation in OPERATIONS.items():
        flops = {case: operation.flops(shape) for case, shape in operation.cases.items()}
        assert flops[chosen[name].case] <= 5e9
        larger = [case for case in flops if flops[case] > flops[chosen[name].case]]
        assert all(flops[case] > 5e9 or name == "embedding" for case in larger)


def test_all_cases_and_dtypes_are_taken_and_an_unknown_case_is_refused() -> None:
    both = (torch.float32, torch.bfloat16)
    found = ask("layer_norm", "kv_append", cases=None, dtypes=both).problems()
    assert len(found) == 2 * (11 + 6)
    assert ask("layer_norm", cases=("odd",)).n_steps == 2
    assert ask("layer_norm", cases=("odd",), passes=PASSES).n_steps == 3
    with pytest.raises(UserError, match=r"'none'; one of gpt2-decode, .*one past a block"):
        ask("layer_norm", cases=("none",)).problems()


def test_calls_take_turns_on_copies_that_differ(provide: Callable) -> None:
    seen: dict[int, float] = {}

    def watched(x: Tensor, *others: Any, **more: Any) -> Tensor:
        seen[x.data_ptr()] = float(x.sum())
        return layer_norm_reference(x, *others, **more)

    provide("batched", {"layer_norm": watched})
    found = by_provider(run("layer_norm"))["batched"]
    size = 4 * (300 * 17 + 2 * 17)
    copies = -(-(1 << 16) // size)
    assert found["rotated"] == copies * size
    assert len(set(seen.values())) == copies


def test_the_numbers_are_the_seeds(provide: Callable) -> None:
    sums: list[float] = []

    def watched(x: Tensor, *others: Any, **more: Any) -> Tensor:
        sums.append(float(x.sum()))
        return layer_norm_reference(x, *others, **more)

    provide("batched", {"layer_norm": watched})
    for seed in (0, 0, 1):
        run("layer_norm", seed=seed)
    first = sums[0]
    assert sums.count(first) >= 2
    assert sums[-1] != first


def test_a_warm_cache_and_16_bits_on_a_cpu_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_benchmark, "last_cache", lambda device: 1 << 20)
    notes = run("layer_norm", dtypes=(torch.bfloat16,))["notes"]
    assert any("may have been warm" in note for note in notes)
    assert any("16-bit" in note for note in notes)
    monkeypatch.setattr(kernel_benchmark, "last_cache", lambda device: 1 << 10)
    assert run("layer_norm")["notes"] == []
    monkeypatch.setattr(kernel_benchmark, "last_cache", lambda device: None)
    assert any("not known" in note for note in run("layer_norm")["notes"])
    assert last_cache(CPU) is None or last_cache(CPU) > 1 << 14


def test_the_record_is_one_that_can_be_saved_and_read(tmp_path: Path) -> None:
    record = run("sample_greedy", passes=PASSES)
    save_record(record, tmp_path / "kernels.json")
    assert load_record(tmp_path / "kernels.json") == record
    assert record["kind"] == "kernels"
    assert record["settings"]["peaks"] == PEAKS.record()
    assert record["settings"]["providers"] == [BASELINE, "batched"]
    assert providers.PROVIDERS[BASELINE].missing(CPU) is None


def test_progress_is_told_as_often_as_was_said(provide: Callable) -> None:
    steps: list[str] = []
    request = ask("layer_norm", "kv_append", cases=("odd", "head_dim 1"), passes=PASSES)
    benchmark(request, steps.append)
    assert len(steps) == request.n_steps
    assert steps[1] == "layer_norm, odd"
