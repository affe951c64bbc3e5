"""What ``gptile generate`` decodes with. Imports wait until it runs."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from gptile.console import status

if TYPE_CHECKING:
    from gptile.model.generation import DecodeStep
    from gptile.model.gpt2 import GPT2

ENGINES = ("auto", "plain", "fast")
WEIGHTS = ("float32", "bfloat16", "int8")

# Parameters. A model smaller than this gains little from more threads or from compiled steps, and
# on a busy machine the threads waiting for each other made the demo ten times slower.
SMALL = 20_000_000


def decoding_options(command: Callable) -> Callable:
    """The parameters ``engine``, ``weights`` and ``threads``."""
    for option in (
        click.option(
            "--threads",
            type=click.IntRange(1),
            help="Of the CPU.  [default: all cores, one for a model below 20M parameters]",
        ),
        click.option(
            "--weights",
            type=click.Choice(WEIGHTS),
            default=WEIGHTS[0],
            show_default=True,
            help="How the fast engine stores weight matrices: smaller ones are read sooner.",
        ),
        click.option(
            "--engine",
            type=click.Choice(ENGINES),
            default="auto",
            show_default=True,
            help="After the prompt: PyTorch's steps (plain), or ones that Numba compiles for this "
            "CPU (fast). auto: fast from 20M parameters on, where it can.",
        ),
    ):
        command = option(command)
    return command


def choose_decode_step(
    model: "GPT2", engine: str, weights: str, threads: int | None, kernels: str
) -> "DecodeStep | None":
    """Set the number of threads, and return the steps that were asked for; None for the model's.

    Raises:
        click.UsageError: for what does not go together.
        UserError: if the fast engine cannot run this model, or is not installed.
    """
    import torch

    small = model.num_parameters() < SMALL
    weight = model.wte.weight
    on_cpu = weight.device.type == "cpu"
    if threads or (on_cpu and small):
        torch.set_num_threads(threads or 1)
    if weights != WEIGHTS[0]:
        if engine == "plain":
            raise click.UsageError(f"--weights {weights} needs --engine fast; plain reads --dtype")
        engine = "fast"
    if engine == "fast" and kernels not in ("auto", "torch"):
        raise click.UsageError(f"--engine fast and --kernels {kernels}: choose one")
    if engine == "auto":
        able = on_cpu and weight.dtype == torch.float32 and kernels == "auto"
        if small or not able:
            return None
    if engine == "plain":
        return None
    from gptile.model.errors import UserError

    try:
        from gptile.model.cpu_decoder import CPUDecoder, set_threads
    except UserError:
        if engine == "auto":
            return None
        raise
    set_threads(torch.get_num_threads())
    decoder = CPUDecoder(model, weights)
    with status("compiling the decode step, once on this machine"):
        decoder.compile()
    return decoder
