"""Everything that a study has found so far, gathered once. The report, `freeze`, and the answers of
verbs are made from it.
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
    """Findings by stage; None for a stage that has not ended."""

    coordinates: dict[str, Json]
    searched: SearchOutcome | None = None
    transferred: Transferred | None = None
    ladder: tuple[RunSpec, ...] = ()
    rungs: tuple[RunResult, ...] = ()
    """Results of `ladder`, in its order."""
    table: RunTable | None = None
    fit: FittedRuns | None = None
    checks: LadderChecks | None = None
    """Results of the ladder's rungs at other learning rates."""
    choice: Choice | None = None
    verdicts: Verdicts | None = None
    """Verdicts for the chosen sizes; before the choice, for the sizes that the budget suggests."""
    wider: Json = None
    """Whether wider models are better, as the report has it."""
    gates: tuple[Gate, ...] = ()
    """All gates once there is a choice; before, only those that failed."""


def gather(study: Study, ledger: Ledger) -> StudyFindings:
    """Return the findings that the ledger's records hold, up to the first stage that has not ended.
    There is no choice if the fit finds none.
    """
    from scaling_fits.laws.law import CannotTellError

    coordinates = ledger.records_for_plan("coordinates")
    failed = find_failed_check(study, coordinates) + select_failed(replay_gates(study, ledger))
    findings = StudyFindings(coordinates=coordinates, gates=failed)
    try:
        search = searched(study, ledger)
        findings = dataclasses.replace(findings, searched=search)
        transfer = transferred(study, ledger)
        verdicts = verdicts_at(study, ledger, transfer, target_guess(study))
        curves = curves_by_width(study, transfer.tests, ledger.results(), transfer.log2_lr)
        failed += find_failed_transfer(verdicts)
        findings = dataclasses.replace(
            findings,
            transferred=transfer,
            verdicts=verdicts,
            wider=wider_body(wider(study, curves), curves),
            gates=failed,
        )
        specs = decide.ladder_specs(study, transfer)
        table = decide.ladder_table(study, specs, ledger.results())
    except (StageMissingError, NoFinishedTrialError):
        return findings
    fit, results = decide.fitted(study, ledger, specs), ledger.results()
    checks = ladder_checks(study, specs, results, verdicts, fit)
    rungs = tuple(results[spec.id] for spec in specs)
    findings = dataclasses.replace(
        findings, ladder=tuple(specs), rungs=rungs, table=table, fit=fit, checks=checks
    )
    try:
        choice = decide.choose(study, fit, decide.aspect_of(study, fit, specs, rungs))
    except CannotTellError:
        return findings
    verdicts = verdicts_at(study, ledger, transfer, choice.sizes)
    lost_rungs = [rung for rung in rungs if rung.loss_nats is None]
    all_gates = gates(study, coordinates, verdicts, fit, choice, lost_rungs, checks)
    all_gates += replay_gates(study, ledger) + failed_gates(ledger, study.study_dir)
    return dataclasses.replace(findings, choice=choice, verdicts=verdicts, gates=all_gates)


def decision_of(study: Study, findings: StudyFindings) -> Decision:
    """Return the decision that follows from the findings.

    Raises:
        StageMissingError: Some runs are missing.
        FactoryError, FactoryChangedError: The user's own model cannot be built, or has changed.
        CannotTellError: All runs have ended, and the ladder fits no law.
    """
    if findings.fit is not None and findings.choice is None:
        from scaling_fits.laws.law import CannotTellError

        remedy = (
            "no gate can be accepted in place of a fit: run more rungs (ladder.widths, "
            "ladder.num_steps) in a child "
        )
        remedy += f"study, by forerun run PLAN --study ANOTHER --fork {study.study_dir}"
        raise CannotTellError((*findings.fit.warnings, remedy))
    if findings.transferred is None or findings.verdicts is None or findings.choice is None:
        raise StageMissingError(
            f"the study has not ended: `{study.command_line('run')}` continues it"
        )
    finished = decide.finished_rungs(study, findings.ladder, findings.rungs)
    return decide.decision(
        study, findings.transferred, findings.verdicts, findings.choice, finished
    )
