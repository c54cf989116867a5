"""Tests of the runs that each transfer test asks for, given the plan and the results so far, and of
the verdict on them.

A transfer test has a grid of runs. The test of the learning rate over width has a second grid, the
control, in the standard parametrization.
"""

import dataclasses
import math

import pytest
from tiny_study import make_result, write_plan_with

from forerun._launcher.study.experiments.sizes import (
    Sizes,
    build_run_at,
    get_base_sizes,
    get_base_value,
    list_axis_sizes,
)
from forerun._launcher.study.experiments.transfer_tests import (
    ROUNDING_OCTAVES,
    GridSettings,
    build_transfer_test,
    judge_test,
)
from forerun._launcher.study.stages.study_folder import read_study
from forerun._transfer.question import to_log2

BEST = {"learning_rate": 0.02, "warmup_fraction": 0.1, "clip_norm": 1.0}
"""Point that the search settled on."""
TARGET = Sizes(width=64, depth=1, batch=64, duration=40 * 64 * 16)
"""Sizes of the main run."""
ALL_AXES = """
[proxy]
num_steps = 40
weight_decay = 0.1
[transfer]
widths = [8, 16, 32, 64]
durations = [0.5, 1.0, 2.0]
depths = [1, 2, 4]
batches = [0.5, 1.0, 2.0]
axis_num_seeds = 2
hyperparameters = { clip_norm = ["width", "duration"], weight_decay = ["width"], beta2 = ["batch"] }
"""


@pytest.fixture(scope="module")
def study(folder):
    return read_study(write_plan_with(folder, ALL_AXES), folder / "study")


def replace_transfer(study, **changes):
    """Return the study with other keys in its plan's transfer section."""
    transfer = study.plan.transfer.model_copy(update=changes)
    return dataclasses.replace(study, plan=study.plan.model_copy(update={"transfer": transfer}))


def make_settings(study, results=(), rounds=0):
    return GridSettings(study=study, results=dict(results), best=BEST, target=TARGET, rounds=rounds)


def plant_losses(grid, optimum, drift=0.0):
    """Return results whose losses lie on a parabola, plus a little noise.

    Args:
        grid: Runs that get a result.
        optimum: Log2 of the optimal value at the smallest size.
        drift: Octaves by which the optimum moves per doubling of the size.
    """
    smallest = min(grid.get_size(spec) for spec, _ in grid.specs)
    results = {}
    for spec, x in grid.specs:
        size = grid.get_size(spec)
        octaves = x - optimum - drift * math.log2(size / smallest)
        noise = 0.001 * math.sin(7 * spec.seed + 3 * x + size)  # any irregular function
        results[spec.id] = make_result(spec, 3.0 + 0.05 * octaves**2 + noise)
    return results


def grow_test(study, axis, optimum, drift=0.0):
    """Give results to a test of the learning rate until it asks for no more runs; return the test
    and its results.
    """
    results = {}
    for _ in range(1 + len(list_axis_sizes(study, axis))):  # each round adds a size or ends
        test = build_transfer_test(make_settings(study, results), "learning_rate", axis)
        if test.grid.is_done(results):
            return test, results
        results |= plant_losses(test.grid, optimum, drift)
    raise AssertionError("the test asks for more and more runs")


def list_log2_values(grid, size):
    """Return the base-2 logarithms of the rates that are run at a size, ascending."""
    return sorted({x for spec, x in grid.specs if grid.get_size(spec) == size})


@pytest.mark.parametrize("drift", [0.0, -0.5])
def test_larger_sizes_use_fewer_rates_around_the_predicted_optimum(study, drift):
    base_optimum = -5.5
    grid = grow_test(study, "width", base_optimum, drift)[0].grid
    narrow = study.plan.transfer.narrow_offsets_octaves
    for size, doublings in ((32, 2), (64, 3)):
        log2_values = list_log2_values(grid, size)
        center = log2_values[0] - min(narrow)
        assert log2_values == [center + offset for offset in narrow]
        # The center is the predicted optimum, rounded to a step of 0.25 octaves. Rounding moves it
        # by up to half a step, and the noise by up to another half.
        assert center % ROUNDING_OCTAVES == 0
        assert abs(center - (base_optimum + drift * doublings)) <= 0.26


def test_every_axis_varies_only_its_own_size(study):
    base = get_base_sizes(study)
    point = {**BEST, "learning_rate": 0.01}
    assert base == Sizes(width=8, depth=1, batch=64, duration=40 * 64)
    assert list_axis_sizes(study, "duration") == (20 * 64, 40 * 64, 80 * 64)
    assert list_axis_sizes(study, "batch") == (32, 64, 128)
    for axis in ("width", "depth", "batch", "duration"):
        for size in list_axis_sizes(study, axis):
            spec = build_run_at(study, axis, size, point, 0)
            sizes = Sizes(
                width=spec.shape.width,
                depth=spec.shape.num_layers,
                batch=spec.batch_tokens,
                duration=spec.num_tokens,
            )
            assert sizes == dataclasses.replace(base, **{axis: size})


def test_axes_share_their_run_at_the_base(study):
    base = get_base_sizes(study)
    point = {**BEST, "learning_rate": 0.01}
    ids_at_base = {
        build_run_at(study, axis, base.get_size(axis), point, 0).id
        for axis in ("width", "depth", "batch")
    }
    assert len(ids_at_base) == 1


@pytest.mark.parametrize(
    ("optimum", "grows"),
    [
        (-1.0, True),  # beyond the highest rate of the grid
        (-5.5, False),  # within the grid
    ],
)
def test_grid_of_the_control_grows_only_until_it_brackets_its_optimum(study, optimum, grows):
    # The tiny margin leaves the verdict open, so only the bracketing decides about more runs.
    two_widths = replace_transfer(study, margin_nats=1e-6, widths=(8, 16))
    first = build_transfer_test(make_settings(two_widths), "learning_rate", "width")
    results = plant_losses(first.grid, optimum) | plant_losses(first.control, optimum)
    again = build_transfer_test(
        make_settings(two_widths, results, rounds=1), "learning_rate", "width"
    )
    assert (again.control != first.control) == grows


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("clip_norm", "width"),
        ("weight_decay", "width"),
        ("beta2", "batch"),
        ("clip_norm", "duration"),
    ],
)
def test_other_hyperparameters_are_tested_around_their_value_at_the_base(study, name, axis):
    grid = build_transfer_test(make_settings(study), name, axis).grid
    assert {spec.hparams.learning_rate for spec, _ in grid.specs} == {BEST["learning_rate"]}
    base_value = get_base_value(study, name, BEST)
    values_at_base = {
        getattr(spec.hparams, name) for spec, x in grid.specs if x == to_log2(name, base_value)
    }
    assert values_at_base == {base_value}
    for spec, x in grid.specs:
        assert to_log2(name, getattr(spec.hparams, name)) == pytest.approx(x, abs=1e-4)


def test_other_hyperparameters_are_tested_at_the_base_and_the_farthest_width(study):
    specs = build_transfer_test(make_settings(study), "clip_norm", "width").grid.specs
    assert {spec.shape.width for spec, _ in specs} == {8, 64}


OPTIMUM, DRIFT = -5.5, -0.4
"""Log2 of the best learning rate at the smallest size, and the octaves by which it moves per
doubling.
"""


def judge_planted_drift(study, axis):
    """Return the verdict of the learning rate's test over an axis if its optimum drifts."""
    test, results = grow_test(study, axis, OPTIMUM, DRIFT)
    return judge_test(make_settings(study, results), test, None)


def test_exponent_over_duration_is_measured(study):
    verdict = judge_planted_drift(study, "duration")
    assert verdict.question.power is None
    assert verdict.drift.estimate == pytest.approx(DRIFT, abs=0.05)
    assert verdict.regret_nats.estimate < study.plan.transfer.margin_nats
    # Three durations do not distinguish a line from a curve that levels off
    # (benchmarks/statistics/bend.py).
    assert verdict.outcome == "cannot_tell"


def test_drift_over_width_is_not_measured_and_refused(study):
    verdict = judge_planted_drift(study, "width")
    assert verdict.question.power is not None
    assert verdict.drift.estimate == pytest.approx(DRIFT, abs=0.05)
    assert verdict.regret_nats.estimate >= study.plan.transfer.margin_nats
    assert verdict.outcome == "drifts"


def test_drift_over_duration_is_refused_without_a_measured_rule(study):
    without_rules = replace_transfer(study, measured_rules=())
    assert judge_planted_drift(without_rules, "duration").outcome == "drifts"
