"""Which runs a scaling choice hangs on: the fit again without each run, and runs far off the law.

Leave-one-out refits say what a choice would have been had a run never been made (Cook 1977, Technometrics 19:15, by
refitting rather than by its linear formula: a law with an irreducible loss is far from linear). They are of the
heaviest law alone, while the choice pools the laws by weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scaling_fits.allocation.allocate import WIDEST_SIZE, allocate
from scaling_fits.forecast.uncertainty import FittedRuns, predict
from scaling_fits.laws import law, weights
from scaling_fits.laws.forms import SHAPES
from scaling_fits.laws.law import LawFit, check_positive
from scaling_fits.laws.solver import Floats
from scaling_fits.laws.table import RunTable, listed
from scaling_fits.laws.weights import near_frontier

LARGE_SHARE = 0.5
"""Of an interval's arm: a run that moves the choice by more is worth a second look."""
LARGE_SHIFT = math.log(1.1)
"""Of log N*, where there are no intervals: 10 % in the best size."""
LARGEST_LOSS_SHIFT = math.log(2.0)
"""Of log loss at the target: a forecast that halves or doubles for one run is none."""

_NUM_STARTS = 2  # the fit itself and the grid's best cell: without one run the optimum is near


@dataclass(frozen=True, kw_only=True, slots=True)
class RowInfluence:
    """What one run does to the choice. A run without which no law is identified has no shifts: all hangs on it."""

    place: int
    """Of the run in the table, from 0."""
    name: str
    """As a reader finds it: by its row in the file, or by what else it is called."""
    shift_log_params: float | None
    """Log N* at the target's 6ND without the run, less log N* with it."""
    shift_log_loss: float | None
    """Log loss at the target without the run, less with it."""
    share_of_arm: float | None
    """The larger shift over the arm of its interval on that side; None without a bootstrap."""
    residual_sds: float
    """How far the run's log loss is above the law (below: negative), in robust sds of all runs."""
    outlier: bool
    """Whether that is further than noise takes a run among so many."""

    @property
    def size_determined(self) -> bool:
        """Whether the other runs tell a best size at all: a law moved by a factor of a thousand tells none."""
        return self.shift_log_params is not None and abs(self.shift_log_params) <= math.log(WIDEST_SIZE)

    @property
    def loss_determined(self) -> bool:
        """Whether the other runs tell the loss at the target."""
        return self.shift_log_loss is not None and abs(self.shift_log_loss) <= LARGEST_LOSS_SHIFT

    @property
    def decisive(self) -> bool:
        """Whether the choice hangs on this run: half an arm, without intervals 10 % in N*, or no law without it."""
        if self.shift_log_params is None:
            return True
        if self.share_of_arm is None:
            return abs(self.shift_log_params) > LARGE_SHIFT
        return self.share_of_arm > LARGE_SHARE


def influence(
    table: RunTable,
    fitted: FittedRuns,
    *,
    target_params: float,
    target_tokens: float,
    names: Sequence[str] | None = None,
) -> tuple[RowInfluence, ...]:
    """What each run does to N* at the target's 6ND and to the loss at the target; the most influential first.

    Args:
        table: the runs `fitted` was fitted to.
        fitted: the fit.
        target_params: N of the run in question.
        target_tokens: its D.
        names: of the runs, for a reader; None: rows of the file by number, other runs by size and tokens.

    Raises:
        LawError: a target that is not finite and positive.
        CannotTellError: the runs identify no law.
    """
    check_positive(target_params=target_params, target_tokens=target_tokens)
    fitted.require()
    fit = fitted.chooser
    target = (np.array([float(target_params)]), np.array([float(target_tokens)]))
    log_nd = math.log(target_params) + math.log(target_tokens)
    near = fitted.weighting == "near_frontier"
    weighed = near_frontier(table) if near else table
    without = law.refit(weighed, fit, _weights_without(table, near), num_starts=_NUM_STARTS).theta
    log_params = law.log_best_params(np.concatenate([fit.theta[None, :], without]), log_nd)
    log_loss = law.log_loss(np.concatenate([fit.theta[None, :], without]), *target)[:, 0]
    arms = _arms(fitted, target_params, target_tokens)
    scores, limit = _residual_sds(weighed, fit), weights.outlier_limit(fit.num_runs, fit.degrees_of_freedom)
    rows = []
    for i in range(table.num_runs):
        needed = bool(law.why_unidentified(table.rows(np.arange(table.num_runs) != i), fit.form))
        shifts = float(log_params[1 + i] - log_params[0]), float(log_loss[1 + i] - log_loss[0])
        rows.append(
            RowInfluence(
                place=i,
                name=table.name(i) if names is None else names[i],
                shift_log_params=None if needed else shifts[0],
                shift_log_loss=None if needed else shifts[1],
                share_of_arm=None if needed or arms is None else max(map(_share, shifts, arms)),
                residual_sds=float(scores[i]),
                outlier=bool(abs(scores[i]) > limit),
            )
        )
    return tuple(sorted(rows, key=_rank))


def influence_warnings(found: tuple[RowInfluence, ...]) -> tuple[str, ...]:
    """What a reader must know of the runs the choice hangs on, and of the outliers; nothing where there are none."""
    warnings = []
    needed = [row for row in found if row.shift_log_params is None]
    if needed:
        warnings.append(f"without {_named(needed)} (each by itself) the runs identify no law: add runs")
    decisive = [row for row in found if row.decisive and row.shift_log_params is not None]
    if decisive:
        worst = decisive[0]
        warnings.append(
            f"the choice hangs on {_named(decisive)}: without {_named([worst])} {_moves(worst)}; look at such runs "
            "again, or add some beside them"
        )
    far = sorted((row for row in found if row.outlier), key=lambda row: -abs(row.residual_sds))
    if far:
        warnings.append(
            f"{_named(far)} off the law by more than noise takes a run (the furthest by "
            f"{far[0].residual_sds:+.1f} robust sds): the fit leans on such runs little; see whether they were "
            "made like the others"
        )
    return tuple(warnings)


def _weights_without(table: RunTable, near: bool) -> Floats:
    """Weights of all runs but one, one row for each left out; nearness is that to the frontier of the others."""
    weight_MR = np.zeros((table.num_runs, table.num_runs))
    for i in range(table.num_runs):
        others = np.arange(table.num_runs) != i
        part = table.rows(others)
        weight_MR[i, others] = (near_frontier(part) if near else part).weight
    return weight_MR


def _arms(fitted: FittedRuns, params: float, tokens: float) -> tuple[tuple[float, float], ...] | None:
    """(lower, upper) arms of the intervals of log N* at the target's 6ND and of log loss; None without a bootstrap."""
    at, best = predict(fitted, params, tokens), allocate(fitted, 6.0 * params * tokens)
    if best.params_interval is None or at.low is None or at.high is None:
        return None
    low, high = map(math.log, best.params_interval)
    centre, loss = math.log(best.params), math.log(at.loss_nats)
    return (centre - low, high - centre), (loss - math.log(at.low), math.log(at.high) - loss)


def _share(shift: float, arms: tuple[float, float]) -> float:
    """Of the arm on the shift's side, which is no shorter than a tenth of both: one law may lie beside the pool."""
    return abs(shift) / max(arms[int(shift > 0)], 0.1 * sum(arms), 1e-12)


def _residual_sds(table: RunTable, fit: LawFit) -> Floats:
    """Residuals of log loss over their robust sd; a run of a quarter of the weight is taken to be twice as noisy."""
    residuals = np.log(table.loss) - law.log_loss(fit.theta[None, :], table.params, table.tokens)[0]
    return weights.robust_sds(residuals * np.sqrt(law.shares_of(table.weight)), SHAPES[fit.form].dim)


def _rank(row: RowInfluence) -> tuple[float, float]:
    """Largest first, by share of the arm where there is one, else by shift of N*; runs that are needed before all."""
    if row.shift_log_params is None:
        return (-math.inf, 0.0)
    shift = abs(row.shift_log_params)
    return (-shift if row.share_of_arm is None else -row.share_of_arm, -shift)


def _named(rows: list[RowInfluence]) -> str:
    return listed([row.name for row in rows])


def _moves(row: RowInfluence) -> str:
    """What becomes of the choice without the run."""
    assert row.shift_log_params is not None and row.shift_log_loss is not None
    size, loss = math.expm1(row.shift_log_params), math.expm1(row.shift_log_loss)
    said = [
        f"the best size moves by {size:+.1%}" if row.size_determined else "the best size is not determined",
        f"the loss at the target moves by {loss:+.2%}" if row.loss_determined else "the loss there is not determined",
    ]
    return " and ".join(said) + (_of_arm(row) if row.size_determined and row.loss_determined else "")


def _of_arm(row: RowInfluence) -> str:
    return "" if row.share_of_arm is None else f" ({row.share_of_arm:.2g} of its interval's arm)"
