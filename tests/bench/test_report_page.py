"""The page of results in a real browser: it fits a laptop and a phone, and prints."""

import html
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gptile.bench.report import write_report
from gptile.bench.result import Result, save_record
from tests.bench.example_results import EXAMPLES, rung

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next((path for name in _NAMES if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt install chromium")

# The page may run nothing, so a page around it looks at it: its size, and what the style did.
HARNESS = """<!doctype html><title>harness</title>
<iframe src="report.html" style="border:0" width="%d" height="800"></iframe><pre id="found"></pre>
<script>
window.onload = () => {
  const page = document.querySelector('iframe').contentDocument;
  const root = page.documentElement;
  const shown = (e) => e.getBoundingClientRect();
  const style = (e, name) => page.defaultView.getComputedStyle(e)[name];
  document.querySelector('#found').textContent = JSON.stringify({
    width: root.clientWidth,
    needed: root.scrollWidth,
    plots: [...page.querySelectorAll('svg')].map((e) => [shown(e).width, shown(e).height]),
    empty_texts: [...page.querySelectorAll('svg text')].filter((e) => !shown(e).width).length,
    red: [...page.querySelectorAll('tr.red td.red')].map((e) => style(e, 'color')),
    red_rows: [...page.querySelectorAll('tr.red > *')].map((e) => style(e, 'backgroundColor')),
    plain: style(page.querySelector('tr:not(.red) td'), 'backgroundColor'),
    headings: [...page.querySelectorAll('h1, h2, h3')].map((e) => +e.tagName[1]),
    unnamed: [...page.querySelectorAll('[aria-labelledby]')].filter((e) => e.getAttribute(
      'aria-labelledby').split(' ').some((id) => !page.getElementById(id))).length,
    tables: [...page.querySelectorAll('table')].every((e) => e.querySelector('th[scope=col]')),
  });
};
</script>
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of every kind of result, one of them red."""
    directory = tmp_path_factory.mktemp("page")
    for kind, rows in EXAMPLES.items():
        red = [rung("wrong", 1.5, ok=False)] if kind == "ladder" else []
        record = Result(kind, {"model": "demo"}, [*rows, *red], ["a note"]).record()
        save_record(record, directory / f"{kind}.json")
    write_report(directory, directory / "report.html")
    return directory


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def browse(*options: str, profile: Path) -> str:
    command = [
        BROWSER or "",
        "--headless=new",
        "--no-sandbox",  # a container's root cannot have one; the page is our own
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--no-first-run",
        "--disable-background-networking",
        f"--user-data-dir={profile}",
        "--virtual-time-budget=20000",
        *options,
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    return run.stdout


@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_and_shows_everything(
    width: int, folder: Path, address: str, tmp_path: Path
) -> None:
    (folder / f"harness-{width}.html").write_text(HARNESS % width, encoding="utf-8")
    size = f"--window-size={max(width, 500) + 40},1000"
    page = f"{address}/harness-{width}.html"
    dom = browse("--dump-dom", size, page, profile=tmp_path)
    match = re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)
    assert match
    found = json.loads(html.unescape(match[1]))
    assert found["width"] == width
    assert found["needed"] == width  # nothing but a table or a plot scrolls sideways
    assert len(found["plots"]) == len(EXAMPLES)
    for plot_width, plot_height in found["plots"]:
        assert plot_width >= 450
        assert 100 < plot_height < 3 * plot_width
    assert found["empty_texts"] == 0
    assert found["headings"][0] == 1
    assert found["headings"].count(1) == 1
    assert found["unnamed"] == 0
    assert found["tables"]
    assert len(found["red"]) == 1
    assert found["red"][0] in ("rgb(168, 32, 26)", "rgb(255, 138, 128)")  # as style sheet says
    assert found["plain"] not in found["red_rows"]


def test_it_prints(folder: Path, address: str, tmp_path: Path) -> None:
    target = tmp_path / "page.pdf"
    options = (f"--print-to-pdf={target}", "--no-pdf-header-footer", f"{address}/report.html")
    browse(*options, profile=tmp_path / "profile")
    content = target.read_bytes()
    assert content.startswith(b"%PDF")
    n_pages = len(re.findall(rb"/Type\s*/Page\b", content))
    # Each result on a page of its own, after the contents.
    assert 1 + len(EXAMPLES) <= n_pages <= 3 * len(EXAMPLES)


def test_it_asks_the_network_for_nothing(folder: Path, tmp_path: Path) -> None:
    """Opened as a file with every address unreachable, nothing is missing."""
    shot = tmp_path / "page.png"
    page = (folder / "report.html").as_uri()
    rules = "--host-resolver-rules=MAP * ~NOTFOUND"
    browse(f"--screenshot={shot}", rules, "--window-size=1280,900", page, profile=tmp_path / "p")
    assert shot.read_bytes().startswith(b"\x89PNG")
    assert shot.stat().st_size > 20_000  # a blank page is far smaller
