"""Transfer bodies that are not the usual one: undecided, one seed, six sizes, a target below the
base, other axes.
"""

import functools
import json
import math

import numpy as np
from example_report import RATES, WIDTHS, judged_test, valley_runs

from transfer.verdict.joint_verdict import judge_together
from transfer.verdict.summary import together_summary


@functools.cache
def _cases():
    rng = np.random.default_rng(1)
    return {
        "undecided": _body(_undecided(rng), {"width": 1.6, "depth": 1.0}),
        "six sizes": _body(
            [_six_sizes(rng), _batch(rng), _beta2(rng)], {"width": 7.0, "batch": 6.0}
        ),
        "one seed, below the base": _body([_one_seed(rng)], {"width": -1.4}),
        "far": _body([_one_seed(rng), _far(rng)], {"width": -1.4, "duration": 13.3}),
    }


NAMES = ("undecided", "six sizes", "one seed, below the base", "far")


def odd_body(name):
    """A report's body with nothing but one of these transfer parts; a fresh copy."""
    return {
        "question": {"proxy": {"parametrization": "mup"}},
        "progress": {},
        "transfer": json.loads(json.dumps(_cases()[name])),
    }


def _body(tests, doublings):
    rates = [judged for test, judged in tests if test["hyperparameter"] == "learning_rate"]
    none = {"value": None, "interval": None}
    untested = {
        "hyperparameter": "weight_decay",
        "base_value": 0.1,
        "target_value": 0.1,
        "rule": "as it is",
        "tested": [],
        "untested": ["width"],
        "outcome": None,
        "drifts": {},
        "regret_nats": none,
        "cost_of_2x_off_nats": None,
    }
    return {
        "tests": [test for test, _ in tests],
        "together": together_summary(judge_together(rates, doublings)),
        "values": [untested],
        "learning_rate": 0.02,
        "at_base_optimum": False,
    }


def _undecided(rng):
    """A fine width, a flat one, one whose optimum lies outside; the control's lies outside
    everywhere.
    """
    planted = (
        ((32,), RATES, -5.4, 0.03),
        ((64,), RATES, -5.4, 0.0),
        ((128,), RATES[:4], -4.0, 0.03),
    )
    runs = [
        run
        for sizes, values, optimum, bend in planted
        for run in valley_runs(
            rng, sizes=sizes, base=32, values=values, optimum=optimum, curvature=bend
        )
    ]
    runs += valley_runs(rng, sizes=WIDTHS, base=32, values=RATES[:4], optimum=-2.0, arm="sp")
    return [judged_test(runs, axis="width", base_size=32, target_size=96)]


def _six_sizes(rng):
    """Narrower grids at larger widths, and a rate at which some runs of a cell diverged."""
    runs = []
    for size in (32, 64, 128, 256, 512, 1024):
        values = RATES if size <= 64 else [-5.75 + step for step in _narrow(size)]
        runs += valley_runs(
            rng, sizes=(size,), base=32, values=values, num_seeds=3, optimum=-5.7, drift=-0.15
        )
    for run in runs:
        if run["log2_value"] >= -3 and run["seed"] == 0:
            run |= {"loss_nats": None, "status": "diverged"}
    return judged_test(runs, axis="width", base_size=32, target_size=4096)


def _narrow(size):
    """Steps about a prediction; at the largest width so close that a heat map's cells hold no
    number.
    """
    return (-1.5, -0.75, *((-0.25, 0.0, 0.25) if size == 1024 else (0.0,)), 0.75, 1.5, 2.75)


def _batch(rng):
    sizes = (8192, 16384, 32768, 65536)
    runs = valley_runs(
        rng, sizes=sizes, base=16384, values=RATES, num_seeds=2, optimum=-5.5, drift=-0.1
    )
    return judged_test(
        runs,
        axis="batch",
        base_size=16384,
        target_size=1 << 20,
        built_in=0.5,
        transferred_log2=-5.5,
    )


def _beta2(rng):
    here = math.log2(0.05)
    tried = [here + step for step in (-2.0, -1.0, 0.0, 1.0, 2.0)]
    runs = valley_runs(
        rng,
        sizes=WIDTHS,
        base=32,
        values=tried,
        num_seeds=3,
        optimum=here - 0.6,
        drift=0.3,
        curvature=0.02,
    )
    return judged_test(
        runs,
        axis="width",
        base_size=32,
        target_size=4096,
        hyperparameter="beta2",
        transferred_log2=here,
    )


def _one_seed(rng):
    runs = valley_runs(rng, sizes=(64, 128, 256), base=256, values=RATES, num_seeds=1, optimum=-5.4)
    return judged_test(runs, axis="width", base_size=256, target_size=96)


def _far(rng):
    """Two short durations and a target ten thousand times as long: intervals beyond all bounds."""
    runs = valley_runs(
        rng,
        sizes=(102_400, 204_800),
        base=204_800,
        values=RATES[1:],
        num_seeds=1,
        optimum=-5.0,
        drift=-0.3,
        curvature=0.01,
    )
    return judged_test(
        runs,
        axis="duration",
        base_size=204_800,
        target_size=2_000_000_000,
        power=None,
        transferred_log2=-5.2,
    )
