"""The wheel: what it holds, and that it works away from the repository and in it."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("model", "kernels", "weights", "bench", "train")


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    # From a clean copy, so that no build folder of this checkout helps.
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "runs")
    )
    command = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", source)
    run(*command, "--wheel-dir", directory, cwd=directory)
    (path,) = directory.glob("*.whl")
    return path


def test_the_wheel_holds_the_package_and_the_demo_and_no_more(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"gptile", "gptile-0.1.0.dist-info"}
    for room in ROOMS:
        assert f"gptile/{room}/__init__.py" in names
    for file in ("config.json", "model.safetensors", "vocab.json", "merges.txt"):
        assert f"gptile/weights/demo/{file}" in names
    assert "gptile/py.typed" in names


@pytest.mark.parametrize("where", ["elsewhere", "in the repository"])
def test_an_installed_wheel_works(wheel: Path, tmp_path: Path, where: str) -> None:
    target = tmp_path / "site"
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        target,
        wheel,
        cwd=tmp_path,
    )
    # Without site-packages' editable hook: only the wheel provides the rooms.
    program = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'ditable' not in str(f)];"
        "import gptile, gptile.weights.files as f; m, t = gptile.load();"
        "print(f.__file__); print(gptile.generate(m, 'ROMEO:',"
        " gptile.SamplingParams(temperature=0, max_new_tokens=3), tokenizer=t)[0].text)"
    )
    cwd = ROOT if where == "in the repository" else tmp_path
    out = run(sys.executable, "-c", program, cwd=cwd, PYTHONPATH=str(target))
    assert out.startswith(str(target))


def test_every_public_name_is_there() -> None:
    import gptile

    for name in gptile.__all__:
        assert getattr(gptile, name) is not None
    assert set(gptile.__all__) == set(gptile._HOMES)
    with pytest.raises(AttributeError, match="nothing"):
        _ = gptile.nothing


def test_everything_but_the_kernels_works_without_triton(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, gptile\n"
        "from gptile.kernels.layer_norm import layer_norm_triton\n"
        "model, tokenizer = gptile.load()\n"
        "params = gptile.SamplingParams(temperature=0, max_new_tokens=3)\n"
        "print(len(gptile.generate(model, 'ROMEO:', params, tokenizer=tokenizer)[0].ids))\n"
        "try:\n"
        "    layer_norm_triton(torch.ones(2, 4), torch.ones(4), torch.ones(4), 1e-5)\n"
        "except TypeError as error:\n"
        "    print('refused')\n"
    )
    assert run(sys.executable, "-c", program, cwd=tmp_path).split() == ["3", "refused"]
