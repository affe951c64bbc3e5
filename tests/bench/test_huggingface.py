"""transformers probes for a package called ``kernels``; it must never find our folder."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from gptile.bench.huggingface import import_transformers, load_reference
from gptile.model.errors import UserError
from gptile.weights.files import DEMO

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
    import sys
    from pathlib import Path
    from gptile.bench.huggingface import import_transformers

    assert any(Path(entry, "kernels", "ops.py").exists() for entry in sys.path), "not at risk"
    transformers = import_transformers()
    from transformers.utils.import_utils import is_kernels_available

    transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1))
    found = sys.modules.get("kernels")
    print(is_kernels_available(), getattr(found, "__file__", None))
"""
STAND_IN = """
    def __getattr__(name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            return type(name, (), {"__init__": lambda self, *args, **kwargs: None})
        return lambda *args, **kwargs: lambda decorated: decorated
"""


@pytest.mark.parametrize("installed", [False, True], ids=["without", "with the real library"])
def test_the_root_on_the_path_does_no_harm(tmp_path: Path, installed: bool) -> None:
    (tmp_path / "probe.py").write_text(textwrap.dedent(PROGRAM))
    site = tmp_path / "site"
    if installed:  # a stand-in with the real one's name and a version that transformers accepts
        version = import_transformers().utils.import_utils.KERNELS_MIN_VERSION
        (site / "kernels").mkdir(parents=True)
        (site / "kernels" / "__init__.py").write_text(textwrap.dedent(STAND_IN))
        (site / f"kernels-{version}.dist-info").mkdir()
        (site / f"kernels-{version}.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n"
        )
    # The root before the site folder, as `python -m` has it.
    path = os.pathsep.join([str(ROOT), str(site), str(tmp_path)])
    run = subprocess.run(
        [sys.executable, "-m", "probe"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    available, file = run.stdout.split(maxsplit=1)
    assert available == str(installed)
    assert str(ROOT) not in file


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_reference_attends_as_asked(attention: str) -> None:
    model = load_reference(DEMO, torch.float64, attention)
    assert model.config._attn_implementation == attention
    assert model.dtype == torch.float64
    assert not model.training


def test_a_directory_that_transformers_cannot_read_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((DEMO / "config.json").read_text())
    with pytest.raises(UserError, match=f"transformers cannot read {tmp_path}"):
        load_reference(tmp_path, torch.float32)
