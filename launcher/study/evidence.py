"""Everything a study found so far, gathered once: what the report, `freeze` and the verbs' answers
are made of.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.experiments.transferred_values import (
    SearchOutcome,
    StageMissingError,
    Transferred,
    Verdicts,
    searched,
    target_guess,
    transferred,
    verdicts_at,
)
from launcher.experiments.wider import curves_by_width, wider, wider_body
from launcher.frozen.frozen import Decision
from launcher.plan.study import NoFinishedTrialError, Study
from launcher.study import decide
from launcher.study.decide import Choice
from launcher.study.gates import (
    Gate,
    failed_gates,
    find_failed_check,
    find_failed_transfer,
    gates,
    select_failed,
)
from launcher.study.ladder_checks import LadderChecks, ladder_checks
from launcher.study.winner_reruns import replay_gates
from proxies.core.canon import Json
from proxies.core.spec import RunResult, RunSpec
from sweeps.store.ledger import Ledger

if TYPE_CHECKING:
    from scaling_fits.forecast.uncertainty import FittedRuns
    from scaling_fits.laws.table import RunTable


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StudyFindings:
    """Stage by stage; None where a stage has not ended."""

    coordinates: dict[str, Json]
    searched: SearchOutcome | None = None
    transferred: Transferred | None = None
    ladder: tuple[RunSpec, ...] = ()
    rungs: tuple[RunResult, ...] = ()
    """What came of `ladder`, in its order."""
    table: RunTable | None = None
    fit: FittedRuns | None = None
    checks: LadderChecks | None = None
    """What the ladder's rungs at other rates say."""
    choice: Choice | None = None
    verdicts: Verdicts | None = None
    """For the chosen shape and steps, or, before the choice, for what the budget suggests."""
    wider: Json = None
    """Whether wider is better, as a report has it."""
    gates: tuple[Gate, ...] = ()
    """All of them, once there is a choice; before, those that failed."""


def gather(study: Study, ledger: Ledger) -> StudyFindings:
    """What the ledger's records say, up to the first stage that has not ended; no choice where the
    fit finds none.
    """
    from scaling_fits.laws.law import CannotTellError

    coordinates = ledger.records_for_plan("coordinates")
    failed = find_failed_check(study, coordinates) + select_failed(replay_gates(study, ledger))
    found = StudyFindings(coordinates=coordinates, gates=failed)
    try:
        won = searched(study, ledger)
        found = dataclasses.replace(found, searched=won)
        moved = transferred(study, ledger)
        verdicts = verdicts_at(study, ledger, moved, target_guess(study))
        curves = curves_by_width(study, moved.tests, ledger.results(), moved.log2_lr)
        failed += find_failed_transfer(verdicts)
        found = dataclasses.replace(
            found,
            transferred=moved,
            verdicts=verdicts,
            wider=wider_body(wider(study, curves), curves),
            gates=failed,
        )
        specs = decide.ladder_specs(study, moved)
        table = decide.ladder_table(study, specs, ledger.results())
    except (StageMissingError, NoFinishedTrialError):
        return found
    fit, results = decide.fitted(study, ledger, specs), ledger.results()
    checks = ladder_checks(study, specs, results, verdicts, fit)
    rungs = tuple(results[spec.id] for spec in specs)
    found = dataclasses.replace(
        found, ladder=tuple(specs), rungs=rungs, table=table, fit=fit, checks=checks
    )
    try:
        choice = decide.choose(study, fit, decide.aspect_of(study, fit, specs, rungs))
    except CannotTellError:
        return found
    verdicts = verdicts_at(study, ledger, moved, choice.sizes)
    lost = [rung for rung in rungs if rung.loss_nats is None]
    closed = gates(study, coordinates, verdicts, fit, choice, lost, checks)
    closed += replay_gates(study, ledger) + failed_gates(ledger, study.study_dir)
    return dataclasses.replace(found, choice=choice, verdicts=verdicts, gates=closed)


def decision_of(study: Study, found: StudyFindings) -> Decision:
    """The decision that the findings make.

    Raises:
        StageMissingError: something is still to run.
        FactoryError, FactoryChangedError: the user's own model cannot be built, or is another.
        CannotTellError: all has run, and the ladder fits no law.
    """
    if found.fit is not None and found.choice is None:
        from scaling_fits.laws.law import CannotTellError

        remedy = (
            "no gate can be accepted in place of a fit: run more rungs (ladder.widths, "
            "ladder.num_steps) in a child "
        )
        remedy += f"study, by forerun run PLAN --study ANOTHER --fork {study.study_dir}"
        raise CannotTellError((*found.fit.warnings, remedy))
    if found.transferred is None or found.verdicts is None or found.choice is None:
        raise StageMissingError(
            f"the study has not ended: `{study.command_line('run')}` continues it"
        )
    finished = decide.finished_rungs(study, found.ladder, found.rungs)
    return decide.decision(study, found.transferred, found.verdicts, found.choice, finished)
