"""Tests of the figures of the ladder and of the main run: axes, marks, and labels that fit."""

import math
import re

import pytest
from drawings import check_drawing, find_texts
from example_report import make_finished_body
from matplotlib.axes import Axes

from forerun._launcher.report.figures import ladder as figures_ladder
from forerun._launcher.report.figures.panel import render_svg


@pytest.fixture
def body():
    """JSON of a finished study's report, which a test may change."""
    return make_finished_body()


def draw_ladder(body):
    """Return the SVG of the ladder's figure."""
    return render_svg(figures_ladder.ladder(body))


def list_labels(svg):
    """Return the texts of a figure."""
    return [label for label, *_ in find_texts(svg)]


def list_loss_ticks(svg):
    """Return the labels of the loss axis as numbers."""
    return [float(label) for label in list_labels(svg) if re.fullmatch(r"\d\.?\d*", label)]


def test_huge_interval_does_not_flatten_the_rungs(body):
    body["frontier"][-1]["interval"] = [1e-3, 1e6]
    body["choice"]["prediction"]["interval"] = [1e-3, 1e6]
    ticks = list_loss_ticks(draw_ladder(body))
    losses = [rung["loss_nats"] for rung in body["ladder"]["rungs"]]
    assert sum(min(losses) <= tick <= max(losses) for tick in ticks) >= 2
    assert min(ticks) > 0.5 * min(losses) and max(ticks) < 2 * max(losses)


def test_forecast_outside_its_interval_is_drawn_where_it_is(body):
    """The forecasts of a degenerate fit to resampled runs may all lie on one side of its own."""
    predicted, held_out = body["choice"]["prediction"], body["fit"]["backtest"]["runs"][0]
    predicted |= {"loss": 1.0, "interval": [1.2, 2.0]}
    held_out |= {"predicted": 3.0, "interval": [1.5, 2.5]}
    axes = capture_axes(lambda: draw_ladder(body))
    for label, value, (low, high) in (
        ("main run", 1.0, (1.2, 2.0)),
        ("back-test", 3.0, (1.5, 2.5)),
    ):
        (marks,) = [marks for marks in axes.containers if marks.get_label() == label]
        line, _, (bars,) = marks.lines
        assert line.get_ydata()[0] == pytest.approx(math.log10(value))
        assert bars.get_segments()[0][:, 1] == pytest.approx([math.log10(low), math.log10(high)])
    bottom, top = axes.get_ylim()
    assert bottom < math.log10(1.0) and math.log10(3.0) < top


def capture_axes(draw):
    """Draw a figure and return its first matplotlib axes."""
    captured = []
    set_xlabel = Axes.set_xlabel

    def capture(axes, *arguments):
        captured.append(axes)
        return set_xlabel(axes, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Axes, "set_xlabel", capture)
        draw()
    return captured[0]


def remove_law(body):
    """Remove the fitted law from the report, and return the report."""
    body |= {"frontier": None, "choice": None}
    body["fit"] |= {"backtest": None, "residual_sd": None}
    for rung in body["ladder"]["rungs"]:
        rung["fitted_nats"] = None
    return body


def test_ladder_without_a_law_shows_the_rungs(body):
    svg = draw_ladder(remove_law(body))
    assert {"width 32", "width 96"} <= set(list_labels(svg))
    assert "main run" not in list_labels(svg)


def remove_losses(body):
    """Remove the law and the losses of the rungs from the report, and return the report."""
    remove_law(body)
    for rung in body["ladder"]["rungs"]:
        rung["loss_nats"] = None
    return body


@pytest.mark.parametrize("change", [lambda body: body, remove_law, remove_losses])
def test_no_text_of_the_ladder_is_cut_off_or_overlaps(body, change):
    change(body)
    check_drawing(draw_ladder(body))


@pytest.mark.parametrize("num_steps", [40, 900, 13_914, 1_000_000, 250_000_000])
def test_labels_of_steps_do_not_overlap(body, num_steps):
    """Without room between them, "5,000" and "10,000" read as "5,00010,000"."""
    shares = (1e-3, 1e-2, 0.05, 0.1, 0.5, 1)
    steps = sorted({max(1, round(num_steps * share)) for share in shares})
    curve = [{"step": step, "loss_nats": 1.3, "low_nats": 1.2, "high_nats": 1.5} for step in steps]
    body["decision"]["predicted"]["curve"] = curve
    body["main_run"] = {
        "steps": steps,
        "train_loss_nats": [2.0] * len(steps),
        "validation_loss_nats": None,
        "event": None,
    }
    svg = render_svg(figures_ladder.main_run(body))
    check_drawing(svg)
    step_labels = [label for label in list_labels(svg) if re.fullmatch(r"[1235],?0[\d,]*", label)]
    assert len(step_labels) >= 2
