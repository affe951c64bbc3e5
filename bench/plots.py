"""Results as plots: one function a kind of result, from the record to a matplotlib Figure.

A record may come from a file that anybody wrote: a value that is not what it should be is left out,
and where nothing is left to draw the functions raise UserError. A time whose correctness check is
red is left out or hatched, and never has a speed-up.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from gptile.bench.figures import (
    COLOURS,
    GREY,
    INK,
    RED,
    WIDTH,
    Axes,
    Figure,
    Record,
    Style,
    add_legend,
    distinct_styles,
    draw_spread,
    label,
    name_rows,
    set_log,
    set_unit,
    styled,
)
from gptile.bench.parity import GRADIENT, OUTPUT
from gptile.bench.reading import check, number, positive, si, speedup, text, timing
from gptile.model.errors import UserError

_MOST_POINTS = 1000
_MOST_BARS = 60
_MOST_PANELS = 3
_MOST_OPERATIONS = 15


@styled
def plot_parity(record: Record) -> Figure:
    """How the error grows from operation to operation, ours beside transformers': a panel for each
    pass, of the first sets of dtype and kernels in the record.

    Raises:
        UserError: where no row has an error to draw.
    """
    panels: dict[str, list[Record]] = {}
    for row in record["rows"]:
        dtype, kernels, section, quantity = (
            text(row["subject"].get(name)) for name in ("dtype", "kernels", "section", "quantity")
        )
        if quantity.startswith((OUTPUT, GRADIENT)) and number(row.get("error")) is not None:
            panels.setdefault(f"{section}, {dtype}, kernels {kernels}", []).append(row)
    shown = list(panels.items())[: 3 * _MOST_PANELS]
    if not shown:
        raise UserError("nothing to plot: no operation has an error")
    figure = Figure(figsize=(WIDTH, 0.5 + 2.1 * len(shown)))
    for axes, (title, rows) in zip(
        figure.subplots(len(shown), squeeze=False)[:, 0], shown, strict=True
    ):
        _draw_growth(axes, rows[:_MOST_POINTS])
        axes.set_title(label(title, 80))
    add_legend(figure)
    return figure


def _draw_growth(axes: Axes, rows: list[Record]) -> None:
    lines = {"ours": "error", "transformers, eager": "eager", "transformers, sdpa": "sdpa"}
    widths = (2.6, 1.6, 1.2)  # where they coincide, each is seen
    for (name, field), colour, width in zip(lines.items(), COLOURS, widths, strict=False):
        errors = [positive(row.get(field)) or float("nan") for row in rows]
        axes.plot(errors, color=colour, linewidth=width, label=name)
    allowed = [positive(row.get("allowed")) or float("nan") for row in rows]
    axes.plot(allowed, color=GREY, linestyle="--", linewidth=1, label="allowed")
    beyond = [
        (x, error)
        for x, row in enumerate(rows)
        if check(row) is False and (error := positive(row["error"]))
    ]
    if beyond:
        axes.plot(*zip(*beyond, strict=True), "x", color=RED, label="beyond what is allowed")
    starts: dict[str, int] = {}
    for x, row in enumerate(rows):
        if (layer := number(row["subject"].get("layer"))) is not None:
            starts.setdefault(f"{layer:.0f}", x)
    every = -(-len(starts) // 24)
    axes.set_xticks(list(starts.values())[::every], list(starts)[::every])
    axes.set_xlabel("operations in their order; the numbers are where layers begin")
    axes.set_ylabel("relative error")
    set_log(axes, "y", "")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")


@styled
def plot_kernels(record: Record) -> Figure:
    """Each rate under the roof that the peaks of the same run make (Williams et al. 2009,
    https://doi.org/10.1145/1498765.1498785), a panel a dtype; below, its share of the roof.

    Raises:
        UserError: where no rate stands beside a check that is not red.
    """
    rows = [row for row in record["rows"] if check(row) is not False and _rate(row)][:_MOST_POINTS]
    if not rows:
        raise UserError("nothing to plot: no rate was measured beside a check that is not red")
    styles = distinct_styles(row["subject"].get("provider") for row in rows)
    dtypes = list(dict.fromkeys(_dtype(row) for row in rows))[:_MOST_PANELS]
    groups = dict(list(_by_work(rows).items())[:_MOST_BARS])
    heights = [3.6, 0.8 + 0.3 * len(groups)][: 1 + bool(groups)]
    figure = Figure(figsize=(WIDTH, 0.5 + sum(heights)))
    parts = figure.subfigures(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    panels = parts[0].subplots(1, len(dtypes), squeeze=False)[0]
    for axes, dtype in zip(panels, dtypes, strict=True):
        of_dtype = [row for row in rows if _dtype(row) == dtype]
        _draw_roofline(axes, of_dtype, styles, record["settings"].get("peaks"))
        axes.set_title(f"Roofline, {label(dtype)}")
    if groups:
        _draw_shares(parts[1].subplots(), groups, styles)
    add_legend(figure)
    return figure


def _dtype(row: Record) -> str:
    return text(row["subject"].get("dtype"))


def _rate(row: Record) -> tuple[float, float] | None:
    """FLOPs a byte and FLOPs a second; None where there is no time, or nothing is computed."""
    time = timing(row.get("seconds"))
    flops, moved = positive(row.get("flops")), positive(row.get("bytes"))
    return (flops / moved, flops / time.median) if time and flops and moved else None


def _draw_roofline(axes: Axes, rows: list[Record], styles: dict[str, Style], peaks: Any) -> None:
    rates = [(text(row["subject"].get("provider")), rate) for row in rows if (rate := _rate(row))]
    for provider, style in styles.items():
        points = [rate for name, rate in rates if name == provider]
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, y, linestyle="none", label=label(provider), alpha=0.85, **style)
    roof = _roof(peaks, _dtype(rows[0]))
    if roof:
        bandwidth, compute = roof
        ridge = compute / bandwidth
        low = min([ridge, *(x for _, (x, _) in rates)]) / 2
        high = max([ridge, *(x for _, (x, _) in rates)]) * 2
        corners = [low * bandwidth, compute, compute]
        axes.plot([low, ridge, high], corners, color=INK, label="measured peaks", zorder=1)
    set_log(axes, "x", "")
    set_log(axes, "y", "FLOP/s")
    axes.set_xlabel("intensity, FLOP/byte")


def _roof(peaks: Any, dtype: str) -> tuple[float, float] | None:
    """Bytes and FLOPs a second."""
    if not isinstance(peaks, dict) or not isinstance(peaks.get("matmul"), dict):
        return None
    bandwidth = max(positive(peaks.get("copy")) or 0, positive(peaks.get("read")) or 0)
    compute = positive(peaks["matmul"].get(dtype))
    return (bandwidth, compute) if bandwidth and compute else None


def _by_work(rows: list[Record]) -> dict[str, list[tuple[str, float]]]:
    """Providers' shares of the roofline, by what they were given to do: what differs of it."""
    found = [(row["subject"], share) for row in rows if (share := positive(row.get("roofline")))]
    fields = dict.fromkeys(name for subject, _ in found for name in subject if name != "provider")
    values = {name: {text(subject.get(name)) for subject, _ in found} for name in fields}
    groups: dict[str, list[tuple[str, float]]] = {}
    for subject, share in found:
        differing = [text(subject.get(name)) for name in fields if len(values[name]) > 1]
        group = groups.setdefault(label(", ".join(differing) or "all"), [])
        group.append((text(subject.get("provider")), share))
    return groups


def _draw_shares(
    axes: Axes, groups: dict[str, list[tuple[str, float]]], styles: dict[str, Style]
) -> None:
    for y, shares in enumerate(groups.values()):
        for provider, share in shares:
            axes.plot(100 * share, y, linestyle="none", label=label(provider), **styles[provider])
    name_rows(axes, list(groups))
    axes.grid(visible=True, axis="y")
    axes.axvline(100, color=INK, linewidth=1)
    axes.set_xlim(0)
    axes.set_xlabel("share of the roofline, %: more is better")
    axes.set_title("How much of its roof each reaches")


@styled
def plot_model(record: Record) -> Figure:
    """Tokens a second of each engine by batch and length, a panel a task, each with its spread.

    Raises:
        UserError: where no speed stands beside a check that is not red.
    """
    rows = [row for row in record["rows"] if check(row) is not False and _speed(row)][:_MOST_POINTS]
    if not rows:
        raise UserError("nothing to plot: no speed was measured beside a check that is not red")
    styles = distinct_styles(_engine(row) for row in rows)
    tasks: dict[str, list[Record]] = {}
    for row in rows:
        tasks.setdefault(text(row["subject"].get("task")), []).append(row)
    tasks = dict(list(tasks.items())[:_MOST_BARS])
    sizes = {task: list(dict.fromkeys(map(_size, found))) for task, found in tasks.items()}
    step = 0.17 * (len(styles) + 1)  # inches a size
    heights = [1.0 + step * len(sizes[task]) for task in tasks]
    legend = 0.3 + 0.2 * (len(styles) // 3)
    figure = Figure(figsize=(WIDTH, legend + sum(heights)))
    panels = figure.subplots(len(tasks), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (task, found) in zip(panels, tasks.items(), strict=True):
        _draw_speeds(axes, found, sizes[task], styles)
        axes.set_title(label(task))
    panels[-1].set_xlabel("tokens/s (p50, with p20 to p80): more is better")
    add_legend(figure)
    return figure


def _engine(row: Record) -> str:
    subject = row["subject"]
    precision = subject.get("precision")
    return text(subject.get("engine")) + (f", {text(precision)}" if precision else "")


def _size(row: Record) -> str:
    subject = row["subject"]
    parts = (("batch", "batch {}"), ("prompt_tokens", "{} tokens"), ("new_tokens", "{} new"))
    found = [said.format(text(subject[name])) for name, said in parts if subject.get(name)]
    return label(", ".join(found) or "all")


def _speed(row: Record) -> tuple[float, float, float] | None:
    """Tokens a second: at the 80 % quantile of the time, at its median, at its 20 % quantile."""
    time, rate = timing(row.get("seconds")), positive(row.get("tokens_per_second"))
    if time is None or rate is None:
        return None
    tokens = rate * time.median
    return tokens / time.quantile(80), rate, tokens / time.quantile(20)


def _draw_speeds(
    axes: Axes, rows: list[Record], sizes: list[str], styles: dict[str, Style]
) -> None:
    for row in rows:
        speed = _speed(row)
        assert speed is not None
        low, middle, high = speed
        engine = _engine(row)
        place = (list(styles).index(engine) + 1) / (len(styles) + 1) - 0.5
        y = sizes.index(_size(row)) + place
        axes.plot([low, high], [y, y], color=styles[engine]["color"], linewidth=1.4)
        axes.plot(middle, y, linestyle="none", label=label(engine), **styles[engine])
    for y in range(1, len(sizes)):
        axes.axhline(y - 0.5, color=GREY, linewidth=0.4)
    name_rows(axes, sizes)
    axes.set_ylim(len(sizes) - 0.5, -0.5)
    set_log(axes, "x", "")


@styled
def plot_ladder(record: Record) -> Figure:
    """Time of each rung, the first on top, with its speed-up to the first; below it, where the
    record has an on/off matrix with times, each set of kernels' speed-up over PyTorch's.

    Raises:
        UserError: where no rung was timed.
    """
    rungs = [row for row in record["rows"] if "rung" in row["subject"]][:_MOST_BARS]
    if not any(timing(row.get("seconds")) for row in rungs):
        raise UserError("nothing to plot: no rung was timed")
    matrix = [row for row in record["rows"] if "matrix" in row["subject"] and speedup(row)]
    matrix = matrix[:_MOST_BARS]
    heights = [len(rungs), *[len(matrix)] * bool(matrix)]
    figure = Figure(figsize=(WIDTH, 1.1 * len(heights) + 0.34 * sum(heights)))
    axes = figure.subplots(len(heights), squeeze=False, height_ratios=[n + 2.5 for n in heights])
    _draw_rungs(axes[0, 0], rungs)
    if matrix:
        _draw_matrix(axes[1, 0], matrix)
    return figure


def _draw_rungs(axes: Axes, rungs: list[Record]) -> None:
    times = [timing(row.get("seconds")) for row in rungs]
    longest = max(time.quantile(80) for time in times if time)
    for y, (row, time) in enumerate(zip(rungs, times, strict=True)):
        if time is None:
            why = f"skipped: {text(row['skipped'])}" if row.get("skipped") else "not timed"
            axes.text(0.008 * longest, y, label(why, 64), va="center", color=GREY, style="italic")
            continue
        red = check(row) is False
        style: Style = {"edgecolor": RED, "hatch": "////"} if red else {}
        axes.barh(y, time.median, 0.62, color="white" if red else COLOURS[0], **style)
        draw_spread(axes, time, y)
        found = speedup(row)
        said = "check red: no speed-up" if red else f"{found}" if found else ""
        axes.annotate(
            f"{si(time.median, 's')}{', ' * bool(said)}{said}",
            (time.quantile(80), y),
            (6, 0),
            textcoords="offset points",
            va="center",
            color=RED if red else INK,
        )
    name_rows(axes, [label(row["subject"]["rung"]) for row in rungs])
    axes.set_xlim(0, 1.5 * longest)
    set_unit(axes.xaxis, "s")
    axes.set_xlabel("time (p50, with p20 to p80): less is better")
    axes.set_title("Each rung on top of the one before; speed-up to the first")


def _draw_matrix(axes: Axes, matrix: list[Record]) -> None:
    for y, row in enumerate(matrix):
        found = speedup(row)
        assert found is not None
        errors = [[found.ratio - found.low], [found.high - found.ratio]]
        axes.errorbar(found.ratio, y, xerr=errors, fmt="o", color=COLOURS[0], capsize=3)
    axes.axvline(1, color=INK, linewidth=1)
    name_rows(axes, [label(", ".join(map(text, row["subject"].values()))) for row in matrix])
    axes.set_xlabel("speed-up over PyTorch's operations, with its 95 % interval")
    axes.set_title("Each kernel alone, and each left out")


@styled
def plot_profile(record: Record) -> Figure:
    """The operations that took longest themselves, and memory over time.

    Raises:
        UserError: where the record has neither.
    """
    timed = [
        (label(row["subject"]["operation"]), seconds, number(row.get("share")))
        for row in record["rows"]
        if "operation" in row["subject"] and (seconds := positive(row.get("self_seconds")))
    ]
    timed = sorted(timed, key=lambda found: -found[1])[:_MOST_OPERATIONS]
    lines = [
        (label(row["subject"]["timeline"]), line)
        for row in record["rows"]
        if "timeline" in row["subject"] and (line := _line(row))
    ]
    if not timed and not lines:
        raise UserError("nothing to plot: neither operations nor a timeline")
    heights = [*[1 + 0.3 * len(timed)] * bool(timed), *[2.2] * len(lines)]
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.3))
    axes = list(figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0])
    if timed:
        _draw_operations(axes.pop(0), timed)
    for ax, (name, (times, values)) in zip(axes, lines, strict=True):
        ax.fill_between(times, values, step="post", color=COLOURS[5], alpha=0.35, linewidth=0)
        ax.step(times, values, where="post", color=COLOURS[0])
        set_unit(ax.xaxis, "s")
        set_unit(ax.yaxis, "B")
        ax.set_ylim(0)
        ax.set_xlim(times[0], times[-1])
        ax.set_xlabel("time")
        ax.set_title(f"{name}: peak {si(max(values), 'B')}")
    return figure


def _draw_operations(axes: Axes, timed: list[tuple[str, float, float | None]]) -> None:
    for y, (_, seconds, share) in enumerate(timed):
        axes.barh(y, seconds, 0.62, color=COLOURS[0])
        said = si(seconds, "s") + ("" if share is None else f", {100 * share:.1f} %")
        axes.annotate(said, (seconds, y), (6, 0), textcoords="offset points", va="center")
    name_rows(axes, [name for name, _, _ in timed])
    axes.set_xlim(0, 1.3 * timed[0][1])
    set_unit(axes.xaxis, "s")
    axes.set_xlabel("own time, all calls")
    axes.set_title("Operations that took longest")


def _line(row: Record) -> tuple[list[float], list[float]] | None:
    """Bytes over seconds, if the row has both for at least two moments."""
    parts = (row.get("times"), row.get("used") or row.get("bytes"))
    times, values = ([number(x) for x in part] if isinstance(part, list) else [] for part in parts)
    found = [(x, y) for x, y in zip(times, values, strict=False) if x is not None and y is not None]
    if len(found) < 2 or len(times) != len(values):
        return None
    return [x for x, _ in found], [y for _, y in found]


class Plot(NamedTuple):
    """How a kind of result is drawn.

    Attributes:
        title: of the kind, for people.
        description: how to read the plot.
    """

    title: str
    description: str
    draw: Callable[[Record], Figure]


PLOTS = {
    "parity": Plot(
        "Parity with transformers",
        "The error after each operation, relative to an fp64 run: ours, transformers' own with two "
        "kinds of attention, and what is allowed. Lower is better; a cross is beyond it.",
        plot_parity,
    ),
    "kernels": Plot(
        "Kernels beside their baselines",
        "Each operation's rate against the peaks measured in the same run, and the share of that "
        "roof it reaches. Further up, or right, is better.",
        plot_kernels,
    ),
    "model": Plot(
        "The whole model beside other engines",
        "Tokens a second by task, batch and length: the median, and the range from the 20 % to the "
        "80 % quantile. Further right is better.",
        plot_model,
    ),
    "ladder": Plot(
        "Optimisations, one rung at a time",
        "Time of one job after each change on top of those before it; shorter is better. Speed-ups "
        "are to the first rung.",
        plot_ladder,
    ),
    "profile": Plot(
        "Where the time goes",
        "Operations by their own time, without what they called, and memory in use over time.",
        plot_profile,
    ),
    "evaluation": Plot(
        "The score of a text",
        "Time to score the same tokens after each change on top of those before it; shorter is "
        "better. Speed-ups are to the first rung.",
        plot_ladder,
    ),
}
"""By the kind of the record, every one of :data:`gptile.bench.result.KINDS`."""
