"""The page of results: what it says, what it refuses, and that no result can put code into it."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptile.bench.plots import PLOTS
from gptile.bench.report import write_report
from gptile.bench.result import KINDS, Result, save_record
from gptile.model.errors import UserError
from tests.bench.example_results import EXAMPLES, rung

HOSTILE = "</title></svg><script>alert(1)</script><img src=x onerror=alert(2)>&amp;"


def save(
    directory: Path, name: str, *rows: dict[str, Any], kind: str = "ladder", **more: Any
) -> None:
    record = Result(kind, {"model": "demo"}, list(rows), ["a note"]).record()
    record["environment"] |= more
    save_record(record, directory / f"{name}.json")


def page_of(directory: Path) -> str:
    write_report(directory, directory / "report.html")
    return (directory / "report.html").read_text(encoding="utf-8")


def test_every_kind_has_a_plot_and_a_section(tmp_path: Path) -> None:
    assert set(PLOTS) == set(KINDS) == set(EXAMPLES)
    for kind, rows in EXAMPLES.items():
        save(tmp_path, kind, *rows, kind=kind)
    sections = write_report(tmp_path, tmp_path / "report.html")
    assert [section.file for section in sections] == sorted(f"{kind}.json" for kind in KINDS)
    assert all(section.plot for section in sections), [section.no_plot for section in sections]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for kind in KINDS:
        assert PLOTS[kind].title in page
    assert page.count("<svg") == len(KINDS)


def test_the_page_stands_alone_and_its_ids_are_its_own(tmp_path: Path) -> None:
    for kind, rows in EXAMPLES.items():
        save(tmp_path, kind, *rows, kind=kind)
    page = page_of(tmp_path)
    assert not re.search(r"""(?:src|href)=["'](?!#)""", page)
    assert "url(http" not in page
    assert "<script" not in page
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    for target in re.findall(r'href="#([^"]*)"', page) + re.findall(r"url\(#([^)]*)\)", page):
        assert target in ids


def test_the_same_results_make_the_same_page(tmp_path: Path) -> None:
    save(tmp_path, "a", *EXAMPLES["ladder"], date="2026-01-01T00:00:00+00:00")
    assert page_of(tmp_path) == page_of(tmp_path)


def test_red_is_said_first_and_has_no_speedup(tmp_path: Path) -> None:
    faster = {"ratio": 3.25, "low": 3.0, "high": 3.5}
    save(tmp_path, "a", rung("plain", 2.0), rung("wrong", 0.6, ok=False, speedup=faster))
    page = page_of(tmp_path)
    assert "1 of 2 checks red" in page[: page.index("<main>")]
    assert "rung wrong" in page
    assert "3.25x" not in page
    assert "withheld" in page
    assert "check red: no speed-up" in page


def test_verdicts(tmp_path: Path) -> None:
    save(tmp_path, "green", rung("plain", 2.0), rung("other", 1.0))
    save(tmp_path, "none", rung("plain", 2.0, ok=None))
    save(tmp_path, "skipped", {"subject": {"rung": "gpu"}, "skipped": "no GPU here"})
    verdicts = [section.verdict for section in write_report(tmp_path, tmp_path / "r.html")]
    assert [verdict.summary for verdict in verdicts] == [
        "2 checks green",
        "no checks",
        "no checks, 1 skipped",
    ]
    assert [verdict.kind for verdict in verdicts] == ["ok", "none", "none"]
    assert "no GPU here" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_a_check_that_is_no_boolean_is_red(tmp_path: Path) -> None:
    save(tmp_path, "a", rung("plain", 2.0, ok="true"))
    assert write_report(tmp_path, tmp_path / "r.html")[0].verdict.kind == "red"


def test_nothing_in_a_result_becomes_code(tmp_path: Path) -> None:
    rows = [
        {"subject": {HOSTILE: HOSTILE, "rung": HOSTILE}, "ok": True, "seconds": [1.0]},
        {"subject": {"rung": "x"}, "ok": False, "skipped": HOSTILE, HOSTILE: HOSTILE},
    ]
    save(tmp_path, "a", *rows, command=HOSTILE, commit=HOSTILE, cpu={"name": HOSTILE})
    page = page_of(tmp_path)
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page
    assert "default-src 'none'" in page


def test_machines_commits_and_changes_are_pointed_out(tmp_path: Path) -> None:
    save(tmp_path, "a", rung("plain", 2.0), commit="abc", cpu={"name": "one"})
    save(tmp_path, "b", rung("plain", 2.0), commit="def+", cpu={"name": "two"})
    page = page_of(tmp_path)
    assert "2 machines: one, two" in page
    assert "2 commits: abc, def+" in page
    assert "Files differed from the commit when these ran: b.json" in page


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", "{", "a.json"),
        ("a.json", "{}", "not a result"),
        ("a.json", '{"schema": 1, "kind": "ladder", "rows": [1]}', "rows must be"),
        ("a.txt", "", "no .json files"),
    ],
)
def test_what_is_no_result_is_named(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=said):
        write_report(tmp_path, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
    with pytest.raises(UserError, match="no such directory"):
        write_report(tmp_path / "nowhere", tmp_path / "report.html")


def test_a_long_result_is_cut_and_says_so(tmp_path: Path) -> None:
    save(tmp_path, "a", *(rung(str(i), 1.0, ok=False) for i in range(900)))
    page = page_of(tmp_path)
    assert "500 more rows are in the file" in page
    assert "and 850 more" in page


finite = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = ("ok", "seconds", "speedup", "error", "skipped", "bytes", "times", "tokens_per_second")
subjects = st.dictionaries(
    st.sampled_from(("rung", "matrix", "operation", "timeline", "section", "quantity", "engine"))
    | st.text(max_size=5),
    json_values,
    max_size=4,
)
any_rows = st.lists(
    st.builds(
        lambda subject, fields: {**fields, "subject": subject},
        subjects,
        st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), json_values, max_size=5),
    ),
    max_size=3,
)


@given(kind=st.sampled_from(KINDS), rows=any_rows, settings=st.dictionaries(st.text(), json_values))
def test_any_result_makes_a_page(
    kind: str, rows: list, settings: dict, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("any")
    record = Result(kind, {}, []).record() | {"rows": rows, "settings": settings, "notes": rows}
    # Not save_record: a file may hold what it never writes, such as half a character.
    (directory / "a.json").write_text(json.dumps(record), encoding="utf-8")
    page = page_of(directory)
    assert page.startswith("<!doctype html>")
    if "<svg" in page:
        ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
