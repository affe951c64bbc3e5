"""The resources of every kernel of every case on every target: ``make resources`` writes the table,
and the tests hold the compiler to it.

The same Triton gives the same bytes on every machine: nothing here asks for a GPU, and the workers
do not see the environment variables that steer Triton and ptxas.
"""

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from gptile.bench.compiler import TARGETS, compile_launches
from gptile.bench.roofline import occupancy
from gptile.kernels.catalog import OPERATIONS
from gptile.kernels.jit import triton

TABLE = Path(__file__).with_name("resources.csv")
DTYPES = ("bfloat16", "float16", "float32")
_PROCESSES = 2  # each holds PyTorch and Triton in memory
_KEPT = (
    "PATH",
    "HOME",
    "TMPDIR",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS",
    "TRITON_CACHE_DIR",
)
"""Environment variables that a worker gets; TRITON_INTERPRET would keep it from compiling."""


class Launch(NamedTuple):
    """One pass of an operation on one of its cases."""

    operation: str
    direction: str
    case: str
    dtype: str


class Row(NamedTuple):
    """One kernel of a launch, as the table has it. Attributes as in
    :class:`~gptile.bench.compiler.Compiled`; ``occupancy`` is the share of a multiprocessor's
    warps, in percent."""

    operation: str
    direction: str
    case: str
    dtype: str
    target: str
    kernel: str
    warps: str
    registers: str
    spilled: str
    shared: str
    occupancy: str
    products: str


def every_launch() -> list[Launch]:
    """What the kernel files can launch, in the table's order."""
    return sorted(
        Launch(operation, direction, case, dtype)
        for operation, module in OPERATIONS.items()
        for direction in module.PASSES
        for case in module.CASES
        for dtype in DTYPES
    )


def compile_rows(target: str, launches: Iterable[Launch]) -> list[Row]:
    """Compile ``launches`` in this process; launches of a kernel that come out equal are one row.

    Kernels that several launches share compile once.
    """
    rows: dict[Row, None] = {}
    for launch in launches:
        module, dtype = OPERATIONS[launch.operation], getattr(torch, launch.dtype)
        start = module.PASSES[launch.direction].launch
        run = partial(start, module.CASES[launch.case], dtype, "meta")
        for kernel in compile_launches(target, run):
            share = f"{100 * occupancy(TARGETS[target], kernel).share:.1f}"
            row = Row(
                *launch,
                target,
                kernel.kernel,
                str(kernel.warps),
                str(kernel.registers),
                str(kernel.spilled),
                str(kernel.shared),
                share,
                kernel.products,
            )
            rows[row] = None
    return list(rows)


def compile_in_worker(target: str, launches: Iterable[Launch]) -> list[Row]:
    """:func:`compile_rows` in a process of its own, where no variable steers the compiler.

    Raises:
        subprocess.CalledProcessError: where a kernel does not compile; stderr has shown why.
    """
    output = subprocess.run(
        [sys.executable, "-m", "gptile.bench.resources", target],
        input=json.dumps(list(launches)),
        env={name: os.environ[name] for name in _KEPT if name in os.environ},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    return [Row(*fields) for fields in csv.reader(io.StringIO(output))]


def read_table() -> tuple[str, list[Row]]:
    """The Triton that compiled the committed table, and its rows."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        version = file.readline().removeprefix("# Triton ").strip()
        _, *rows = csv.reader(file)
    return version, [Row(*fields) for fields in rows]


def write_table() -> None:
    """Compile everything, two targets at a time, and replace the committed table."""
    launches = every_launch()

    def compile_target(target: str) -> list[Row]:
        rows = compile_in_worker(target, launches)
        print(f"{target}: {len(rows)} rows", file=sys.stderr)
        return rows

    with ThreadPoolExecutor(_PROCESSES) as pool:
        rows = [row for rows in pool.map(compile_target, TARGETS) for row in rows]
    # Stable: the kernels of one launch stay in their order.
    rows.sort(key=lambda row: (row.operation, row.direction, row.case, row.dtype, row.target))
    text = io.StringIO()
    text.write(f"# Triton {triton.__version__}\n")
    header = [field.replace("direction", "pass") for field in Row._fields]
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    partial = TABLE.with_suffix(".partial")
    partial.write_text(text.getvalue(), encoding="utf-8", newline="")
    partial.replace(TABLE)


def _work(target: str) -> None:
    """A worker: launches as JSON on standard input, rows as CSV on standard output."""
    launches = [Launch(*fields) for fields in json.load(sys.stdin)]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    for operation in dict.fromkeys(launch.operation for launch in launches):
        print(f"{target}: {operation}", file=sys.stderr)
        chosen = (launch for launch in launches if launch.operation == operation)
        writer.writerows(compile_rows(target, chosen))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _work(sys.argv[1])
    else:
        write_table()
