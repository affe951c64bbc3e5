"""The results in a folder as one HTML page: nothing to load, nothing that runs, good in print.

A result may come from anybody. So every text is escaped by the template, plots are drawn with
formulas off and reach the page as parsed SVG, and the page's Content-Security-Policy allows no
script and no request at all.
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gptile.bench.figures import Record, render
from gptile.bench.files import write_whole
from gptile.bench.plots import PLOTS
from gptile.bench.reading import check, number, si, text
from gptile.bench.result import load_record
from gptile.bench.tables import Table, make_tables, red_rows
from gptile.model.errors import UserError

try:
    import jinja2
    from markupsafe import Markup
except ImportError:
    raise UserError("jinja2 is needed: in the repository, pip install '.[bench]'") from None

_MOST_RED = 50
_COMMIT = 12  # digits that tell one
_SVG = "http://www.w3.org/2000/svg"
_HREF = "{http://www.w3.org/1999/xlink}href"
ElementTree.register_namespace("", _SVG)


@dataclass(frozen=True)
class Verdict:
    """How the checks of one result came out.

    Attributes:
        kind: ok, red, or none where nothing was checked.
    """

    kind: str
    n_red: int
    n_green: int
    n_skipped: int

    @property
    def summary(self) -> str:
        """In words."""
        checked = _counted(self.n_red + self.n_green, "check")
        if self.kind == "none":
            found = "no checks"
        elif self.kind == "red":
            found = f"{self.n_red:,} of {checked} red"
        else:
            found = f"{checked} green"
        return f"{found}, {self.n_skipped:,} skipped" if self.n_skipped else found


@dataclass(frozen=True)
class Section:
    """One result, as the template shows it.

    Attributes:
        anchor: id of its heading.
        title: what kind of result it is.
        file: relative to the folder.
        facts: name and value of where and how it came about.
        plot: inline SVG, or empty where ``no_plot`` says why.
    """

    anchor: str
    title: str
    file: str
    verdict: Verdict
    machine: str
    date: str
    commit: str
    command: str
    facts: list[tuple[str, str]]
    settings: list[tuple[str, str]]
    notes: list[str]
    red: list[str]
    more_red: int
    plot: Markup
    no_plot: str
    plot_title: str
    plot_description: str
    tables: list[Table]


def write_report(directory: Path, output: Path) -> list[Section]:
    """Make a page of every ``.json`` file under ``directory``.

    Returns:
        What it shows, in the order of the files' names.

    Raises:
        UserError: where there are none, or naming each that is no result.
        OSError: if a file cannot be read or the page cannot be written; nothing is left behind.
    """
    sections = [
        _section(f"result-{index}", str(path.relative_to(directory)), record)
        for index, (path, record) in enumerate(_load(directory), 1)
    ]
    overall, headline = _overall(sections)
    page = _template().render(
        sections=sections,
        warnings=_warnings(sections),
        folder=text(str(directory.resolve().name)),
        overall=overall,
        headline=headline,
        dates=_dates(sections),
    )
    # A lone half of a surrogate pair, which JSON can spell, is no character.
    write_whole(output, page.encode("utf-8", errors="replace"))
    return sections


def _load(directory: Path) -> list[tuple[Path, Record]]:
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory")
    paths = sorted(directory.rglob("*.json"))
    if not paths:
        raise UserError(
            f"{directory}: no .json files; gptile bench, parity and evaluate write them"
        )
    found, wrong = [], []
    for path in paths:
        try:
            found.append((path, load_record(path)))
        except UserError as error:
            wrong.append(str(error))
    if wrong:
        raise UserError(f"{'; '.join(wrong)}: move what is no result elsewhere")
    return found


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(mark=_mark, counted=_counted)
    return environment.get_template("report.html")


def _mark(kind: str) -> str:
    """A sign beside the colour, for those who do not see it."""
    return {"ok": "\u2713", "red": "\u2717", "none": "\u25cb"}[kind]


def _counted(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def _overall(sections: list[Section]) -> tuple[Verdict, str]:
    """All verdicts in one, and in words."""
    verdicts = [section.verdict for section in sections]
    kinds = {verdict.kind for verdict in verdicts}
    kind = "red" if "red" in kinds else "ok" if "ok" in kinds else "none"
    total = Verdict(
        kind,
        sum(verdict.n_red for verdict in verdicts),
        sum(verdict.n_green for verdict in verdicts),
        sum(verdict.n_skipped for verdict in verdicts),
    )
    return total, total.summary


def _dates(sections: list[Section]) -> str:
    dates = sorted({section.date.partition("T")[0] for section in sections})
    return dates[0] if len(dates) == 1 else f"from {dates[0]} to {dates[-1]}"


def _section(anchor: str, file: str, record: Record) -> Section:
    environment, rows = record["environment"], record["rows"]
    kind = record["kind"]
    plot, no_plot = _plot(record, anchor)
    red = red_rows(rows)
    notes = record.get("notes")
    return Section(
        anchor=anchor,
        title=PLOTS[kind].title,
        file=file,
        verdict=_verdict(rows),
        machine=_machine(environment),
        date=text(environment.get("date")),
        commit=_commit(environment.get("commit")),
        command=text(environment.get("command"), limit=4000),
        facts=_facts(environment),
        settings=[(_words(name), text(value)) for name, value in record["settings"].items()],
        notes=[text(note, limit=4000) for note in (notes if isinstance(notes, list) else [])],
        red=red[:_MOST_RED],
        more_red=len(red[_MOST_RED:]),
        plot=plot,
        no_plot=no_plot,
        plot_title=PLOTS[kind].title,
        plot_description=PLOTS[kind].description,
        tables=make_tables(rows),
    )


def _verdict(rows: list[dict[str, Any]]) -> Verdict:
    counts = Counter(check(row) for row in rows)
    skipped = sum(bool(row.get("skipped")) for row in rows)
    kind = "red" if counts[False] else "ok" if counts[True] else "none"
    return Verdict(kind, counts[False], counts[True], skipped)


def _machine(environment: dict[str, Any]) -> str:
    """The name of what ran."""
    part = environment.get("gpu") or environment.get("cpu")
    name = part.get("name") if isinstance(part, dict) else None
    return text(name or environment.get("device"))


def _commit(value: Any) -> str:
    """Short, with the sign of changed files."""
    commit = text(value)
    return f"{commit[:_COMMIT]}{'+' if commit[_COMMIT:].endswith('+') else ''}"


_UNITS = {"clock": "MHz", "clock_limit": "MHz", "memory_clock": "MHz", "power_limit": "W"}


def _facts(environment: dict[str, Any]) -> list[tuple[str, str]]:
    """All but the command, which stands on its own."""
    facts = []
    for name, value in environment.items():
        if name == "command":
            continue
        if isinstance(value, dict) and name != "versions":
            parts = [_part(key, item) for key, item in value.items() if item is not None]
            facts.append((_words(name), text(", ".join(parts), limit=4000)))
        else:
            facts.append((_words(name), text(value, limit=4000)))
    return facts


def _part(name: str, value: Any) -> str:
    found = number(value)
    if name == "name":
        return text(value)
    if name == "memory" and found is not None:
        return f"memory {si(found, 'B')}"
    if name in _UNITS and found is not None:
        return f"{_words(name)} {found:.0f} {_UNITS[name]}"
    return f"{_words(name)} {text(value)}"


def _words(name: str) -> str:
    """A field's name for people."""
    words = text(name.replace("_", " "))
    return {"cpu": "CPU", "gpu": "GPU"}.get(words, words)


def _warnings(sections: list[Section]) -> list[str]:
    """Why the results on the page cannot be compared with each other as they are."""
    found = []
    for what, values in (
        ("machines", {section.machine for section in sections}),
        ("commits", {section.commit for section in sections}),
    ):
        if len(values) > 1:
            named = ", ".join(sorted(values))
            found.append(f"These results come from {len(values)} {what}: {named}.")
    changed = [section.file for section in sections if section.commit.endswith("+")]
    if changed:
        found.append(f"Files differed from the commit when these ran: {text(changed)}.")
    return found


def _plot(record: Record, prefix: str) -> tuple[Markup, str]:
    kind = PLOTS[record["kind"]]
    try:
        figure = kind.draw(record)
    except UserError as error:
        why = str(error)
        return Markup(), why[:1].upper() + why[1:]
    return inline_svg(render(figure, "svg"), prefix, kind.title, kind.description), ""


def inline_svg(content: bytes, prefix: str, title: str, description: str) -> Markup:
    """matplotlib's SVG as an element of a page that has other plots: its ids made the page's own,
    its style sheet (which would style the whole page) dropped, and named for screen readers."""
    svg = ElementTree.fromstring(content)
    for parent in list(svg.iter()):
        for child in list(parent):
            if child.tag == f"{{{_SVG}}}style" or child.tag.endswith("metadata"):
                parent.remove(child)
    used = set(re.findall(r"#([\w.-]+)", ElementTree.tostring(svg, encoding="unicode")))
    for element in svg.iter():
        identity = element.attrib.pop("id", None)
        if identity in used:
            element.set("id", f"{prefix}-{identity}")
        reference = element.attrib.pop(_HREF, None)
        if reference:
            element.set("href", f"#{prefix}-{reference.removeprefix('#')}")
        for name, value in element.attrib.items():
            element.set(name, value.replace("url(#", f"url(#{prefix}-"))
    svg.set("role", "img")
    svg.set("aria-labelledby", f"{prefix}-title {prefix}-description")
    svg.set("style", "stroke-linejoin: round; stroke-linecap: butt")
    for index, (tag, words) in enumerate((("title", title), ("desc", description))):
        named = ElementTree.Element(f"{{{_SVG}}}{tag}")
        named.set("id", f"{prefix}-{'title' if tag == 'title' else 'description'}")
        named.text = words
        svg.insert(index, named)
    return Markup(ElementTree.tostring(svg, encoding="unicode"))
