"""The report of a study (`Report`), built from the study's ledger.

The terminal, the page, and the figures are rendered from the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from forerun._launcher.main_run.logbook.logbook import LOGBOOK_FILE, RUN_DIR
from forerun._launcher.main_run.progress_output import print_progress
from forerun._launcher.report.views.curve_comparison import compare_widths
from forerun._launcher.report.views.fit_findings import Choice
from forerun._launcher.report.views.noise_scale import build_noise_section
from forerun._launcher.report.views.report_model import (
    Calibration,
    Corpus,
    MainRun,
    Report,
    Spend,
    UserRun,
)
from forerun._launcher.report.views.report_model import Decision as ReportedDecision
from forerun._launcher.report.views.scaling_sections import (
    build_choice_section,
    build_frontier_section,
    build_ladder_section,
)
from forerun._launcher.report.views.search import build_search_section
from forerun._launcher.report.views.tables import build_fit_section
from forerun._launcher.report.views.transfer_section import build_transfer_section
from forerun._launcher.study.calibration.procedure import read_calibrations
from forerun._launcher.study.calibration.study_cost import plan_main_run
from forerun._launcher.study.experiments.ladder import build_stage_runs
from forerun._launcher.study.experiments.search import SearchState
from forerun._launcher.study.experiments.transfer_results import list_tests_with_runs
from forerun._launcher.study.plan.calibration_records import describe_mode
from forerun._launcher.study.plan.study import Study
from forerun._launcher.study.stages import main_run_choice
from forerun._launcher.study.stages.concluded_runs import CONCLUDED
from forerun._launcher.study.stages.finding_cache import load_or_compute
from forerun._launcher.study.stages.gates import Gate
from forerun._launcher.study.stages.next_runs import NextRuns, find_next_runs
from forerun._launcher.study.stages.study_findings import (
    StudyFindings,
    build_decision_from_findings,
    gather_findings,
)
from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._sweeps.store.ledger import WORK_RECORD, Ledger

if TYPE_CHECKING:
    from forerun._launcher.main_run.frozen.frozen import Decision


def build_main_run_section(study: Study, ledger: Ledger, digest: str) -> MainRun | None:
    """Return section `main_run` of the report; None if nothing is known of a main run.

    The log of the embedded trainer is read if the run was launched into its usual place. The end of
    any other run comes from the attestation of its launch. The record of a concluded run (`forerun
    watch --conclude`) takes precedence over both.
    """
    from forerun._launcher.main_run import metrics_file

    folder = study.study_dir / "frozen" / digest
    lines = metrics_file.read_lines(folder / RUN_DIR) if study.plan.command is None else []
    lines = [line for line in lines if "train_loss_nats" in line]
    if lines:
        ending = metrics_file.read_ending(folder / RUN_DIR)
        event, loss = (ending.event, ending.validation_loss_nats) if ending else (None, None)
    else:
        event, loss = _read_launch_outcome(folder, digest)
    if (record := ledger.find(CONCLUDED, digest)) is not None:
        event, loss = "finished", cast(Any, record.body)["actual_nats"]
    if not lines and event is None:
        return None
    steps, losses = (
        [cast(Any, line[key]) for line in lines] for key in ("step", "train_loss_nats")
    )
    return MainRun(steps=steps, train_loss_nats=losses, validation_loss_nats=loss, event=event)


def _read_launch_outcome(folder: Path, digest: str) -> tuple[Any, Any]:
    """Return the event that ended the last launch, and its validation loss in nats.

    Each is None if it is not known.
    """
    from forerun._launcher.main_run.frozen.frozen import TamperedError
    from forerun._launcher.main_run.frozen.launch_file import get_attestation_path, read_attestation

    if not (path := get_attestation_path(folder, "launch")).is_file():
        return None, None
    try:
        outcome = cast(Any, read_attestation(path, digest))["outcome"]
    except TamperedError as error:
        print_progress(f"forerun: the report has no outcome of the main run: {error}")
        return None, None
    return outcome["event"], outcome["validation_loss_nats"]


_KINDS_WITHOUT_EVIDENCE = ("accepted", "driver", WORK_RECORD)
"""Kinds of records that do not change what any gate finds."""
Progress = tuple[int, int] | None
"""Ended runs of a stage, and runs requested so far."""
PROGRESS_LABEL = "computing verdicts, fit and forecast"
"""Label of the progress shown while findings are computed."""


def build_report(study: Study, ledger: Ledger, findings: StudyFindings | None = None) -> Report:
    """Return the report of a study as its ledger is now. The report holds no time and no path.

    Args:
        study: The study as recorded.
        ledger: The ledger as just read.
        findings: Findings from `gather_findings`; None to gather them here, or to take them from
            the cache of an earlier call (`finding_cache`).
    """
    return build_report_and_next_runs(study, ledger, findings)[0]


def build_report_and_next_runs(
    study: Study, ledger: Ledger, findings: StudyFindings | None = None
) -> tuple[Report, NextRuns | None]:
    """Return the report, and the runs that would decide the gates that cannot tell.

    The runs are shown to people, and no part of the report. The arguments are those of
    `build_report`.
    """

    def compute() -> tuple[dict[str, Json], bool]:
        computed_findings = gather_findings(study, ledger) if findings is None else findings
        computed = build_recorded_report(study, ledger, computed_findings)
        next_runs = find_next_runs(study, ledger, computed_findings, computed.accepted)
        # Two kinds of reports are not cached: one that depends on the user's code, which may have
        # changed, and one with a lost curve, because its message is printed on every call.
        has_lost_curve = computed_findings.choice is not None and computed.digest is None
        cacheable = {"report": computed.to_json(), "next_runs": canon.to_json(next_runs)}
        return cacheable, study.factory is None and not has_lost_curve

    cached = load_or_compute(study, ledger, compute, anew=findings is not None)
    report = Report.model_validate(cached["report"])
    # Acceptances, the main run, and the logbook are read on every call, not from the cache.
    digest = report.digest
    current = {
        "accepted": list_accepted_gates(ledger, report.gates),
        "main_run": None if digest is None else build_main_run_section(study, ledger, digest),
        "has_logbook": (study.study_dir / LOGBOOK_FILE).is_file(),
    }
    next_runs = cached["next_runs"]
    return report.model_copy(update=current), canon.decode(
        NextRuns, next_runs
    ) if next_runs else None


def build_recorded_report(study: Study, ledger: Ledger, findings: StudyFindings) -> Report:
    """Return the part of the report that comes from the study's records.

    `build_report_and_next_runs` adds the main run and the logbook, which the records do not hold.
    """
    results = ledger.get_results()
    searched, transferred, verdicts = findings.searched, findings.transferred, findings.verdicts
    choice, fit = findings.choice, findings.fit
    choice_section = build_choice_section(study, findings)
    decision = _make_decision(study, findings) if choice is not None else None
    user_command = None
    if transferred is not None and choice is not None:
        user_command = main_run_choice.format_user_command(study, transferred, choice)
    return Report(
        schema_version=1,
        question=study.question,
        corpus=Corpus(
            data_id=study.manifest.data_id,
            tokenizer=study.manifest.tokenizer,
            vocab_size=study.manifest.vocab_size,
            num_documents=study.manifest.num_documents,
            num_train_tokens=study.manifest.count_tokens("train"),
            num_validation_tokens=study.manifest.count_tokens("validation"),
        ),
        progress=count_progress(study, ledger, findings),
        calibration=_build_calibration_section(ledger),
        coordinates=findings.coordinates,
        wider=None
        if transferred is None
        else compare_widths(study, transferred.tests, results, transferred.log2_lr),
        search=None if searched is None else build_search_section(study, ledger, searched),
        transfer=None
        if transferred is None or verdicts is None
        else build_transfer_section(study, transferred, verdicts, results),
        ladder=build_ladder_section(study, findings, results),
        fit=None
        if fit is None
        else build_fit_section(fit, None if choice is None else choice.prediction),
        frontier=build_frontier_section(study, findings),
        choice=choice_section,
        noise_scale=build_noise_section(study, findings.ladder, choice),
        gates=list(findings.gates),
        accepted=list_accepted_gates(ledger, findings.gates),
        decision=None
        if decision is None
        else ReportedDecision.model_validate(canon.to_json(decision)),
        digest=None if decision is None else decision.digest,
        own_run=None if user_command is None else UserRun(kind="command", line=user_command),
        spend=_build_spend_section(study, ledger, choice_section),
        ledger_head=ledger.head_hash,
    )


def _make_decision(study: Study, findings: StudyFindings) -> Decision | None:
    """Return the decision; None, with a printed message, if a curve or code that it needs is lost.

    `freeze` refuses such a study.
    """
    from forerun._launcher.main_run.frozen.frozen import FrozenError
    from forerun._proxies.core.programs import FactoryChangedError, FactoryError
    from forerun._sweeps.store.errors import CurveCorrupt

    try:
        return build_decision_from_findings(study, findings)
    except (CurveCorrupt, FrozenError, FactoryError, FactoryChangedError) as error:
        print_progress(f"forerun: the report has no launch config: {error}")
        return None


def count_progress(study: Study, ledger: Ledger, findings: StudyFindings) -> dict[str, Progress]:
    """Return the number of ended runs, and of runs requested so far, by stage.

    A stage that has not been reached is absent.
    """
    results = ledger.get_results()
    stages: dict[str, Progress] = {"search": SearchState(study, ledger).count_runs()}
    runs = {}
    if findings.searched is not None:
        tests = list_tests_with_runs(study, ledger)
        runs["transfer"] = [spec for test in tests for spec in test.specs]
    if findings.transferred is not None:
        rungs = main_run_choice.build_ladder_runs(study, findings.transferred)
        runs["ladder"] = build_stage_runs(study, rungs)
    for stage, specs in runs.items():
        ids = {spec.id for spec in specs}
        stages[stage] = (len(ids & results.keys()), len(ids))
    return stages


def list_accepted_gates(ledger: Ledger, gates: Sequence[Gate]) -> dict[str, str]:
    """Return the accepted gates with the reasons given for them.

    An acceptance holds while the gate's outcome is the same, and either no evidence was recorded
    after it, or the gate's reason is the same in every number and word. A new version of forerun
    that words reasons differently therefore does not revoke an acceptance.
    """
    reasons: dict[str, str] = {}
    by_name = {gate.name: gate for gate in gates}
    newest = max(
        (
            record.seq
            for record in ledger.iterate_records()
            if record.kind not in _KINDS_WITHOUT_EVIDENCE
        ),
        default=0,
    )
    for record in ledger.read_records("accepted"):
        assert isinstance(record.body, dict)
        gate = by_name.get(str(record.body["gate"]))
        if gate is None or gate.outcome != record.body["outcome"]:
            continue
        if record.seq > newest or gate.reason == record.body["found"]:
            reasons[gate.name] = str(record.body["reason"])
    return reasons


def _build_spend_section(study: Study, ledger: Ledger, choice: Choice | None) -> Spend:
    """Return section `spend`: the cost of the runs, also as a share of the main run.

    The coordinate check, lost executions, and runs that another study paid for are not counted.
    """
    results = ledger.get_own_results()
    flops = sum(result.flops for result in results)
    target_flops = plan_main_run(study).flops["causal"] if choice is None else choice.flops_causal
    return Spend(
        num_runs=len(results),
        num_imported=len(ledger.read_imported_ids()),
        by_status=Counter(str(result.status) for result in results),
        flops_causal=flops,
        worker_seconds=sum(result.seconds for result in results),
        share_of_target=flops / target_flops,
    )


def _build_calibration_section(ledger: Ledger) -> list[Calibration]:
    """Return section `calibration`: every choice of a mode, in the ledger's order.

    The section is empty if the plan sets the modes.
    """
    section = []
    for calibration in read_calibrations(ledger):
        request, timing = calibration.asked, calibration.figure
        section.append(
            Calibration(
                part=request.part,
                width=request.shape.width,
                num_layers=request.shape.num_layers,
                batch_tokens=request.batch_tokens,
                mode=describe_mode(calibration.chosen, request.given),
                why=calibration.why,
                trial_steps_per_second=timing.trial_steps_per_second if timing else None,
                planned_seconds=timing.planned_seconds if timing else None,
                device=calibration.device,
                num_workers=calibration.num_workers,
                numerics=canon.to_json(calibration.chosen),
                figures=[canon.to_json(figure) for figure in calibration.figures],
            )
        )
    return section
