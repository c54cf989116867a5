"""What the checked rungs say about the whole ladder: how far lost rate tilts the fit, and as plain data. No torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.experiments.ladder import RungCheck, check, checked_rungs, largest_share
from launcher.experiments.transferred import Verdicts
from launcher.plan.study import Study
from proxies.core.canon import Json
from proxies.core.flops import count_params
from proxies.core.spec import RunResult, RunSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from launcher.study.gates import Gate
    from scaling_fits.forecast.uncertainty import FittedRuns, Prediction
    from scaling_fits.laws.law import LawFit
    from scaling_fits.laws.table import RunTable

    Floats = NDArray[np.float64]

PROBE_NATS = 0.01
"""Size of the excess at one rung by which the fit's answer to it is measured; answers to others are scaled."""

LEAST_SPREAD = 0.5
"""E-folds of FLOPs between checked rungs for a line through them; with less, all rungs are taken to lose the same."""
MOST_BEYOND = 3.0
"""No rung is taken to lose more than so many times what a checked one does, however far the line is from it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LadderChecks:
    """Every checked rung, as far as its runs have ended."""

    rungs: tuple[RungCheck, ...]
    wanted: int
    """Rungs that the plan checks: 0 where it asks for none, or pays for none."""
    reaches: float
    """FLOPs of the largest checked rung over those of the ladder's largest; 0 without any."""
    share_for_largest: float | None
    """`ladder.check_share` that would check the largest rung too; None where it is checked, or none are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tilt:
    """How the forecast at the chosen size would move."""

    shift_nats: float
    """If every rung lost what a line through the checked ones' excess in log FLOPs says, and that were taken off."""
    interval: tuple[float, float]
    """By the uncertainty of the excess alone, to first order."""
    with_neighbours_nats: float | None
    """If the better neighbours' losses stood for the rungs'; None where no neighbour is better."""


def ladder_checks(
    study: Study, specs: Sequence[RunSpec], results: Mapping[str, RunResult], verdicts: Verdicts, fit: FittedRuns
) -> LadderChecks:
    """The checks of a ladder, judged."""
    wanted, transfer = checked_rungs(study, specs), study.plan.transfer
    noise = noise_of(verdicts)
    found = []
    for one in wanted:
        loss, sd = results[one.rung.id].loss_nats, fit.heaviest.residual_sd
        own = noise if noise is not None or loss is None or sd is None else sd * loss
        judged = check(one, results, own, margin_nats=transfer.margin_nats, level=transfer.level)
        found += [judged] if judged is not None else []
    top = max((six_nd(one.rung) for one in wanted), default=0.0) / max(map(six_nd, specs))
    missing = bool(study.plan.ladder.check_offsets_octaves) and top < 1
    return LadderChecks(
        rungs=tuple(found),
        wanted=len(wanted),
        reaches=top,
        share_for_largest=largest_share(study, specs) if missing else None,
    )


def noise_of(verdicts: Verdicts) -> float | None:
    """Standard deviation of a run beside others of its seed: the largest of the learning rate's tests."""
    found = [
        judged.verdict.noise_nats
        for test, judged in verdicts.tests
        if test.hyperparameter == "learning_rate" and judged.verdict.noise_nats is not None
    ]
    return max(found, default=None)


def six_nd(spec: RunSpec) -> float:
    """6 N D, the FLOPs that the fit goes by."""
    return 6.0 * count_params(spec.shape).total * spec.num_tokens


def tilt(
    checks: Sequence[RungCheck], specs: Sequence[RunSpec], table: RunTable, fit: FittedRuns, target: Prediction
) -> Tilt | None:  # fmt: skip
    """Fit again with the excess taken off; None where no rung has one, or the fit has no numbers.

    Members keep their weights: it is asked what the losses do, not what another choice of laws would.
    """
    import numpy as np

    known = [one for one in checks if one.excess is not None]
    if not known or fit.status == "unidentified":
        return None
    log_flops = np.log(6.0 * table.params * table.tokens)
    at = np.array([math.log(six_nd(one.rung)) for one in known])
    degree = 1 if np.ptp(at) > LEAST_SPREAD else 0

    def line(nats: Sequence[float]) -> Floats:
        """What every rung loses if a line in log FLOPs through the checked ones says so."""
        through: Floats = np.polyval(np.polyfit(at, np.array(nats, dtype=np.float64), degree), log_flops).astype(float)
        return through

    def moved(lost: Floats) -> float | None:
        found = _forecast(dataclasses.replace(table, loss=table.loss - lost), fit, target)
        return None if found is None else found - _as_it_is(fit, target)

    values = [one.excess.nats for one in known if one.excess is not None]
    most = np.minimum(MOST_BEYOND * max(values), table.loss / 2)
    shift = moved(np.clip(line(values), 0.0, most))
    unit = [np.where(np.arange(len(known)) == index, PROBE_NATS, 0.0) for index in range(len(known))]
    answers = [moved(line(probe.tolist())) for probe in unit]
    if shift is None or None in answers:
        return None
    # Each rung's noise is its own: its draws, made with one seed, are shuffled against the others'.
    mixed = [
        np.random.default_rng(index).permutation(one.excess.draws) - one.excess.nats
        for index, one in enumerate(known)
        if one.excess is not None
    ]
    shifts = shift + np.array(answers, dtype=float) / PROBE_NATS @ np.stack(mixed)
    low, high = np.quantile(shifts, [(1 - fit.level) / 2, (1 + fit.level) / 2])
    return Tilt(
        shift_nats=shift,
        interval=(min(float(low), shift), max(float(high), shift)),
        with_neighbours_nats=_with_neighbours(checks, specs, table, fit, target),
    )


def _with_neighbours(
    checks: Sequence[RungCheck], specs: Sequence[RunSpec], table: RunTable, fit: FittedRuns, target: Prediction
) -> float | None:  # fmt: skip
    """The forecast's shift with the better neighbours' losses in place of the rungs' own."""
    better = {
        one.rung.id: one.best.loss_nats
        for one in checks
        if one.own.loss_nats is not None and one.best and one.best.octaves
    }
    # A checked rung with a better neighbour has a loss, so it is a row; rungs without one are no rows.
    rows = {(count_params(spec.shape).total, spec.num_tokens): better[spec.id] for spec in specs if spec.id in better}
    if not rows:
        return None
    loss = table.loss.copy()
    for row, key in enumerate(zip(table.params.tolist(), table.tokens.tolist(), strict=True)):
        loss[row] = rows.get((int(key[0]), int(key[1])), loss[row])
    moved = _forecast(dataclasses.replace(table, loss=loss), fit, target)
    return None if moved is None else moved - _as_it_is(fit, target)


def _as_it_is(fit: FittedRuns, target: Prediction) -> float:
    return _pooled(fit.members, fit, target)


def _forecast(table: RunTable, fit: FittedRuns, target: Prediction) -> float | None:
    """The loss at the target with every member fitted to these losses; None where one has no numbers then."""
    from scaling_fits.laws.law import fit_law
    from scaling_fits.laws.weights import near_frontier

    weighed = near_frontier(table) if fit.weighting == "near_frontier" else table
    refits = [fit_law(weighed, m.form) if w > 0 else m for m, w in zip(fit.members, fit.weights, strict=True)]
    if any(refit.status == "unidentified" for refit, w in zip(refits, fit.weights, strict=True) if w > 0):
        return None
    return _pooled(refits, fit, target)


def _pooled(members: Sequence[LawFit], fit: FittedRuns, target: Prediction) -> float:
    """Nats at the target by these members and the fit's weights and drift, as `predict` mixes them."""
    import numpy as np

    from scaling_fits.forecast.uncertainty import expected_log_loss

    n, d = np.array([target.params]), np.array([target.tokens])
    return math.exp(float(expected_log_loss(dataclasses.replace(fit, members=tuple(members)), n, d)[0]))


def checks_body(checks: LadderChecks | None, found: Tilt | None, gates: Sequence[Gate]) -> dict[str, Json]:
    """For the report's `ladder`: every checked rung, the gate, and what the forecast would do.

    Args:
        checks: as judged; None where the ladder has not ended.
        found: of the forecast; None where there is none.
        gates: all of them; empty before there is a choice.
    """
    gate = next((gate for gate in gates if gate.name == "ladder_tuned"), None)
    return {
        "checks": [_check_body(one) for one in checks.rungs] if checks is not None else [],
        "tuned": None if gate is None else {"outcome": gate.outcome, "reason": gate.reason},
        "sensitivity": None
        if found is None
        else {
            "shift_nats": {"value": found.shift_nats, "interval": list(found.interval)},
            "with_better_neighbours_nats": found.with_neighbours_nats,
        },
    }


def _check_body(one: RungCheck) -> dict[str, Json]:
    excess = one.excess
    return {
        "width": one.rung.shape.width,
        "params": count_params(one.rung.shape).total,
        "tokens": one.rung.num_tokens,
        "num_steps": one.rung.schedule.num_steps,
        "offsets": [
            {
                "octaves": tried.octaves,
                "learning_rate": tried.learning_rate,
                "loss_nats": tried.loss_nats,
                "num_seeds": len(tried.losses_nats),
            }
            for tried in one.tried
        ],
        "noise_nats": one.noise_nats,
        "excess_nats": {"value": None if excess is None else excess.nats,
                        "interval": None if excess is None else list(excess.interval)},
        "optimum_octaves": {"value": None if excess is None else excess.optimum_octaves,
                            "interval": None if excess is None else list(excess.optimum_interval)},
        "better_octaves": one.best.octaves if one.best is not None and one.best.octaves else None,
        "outcome": one.outcome,
        "words": one.words,
    }  # fmt: skip
