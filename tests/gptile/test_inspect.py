"""``gptile inspect`` as a user meets it: what it prints, and its exit code."""

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from gptile import inspection
from gptile.bench.compiler import TARGETS, Compiled
from gptile.bench.resources import Launch, compile_in_worker
from gptile.cli import main
from gptile.kernels.catalog import OPERATIONS


def compiling(*args: str) -> str:
    """The output of the command in a process that compiles, 100 columns wide."""
    run = subprocess.run(
        [sys.executable, "-m", "gptile", "inspect", *args],
        env={**os.environ, "TRITON_INTERPRET": "0", "COLUMNS": "100"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture
def inspect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process: exit code, stdout, stderr."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gptile", "inspect", *args])
        with pytest.raises(SystemExit) as exit:
            main()
        return (exit.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Compiled]], None]:
    """In place of the compiler: the kernels every pass is said to launch."""

    def say(kernels: list[Compiled]) -> None:
        monkeypatch.setattr(inspection, "compile_launches", lambda target, launches: kernels)

    return say


def kernel(name: str = "_kernel", products: str = "none", code: str = "text") -> Compiled:
    return Compiled(name, (3, 5), 4, 64, 0, 1024, products, {"ttir": code, "llir": code})


def test_every_operation_pass_case_and_target_is_listed(inspect: Callable) -> None:
    code, out, err = inspect("--json")
    assert (code, err) == (0, "")
    listed = json.loads(out)
    assert listed["targets"] == [*TARGETS]
    assert [found["operation"] for found in listed["operations"]] == [*OPERATIONS]
    for found in listed["operations"]:
        module = OPERATIONS[found["operation"]]
        assert found["passes"] == [*module.PASSES]
        assert found["cases"] == module.CASES
        assert found["summary"]
        assert " ".join(module.__doc__.replace("``", "").split()).startswith(found["summary"])
    code, text, _ = inspect()
    assert code == 0
    words = " ".join(text.split())  # lists go on in the next line
    for name in (*OPERATIONS, *TARGETS, "gpt2-mlp-proj-batch-int8", "activation backward"):
        assert name in words


WRONG = {
    "operation": (["nothing"], ["nothing", *OPERATIONS]),
    "case": (["attention", "--case", "none"], ["none", *OPERATIONS["attention"].CASES]),
    "pass": (["attention", "--pass", "none"], ["none", *OPERATIONS["attention"].PASSES]),
    "target": (["attention", "--target", "sm_70"], ["sm_70", *TARGETS]),
    "compared target": (["attention", "--compare", "sm_80,sm_70"], ["sm_70", *TARGETS]),
    "dtype": (["attention", "--dtype", "int8"], ["int8", "bf16", "fp16", "fp32", "bfloat16"]),
    "stage": (["attention", "--show", "asm"], ["asm", "ttir", "ptx", "amdgcn"]),
    "NVIDIA stage": (["attention", "--show", "amdgcn"], ["sm_90 has no amdgcn", "ptx, sass"]),
    "AMD stage": (
        ["attention", "--show", "ptx", "--target", "gfx942"],
        ["gfx942 has no ptx", "ttir, ttgir, llir, amdgcn"],
    ),
    "no operation": (["--show", "ptx"], ["which operation"]),
    "code as JSON": (["attention", "--show", "ptx", "--json"], ["--show", "--json"]),
    "code of two targets": (
        ["attention", "--show", "ptx", "--compare", "sm_80,sm_90"],
        ["--show", "--compare"],
    ),
    "kernel without code": (["attention", "--kernel", "x"], ["--kernel", "--show"]),
    "interpreter": (["attention"], ["TRITON_INTERPRET", "unset it"]),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_request_is_one_line_with_the_choices(inspect: Callable, what: str) -> None:
    args, words = WRONG[what]
    code, out, err = inspect(*args)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    for word in words:
        assert word in err


def test_an_unknown_kernel_is_one_line_with_the_choices(inspect: Callable, faked: Callable) -> None:
    faked([kernel("_one"), kernel("_two")])
    code, out, err = inspect("attention", "--show", "ttir", "--kernel", "_three")
    assert (code, out) == (2, "")
    assert err == "gptile: error: unknown kernel '_three'; one of _one, _two\n"


def test_the_numbers_are_the_compilers_and_the_kernel_files() -> None:
    args = ("attention", "--case", "head_dim 40", "--compare", "sm_80,gfx942", "--dtype", "fp16")
    found = json.loads(compiling(*args, "--json"))
    module = OPERATIONS["attention"]
    shape = module.CASES["head_dim 40"]
    assert (found["dtype"], found["shape"]) == ("float16", shape)
    assert [one["pass"] for one in found["passes"]] == [*module.PASSES]
    launches = [Launch("attention", name, "head_dim 40", "float16") for name in module.PASSES]
    rows = [row for target in ("sm_80", "gfx942") for row in compile_in_worker(target, launches)]
    for one in found["passes"]:
        work = module.PASSES[one["pass"]].work(shape, torch.float16)
        assert (one["loaded"], one["stored"], one["distinct"], one["flops"]) == work
        assert one["intensity"] == work.flops / work.distinct
        for k, row in zip(
            one["kernels"], [row for row in rows if row.direction == one["pass"]], strict=True
        ):
            for name in ("target", "kernel", "warps", "registers", "spilled", "shared", "products"):
                assert str(k[name]) == getattr(row, name)
            assert f"{100 * k['occupancy']['share']:.1f}" == row.occupancy
        # The A100's datasheet: 2,039 GB/s, 312 TFLOP/s.
        memory, compute = work.distinct / 2.039e12, work.flops / 312e12
        bound = one["rooflines"]["A100 SXM 80 GB"]
        assert bound["seconds"] == pytest.approx(max(memory, compute))
        assert bound["limit"] == ("memory" if memory > compute else "compute")


def test_the_tables_show_what_json_says() -> None:
    args = ("attention", "--pass", "backward", "--target", "sm_90", "--case", "gpt2-prefill")
    lines = compiling(*args).splitlines()
    (found,) = json.loads(compiling(*args, "--json"))["passes"]
    assert max(map(len, lines)) <= 100
    # Each row's values in the order of the kernels, whose names head the columns.
    rows = {line[1:18].strip(): line[18:].split() for line in lines}
    kernels = found["kernels"]
    assert [k["kernel"] for k in kernels] in [line.split() for line in lines]
    assert rows["registers"] == [str(k["registers"]) for k in kernels]
    assert rows["shared bytes"] == [str(k["shared"]) for k in kernels]
    assert rows["spilled bytes"] == [str(k["spilled"]) for k in kernels]
    assert rows["warps"] == [str(k["warps"]) for k in kernels]
    marked = [line.split(" * ")[0].strip() for line in lines if " * " in line and "µs" in line]
    assert marked == ["H100 SXM", "H200 SXM"]
    assert any(line.startswith(f"backward: {found['flops'] / 1e9:.3g} GFLOP") for line in lines)


def test_targets_stand_side_by_side(inspect: Callable, faked: Callable) -> None:
    faked([kernel("_one"), kernel("_two"), kernel("_two")])
    code, out, _ = inspect("attention", "--pass", "forward", "--compare", "sm_80,sm_86,gfx942")
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["kernel", "sm_80", "sm_86", "gfx942"] in lines
    # 64 registers a thread leave 32 warps of 64, of 48 and of AMD's 32.
    assert "50% (registers) 67% (registers) 100% (warps)".split() in [line[1:] for line in lines]
    assert [line for line in lines if line in (["_one"], ["_two"])] == [["_one"], ["_two"]]
    assert out.count("2 times 3 x 5") == 3


@pytest.mark.parametrize(
    ("products", "dtype", "peak"),
    [("wgmma", "bf16", 312e12), ("none", "bf16", 19.5e12), ("mfma", "fp32", 19.5e12)],
)
def test_the_peak_is_that_of_the_units_used(
    inspect: Callable,
    faked: Callable,
    monkeypatch: pytest.MonkeyPatch,
    products: str,
    dtype: str,
    peak: float,
) -> None:
    faked([kernel(products=products), kernel()])
    heavy = (
        OPERATIONS["attention"]
        .PASSES["forward"]
        ._replace(work=lambda shape, dtype: inspection.Work(1, 1, 1, 10**15))
    )
    monkeypatch.setitem(OPERATIONS["attention"].PASSES, "forward", heavy)
    _, out, _ = inspect("attention", "--pass", "forward", "--dtype", dtype, "--json")
    bound = json.loads(out)["passes"][0]["rooflines"]["A100 SXM 80 GB"]
    assert bound == {"seconds": pytest.approx(1e15 / peak), "limit": "compute"}


def test_code_is_shown_once_under_its_name(inspect: Callable, faked: Callable) -> None:
    faked([kernel("_one", code="first"), kernel("_two", code="second")] * 2)
    args = ("attention", "--case", "gpt2-prefill", "--target", "sm_80", "--show")
    _, out, _ = inspect(*args, "ttir")
    header = "attention forward, sm_80, gpt2-prefill, bfloat16"
    assert out == f"// _one: {header}\nfirst\n\n// _two: {header}\nsecond\n\n"
    _, out, _ = inspect(*args, "llir", "--kernel", "_two")
    assert out == f"; _two: {header}\nsecond\n\n"


@pytest.mark.parametrize(
    ("stage", "target", "word"),
    [
        ("ptx", "sm_90", ".target sm_90"),
        ("sass", "sm_80", "LDG.E"),
        ("amdgcn", "gfx90a", "amdgcn-amd-amdhsa--gfx90a"),
    ],
)
def test_machine_code_can_be_shown(stage: str, target: str, word: str) -> None:
    out = compiling("layer_norm", "--pass", "forward", "--target", target, "--show", stage)
    assert word in out


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 "), (999.6, "1 k"), (1_610_612_736, "1.61 G"), (8.51e-6, "8.51 µ"), (2e-12, "0.002 n")],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert inspection._si(value) == text
