"""Evaluation of the loss curves in the ledger: whether wider models are better at every step, how a
run's gradients spiked, and where runs branch off. No torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING

from launcher.experiments.sweep_grids import TransferTest
from launcher.plan.study import Study
from proxies.core.branches import branch_step, trunk_id, trunk_order
from proxies.core.hyperparameters import LEARNING_RATE
from proxies.core.notation import format_factor
from proxies.core.spec import Curve, RunResult, RunSpec
from sweeps.store.curves import load_curve
from sweeps.store.errors import SweepError
from transfer.question import Point

if TYPE_CHECKING:
    from proxies.coordinates.wider import CurvePair, WiderVerdict
    from proxies.core.canon import Json

NUM_RATES = 3
"""Number of learning rates that are compared: the base's best, and the next ones below. Above it
the widest models become unstable first.
"""
NUM_POINTS = 40
"""Number of points of a curve in the report."""


def curve_of(study: Study, result: RunResult | None) -> Curve | None:
    """Return a finished run's curve; None if it cannot be read."""
    if result is None or result.status != "finished":
        return None
    try:
        return load_curve(study.study_dir, result)
    except (SweepError, OSError):
        return None


def curves_by_width(
    study: Study, tests: Sequence[TransferTest], results: Mapping[str, RunResult], best_log2: float
) -> dict[float, dict[int, dict[int, Curve]]]:
    """Return curves of the learning rate over width at the rates that are compared: log2 of the
    rate -> width -> seed -> curve.
    """
    test = next(
        (one for one in tests if (one.hyperparameter, one.axis) == (LEARNING_RATE, "width")), None
    )
    if test is None:
        return {}
    widths: dict[float, set[int]] = {}
    for spec, value in test.condition.specs:
        widths.setdefault(value, set()).add(spec.shape.width)
    below = sorted(
        (value for value in widths if value <= best_log2 + 0.5 and len(widths[value]) > 1),
        reverse=True,
    )
    found: dict[float, dict[int, dict[int, Curve]]] = {value: {} for value in below[:NUM_RATES]}
    for spec, value in test.condition.specs:
        if value in found and (curve := curve_of(study, results.get(spec.id))) is not None:
            found[value].setdefault(spec.shape.width, {})[spec.seed] = curve
    return found


def wider(
    study: Study, curves: Mapping[float, Mapping[int, Mapping[int, Curve]]]
) -> WiderVerdict | None:
    """Judge whether wider models are better, by every two neighboring widths at a rate."""
    from proxies.coordinates.wider import judge_wider

    pairs = [
        pair
        for value, by_width in curves.items()
        for small, large in zip(sorted(by_width), sorted(by_width)[1:], strict=False)
        if (pair := _paired(small, large, value, by_width[small], by_width[large])) is not None
    ]
    transfer = study.plan.transfer
    return judge_wider(pairs, level=transfer.level, margin_nats=transfer.margin_nats)


def _paired(
    small: int, large: int, value: float, narrow: Mapping[int, Curve], wide: Mapping[int, Curve]
) -> CurvePair | None:
    import numpy as np

    from proxies.coordinates.wider import CurvePair

    seeds = sorted(narrow.keys() & wide.keys())
    if not seeds:
        return None
    runs = [
        dict(zip(one[seed].steps, one[seed].train_loss_nats, strict=True))
        for one in (narrow, wide)
        for seed in seeds
    ]
    steps = sorted(set.intersection(*map(set, runs)))
    losses = [[run[step] for step in steps] for run in runs]
    stacked = np.array(losses, dtype=np.float64).reshape(2, len(seeds), len(steps))
    return CurvePair(
        small=small,
        large=large,
        log2_value=value,
        steps=np.array(steps, dtype=np.int64),
        small_nats=stacked[0],
        large_nats=stacked[1],
    )


def wider_body(
    found: WiderVerdict | None, curves: Mapping[float, Mapping[int, Mapping[int, Curve]]]
) -> Json:
    """Return the verdict for the report, with the mean curves at the highest rate that was
    compared.
    """
    if found is None:
        return None
    pairs: list[Json] = [
        {
            "small": pair.small,
            "large": pair.large,
            "learning_rate": 2.0**pair.log2_value,
            "num_seeds": pair.num_seeds,
            "steps": [pair.first_step, pair.last_step],
            "excess_nats": pair.excess_nats,
            "interval": list(pair.interval),
            "outcome": pair.outcome,
        }
        for pair in found.pairs
    ]
    value = max(curves)
    return {
        "outcome": found.outcome,
        "level": found.level,
        "margin_nats": found.margin_nats,
        "pairs": pairs,
        "learning_rate": 2.0**value,
        "curves": [_mean(width, [*runs.values()]) for width, runs in sorted(curves[value].items())],
    }


def branches_body(study: Study, rungs: Sequence[RunSpec], results: Mapping[str, RunResult]) -> Json:
    """Return the curves of the widest rungs that share a stable phase, each from the step at which
    it left the shorter one; None if none share one.
    """
    trunks: dict[str, list[RunSpec]] = {}
    for spec in rungs:
        trunks.setdefault(trunk_id(spec) or spec.id, []).append(spec)
    members = max(trunks.values(), key=lambda specs: (len(specs), specs[0].shape.width), default=[])
    start = 0
    curves: list[Json] = []
    for spec in sorted(members, key=trunk_order) if len(members) > 1 else ():
        if (curve := curve_of(study, results.get(spec.id))) is not None:
            own = [at for at, step in enumerate(curve.steps) if step > start]
            size = max(1, len(own) // NUM_POINTS)
            blocks = [own[first : first + size] for first in range(0, len(own), size)]
            curves.append(
                {
                    "num_steps": spec.schedule.num_steps,
                    "branch_step": branch_step(spec),
                    "steps": [mean(curve.steps[at] for at in block) for block in blocks],
                    "train_loss_nats": [
                        mean(curve.train_loss_nats[at] for at in block) for block in blocks
                    ],
                }
            )
            start = branch_step(spec)
    return {"width": members[0].shape.width, "curves": curves} if curves else None


def _mean(width: int, runs: Sequence[Curve]) -> Json:
    import numpy as np

    from proxies.coordinates.wider import parts_of

    steps = np.array(runs[0].steps, dtype=np.int64)
    alike = [run.train_loss_nats for run in runs if run.steps == runs[0].steps]
    losses = np.array(alike, dtype=np.float64).mean(axis=0)
    parts = parts_of(steps, min(NUM_POINTS, len(steps)))
    return {
        "width": width,
        "steps": [float(steps[part].mean()) for part in parts],
        "train_loss_nats": [float(losses[part].mean()) for part in parts],
    }


def spike_words(
    study: Study,
    specs: Sequence[tuple[RunSpec, float]],
    results: Mapping[str, RunResult],
    sizes: Mapping[str, int],
    culprit: Point,
) -> str:
    """Describe how the gradients of the run that causes a drift spiked, compared with other runs of
    its size; empty if there is no log.

    Args:
        study: Study of the runs.
        specs: The test's runs with their values.
        results: Results by run id.
        sizes: Size of each run on its axis, by run id.
        culprit: Point of the run that alone causes the drift.
    """
    import statistics

    from proxies.coordinates.wider import spike_ratio

    ratios: dict[bool, list[float]] = {True: [], False: []}
    for spec, value in specs:
        curve = curve_of(study, results.get(spec.id)) if sizes[spec.id] == culprit.size else None
        if curve is None:
            continue
        # A trainer may log only some of its steps.
        after_warmup = bisect_right(curve.steps, spec.schedule.warmup_steps)
        if (ratio := spike_ratio(curve.grad_norm, after_warmup)) is not None:
            ratios[(value, spec.seed) == (culprit.log2_value, culprit.seed)].append(ratio)
    if not ratios[True] or not ratios[False]:
        return ""
    others = statistics.median(ratios[False])
    return (
        f"that run's largest gradient norm after its warmup is {format_factor(ratios[True][0])} "
        "times its median; "
        f"those of the other runs of this size are {format_factor(others)} times theirs, in the "
        "median"
    )
