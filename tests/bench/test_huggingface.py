"""transformers probes for a package called ``kernels``; it must never find our folder."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("installed", [False, True], ids=["without", "with the real library"])
def test_the_root_on_the_path_does_no_harm(tmp_path: Path, installed: bool) -> None:
    (tmp_path / "probe.py").write_text(textwrap.dedent(PROGRAM))
    site = tmp_path / "site"
    if installed:  # a stand-in with the real one's name and a version transformers accepts
        (site / "kernels").mkdir(parents=True)
        (site / "kernels" / "__init__.py").write_text(
            "def _any(*args, **kwargs):\n    return _any\n"
            "def __getattr__(name):\n    if name.startswith('__'): raise AttributeError(name)\n"
            "    return type(name, (), {'__init__': _any, '__class_getitem__': _any})\n"
        )
        (site / "kernels-0.16.0.dist-info").mkdir()
        (site / "kernels-0.16.0.dist-info" / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: kernels\nVersion: 0.16.0\n"
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
