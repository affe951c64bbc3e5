"""What a benchmark of the whole model is asked to measure."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gptile.bench.engines import BASELINE, Choice
from gptile.bench.model_checks import Size
from gptile.model.config import GPT2Config
from gptile.model.errors import UserError


@dataclass(frozen=True)
class Plan:
    """See :mod:`gptile.bench.model_benchmark`.

    Attributes:
        choices: the engines, the baseline among them.
        baseline: what the others are compared with.
        tasks: of :data:`~gptile.bench.engines.TASKS`.
        batches, prompt_tokens: every combination is a row of each task. No ``prompt_tokens`` are
            32 and half the context.
        new_tokens: of a call that decodes, at least 2.
        threads: of every engine.
        rounds: samples of each.
        device: for PyTorch.
    """

    choices: tuple[Choice, ...]
    baseline: Choice
    tasks: tuple[str, ...]
    batches: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    new_tokens: int
    threads: int
    rounds: int
    device: str

    def sizes(self) -> list[Size]:
        """Batch and tokens, short rows first: transformers' static cache never shrinks."""
        return [
            (batch, n) for n in sorted({*self.prompt_tokens}) for batch in sorted({*self.batches})
        ]


def make_plan(
    engines: Iterable[str],
    precisions: tuple[str, ...],
    *,
    device: str,
    **measured: Any,
) -> Plan:
    """The engines in each of the precisions that they have.

    Args:
        precisions: empty for what suits the device, and for peers all that they have.
        device: the first precision's baseline runs there too.
        measured: the other fields of :class:`Plan`.

    Raises:
        UserError: if an engine has none of the precisions, or does not run on the device.
    """
    usual = ("float32",) if device == "cpu" else ("bfloat16",)
    baseline = Choice(BASELINE, next((p for p in precisions if p != "int8"), usual[0]))
    choices = []
    for name in dict.fromkeys(engines):
        entry = Choice(name, "").entry
        wanted = precisions or (entry.precisions if entry.peer else usual)
        found = [Choice(name, precision) for precision in wanted if precision in entry.precisions]
        if device != "cpu" and not entry.cuda:
            raise UserError(f"{name} is measured on a CPU only; leave it out, or use --device cpu")
        choices += found
    if not choices:
        raise UserError(f"none of the engines has {', '.join(precisions)}; see --help")
    chosen = tuple(dict.fromkeys([*choices, baseline]))
    return Plan(chosen, baseline, device=device, **measured)


def fit(plan: Plan, config: GPT2Config) -> Plan:
    """The plan with the lengths that suit the model's context where none were given.

    Raises:
        UserError: with the numbers, for what does not fit.
    """
    half = config.n_positions // 2
    plan = dataclasses.replace(plan, prompt_tokens=plan.prompt_tokens or (min(32, half), half))
    new = max({"prefill": 1, "decode": plan.new_tokens}.get(task, 0) for task in plan.tasks)
    longest = max(plan.prompt_tokens)
    if longest + new > config.n_positions:
        raise UserError(
            f"{longest} prompt tokens and {new} new ones exceed the model's context of "
            f"{config.n_positions}; lower --prompt-tokens or --new-tokens"
        )
    return plan
