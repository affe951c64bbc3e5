"""Kernels compile for GPUs that are not here, within their budget, as the committed table says.

The whole table takes minutes to compile (``make resources``): here each pass meets three targets,
once in each dtype, and its cases in turn.
"""

import csv
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from gptile.bench import compiler
from gptile.bench.compiler import TARGETS
from gptile.bench.resources import (
    DTYPES,
    Launch,
    Row,
    compile_in_worker,
    every_launch,
    read_table,
)
from gptile.kernels.catalog import OPERATIONS
from gptile.kernels.jit import triton
from gptile.model.errors import UserError

ATTENTION = Launch("attention", "forward", "gpt2-prefill", "bfloat16")


def sample() -> Iterator[tuple[str, Launch]]:
    passes = [(operation, name) for operation, m in OPERATIONS.items() for name in m.PASSES]
    for index, (operation, direction) in enumerate(passes):
        cases = [*OPERATIONS[operation].CASES]
        for turn, dtype in enumerate(DTYPES):
            target = [*TARGETS][(index + 3 * turn) % len(TARGETS)]
            case = cases[(index + turn) % len(cases)]
            yield target, Launch(operation, direction, case, dtype)


SAMPLE = [*sample()]


def faults(row: Row) -> list[str]:
    """What a kernel may not do."""
    budget = getattr(OPERATIONS[row.operation], "SPILL_BUDGET", {}).get(row.kernel, 0)
    found = []
    if int(row.spilled) > budget:
        found.append(f"spills {row.spilled} bytes, {budget} allowed: {row}")
    if int(row.shared) > TARGETS[row.target].shared_limit:
        found.append(f"needs more shared memory than there is: {row}")
    if row.products == "fma" and row.dtype != "float32":
        found.append(f"multiplies tiles without tensor cores: {row}")
    return found


def launch_of(row: Row) -> Launch:
    return Launch(*row[:4])


@pytest.fixture(scope="module")
def table() -> list[Row]:
    return read_table()[1]


@pytest.fixture(scope="module", params=TARGETS)
def compiled(request: pytest.FixtureRequest) -> tuple[str, list[Row]]:
    launches = [launch for target, launch in SAMPLE if target == request.param]
    return request.param, compile_in_worker(request.param, launches)


def test_the_sample_meets_everything() -> None:
    assert {target for target, _ in SAMPLE} == {*TARGETS}
    met = {(launch.operation, launch.direction, launch.dtype) for _, launch in SAMPLE}
    assert met == {(launch.operation, launch.direction, launch.dtype) for launch in every_launch()}


def test_kernels_compile_within_their_budget(compiled: tuple[str, list[Row]]) -> None:
    target, rows = compiled
    assert {(target, launch_of(row)) for row in rows} == {x for x in SAMPLE if x[0] == target}
    assert [fault for row in rows for fault in faults(row)] == []
    assert all(0 < int(row.registers) <= 512 for row in rows)


def test_kernels_are_what_the_table_says(compiled: tuple[str, list[Row]], table: list[Row]) -> None:
    version, _ = read_table()
    if triton.__version__ != version:
        pytest.skip(f"the table is Triton {version}'s, and this is {triton.__version__}")
    target, rows = compiled
    launches = {launch_of(row) for row in rows}
    said = [row for row in table if row.target == target and launch_of(row) in launches]
    assert sorted(rows) == sorted(said), "run make resources"


def test_the_table_has_every_launch_on_every_target(table: list[Row]) -> None:
    there = {(row.target, launch_of(row)) for row in table}
    missing = {(target, launch) for target in TARGETS for launch in every_launch()} ^ there
    assert not missing, "run make resources"


def test_the_table_is_within_the_budget(table: list[Row]) -> None:
    assert [fault for row in table for fault in faults(row)] == []


PROGRAM = """
import csv, sys
from gptile.bench.resources import Launch, compile_rows
from gptile.kernels import attention

options = eval(sys.argv[2])
right = attention.launch
attention.launch = lambda *args, **kwargs: right(*args, **{**kwargs, **options})
for target in sys.argv[1].split(","):
    csv.writer(sys.stdout).writerows(compile_rows(target, [Launch(*sys.argv[3:])]))
"""


def compile_with(targets: str, **options: object) -> list[Row]:
    """Attention, compiled in one process for several targets, with other launch options."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, targets, repr(options), *ATTENTION],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    return [Row(*fields) for fields in csv.reader(io.StringIO(run.stdout))]


PLANTED = {
    "a spill": ("sm_90", {"maxnreg": 64}, "spills"),
    "a spill on AMD": ("gfx942", {"waves_per_eu": 8}, "spills"),
    "shared memory": ("sm_86", {"num_stages": 8}, "shared memory"),
    "no tensor cores": ("sm_80", {"FP32": True}, "tensor cores"),
    "no tensor cores on Hopper": ("sm_90", {"FP32": True}, "tensor cores"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_seen(fault: str) -> None:
    target, options, words = PLANTED[fault]
    assert any(words in found for row in compile_with(target, **options) for found in faults(row))


def test_targets_do_not_share_a_cache() -> None:
    """One process may compile for several targets in turn, in any order."""
    together = compile_with("sm_90,gfx942,sm_80")
    apart = [compile_in_worker(target, [ATTENTION]) for target in ("sm_90", "gfx942", "sm_80")]
    assert together == [row for rows in apart for row in rows]
    assert [row.products for row in together] == ["wgmma", "mfma", "mma.sync"]


def test_the_environment_does_not_steer_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = compile_in_worker("sm_80", [ATTENTION])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    assert compile_in_worker("sm_80", [ATTENTION]) == plain


def test_a_missing_cuobjdump_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nvidia:
        @property
        def cuobjdump(self) -> None:
            raise RuntimeError("Cannot find cuobjdump")

    knobs = SimpleNamespace(nvidia=Nvidia())
    monkeypatch.setattr(compiler, "triton", SimpleNamespace(knobs=knobs))
    with pytest.raises(UserError, match=r"cuobjdump.*reinstall triton"):
        compiler._nvidia_resources(object())
