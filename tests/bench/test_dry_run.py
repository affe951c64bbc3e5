"""A dry run launches what a real run launches, and costs next to nothing."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.nn.functional as F
from triton.runtime.interpreter import GridExecutor

from gptile.bench.dry_run import dry_run, generation, hollow_model, recording, scoring
from gptile.kernels import Ops
from gptile.model.config import PRESETS
from gptile.model.generation import generate
from gptile.model.gpt2 import GPT2
from gptile.model.sampling import SamplingParams


@contextmanager
def executions() -> Iterator[list[tuple[str, tuple[int, ...], tuple[Any, ...]]]]:
    """Name, grid and arguments of every kernel that the interpreter runs."""
    found = []
    run = GridExecutor.__call__

    def counting(self: Any, *args: Any, **options: Any) -> None:
        found.append((self.fn.__name__, self.grid, args))
        run(self, *args, **options)

    with patch.object(GridExecutor, "__call__", counting):
        yield found


def form(argument: Any) -> Any:
    """What a launch shows of an argument: of a tensor dtype, shape, strides and alignment."""
    if not isinstance(argument, torch.Tensor):
        return argument
    aligned = argument.data_ptr() % 16 == 0
    return argument.dtype, argument.shape, argument.stride(), aligned


@pytest.fixture
def twins(small_model: Callable[..., GPT2]) -> Callable[..., tuple[GPT2, GPT2]]:
    """Makes a hollow model and a whole one of the same config."""

    def make(**fields: Any) -> tuple[GPT2, GPT2]:
        reference = small_model(**fields)
        whole = GPT2(reference.config, Ops.triton()).eval()
        whole.load_state_dict(reference.state_dict())
        return hollow_model(whole.config, torch.float32), whole

    return make


@pytest.mark.parametrize(
    ("n_rows", "n_tokens"), [(1, 1), (1, 5), (2, 9), (3, 17), (17, 2)], ids=str
)
def test_generation_launches_what_a_real_one_does(
    twins: Callable, n_rows: int, n_tokens: int
) -> None:
    hollow, whole = twins()
    with recording() as dry:
        assert sum(1 for _ in generation(hollow, n_rows, n_tokens, 3)) == 3
    params = SamplingParams(max_new_tokens=3, temperature=0, stop_token_ids=(), seed=0)
    with executions() as real:
        generate(whole, [[0] * n_tokens] * n_rows, params)
    assert [(launch.kernel, launch.grid) for launch in dry] == [found[:2] for found in real]
    for launch, (_, _, args) in zip(dry, real, strict=True):
        values = [*launch.arguments.values()][: len(args)]
        assert [*map(form, values)] == [*map(form, args)], launch.kernel


def test_scoring_launches_what_a_real_run_does(twins: Callable) -> None:
    hollow, whole = twins(n_positions=64)
    with recording() as dry:
        scoring(hollow, 2, 33)
    with executions() as real:
        scoring(whole, 2, 33)
    assert [(launch.kernel, launch.grid) for launch in dry] == [found[:2] for found in real]
    assert {launch.operation for launch in dry} >= {"attention", "linear_cross_entropy"}


def test_a_missing_launch_would_be_seen(twins: Callable) -> None:
    hollow, whole = twins(n_layer=2)
    with recording() as dry:
        scoring(hollow, 2, 9)
    with executions() as real:
        scoring(GPT2(whole.config, Ops.triton().replace(attention=Ops.torch().attention)), 2, 9)
    assert Counter(launch.kernel for launch in dry) != Counter(name for name, *_ in real)


def test_the_lengths_are_real(twins: Callable) -> None:
    hollow, _ = twins(n_positions=32)
    with recording() as launches:
        steps = generation(hollow, 2, 7, 4)
        next(steps)
        launches.clear()
        next(steps)
    starts = {
        tuple(launch.arguments["starts_ptr"].tolist())
        for launch in launches
        if "starts_ptr" in launch.arguments
    }
    assert starts == {(7, 7)}


def test_a_penalty_is_another_kernel(twins: Callable) -> None:
    hollow, _ = twins()
    marks = set()
    for penalty in (1.0, 1.3):
        with recording() as launches:
            next(generation(hollow, 1, 3, 2, penalty=penalty))
        marks.add(launches[-1].arguments["HAS_SEEN"])
    assert marks == {False, True}


def test_a_large_model_costs_no_memory_and_multiplies_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a product was computed")

    monkeypatch.setattr(F, "linear", refuse)
    before = psutil.Process().memory_info().rss
    model = hollow_model(PRESETS["gpt2-xl"], torch.float32)
    with recording() as launches:
        for _ in generation(model, 4, 300, 2):
            pass
    assert len(launches) > 2 * 48 * 5
    assert model.num_parameters() * 4 > 6e9
    assert psutil.Process().memory_info().rss - before < 500e6


def test_outside_it_kernels_refuse_the_cpu_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from gptile.kernels import launch

    monkeypatch.setattr(launch, "interpreting", lambda: False)
    x = torch.ones(2, 3)
    with pytest.raises(ZeroDivisionError), dry_run(lambda *_: 1 / 0):
        launch.launch(object(), (1,), x)
    with dry_run(lambda *_: None):
        launch.check_inputs(x)
    with pytest.raises(TypeError, match="needs a GPU"):
        launch.check_inputs(x)
    assert F.linear(x, torch.ones(2, 3))[0, 0] == 3
