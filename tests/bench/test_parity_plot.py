"""The plot of a comparison: what is drawn, from a record that anybody may have written."""

from typing import Any

import pytest

from gptile.bench.plots import plot_parity
from gptile.model.errors import UserError


def row(error: Any, layer: int | None, section: str = "forward", **fields: Any) -> dict[str, Any]:
    subject = {"dtype": "float32", "kernels": "auto", "section": section, "quantity": "output"}
    measures = {"error": error, "eager": 1e-7, "sdpa": 2e-7, "allowed": 3e-7, "ok": True}
    return {"subject": {**subject, "layer": layer}, **measures, **fields}


def test_each_pass_is_a_panel_with_its_layers() -> None:
    rows = [row(0.0, None), row(1e-7, 0), row(2e-7, 0), row(4e-7, 1, ok=False)]
    rows += [row(1e-7, 1, "backward"), row(1e-7, 0, "backward")]
    figure = plot_parity({"rows": rows})
    forward, backward = figure.axes
    assert [text.get_text() for text in forward.get_xticklabels()] == ["0", "1"]
    assert list(forward.get_xticks()) == [1, 3]
    assert [text.get_text() for text in backward.get_xticklabels()] == ["1", "0"]
    lines = {line.get_label(): line for line in forward.lines}
    assert list(lines["ours"].get_ydata())[1:] == [1e-7, 2e-7, 4e-7]
    assert list(lines["transformers, sdpa"].get_ydata()) == [2e-7] * 4
    assert list(lines["beyond what is allowed"].get_xdata()) == [3]
    assert forward.get_yscale() == "log"
    assert "beyond what is allowed" not in {line.get_label() for line in backward.lines}


def test_parameters_and_unreadable_values_are_left_out() -> None:
    rows = [row(1e-7, 0), row("1e-7", 0), row(None, 1), row(1e-7, 1, eager=None, ok=None)]
    rows.append({"subject": {"section": "backward", "quantity": "grad wte.weight"}, "error": 1e-7})
    (axes,) = plot_parity({"rows": rows}).axes
    assert len(axes.lines[0].get_ydata()) == 2


@pytest.mark.parametrize("rows", [[], [row(None, 0)], [{"subject": {}, "error": 1e-7}]])
def test_nothing_to_draw_is_said(rows: list) -> None:
    with pytest.raises(UserError, match="nothing to plot"):
        plot_parity({"rows": rows})
