"""Everything that a study has found so far, gathered once. The report, `freeze`, and the answers of
verbs are made from it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forerun._launcher.main_run.frozen.frozen import Decision
from forerun._launcher.study.experiments.coordinate_record import (
    RecordedCheck,
    read_coordinate_checks,
)
from forerun._launcher.study.experiments.transfer_results import (
    SearchResult,
    StageMissingError,
    TransferResult,
    Verdicts,
    guess_target_sizes,
    judge_tests,
    load_search_result,
    load_transfer_result,
)
from forerun._launcher.study.plan.study import NoFinishedTrialError, Study
from forerun._launcher.study.stages import main_run_choice
from forerun._launcher.study.stages.gates import (
    Gate,
    build_failed_runs_gate,
    find_failed_check,
    find_failed_transfer,
    judge_gates,
    select_failed,
)
from forerun._launcher.study.stages.ladder_checks import LadderChecks, judge_ladder
from forerun._launcher.study.stages.main_run_choice import MainRunChoice
from forerun._launcher.study.stages.winner_reruns import build_replay_gate
from forerun._proxies.core.spec import RunResult, RunSpec
from forerun._sweeps.store.ledger import Ledger

if TYPE_CHECKING:
    from forerun._scaling_fits.forecast.uncertainty import FittedRuns


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StudyFindings:
    """Findings by stage; None for a stage that has not ended."""

    coordinates: dict[str, RecordedCheck]
    """Coordinate checks by name."""
    searched: SearchResult | None = None
    transferred: TransferResult | None = None
    ladder: tuple[RunSpec, ...] = ()
    """Rungs of the ladder."""
    rungs: tuple[RunResult, ...] = ()
    """Results of `ladder`, in its order."""
    fit: FittedRuns | None = None
    checks: LadderChecks | None = None
    """Results of the ladder's rungs at other learning rates."""
    choice: MainRunChoice | None = None
    verdicts: Verdicts | None = None
    """Verdicts for the chosen sizes; before the choice, for the sizes that the budget suggests."""
    gates: tuple[Gate, ...] = ()
    """All gates once there is a choice; before, only those that failed."""


def gather_findings(study: Study, ledger: Ledger) -> StudyFindings:
    """Return the findings from the ledger's records, up to the first stage that has not ended. If
    the fit determines no law, there is no choice of the main run.
    """
    from forerun._scaling_fits.laws.law import CannotTellError

    coordinates = read_coordinate_checks(ledger)
    failed = find_failed_check(study, coordinates) + select_failed(build_replay_gate(study, ledger))
    findings = StudyFindings(coordinates=coordinates, gates=failed)
    try:
        search = load_search_result(study, ledger)
        findings = dataclasses.replace(findings, searched=search)
        transfer = load_transfer_result(study, ledger)
        verdicts = judge_tests(study, ledger, transfer, guess_target_sizes(study))
        failed += find_failed_transfer(verdicts)
        findings = dataclasses.replace(
            findings, transferred=transfer, verdicts=verdicts, gates=failed
        )
        specs = main_run_choice.build_ladder_runs(study, transfer)
    except (StageMissingError, NoFinishedTrialError):
        return findings
    results = ledger.get_results()
    if any(spec.id not in results for spec in specs):
        return findings
    fit = main_run_choice.load_or_fit_ladder(study, ledger, specs)
    checks = judge_ladder(study, specs, results, verdicts, fit)
    rungs = tuple(results[spec.id] for spec in specs)
    findings = dataclasses.replace(
        findings, ladder=tuple(specs), rungs=rungs, fit=fit, checks=checks
    )
    try:
        choice = main_run_choice.choose_main_run(
            study, fit, main_run_choice.fit_aspect_term(study, fit, specs, rungs)
        )
    except CannotTellError:
        return findings
    verdicts = judge_tests(study, ledger, transfer, choice.sizes)
    lost_rungs = [rung for rung in rungs if rung.loss_nats is None]
    all_gates = judge_gates(study, coordinates, verdicts, fit, choice, lost_rungs, checks)
    all_gates += build_replay_gate(study, ledger) + build_failed_runs_gate(ledger, study.study_dir)
    return dataclasses.replace(findings, choice=choice, verdicts=verdicts, gates=all_gates)


def build_decision_from_findings(study: Study, findings: StudyFindings) -> Decision:
    """Return the decision that follows from the findings.

    Raises:
        StageMissingError: Some runs are missing.
        FactoryError, FactoryChangedError: The user's own model cannot be built, or has changed.
        CannotTellError: All runs have ended, and the ladder fits no law.
    """
    if findings.fit is not None and findings.choice is None:
        from forerun._scaling_fits.laws.law import CannotTellError

        remedy = (
            "no gate can be accepted in place of a fit: run more rungs (ladder.widths, "
            "ladder.num_steps) in a child study, by forerun run PLAN --study ANOTHER --fork "
            f"{study.study_dir}"
        )
        raise CannotTellError((*findings.fit.warnings, remedy))
    if findings.transferred is None or findings.verdicts is None or findings.choice is None:
        raise StageMissingError(
            f"the study has not ended: `{study.format_command('run')}` continues it"
        )
    finished = main_run_choice.load_finished_rungs(study, findings.ladder, findings.rungs)
    return main_run_choice.build_decision(
        study, findings.transferred, findings.verdicts, findings.choice, finished
    )
