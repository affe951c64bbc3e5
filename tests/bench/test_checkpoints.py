"""Checkpoints made on the spot: GPT-2's sizes, the same weights each time, gone afterwards."""

import dataclasses
from pathlib import Path

import pytest
import torch

from gptile.bench import checkpoints
from gptile.bench.checkpoints import checkpoint_directory, random_checkpoint
from gptile.model.config import GPT2Config
from gptile.model.errors import UserError
from gptile.weights import open_checkpoint
from gptile.weights.files import DEMO

SMALL = GPT2Config(vocab_size=61, n_positions=32, n_embd=24, n_layer=2, n_head=3)


def test_a_name_without_random_is_that_checkpoint() -> None:
    with checkpoint_directory("demo") as directory:
        assert directory == DEMO
    assert DEMO.exists()
    with checkpoint_directory(str(DEMO)) as directory:
        assert directory.samefile(DEMO)


def test_a_random_one_has_that_size_and_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checkpoints.PRESETS, "gpt2", SMALL)
    with checkpoint_directory("random:gpt2") as directory:
        checkpoint = open_checkpoint(directory)
        assert checkpoint.config == SMALL
        kept = directory
    assert not kept.exists()
    assert not kept.parent.exists()


def test_it_is_removed_after_an_error_too() -> None:
    kept: list[Path] = []
    with pytest.raises(KeyError), random_checkpoint(SMALL) as directory:  # noqa: PT012
        kept.append(directory)
        raise KeyError
    assert not kept[0].exists()


def test_the_weights_are_the_same_each_time_and_leave_the_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with random_checkpoint(SMALL) as directory:
        first = open_checkpoint(directory).load_model().state_dict()
    assert torch.equal(torch.rand(3), expected)
    with random_checkpoint(dataclasses.replace(SMALL)) as directory:
        second = open_checkpoint(directory).load_model().state_dict()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_no_parameter_is_at_a_value_that_hides_mistakes() -> None:
    with random_checkpoint(SMALL) as directory:
        model = open_checkpoint(directory).load_model()
    for name, parameter in model.named_parameters():
        assert parameter.std() > 0.001, name


@pytest.mark.parametrize("name", ["random:gpt3", "random:", "random:random:gpt2"])
def test_an_unknown_size_is_answered_with_those_there_are(name: str) -> None:
    words = rf"{name}: random models are .*random:gpt2-xl"
    with pytest.raises(UserError, match=words), checkpoint_directory(name):
        pass


def test_a_checkpoint_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError), checkpoint_directory(str(tmp_path / "none")):
        pass


def test_a_file_beside_other_weights_is_refused(tmp_path: Path) -> None:
    """transformers, given the directory, would read the other ones."""
    with random_checkpoint(SMALL) as directory:
        other = directory / "other.safetensors"
        other.write_bytes((directory / "model.safetensors").read_bytes())
        with (
            pytest.raises(UserError, match=r"other\.safetensors: other weights lie beside it"),
            checkpoint_directory(str(other)),
        ):
            pass
        (directory / "model.safetensors").unlink()
        with checkpoint_directory(str(other)) as found:
            assert found == directory
