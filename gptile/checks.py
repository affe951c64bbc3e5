"""The commands that check the machine, the numbers and the kernels. Imports wait until one runs."""

import dataclasses
import json
import sys

import click

from gptile.console import (
    DTYPES,
    SHORT_DTYPES,
    examples,
    parse_dtype,
    print_table,
    status,
)


@click.command(**examples("gptile doctor", "gptile doctor --json"))
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def doctor(as_json: bool) -> None:
    """Check this machine: what is here, what will run where and why, and what to do about it."""
    from gptile.doctor import examine

    checks = examine()
    if as_json:
        click.echo(json.dumps({"checks": [dataclasses.asdict(check) for check in checks]}))
    else:
        rows = [(check.status, check.name, check.finding, check.next_step) for check in checks]
        print_table(["", "check", "finding", "next step"], rows)
    if any(check.status == "fail" for check in checks):
        sys.exit(1)


@click.command(
    **examples(
        "gptile inspect",
        "gptile inspect attention --target sm_90 --case gpt2-prefill",
        "gptile inspect attention --pass forward --compare sm_80,sm_90,gfx942",
        "gptile inspect layer_norm --pass forward --show ptx",
        "gptile inspect attention --dtype fp32 --json",
    )
)
@click.argument("operation", required=False)
@click.option("--target", help="GPU to compile for.  [default: sm_90]")
@click.option("--compare", help="Targets side by side, such as sm_80,sm_90.")
@click.option(
    "--dtype",
    type=click.Choice([*SHORT_DTYPES, *DTYPES]),
    default="bf16",
    show_default=True,
    metavar="DTYPE",
    help="bf16, fp16 or fp32, or their long names.",
)
@click.option("--case", help="Shapes by name.  [default: the operation's first]")
@click.option("--pass", "direction", help="[default: all]")
@click.option(
    "--show",
    type=click.Choice(["ttir", "ttgir", "llir", "ptx", "sass", "amdgcn"]),
    help="Print this stage of the compilation instead of tables.",
)
@click.option("--kernel", help="What --show prints.  [default: every kernel]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def inspect(
    operation: str | None,
    target: str | None,
    compare: str | None,
    dtype: str,
    case: str | None,
    direction: str | None,
    show: str | None,
    kernel: str | None,
    as_json: bool,
) -> None:
    """What the compiler made of an OPERATION's kernels, and what a GPU allows them. Needs no GPU.

    Without OPERATION: the operations, their passes and cases, and the targets. With one: each
    kernel's grid, warps, registers, spilled bytes, shared memory, occupancy and what limits it, and
    how it multiplies tiles; each pass's FLOPs, bytes, and time at the peak rates of known GPUs.
    """
    from gptile import inspection

    if show and (as_json or compare):
        raise click.UsageError("--show prints code of one target: neither --json nor --compare")
    if kernel and not show:
        raise click.UsageError("--kernel is for --show")
    if target and compare:
        raise click.UsageError("give --target or --compare, not both")
    if operation is None:
        if target or compare or case or direction or show:
            raise click.UsageError("which operation? gptile inspect lists them")
        if as_json:
            click.echo(json.dumps(inspection.choices()))
        else:
            inspection.print_choices()
        return
    targets = [name.strip() for name in (compare or target or "sm_90").split(",")]
    if show:
        inspection.check_stage(targets[0], show)
    with status("compiling"):
        found = inspection.inspect(
            operation,
            targets=targets,
            dtype=parse_dtype(SHORT_DTYPES.get(dtype, dtype)),
            case=case,
            direction=direction,
        )
    if show:
        inspection.print_code(found, show, kernel)
    elif as_json:
        click.echo(json.dumps(inspection.record(found)))
    else:
        inspection.print_inspection(found)
