"""Results of the checked rungs for the whole ladder, also as plain data. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.experiments.ladder import RungCheck, check, checked_rungs
from launcher.experiments.transferred_values import Verdicts
from launcher.plan.study import Study
from proxies.core.canon import Json
from proxies.core.spec import RunResult, RunSpec

if TYPE_CHECKING:
    from launcher.study.gates import Gate
    from scaling_fits.forecast.uncertainty import FittedRuns


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LadderChecks:
    """Every checked rung whose runs have ended."""

    rungs: tuple[RungCheck, ...]
    wanted: int
    """Number of rungs that the plan checks; 0 if it asks for none, or its budget for checks pays
    for none.
    """


def ladder_checks(
    study: Study,
    specs: Sequence[RunSpec],
    results: Mapping[str, RunResult],
    verdicts: Verdicts,
    fit: FittedRuns,
) -> LadderChecks:
    """Judge the checked rungs of a ladder."""
    needed, transfer = checked_rungs(study, specs), study.plan.transfer
    noise = noise_of(verdicts)
    rungs = []
    for rung_runs in needed:
        loss, sd = results[rung_runs.rung.id].loss_nats, fit.fit.residual_sd
        rung_noise = noise if noise is not None or loss is None or sd is None else sd * loss
        rung_check = check(
            rung_runs, results, rung_noise, margin_nats=transfer.margin_nats, level=transfer.level
        )
        rungs += [rung_check] if rung_check is not None else []
    return LadderChecks(rungs=tuple(rungs), wanted=len(needed))


def noise_of(verdicts: Verdicts) -> float | None:
    """Return the standard deviation of a run's loss between seeds, in nats: the largest of the
    learning rate's tests; None if unknown.
    """
    noises = [
        result.verdict.noise_nats
        for test, result in verdicts.tests
        if test.hyperparameter == "learning_rate" and result.verdict.noise_nats is not None
    ]
    return max(noises, default=None)


def checks_body(
    study: Study, checks: LadderChecks | None, gates: Sequence[Gate]
) -> dict[str, Json]:
    """Return the checked rungs and their gate for the report's `ladder`.

    Args:
        study: Study of the ladder.
        checks: Judged checks; None if the ladder has not ended.
        gates: All gates; empty before there is a choice.
    """
    gate = next((gate for gate in gates if gate.name == "ladder_tuned"), None)
    return {
        "checks": [_build_check_body(study, rung_check) for rung_check in checks.rungs]
        if checks is not None
        else [],
        "tuned": None if gate is None else {"outcome": gate.outcome, "reason": gate.reason},
    }


def _build_check_body(study: Study, rung_check: RungCheck) -> dict[str, Json]:
    excess = rung_check.excess
    return {
        "width": rung_check.rung.shape.width,
        "params": study.num_params(rung_check.rung.shape),
        "tokens": rung_check.rung.num_tokens,
        "num_steps": rung_check.rung.schedule.num_steps,
        "offsets": [
            {
                "octaves": tried.octaves,
                "learning_rate": tried.learning_rate,
                "loss_nats": tried.loss_nats,
                "num_seeds": len(tried.losses_nats),
            }
            for tried in rung_check.tried
        ],
        "noise_nats": rung_check.noise_nats,
        "excess_nats": {
            "value": None if excess is None else excess.nats,
            "interval": None if excess is None else list(excess.interval),
        },
        "optimum_octaves": {
            "value": None if excess is None else excess.optimum_octaves,
            "interval": None if excess is None else list(excess.optimum_interval),
        },
        "better_octaves": rung_check.best.octaves
        if rung_check.best is not None and rung_check.best.octaves
        else None,
        "outcome": rung_check.outcome,
        "words": rung_check.words,
    }
