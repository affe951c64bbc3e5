"""Wrong kernels, made by changing the text of right ones."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def plant(tmp_path: Path) -> Callable[[ModuleType, str, str], ModuleType]:
    """Loads a copy of a kernel file in which one piece of text is replaced."""

    def load(module: ModuleType, right: str, wrong: str) -> ModuleType:
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        assert right in source, "the kernel has changed: plant the fault anew"
        name = f"planted_{abs(hash((right, wrong)))}"
        path = tmp_path / f"{name}.py"  # the JIT reads its source from a file
        # Under another namespace, beside the right operations.
        path.write_text(source.replace(right, wrong, 1).replace('"gptile::', f'"{name}::'))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        planted = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(planted)
        return planted

    return load
