"""What the checked rungs say about the whole ladder, and as plain data. No torch."""

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
    """Every checked rung, as far as its runs have ended."""

    rungs: tuple[RungCheck, ...]
    wanted: int
    """Rungs that the plan checks: 0 where it asks for none, or pays for none."""


def ladder_checks(
    study: Study,
    specs: Sequence[RunSpec],
    results: Mapping[str, RunResult],
    verdicts: Verdicts,
    fit: FittedRuns,
) -> LadderChecks:
    """The checks of a ladder, judged."""
    needed, transfer = checked_rungs(study, specs), study.plan.transfer
    noise = noise_of(verdicts)
    found = []
    for one in needed:
        loss, sd = results[one.rung.id].loss_nats, fit.fit.residual_sd
        own = noise if noise is not None or loss is None or sd is None else sd * loss
        judged = check(one, results, own, margin_nats=transfer.margin_nats, level=transfer.level)
        found += [judged] if judged is not None else []
    return LadderChecks(rungs=tuple(found), wanted=len(needed))


def noise_of(verdicts: Verdicts) -> float | None:
    """Standard deviation of a run beside others of its seed: the largest of the learning rate's
    tests.
    """
    found = [
        judged.verdict.noise_nats
        for test, judged in verdicts.tests
        if test.hyperparameter == "learning_rate" and judged.verdict.noise_nats is not None
    ]
    return max(found, default=None)


def checks_body(
    study: Study, checks: LadderChecks | None, gates: Sequence[Gate]
) -> dict[str, Json]:
    """For the report's `ladder`: every checked rung, and the gate.

    Args:
        study: whose ladder it is.
        checks: as judged; None where the ladder has not ended.
        gates: all of them; empty before there is a choice.
    """
    gate = next((gate for gate in gates if gate.name == "ladder_tuned"), None)
    return {
        "checks": [_check_body(study, one) for one in checks.rungs] if checks is not None else [],
        "tuned": None if gate is None else {"outcome": gate.outcome, "reason": gate.reason},
    }


def _check_body(study: Study, one: RungCheck) -> dict[str, Json]:
    excess = one.excess
    return {
        "width": one.rung.shape.width,
        "params": study.num_params(one.rung.shape),
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
        "excess_nats": {
            "value": None if excess is None else excess.nats,
            "interval": None if excess is None else list(excess.interval),
        },
        "optimum_octaves": {
            "value": None if excess is None else excess.optimum_octaves,
            "interval": None if excess is None else list(excess.optimum_interval),
        },
        "better_octaves": one.best.octaves if one.best is not None and one.best.octaves else None,
        "outcome": one.outcome,
        "words": one.words,
    }
