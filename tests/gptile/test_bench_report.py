"""``gptile bench report`` as a user meets it: a page, a table, one clear line where it fails."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gptile.bench.result import Result, save_record
from gptile.cli import main

Report = Callable[..., tuple[int, str, str]]


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Report:
    """Run it in this process: exit code, stdout, stderr."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gptile", "bench", "report", *args])
        with pytest.raises(SystemExit) as exit:
            main()
        return exit.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture
def results(tmp_path: Path) -> Path:
    directory = tmp_path / "results"
    (directory / "deeper").mkdir(parents=True)
    rows = [
        {"subject": {"rung": "plain"}, "ok": True, "seconds": [2.0, 2.1, 1.9]},
        {"subject": {"rung": "wrong"}, "ok": False, "seconds": [1.0, 1.1, 0.9]},
    ]
    save_record(Result("ladder", {}, rows).record(), directory / "ladder.json")
    save_record(Result("evaluation", {}, rows[:1]).record(), directory / "deeper" / "score.json")
    return directory


def test_it_writes_a_page_and_says_what_is_on_it(report: Report, results: Path) -> None:
    code, out, err = report(str(results))
    assert (code, err) == (0, "")
    page = results / "report.html"
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "1 of 2 checks red" in out
    assert "score.json" in out
    assert out.splitlines()[-1].endswith("report.html")
    assert report(str(results))[0] == 0  # its own page is no result
    code, out, _ = report(str(results), "-o", str(results / "page.html"), "--json")
    found = json.loads(out.splitlines()[-1])
    assert found["page"] == str(results / "page.html")
    assert [result["file"] for result in found["results"]] == ["deeper/score.json", "ladder.json"]


def test_wrong_inputs(report: Report, results: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for args, words in (
        ([str(tmp_path / "nowhere")], "nowhere: no such directory"),
        ([str(results / "ladder.json")], "ladder.json: no such directory"),
        ([str(tmp_path / "empty")], "no .json files"),
        ([str(results), "-o", str(tmp_path / "no" / "page.html")], "no such directory"),
        ([], "DIRECTORY"),
    ):
        code, out, err = report(*args)
        assert (code, out) == (2, "")
        assert words in err
        assert len(err.splitlines()) == 1
    (results / "broken.json").write_text("{", encoding="utf-8")
    code, _, err = report(str(results))
    assert code == 2
    assert "broken.json" in err
    assert not (results / "report.html").exists()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root writes anywhere")
def test_a_directory_that_is_read_only(report: Report, results: Path) -> None:
    results.chmod(0o500)
    code, _, err = report(str(results))
    results.chmod(0o700)
    assert code == 2
    assert "cannot be written" in err
