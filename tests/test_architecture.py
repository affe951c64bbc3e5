"""The rooms import one way only, and outside code is met in one place each."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A room may import the rooms after it.
ORDER = ["gptile", "bench", "train", "weights", "model", "kernels"]
SOURCES = [path for room in ORDER for path in sorted((ROOT / room).rglob("*.py"))]


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_rooms_import_downwards(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    for name in imports(path):
        parts = name.split(".")
        assert parts[0] not in ORDER[1:], f"{path} imports a bare {parts[0]}"
        if parts[0] == "gptile" and room != "gptile":
            assert len(parts) > 1, f"{path} imports the front door"
            assert parts[1] in ORDER[1:], f"{path} imports the front door"
            assert ORDER.index(parts[1]) >= ORDER.index(room), f"{path} imports upwards: {name}"


def importers_of(package: str) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for path in SOURCES
        if any(name.split(".")[0] == package for name in imports(path))
    }


def test_transformers_is_imported_in_one_place() -> None:
    assert importers_of("transformers") == {"bench/huggingface.py"}


def test_pickle_is_read_in_one_place() -> None:
    assert importers_of("pickle") == {"weights/convert.py"}
    readers = {str(p.relative_to(ROOT)) for p in SOURCES if "torch.load(" in p.read_text()}
    assert readers == {"weights/convert.py"}
    assert "weights_only=True" in (ROOT / "weights/convert.py").read_text()
