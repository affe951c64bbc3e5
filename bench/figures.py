"""What plots share: one look, and files that are the same for the same figure.

Importing this module needs matplotlib, and raises UserError where it is missing.
"""

import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from gptile.bench.files import write_whole
from gptile.bench.reading import si, text
from gptile.bench.timing import Timing
from gptile.model.errors import UserError

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter
except ImportError:
    raise UserError("matplotlib is needed: in the repository, pip install '.[bench]'") from None

Record: TypeAlias = dict[str, Any]
Style: TypeAlias = dict[str, Any]

# Okabe and Ito's colours, told apart whatever one's colour vision (https://jfly.uni-koeln.de/color/).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
RED, INK, GREY = "#b3261e", "#333333", "#666666"
WIDTH = 7.6  # inches

STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#767676",
    "axes.grid": True,
    "axes.labelcolor": "#333333",
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "figure.constrained_layout.use": True,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: the same figure everywhere
    "font.size": 9.5,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.5,
    "svg.fonttype": "none",  # text stays text: it can be searched and read aloud
    "svg.hashsalt": "gptile",
    "text.parse_math": False,  # a name with two dollar signs is no formula
    "xtick.color": "#555555",
    "ytick.color": "#555555",
}
_NO_DATE: dict[str, dict[str, Any]] = {
    "png": {},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
}


def styled(draw: Callable[[Record], Figure]) -> Callable[[Record], Figure]:
    """The plot in :data:`STYLE`."""
    return matplotlib.rc_context(STYLE)(draw)


def check_figure_path(path: Path) -> None:
    """Refuse a file that no figure can be saved as, before the long work that ends with it.

    Raises:
        UserError: naming the suffixes there are.
    """
    if path.suffix.lower().removeprefix(".") not in _NO_DATE:
        raise UserError(f"{path}: a plot is saved as .{', .'.join(_NO_DATE)}: name such a file")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, SVG or PDF, by the file's suffix; the same figure, the same bytes.

    Raises:
        UserError: for another suffix.
        OSError: if it cannot be written; nothing is left behind.
    """
    check_figure_path(path)
    write_whole(path, render(figure, path.suffix.lower().removeprefix(".")))


@matplotlib.rc_context(STYLE)
def render(figure: Figure, form: str) -> bytes:
    """The figure as the bytes of a ``png``, ``svg`` or ``pdf`` file."""
    content = io.BytesIO()
    figure.savefig(content, format=form, dpi=160, metadata=_NO_DATE[form])
    return content.getvalue()


def draw_spread(axes: Axes, time: Timing, y: float) -> None:
    axes.plot([time.quantile(20), time.quantile(80)], [y, y], color=INK, linewidth=1.2)


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Horizontal bars from top to bottom, by name."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.grid(visible=False, axis="y")


def set_unit(axis: Axis, unit: str) -> None:
    """Tick labels with the unit and its prefix; plain numbers where there is no unit."""
    axis.set_major_formatter(lambda value, _: si(value, unit) if unit else f"{value:,g}")


def set_log(axes: Axes, which: str, unit: str) -> None:
    """Make the ``x`` or ``y`` axis logarithmic, once the data are drawn, with at least two ticks
    that have a label."""
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = sorted(axis.get_view_interval())
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axis.set_minor_formatter(NullFormatter())
    set_unit(axis, unit)


def distinct_styles(names: Iterable[Any]) -> dict[str, Style]:
    """A colour and a marker for each name, in the order they come, as far as there are any."""
    found = list(dict.fromkeys(map(text, names)))
    n = len(COLOURS)
    # The markers move on by one with each round of the colours: n * n pairs.
    return {
        name: {"color": COLOURS[i % n], "marker": MARKERS[(i + i // n) % n]}
        for i, name in enumerate(found)
    }


def add_legend(figure: Figure) -> None:
    """One for all axes, above them."""
    found: dict[Any, Any] = {}
    for axes in figure.axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    figure.legend(found.values(), found, loc="outside upper left", ncols=3)


def label(value: Any, limit: int = 52) -> str:
    """A name that leaves room for the plot."""
    words = text(value)
    return words if len(words) <= limit else words[: limit - 1] + "\u2026"
