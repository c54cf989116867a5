import math

import pytest

from transfer.tables import cells


@pytest.mark.parametrize(("cell", "said"), [
    (2.5, 2.5), ("2.5", 2.5), (3, 3.0), (math.nan, None), ("nan", None), ("-inf", None), ("Infinity", None),
    ("diverged", None), (" Diverged ", None),
])  # fmt: skip
def test_losses(cell, said):
    problems = []
    assert cells.loss(cell, "here", problems) == said
    assert problems == []


@pytest.mark.parametrize("cell", ["", None, "two", 0, -1, 1e-300, "1e300", True, "crashed"])
def test_what_is_no_loss_is_refused_with_its_place(cell):
    problems = []
    cells.loss(cell, "row 3, column loss", problems)
    assert problems[0].startswith(f"row 3, column loss: {cell!r} is not a loss > 0")


@pytest.mark.parametrize(("cell", "whole"), [(64, 64), ("64", 64), ("1e6", 10**6), (6.4e10, 64 * 10**9)])
def test_sizes(cell, whole):
    problems = []
    assert cells.whole(cell, "here", 1, problems) == whole
    assert problems == []


@pytest.mark.parametrize("cell", [0, -1, 1.5, "wide", "", None, math.inf, "9" * 400, 10**400, True])
def test_what_is_no_size_is_refused_briefly(cell):
    problems = []
    cells.whole(cell, "here", 1, problems)
    assert "is not a whole number >= 1" in problems[0]
    assert len(problems[0]) < 120


def test_octaves():
    problems = []
    assert cells.octaves("0.25", "learning_rate", "", problems) == -2
    assert cells.octaves("0.75", "beta1", "", problems) == -2
    assert cells.octaves(0, "beta1", "", problems) == 0
    for off in ("weight_decay", "warmup_fraction", "clip_norm"):
        assert cells.octaves("0.0", off, "", problems) is None
    assert problems == []


@pytest.mark.parametrize(("cell", "name"), [
    (0, "learning_rate"), (0, "output_multiplier"), (-0.1, "weight_decay"), (1, "beta2"), (1.5, "beta1"),
    (-0.5, "beta2"), ("nan", "learning_rate"), ("inf", "clip_norm"), (1e305, "learning_rate"), (1e-300, "clip_norm"),
    ("", "weight_decay"), (None, "learning_rate"), (math.inf, "beta1"),
])  # fmt: skip
def test_what_has_no_octave_is_refused(cell, name):
    problems = []
    assert cells.octaves(cell, name, "row 2, column x", problems) is None
    assert problems[0].startswith("row 2, column x: ")


def test_values_written_differently_are_one():
    assert cells.plain("1e-3") == cells.plain(0.001) == cells.plain("0.0010")
    assert cells.plain(None) == cells.plain("") == cells.plain(" ")
    assert cells.plain("nan") == cells.plain("nan")
    assert cells.shown(0.001) == "0.001" and cells.shown("") == "empty" and len(cells.shown("x" * 400)) < 50
