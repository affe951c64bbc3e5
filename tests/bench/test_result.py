"""Result files: complete or not there, finite JSON, and refused where they are something else."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from gptile.bench import result
from gptile.bench.result import KINDS, Result, load_record, save_record
from gptile.model.errors import UserError

ROW = {"subject": {"rung": "naive loop"}, "seconds": (0.5, 0.25), "ok": True}


@pytest.fixture
def record() -> dict[str, Any]:
    return Result("ladder", {"rounds": 2}, [ROW], ["a note"], seed=3).record()


def test_a_record_is_read_as_it_was_saved(record: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "ladder.json"
    save_record(record, path)
    assert load_record(path) == record
    assert record["kind"] == "ladder"
    assert record["rows"] == [{**ROW, "seconds": [0.5, 0.25]}]
    assert record["notes"] == ["a note"]
    assert record["environment"]["seed"] == 3
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_has_no_number_for_is_null(value: float) -> None:
    row = {"subject": {"x": value}, "seconds": [1.0, value], "speedup": {"low": value}}
    record = Result("model", {"x": (value, {"y": value})}, [row]).record()
    json.dumps(record, allow_nan=False)
    assert record["rows"] == [
        {"subject": {"x": None}, "seconds": [1.0, None], "speedup": {"low": None}}
    ]
    assert record["settings"] == {"x": [None, {"y": None}]}


def test_names_that_are_no_strings_become_some() -> None:
    assert Result("model", {1: {None: 2}}, []).record()["settings"] == {"1": {"None": 2}}


def test_a_file_is_replaced_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, record: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "ladder.json"
    save_record(record, path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        save_record({**record, "rows": [object()]}, path)
    with pytest.raises(ValueError, match="JSON compliant"):
        save_record({**record, "notes": math.nan}, path)
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]


def test_a_directory_that_is_not_there_is_an_error(record: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        save_record(record, tmp_path / "no" / "ladder.json")


WRONG = {
    "no JSON": ("{", "not valid JSON"),
    "a list": ("[]", "expected a JSON object"),
    "another object": ("{}", "not a result of gptile"),
    "another schema": ({"schema": 2}, "not a result of gptile"),
    "another kind": ({"kind": "cake"}, "not a result of gptile"),
    "a kind that is no name": ({"kind": ["ladder"]}, "not a result of gptile"),
    "no rows": ({"rows": None}, "rows must be a list"),
    "rows that are none": ({"rows": ["x"]}, "rows must be a list"),
    "a row about nothing": ({"rows": [{"seconds": [1]}]}, "each with a subject"),
    "a subject that is a name": ({"rows": [{"subject": "x"}]}, "each with a subject"),
    "no settings": ({"settings": []}, "settings is missing"),
    "no environment": ({"environment": None}, "environment is missing"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_is_no_result_is_refused_by_name(
    record: dict[str, Any], tmp_path: Path, what: str
) -> None:
    content, words = WRONG[what]
    path = tmp_path / "found.json"
    path.write_text(content if isinstance(content, str) else json.dumps({**record, **content}))
    with pytest.raises(UserError, match=words) as error:
        load_record(path)
    assert str(path) in str(error.value)


def test_every_kind_there_is_can_be_read(tmp_path: Path) -> None:
    for kind in KINDS:
        save_record(Result(kind, {}, []).record(), tmp_path / f"{kind}.json")
        assert load_record(tmp_path / f"{kind}.json")["kind"] == kind


def test_the_environment_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(result, "environment", lambda *given: asked.append(given) or {})
    Result("model", {}, [], device="cuda", seed=5).record()
    assert asked == [("cuda", 5)]
