"""Reports with unusual transfer tests: undecided, one seed, six sizes, or far extrapolated."""

import functools
import json
import math

import numpy as np
from example_report import LOG2_RATES, WIDTHS, judge_test, make_basin_runs, make_finished_body

from forerun._transfer.verdict.joint_verdict import judge_axes_together
from forerun._transfer.verdict.summary import summarize_joint_verdict

NAMES = ("undecided", "six sizes", "one seed, below the base", "far")
"""Names of the reports, in the order of `_make_cases`."""


@functools.cache
def _make_cases():
    """Return the section `transfer` of each report by name.

    All cases draw from one generator, so their order fixes the losses. A new case goes last.
    """
    rng = np.random.default_rng(1)
    cases = {
        "undecided": _build_section(_judge_undecided(rng), {"width": 1.6, "depth": 1.0}),
        "six sizes": _build_section(
            [_judge_six_sizes(rng), _judge_batch(rng), _judge_beta2(rng)],
            {"width": 7.0, "batch": 6.0},
        ),
        "one seed, below the base": _build_section([_judge_one_seed(rng)], {"width": -1.4}),
        "far": _build_section(
            [_judge_one_seed(rng), _judge_far(rng)], {"width": -1.4, "duration": 13.3}
        ),
    }
    assert tuple(cases) == NAMES
    return cases


def make_unusual_body(name):
    """Return a report with this section `transfer` and no other stage, a new copy."""
    sections = ("search", "ladder", "fit", "frontier", "choice", "decision", "digest", "wider")
    return make_finished_body() | {
        **dict.fromkeys(sections),
        "question": {"proxy": {"parametrization": "mup"}},
        "progress": {},
        "transfer": json.loads(json.dumps(_make_cases()[name])),
    }


def _build_section(tests, doublings):
    """Return the section `transfer` of these tests, with one value that was not tested.

    Args:
        tests: Pairs of `judge_test`.
        doublings: Doublings from the base to the target, by axis.
    """
    rate_verdicts = [
        verdict for test, verdict in tests if test["hyperparameter"] == "learning_rate"
    ]
    no_estimate = {"value": None, "interval": None}
    untested = {
        "hyperparameter": "weight_decay",
        "base_value": 0.1,
        "target_value": 0.1,
        "rule": "as it is",
        "tested": [],
        "untested": ["width"],
        "outcome": None,
        "drifts": {},
        "regret_nats": no_estimate,
        "cost_of_2x_off_nats": None,
    }
    return {
        "tests": [test for test, _ in tests],
        "together": summarize_joint_verdict(judge_axes_together(rate_verdicts, doublings)),
        "values": [untested],
        "learning_rate": 0.02,
        "at_base_optimum": False,
    }


def _judge_undecided(rng):
    """Return a test and its verdict, in a list: one basin is good, one is flat, and the optimum of
    one is outside the range.

    The control's optimum is outside the range at every width.
    """
    basins = (
        (32, LOG2_RATES, -5.4, 0.03),
        (64, LOG2_RATES, -5.4, 0.0),
        (128, LOG2_RATES[:4], -4.0, 0.03),
    )
    runs = []
    for width, values, optimum, curvature in basins:
        runs += make_basin_runs(
            rng, sizes=(width,), base=32, values=values, optimum=optimum, curvature=curvature
        )
    runs += make_basin_runs(
        rng, sizes=WIDTHS, base=32, values=LOG2_RATES[:4], optimum=-2.0, arm="sp"
    )
    return [judge_test(runs, axis="width", base_size=32, target_size=96)]


def _judge_six_sizes(rng):
    """Return a test with narrower grids at larger widths and rates at which one seed diverged."""
    runs = []
    for size in (32, 64, 128, 256, 512, 1024):
        values = LOG2_RATES if size <= 64 else [-5.75 + offset for offset in _list_offsets(size)]
        runs += make_basin_runs(
            rng, sizes=(size,), base=32, values=values, num_seeds=3, optimum=-5.7, drift=-0.15
        )
    for run in runs:
        if run["log2_value"] >= -3 and run["seed"] == 0:
            run |= {"loss_nats": None, "status": "diverged"}
    return judge_test(runs, axis="width", base_size=32, target_size=4096)


def _list_offsets(size):
    """Return a grid's offsets in octaves; the largest size is too dense for heat map numbers."""
    center = (-0.25, 0.0, 0.25) if size == 1024 else (0.0,)
    return (-1.5, -0.75, *center, 0.75, 1.5, 2.75)


def _judge_batch(rng):
    """Return a test over the batch size with a built-in square-root rule."""
    sizes = (8192, 16384, 32768, 65536)
    runs = make_basin_runs(
        rng, sizes=sizes, base=16384, values=LOG2_RATES, num_seeds=2, optimum=-5.5, drift=-0.1
    )
    return judge_test(
        runs,
        axis="batch",
        base_size=16384,
        target_size=1 << 20,
        built_in=0.5,
        transferred_log2=-5.5,
    )


def _judge_beta2(rng):
    """Return a test of beta2, which is searched on the scale of log2(1 - beta2)."""
    transferred_log2 = math.log2(0.05)
    values = [transferred_log2 + offset for offset in (-2.0, -1.0, 0.0, 1.0, 2.0)]
    runs = make_basin_runs(
        rng,
        sizes=WIDTHS,
        base=32,
        values=values,
        num_seeds=3,
        optimum=transferred_log2 - 0.6,
        drift=0.3,
        curvature=0.02,
    )
    return judge_test(
        runs,
        axis="width",
        base_size=32,
        target_size=4096,
        hyperparameter="beta2",
        transferred_log2=transferred_log2,
    )


def _judge_one_seed(rng):
    """Return a test with one seed and a target below the base."""
    runs = make_basin_runs(
        rng, sizes=(64, 128, 256), base=256, values=LOG2_RATES, num_seeds=1, optimum=-5.4
    )
    return judge_test(runs, axis="width", base_size=256, target_size=96)


def _judge_far(rng):
    """Return a test of two short durations whose target is ten thousand times as long."""
    runs = make_basin_runs(
        rng,
        sizes=(102_400, 204_800),
        base=204_800,
        values=LOG2_RATES[1:],
        num_seeds=1,
        optimum=-5.0,
        drift=-0.3,
        curvature=0.01,
    )
    return judge_test(
        runs,
        axis="duration",
        base_size=204_800,
        target_size=2_000_000_000,
        power=None,
        transferred_log2=-5.2,
    )
