"""What ``gptile inspect`` finds and prints: the kernels of an operation as the compiler made them,
and the time that peak rates allow them, on GPUs that need not be here."""

import dataclasses
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch

from gptile.bench.compiler import TARGETS, Compiled, compile_launches, find_target
from gptile.bench.roofline import GPUS, Roofline, occupancy, roofline
from gptile.console import print_table
from gptile.kernels.catalog import OPERATIONS
from gptile.kernels.launch import Work
from gptile.model.errors import UserError


@dataclasses.dataclass(frozen=True)
class Inspected:
    """One pass of an operation on one of its cases.

    Attributes:
        kernels: by target, what the pass launches, in order.
        rooflines: by GPU.
    """

    direction: str
    work: Work
    kernels: dict[str, list[Compiled]]
    rooflines: dict[str, Roofline]


@dataclasses.dataclass(frozen=True)
class Inspection:
    """Passes of an operation on one of its cases, compiled for some targets."""

    operation: str
    case: str
    dtype: torch.dtype
    passes: list[Inspected]

    @property
    def targets(self) -> list[str]:
        return list(self.passes[0].kernels)


def inspect(
    operation: str,
    *,
    targets: Sequence[str],
    dtype: torch.dtype,
    case: str | None = None,
    direction: str | None = None,
) -> Inspection:
    """Compile an operation's passes (or one of them) for one of its cases (or its first).

    Raises:
        UserError: for an unknown name, with those there are.
    """
    module = _operation(operation)
    case = next(iter(module.CASES)) if case is None else _known("case", case, module.CASES)
    directions = [*module.PASSES] if direction is None else [direction]
    for name in directions:
        _known("pass", name, module.PASSES)
    for target in targets:
        find_target(target)
    passes = [_inspect_pass(module, name, case, targets, dtype) for name in directions]
    return Inspection(operation, case, dtype, passes)


def _inspect_pass(
    module: ModuleType, direction: str, case: str, targets: Sequence[str], dtype: torch.dtype
) -> Inspected:
    shape = module.CASES[case]
    run = partial(module.PASSES[direction].launch, shape, dtype, "meta")
    kernels = {target: compile_launches(target, run) for target in targets}
    work = module.PASSES[direction].work(shape, dtype)
    # Whatever is not a product on tensor cores is taken at the peak of fp32, fp32 products too;
    # what sampling does in fp64 takes longer.
    tensor_cores = dtype.itemsize == 2 and any(
        kernel.products not in ("none", "fma") for found in kernels.values() for kernel in found
    )
    rooflines = {name: roofline(gpu, work, tensor_cores=tensor_cores) for name, gpu in GPUS.items()}
    return Inspected(direction, work, kernels, rooflines)


def _operation(name: str) -> ModuleType:
    return OPERATIONS[_known("operation", name, OPERATIONS)]


def _known(kind: str, name: str, names: Any) -> str:
    if name not in names:
        raise UserError(f"unknown {kind} {name!r}; one of {', '.join(names)}")
    return name


def choices() -> dict[str, Any]:
    """What can be inspected, as JSON has it."""
    return {
        "operations": [
            {
                "operation": name,
                "summary": _summary(module),
                "passes": [*module.PASSES],
                "cases": {case: dict(shape) for case, shape in module.CASES.items()},
            }
            for name, module in OPERATIONS.items()
        ],
        "targets": [*TARGETS],
    }


def print_choices() -> None:
    """What can be inspected, for reading."""
    for name, module in OPERATIONS.items():
        _print_wrapped(f"{name}: ", [_summary(module)])
        _print_wrapped("  passes  ", module.PASSES)
        _print_wrapped("  cases   ", module.CASES)
    _print_wrapped("targets: ", TARGETS)


def _print_wrapped(title: str, names: Iterable[str]) -> None:
    """A list in the width of the terminal."""
    lines = textwrap.wrap(
        ", ".join(names),
        shutil.get_terminal_size().columns,
        initial_indent=title,
        subsequent_indent=" " * len(title),
        break_on_hyphens=False,
    )
    print("\n".join(lines))


def _summary(module: ModuleType) -> str:
    """The first sentence of the kernel file."""
    text = " ".join((module.__doc__ or "").replace("``", "").split())
    return re.split(r"[.:]\s", f"{text} ")[0]


def record(inspection: Inspection) -> dict[str, Any]:
    """The inspection as JSON has it."""
    return {
        "operation": inspection.operation,
        "case": inspection.case,
        "shape": dict(OPERATIONS[inspection.operation].CASES[inspection.case]),
        "dtype": _dtype(inspection),
        "passes": [
            {
                "pass": found.direction,
                **found.work._asdict(),
                "intensity": _intensity(found.work),
                "kernels": [
                    _kernel_record(target, kernel)
                    for target, kernels in found.kernels.items()
                    for kernel in kernels
                ],
                "rooflines": {name: bound._asdict() for name, bound in found.rooflines.items()},
            }
            for found in inspection.passes
        ],
    }


def _kernel_record(target: str, kernel: Compiled) -> dict[str, Any]:
    fields = [field.name for field in dataclasses.fields(kernel) if field.name != "code"]
    return {
        "target": target,
        **{name: getattr(kernel, name) for name in fields},
        "occupancy": occupancy(find_target(target), kernel)._asdict(),
    }


def print_inspection(inspection: Inspection) -> None:
    """Tables for reading: each pass's kernels side by side, or each kernel's targets where there
    are several, then the rooflines of all."""
    shape = OPERATIONS[inspection.operation].CASES[inspection.case]
    sizes = ", ".join(f"{name} {size}" for name, size in shape.items())
    print(f"{inspection.operation}, {inspection.case} ({sizes})")
    print(f"{_dtype(inspection)}, compiled for {', '.join(inspection.targets)}")
    for found in inspection.passes:
        work = found.work
        print(
            f"\n{found.direction}: {_si(work.flops)}FLOP; loads {_si(work.loaded)}B, stores "
            f"{_si(work.stored)}B; {_si(work.distinct)}B at least, {_intensity(work):.3g} FLOP a "
            "byte of these"
        )
        _print_kernels(found)
    _print_rooflines(inspection)


_QUANTITIES = (
    "grid",
    "warps",
    "registers",
    "spilled bytes",
    "shared bytes",
    "occupancy",
    "products",
)


def _quantities(target: str, kernel: Compiled, launches: int) -> tuple[str, ...]:
    """Values of :data:`_QUANTITIES`."""
    full = occupancy(find_target(target), kernel)
    times = f"{launches} times " if launches > 1 else ""
    return (
        times + " x ".join(map(str, kernel.grid)),
        str(kernel.warps),
        str(kernel.registers),
        str(kernel.spilled),
        str(kernel.shared),
        f"{full.share:.0%} ({full.limit})",
        kernel.products,
    )


def _print_kernels(found: Inspected) -> None:
    # Launches that came out equal for every target are told once, with their number.
    launches = Counter(zip(*found.kernels.values(), strict=True))
    names = [kernels[0].kernel for kernels in launches]
    columns = [
        [
            _quantities(target, kernel, times)
            for target, kernel in zip(found.kernels, kernels, strict=True)
        ]
        for kernels, times in launches.items()
    ]
    if len(found.kernels) == 1:
        values = zip(_QUANTITIES, *(column for (column,) in columns), strict=True)
        print_table(["", *names], [*values])
        return
    rows: list[tuple[str, ...]] = []
    for name, by_target in zip(names, columns, strict=True):
        rows.append((name, *("" for _ in by_target)))
        rows += [(f"  {what}", *row) for what, *row in zip(_QUANTITIES, *by_target, strict=True)]
    print_table(["kernel", *found.kernels], rows)


def _print_rooflines(inspection: Inspection) -> None:
    print("\nTime at the GPU's peak rates, re-reads served by its caches (* is compiled for here):")
    rows = [
        (
            f"{name} *" if gpu.target in inspection.targets else name,
            *(
                f"{_si(bound.seconds)}s {bound.limit}"
                for bound in (found.rooflines[name] for found in inspection.passes)
            ),
        )
        for name, gpu in GPUS.items()
    ]
    print_table(["GPU", *(found.direction for found in inspection.passes)], rows)


def check_stage(target: str, stage: str) -> None:
    """Refuse a stage of the compilation that the target has not.

    Raises:
        UserError: with those it has.
    """
    stages = find_target(target).stages
    if stage not in stages:
        raise UserError(f"{target} has no {stage}; one of {', '.join(stages)}")


def print_code(inspection: Inspection, stage: str, kernel: str | None = None) -> None:
    """One stage of the compilation of every kernel, or of the one of that name.

    Raises:
        UserError: for an unknown kernel.
    """
    (target,) = inspection.targets
    found = [(p.direction, k) for p in inspection.passes for k in p.kernels[target]]
    if kernel is not None:
        _known("kernel", kernel, dict.fromkeys(k.kernel for _, k in found))
        found = [(direction, k) for direction, k in found if k.kernel == kernel]
    comment = ";" if stage in ("llir", "amdgcn") else "//"
    what = f"{target}, {inspection.case}, {_dtype(inspection)}"
    printed = set()
    for direction, k in found:
        code = k.code[stage].strip()
        if code not in printed:
            print(f"{comment} {k.kernel}: {inspection.operation} {direction}, {what}\n{code}\n")
        printed.add(code)


def _dtype(inspection: Inspection) -> str:
    return str(inspection.dtype).removeprefix("torch.")


def _intensity(work: Work) -> float:
    return work.flops / max(work.distinct, 1)


_PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "µ": 1e-6, "n": 1e-9}


def _si(value: float) -> str:
    """Three digits and the prefix of the unit that follows."""
    if value == 0:
        return "0 "
    fitting = (prefix for prefix, factor in _PREFIXES.items() if value >= 0.9995 * factor)
    prefix = next(fitting, "n")
    return f"{value / _PREFIXES[prefix]:.3g} {prefix}"
