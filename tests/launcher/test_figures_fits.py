"""The ladder's figures show what the body says: every law by name, nothing dropped, nothing on other text."""

import itertools
import math
import re
import xml.etree.ElementTree as ET

import pytest
from example_report import finished_body
from matplotlib.axes import Axes
from test_figures_transfer import LETTER, texts

from launcher.figures import fits as figures_fits
from launcher.figures.panel import svg_of


@pytest.fixture
def body():
    return finished_body()


def ladder(body):
    return svg_of(figures_fits.ladder(body))


def residuals(body):
    return svg_of(figures_fits.residuals(body))


def said_in(svg):
    return [said for said, *_ in texts(svg)]


def losses_on_axis(svg):
    """Labels of the loss axis as numbers."""
    return [float(said) for said in said_in(svg) if re.fullmatch(r"\d\.?\d*", said)]


def test_every_law_stands_at_the_end_of_its_line_with_its_weight(body):
    said = said_in(ladder(body))
    for member in body["fit"]["members"]:
        assert f"{member['form']} {100 * member['weight']:.0f} %" in said
    assert {"main run", "best for the compute", "back-test", "width 96"} <= set(said)


def test_a_law_without_a_frontier_has_no_line_and_a_law_alone_no_name(body):
    whole = ladder(body)
    body["fit"]["members"][1]["frontier"] = None
    two = said_in(ladder(body))
    assert not any(said.startswith("coupled") for said in two)
    assert any(said.startswith("power") for said in two)
    body["fit"]["members"][2]["frontier"] = None
    one = ladder(body)
    assert not any(said.startswith("chinchilla") for said in said_in(one)), "it is the pool's own frontier"
    assert one.count("<path") < whole.count("<path")


def test_names_of_laws_that_end_together_do_not_meet(body):
    for member in body["fit"]["members"]:
        member["frontier"][-1]["loss_nats"] = 1.7
    heights = sorted(y for said, _, y, _ in texts(ladder(body)) if said.endswith(" %"))
    assert len(heights) == 3
    assert min(b - a for a, b in itertools.pairwise(heights)) > 8.5


def test_a_law_or_a_band_that_explodes_does_not_flatten_the_rungs(body):
    body["fit"]["members"][2]["frontier"][-1]["loss_nats"] = 1e-6
    body["frontier"][-1]["interval"] = [1e-3, 1e6]
    body["choice"]["prediction"]["interval"] = [1e-3, 1e6]
    ticks = losses_on_axis(ladder(body))
    losses = [rung["loss_nats"] for rung in body["ladder"]["rungs"]]
    assert sum(min(losses) <= tick <= max(losses) for tick in ticks) >= 2
    assert min(ticks) > 0.5 * min(losses) and max(ticks) < 2 * max(losses)


def test_the_axis_of_losses_has_a_few_round_numbers(body):
    for factor in (0.1, 1.0, 4.0):
        scaled = finished_body()
        for rung in scaled["ladder"]["rungs"]:
            rung["loss_nats"] *= factor
        scaled |= {"frontier": None, "choice": None}
        scaled["fit"] |= {"backtest": None, "members": []}
        assert 3 <= len(losses_on_axis(ladder(scaled))) <= 8


def test_held_out_runs_are_drawn_with_their_intervals_or_without(body):
    drawn = ladder(body)
    body["fit"]["backtest"]["runs"][0]["interval"] = None
    bare = ladder(body)
    assert bare != drawn and "back-test" in said_in(bare)
    body["fit"]["backtest"] = None
    assert "back-test" not in said_in(ladder(body))


def test_a_forecast_outside_its_own_interval_is_drawn_where_it_is(body):
    """Of a degenerate fit: the resampled ones lie elsewhere, above the point or below it."""
    predicted, held_out = body["choice"]["prediction"], body["fit"]["backtest"]["runs"][0]
    predicted |= {"loss": 1.0, "interval": [1.2, 2.0]}
    held_out |= {"predicted": 3.0, "interval": [1.5, 2.5]}
    figure = drawn_axes(lambda: ladder(body))
    for label, value, (low, high) in (("main run", 1.0, (1.2, 2.0)), ("back-test", 3.0, (1.5, 2.5))):
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
        patched.setattr(Axes, "set_xlabel", lambda axes, *said: (seen.append(axes), labelled(axes, *said)))
        draw()
    return seen[0]


def test_a_band_needs_intervals(body):
    whole = ladder(body)
    for point in body["frontier"]:
        point["interval"] = None
    bare = ladder(body)
    assert "opacity:0.16" in whole and "opacity:0.16" not in bare
    assert "90 % of new runs" in said_in(whole) and "90 % of new runs" not in said_in(bare)


def test_where_the_rungs_end_is_marked_and_what_was_foretold_lies_beside_them(body):
    """A line at the largest rung that has a loss; without a forecast there is nothing beyond it."""
    assert "largest rung" in said_in(ladder(body))
    lines, xs = [], []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Axes, "axvline", lambda axes, x, **_: lines.append(x))
        patched.setattr(
            figures_fits, "interval_marks",
            lambda axes, points, _, **told: xs.append((told["label"], [x for x, _ in points], axes.get_xlim())),
        )  # fmt: skip
        ladder(body)
    assert lines == [math.log10(max(rung["flops"] for rung in body["ladder"]["rungs"]))]
    ((_, held, (left, right)),) = [one for one in xs if one[0] == "back-test"]
    assert all(at < lines[0] - 0.02 * (right - left) for at in held), "or their marks hide each other"
    assert "largest rung" not in said_in(ladder(body | {"choice": None, "frontier": None}))


def test_residuals_lie_at_measured_over_fitted(body):
    before = residuals(body)
    assert before.count("opacity:0.1;") + before.count('opacity:0.1"') >= 2, "one and two standard deviations"
    body["ladder"]["rungs"][3]["loss_nats"] = body["ladder"]["rungs"][3]["fitted_nats"] * 1.5
    after = losses_on_axis(residuals(body))
    assert max(after) >= 20, "percent of the loss"


def no_law(body):
    body |= {"frontier": None, "choice": None}
    body["fit"] |= {"backtest": None, "residual_sd": None}
    for member in body["fit"]["members"]:
        member["frontier"] = None
    for rung in body["ladder"]["rungs"]:
        rung["fitted_nats"] = None
    return body


def test_without_a_law_there_are_the_rungs(body):
    svg = ladder(no_law(body))
    assert {"width 32", "width 96"} <= set(said_in(svg))
    assert "main run" not in said_in(svg)
    ET.fromstring(residuals(body))


def no_losses(body):
    no_law(body)
    for rung in body["ladder"]["rungs"]:
        rung["loss_nats"] = None
    return body


@pytest.mark.parametrize("change", [lambda body: body, no_law, no_losses])
def test_nothing_is_cut_off_or_lies_on_other_text(body, change):
    change(body)
    for svg in (ladder(body), residuals(body)):
        ET.fromstring(svg)
        assert not re.search(r"\bnan\b", svg)
        assert not re.search(r":#(?!fff)[0-9a-f]{6}", svg), "a colour that a dark page cannot change"
        width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())
        boxes = [(said, x, x + LETTER * size * len(said), y - 0.7 * size, y) for said, x, y, size in texts(svg)]
        for said, left, right, _, bottom in boxes:
            assert left > -3 and right < width + 3 and 0 < bottom <= height, said
        for i, (said, left, right, top, bottom) in enumerate(boxes):
            for other, left_2, right_2, top_2, bottom_2 in boxes[:i]:
                apart = left >= right_2 - 1 or left_2 >= right - 1 or top >= bottom_2 or top_2 >= bottom
                assert apart, f"{said} on {other}"
