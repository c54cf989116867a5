"""The ladder's figures show what the body says: every law by name, nothing dropped, nothing on
other text.
"""

import math
import re

import pytest
from example_report import finished_body
from matplotlib.axes import Axes
from test_figures_transfer import check_drawing, texts

from launcher.figures import fits as figures_fits
from launcher.figures.panel import svg_of


@pytest.fixture
def body():
    return finished_body()


def ladder(body):
    return svg_of(figures_fits.ladder(body))


def said_in(svg):
    return [said for said, *_ in texts(svg)]


def losses_on_axis(svg):
    """Labels of the loss axis as numbers."""
    return [float(said) for said in said_in(svg) if re.fullmatch(r"\d\.?\d*", said)]


def test_a_band_that_explodes_does_not_flatten_the_rungs(body):
    body["frontier"][-1]["interval"] = [1e-3, 1e6]
    body["choice"]["prediction"]["interval"] = [1e-3, 1e6]
    ticks = losses_on_axis(ladder(body))
    losses = [rung["loss_nats"] for rung in body["ladder"]["rungs"]]
    assert sum(min(losses) <= tick <= max(losses) for tick in ticks) >= 2
    assert min(ticks) > 0.5 * min(losses) and max(ticks) < 2 * max(losses)


def test_a_forecast_outside_its_own_interval_is_drawn_where_it_is(body):
    """Of a degenerate fit: the resampled ones lie elsewhere, above the point or below it."""
    predicted, held_out = body["choice"]["prediction"], body["fit"]["backtest"]["runs"][0]
    predicted |= {"loss": 1.0, "interval": [1.2, 2.0]}
    held_out |= {"predicted": 3.0, "interval": [1.5, 2.5]}
    figure = drawn_axes(lambda: ladder(body))
    for label, value, (low, high) in (
        ("main run", 1.0, (1.2, 2.0)),
        ("back-test", 3.0, (1.5, 2.5)),
    ):
        (marks,) = [held for held in figure.containers if held.get_label() == label]
        line, _, (bars,) = marks.lines
        assert line.get_ydata()[0] == pytest.approx(math.log10(value))
        assert bars.get_segments()[0][:, 1] == pytest.approx([math.log10(low), math.log10(high)])
    bottom, top = figure.get_ylim()
    assert bottom < math.log10(1.0) and math.log10(3.0) < top


def drawn_axes(draw):
    """The axes that a figure was painted into."""
    seen = []
    with pytest.MonkeyPatch.context() as patched:
        labelled = Axes.set_xlabel
        patched.setattr(
            Axes, "set_xlabel", lambda axes, *said: (seen.append(axes), labelled(axes, *said))
        )
        draw()
    return seen[0]


def no_law(body):
    body |= {"frontier": None, "choice": None}
    body["fit"] |= {"backtest": None, "residual_sd": None}
    for rung in body["ladder"]["rungs"]:
        rung["fitted_nats"] = None
    return body


def test_without_a_law_there_are_the_rungs(body):
    svg = ladder(no_law(body))
    assert {"width 32", "width 96"} <= set(said_in(svg))
    assert "main run" not in said_in(svg)


def no_losses(body):
    no_law(body)
    for rung in body["ladder"]["rungs"]:
        rung["loss_nats"] = None
    return body


@pytest.mark.parametrize("change", [lambda body: body, no_law, no_losses])
def test_nothing_is_cut_off_or_lies_on_other_text(body, change):
    change(body)
    check_drawing(ladder(body))


@pytest.mark.parametrize("num_steps", [40, 900, 13_914, 1_000_000, 250_000_000])
def test_labels_of_steps_stay_apart(body, num_steps):
    """ "5,000" and "10,000" were drawn as "5,00010,000"."""
    steps = sorted({max(1, round(num_steps * part)) for part in (1e-3, 1e-2, 0.05, 0.1, 0.5, 1)})
    curve = [{"step": step, "loss_nats": 1.3, "low_nats": 1.2, "high_nats": 1.5} for step in steps]
    body["decision"] = {"predicted": {"curve": curve}}
    body["main_run"] = {"steps": steps, "train_loss_nats": [2.0] * len(steps)}
    drawn = svg_of(figures_fits.main_run(body))
    check_drawing(drawn)
    assert sum(bool(re.fullmatch(r"[1235],?0[\d,]*", label)) for label in said_in(drawn)) >= 2
