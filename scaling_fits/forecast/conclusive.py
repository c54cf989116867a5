"""Whether a forecast is conclusive: the fit's status, its back-test, how far it reaches, how wide its interval is.

The gate `fit` of a study and every verb that prints a forecast ask here, so all of them say the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxies.core.canon import Json

if TYPE_CHECKING:
    from scaling_fits.forecast.hindcast import Backtest
    from scaling_fits.forecast.uncertainty import FittedRuns

INCONCLUSIVE = "the forecast is inconclusive"
"""How the warning begins that is said before a number."""

FARTHEST_REACH = 100.0
"""Times the largest rung's FLOPs: published ladders were back-tested to 30 and 100 times, with errors of 4 to 6 %."""

LARGEST_ERROR = 0.05
"""Of a held-out rung's loss: twice the median that public ladders show at 10 times the compute."""

WIDEST_HALF = 0.25
"""Half the predicted loss's interval over the loss: a wider one predicts nothing."""


def fit_doubts(fit: FittedRuns) -> tuple[str, ...]:
    """Why no forecast by this fit is conclusive; empty where its law converged and foretold the largest runs."""
    if fit.status != "converged":
        return (f"{fit.status}: {'; '.join(fit.warnings)}",)
    if fit.backtest is None:
        return ("too few rungs to hold the largest one out",)
    said, wrong = backtested(fit.backtest, fit.level)
    return (", ".join(said),) if wrong else ()


def backtested(backtest: Backtest, level: float) -> tuple[list[str], bool]:
    """What the held-out rungs say, and whether it is against the fit: too far off, or too few inside."""
    from scipy.special import bdtr

    num_runs, covered = len(backtest.runs), backtest.num_covered or 0
    # As few as chance would allow once in twenty times, if the intervals were right.
    least = next((least for least in range(1, num_runs + 1) if bdtr(least, num_runs, level) >= 0.05), 1)
    said = [
        f"largest rungs held out ({num_runs}) predicted with {backtest.largest_error:.2%} error at most",
        f"{covered} of {num_runs} inside the {level:.0%} interval"
        + ("" if backtest.num_covered is not None else " (there is none without refits)"),
    ]
    return said, covered < least or backtest.largest_error > LARGEST_ERROR


def reach_doubts(loss_nats: float, interval: tuple[float, float] | None, extrapolation: float) -> tuple[str, ...]:
    """Why a conclusive fit may say little of a run so far out, or of one whose loss has so wide an interval."""
    doubts = []
    if extrapolation > FARTHEST_REACH:
        reach = f"target at {extrapolation:.3g} times the largest rung's FLOPs"
        doubts.append(f"{reach}: beyond {FARTHEST_REACH:g} no back-test speaks, add larger rungs")
    if interval is not None:
        half = (interval[1] - interval[0]) / 2 / loss_nats
        if half > WIDEST_HALF:
            known = f"known to {half:.0%} only" if half < 1 else "not determined"
            doubts.append(f"the predicted loss is {known}: add rungs")
    return tuple(doubts)


def inconclusive(doubts: tuple[str, ...]) -> tuple[str, ...]:
    """The warning that comes before a forecast with such doubts; none without."""
    return (f"{INCONCLUSIVE}: {'; '.join(doubts)}",) if doubts else ()


def first_and_rest(warnings: Json) -> tuple[list[str], list[Json]]:
    """What must be said before a number, and the warnings that may follow it; `warnings` as of the JSON."""
    every = warnings if isinstance(warnings, list) else []
    first = [warning for warning in every if isinstance(warning, str) and warning.startswith(INCONCLUSIVE)]
    return first, [warning for warning in every if warning not in first]
