"""Training loss curves in the report: means by width, and the decay branches of the ladder.

The module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from forerun._launcher.report.views.finding import LossCurve
from forerun._launcher.report.views.fit_findings import Branches, Wider
from forerun._launcher.study.experiments.transfer_tests import TransferTest
from forerun._launcher.study.plan.study import Study
from forerun._proxies.core.branches import (
    compute_branch_step,
    compute_trunk_id,
    make_trunk_sort_key,
)
from forerun._proxies.core.hyperparameters import LEARNING_RATE
from forerun._proxies.core.spec import Curve, RunResult, RunSpec
from forerun._sweeps.store.curves import load_curve
from forerun._sweeps.store.errors import SweepError

NUM_POINTS = 40
"""Maximum number of points of a curve in the report."""
MIN_STEPS = 8
"""Minimum number of logged steps of a curve that is drawn by width."""
SKIPPED_SHARE = 0.02
"""Share of the steps that is left out at the start, where all models are equally bad."""


def load_curve_or_none(study: Study, result: RunResult | None) -> Curve | None:
    """Return a finished run's curve; None if it cannot be read."""
    if result is None or result.status != "finished":
        return None
    try:
        return load_curve(study.study_dir, result)
    except (SweepError, OSError):
        return None


def compare_widths(
    study: Study, tests: Sequence[TransferTest], results: Mapping[str, RunResult], best_log2: float
) -> Wider | None:
    """Return the mean training loss of each width at one learning rate.

    The rate is the highest that was run at two widths and is not above the base's best rate. In muP
    a wider model is better at every step (Tensor Programs V, arXiv 2203.03466, section 8).

    Args:
        study: The study.
        tests: Transfer tests of the study; those of the learning rate over width are used.
        results: Results by run id.
        best_log2: log2 of the best learning rate at the base.

    Returns:
        The curves by width; None if no rate has curves of two widths.
    """
    specs = [
        spec
        for test in tests
        if (test.hyperparameter, test.axis) == (LEARNING_RATE, "width")
        for spec in test.grid.specs
    ]
    widths: dict[float, set[int]] = {}
    for spec, value in specs:
        widths.setdefault(value, set()).add(spec.shape.width)
    # A rate that was run counts as the best one up to half an octave above the fitted optimum.
    rates = [rate for rate in widths if rate <= best_log2 + 0.5 and len(widths[rate]) > 1]
    curves: dict[int, list[Curve]] = {}
    for spec, value in specs if rates else ():
        curve = load_curve_or_none(study, results.get(spec.id)) if value == max(rates) else None
        if curve is not None and len(curve.steps) >= MIN_STEPS:
            curves.setdefault(spec.shape.width, []).append(curve)
    if len(curves) < 2:
        return None
    return Wider(
        learning_rate=2.0 ** max(rates),
        curves=[_average_curves(width, runs) for width, runs in sorted(curves.items())],
    )


def _average_curves(width: int, runs: Sequence[Curve]) -> LossCurve:
    """Return the mean of the curves with the same steps as the first, averaged over blocks.

    The blocks have about equal lengths in log steps.
    """
    import numpy as np

    first = int(SKIPPED_SHARE * len(runs[0].steps))
    steps = np.array(runs[0].steps[first:], dtype=np.float64)
    alike = [run.train_loss_nats[first:] for run in runs if run.steps == runs[0].steps]
    losses = np.array(alike, dtype=np.float64).mean(axis=0)
    ends = np.unique(np.geomspace(1, len(steps) + 1, NUM_POINTS + 1).astype(int)) - 1
    sizes = np.diff(ends)
    return LossCurve(
        width=width,
        steps=(np.add.reduceat(steps, ends[:-1]) / sizes).tolist(),
        train_loss_nats=(np.add.reduceat(losses, ends[:-1]) / sizes).tolist(),
    )


def build_branches(
    study: Study, rungs: Sequence[RunSpec], results: Mapping[str, RunResult]
) -> Branches | None:
    """Return the curves of rungs that share a stable phase; None if no rungs do.

    If several groups of rungs share a phase, the result is the largest group, or the widest of the
    largest groups. Each curve begins at the step where the next shorter rung begins to decay.
    """
    trunks: dict[str, list[RunSpec]] = {}
    for spec in rungs:
        trunks.setdefault(compute_trunk_id(spec) or spec.id, []).append(spec)
    members = max(trunks.values(), key=lambda specs: (len(specs), specs[0].shape.width), default=[])
    start = 0
    curves: list[LossCurve] = []
    for spec in sorted(members, key=make_trunk_sort_key) if len(members) > 1 else ():
        if (curve := load_curve_or_none(study, results.get(spec.id))) is None:
            continue
        points = [
            point
            for point in zip(curve.steps, curve.train_loss_nats, strict=True)
            if point[0] > start
        ]
        size = max(1, len(points) // NUM_POINTS)
        blocks = [points[first : first + size] for first in range(0, len(points), size)]
        start = compute_branch_step(spec)
        curves.append(
            LossCurve(
                num_steps=spec.schedule.num_steps,
                branch_step=start,
                steps=[mean(step for step, _ in block) for block in blocks],
                train_loss_nats=[mean(loss for _, loss in block) for block in blocks],
            )
        )
    return Branches(width=members[0].shape.width, curves=curves) if curves else None
