"""A deployment finds every kernel in what ``gptile compile`` wrote, and a missing one is seen."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gptile.bench.ahead_of_time import MANIFEST, representatives
from gptile.model.gpt2 import GPT2
from gptile.weights.save import save_checkpoint

DEPLOYMENT = Path(__file__).parents[1] / "bench" / "deployment.py"


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "TRITON_INTERPRET": "0", "HF_HUB_OFFLINE": "1", **variables}


def gptile(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gptile", *map(str, arguments)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)


def deploy(cache: Path, model: object, target: str, dtype: str, batch: int) -> dict[str, Any]:
    """What a deployment with that cache compiled and loaded."""
    command = [sys.executable, str(DEPLOYMENT), str(model), target, dtype, str(batch)]
    run = subprocess.run(
        command, env=environment(TRITON_CACHE_DIR=str(cache)), stdout=subprocess.PIPE, check=True
    )
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def odd(small_model: Callable[..., GPT2], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose sizes align nothing."""
    directory = tmp_path_factory.mktemp("models") / "odd"
    sizes = {"n_embd": 36, "n_head": 3, "n_layer": 2, "n_positions": 90, "vocab_size": 61}
    save_checkpoint(small_model(**sizes), directory)
    return directory


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("compiled") / "kernels"
    run = gptile(
        "compile", "demo", "--target=sm_90", "--dtype=bfloat16", "--batch=3", "-o", directory
    )
    assert run.returncode == 0, run.stderr
    return directory


def test_a_deployment_compiles_nothing(compiled: Path) -> None:
    before = sorted(compiled.rglob("*"))
    found = deploy(compiled, "demo", "sm_90", "bfloat16", 3)
    assert found["missed"] == {}
    assert found["loaded"] > 20
    assert sorted(compiled.rglob("*")) == before


def test_nor_does_one_of_odd_sizes(odd: Path, tmp_path: Path) -> None:
    target = "gfx942"
    cache = tmp_path / "kernels"
    run = gptile("compile", odd, "--target", target, "--batch=3", "-o", cache, "--json")
    assert run.returncode == 0, run.stderr
    manifest = json.loads(run.stdout)
    assert manifest == json.loads((cache / MANIFEST).read_text())
    entries = {kernel["entry"] for kernel in manifest["kernels"]}
    assert entries == {path.name for path in cache.iterdir() if path.is_dir()}
    assert (manifest["target"], manifest["dtype"]) == (target, "float32")
    assert deploy(cache, odd, target, "float32", 3)["missed"] == {}


def test_a_missing_entry_is_compiled_and_seen(compiled: Path, tmp_path: Path) -> None:
    manifest = json.loads((compiled / MANIFEST).read_text())
    entry = next(k["entry"] for k in manifest["kernels"] if k["operation"] == "embedding")
    aside = compiled / entry
    shutil.move(aside, tmp_path)
    try:
        missed = deploy(compiled, "demo", "sm_90", "bfloat16", 3)["missed"]
        assert [name.split()[0] for name in missed] == ["_forward_kernel"]
        assert (aside / "_forward_kernel.cubin").exists(), "compiled anew, to the same name"
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.move(tmp_path / entry, compiled)


def test_what_was_not_asked_for_is_not_there(compiled: Path, tmp_path: Path) -> None:
    copy = tmp_path / "kernels"
    shutil.copytree(compiled, copy)
    (tmp_path / "moved").symlink_to(compiled)
    assert deploy(copy, "demo", "sm_90", "float16", 1)["missed"]
    assert deploy(tmp_path / "moved", "demo", "sm_90", "bfloat16", 2)["missed"] == {}


def test_a_directory_is_replaced_whole_and_may_be_made_for_another_place(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "old").mkdir(parents=True)
    (here / MANIFEST).write_text("{}")
    run = gptile("compile", "demo", "--target=sm_90", "--batch=1", "-o", here, "--at", there)
    assert run.returncode == 0, run.stderr
    assert f"TRITON_CACHE_DIR={there}" in run.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert not (here / "old").exists()
    here.rename(there)
    assert deploy(there, "demo", "sm_90", "float32", 1)["missed"] == {}
    there.rename(here)
    assert deploy(here, "demo", "sm_90", "float32", 1)["missed"], "an entry names absolute paths"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "--target=sm_70"], r"unknown target 'sm_70'; one of sm_80, .*gfx942"),
        (["demo", "--target=sm_90", "--batch=0"], r"--batch"),
        (["demo", "--target=sm_90", "--at=kernels"], r"--at kernels: the path must be absolute"),
        (["random:gpt3", "--target=sm_90"], r"random models are .*random:gpt2-medium"),
        (["demo"], r"--target"),
        (["nothing-here", "--target=sm_90"], r"nothing-here"),
    ],
    ids=str,
)
def test_wrong_options_are_named(arguments: list[str], words: str, tmp_path: Path) -> None:
    run = gptile("compile", *arguments, "-o", tmp_path / "kernels")
    assert run.returncode == 2, run.stderr
    assert re.search(words, run.stderr), run.stderr
    assert [*tmp_path.iterdir()] == []


def test_another_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    run = gptile("compile", "demo", "--target=sm_90", "-o", tmp_path)
    assert run.returncode == 2
    assert "was not written by gptile compile" in run.stderr
    run = gptile("compile", "demo", "--target=sm_90", "-o", tmp_path / "a" / "b")
    assert run.returncode == 2
    assert "there is no directory" in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("largest", [1, 2, 7, 16, 100, 1024])
def test_representatives_stand_for_every_number(largest: int) -> None:
    def nature(number: int) -> tuple[int, int]:
        return (number - 1).bit_length(), min(number & -number, 16)

    numbers = range(1, largest + 1)
    chosen = representatives(largest)
    assert {*map(nature, chosen)} == {*map(nature, numbers)}
    assert len(chosen) == len({*map(nature, numbers)})
    assert largest in chosen
    assert torch.tensor(chosen).diff().gt(0).all()
