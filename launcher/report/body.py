"""The content of `report.json`: every finding as plain numbers.

All figures and answers are drawn from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from launcher.base.talk import say
from launcher.calibration.procedure import calibrations
from launcher.calibration.study_cost import planned_main_run
from launcher.experiments.ladder import stage_specs
from launcher.experiments.search import num_asked
from launcher.experiments.transferred_values import asked, transfer_body
from launcher.experiments.wider import branches_body
from launcher.logbook.logbook import LOGBOOK_FILE, RUN_DIR
from launcher.plan.calibration_records import mode_name
from launcher.plan.study import Study
from launcher.study import decide
from launcher.study.decide import Choice, own_run
from launcher.study.evidence import StudyFindings, decision_of, gather
from launcher.study.finding_cache import cached, key_of
from launcher.study.gates import Gate, forecast_warnings
from launcher.study.history import CONCLUDED
from launcher.study.ladder_checks import checks_body
from launcher.study.next_runs import next_runs
from launcher.views.aspect import aspect_body
from launcher.views.batch import noise_body
from launcher.views.search import search_body
from launcher.views.tables import fit_body, frontier_flops
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.flops import count_params, flops_per_token
from proxies.core.spec import RunResult
from sweeps.store.curves import curve_path, noise_path
from sweeps.store.ledger import DRIVEN, Ledger

if TYPE_CHECKING:
    from launcher.frozen.frozen import Decision


def main_run(study: Study, ledger: Ledger, digest: str) -> Json:
    """Return section `main_run` of the report; None if nothing is known of a main run.

    The embedded trainer's log is read if it was launched into its usual place. The end of another
    run comes from the attestation of its launch, or from the record of a concluded run (`forerun
    watch --conclude`).
    """
    from launcher.base import metrics

    folder = study.study_dir / "frozen" / digest
    lines = metrics.read(folder / RUN_DIR) if study.plan.command is None else []
    lines = [line for line in lines if "train_loss_nats" in line]
    if lines:
        ending = metrics.read_ending(folder / RUN_DIR)
        event, loss = (
            (None, None) if ending is None else (ending.event, ending.validation_loss_nats)
        )
    else:
        event, loss = _read_launch_outcome(folder, digest)
    if (record := ledger.find(CONCLUDED, digest)) is not None:
        event, loss = "finished", cast(Any, record.body)["actual_nats"]
    if not lines and event is None:
        return None
    steps, losses = (
        [cast(Any, line[key]) for line in lines] for key in ("step", "train_loss_nats")
    )
    return {"steps": steps, "train_loss_nats": losses, "validation_loss_nats": loss, "event": event}


def _read_launch_outcome(folder: Path, digest: str) -> tuple[Any, Any]:
    """Return how the last launch ended, and its validation loss in nats; None where that is not
    known.
    """
    from launcher.frozen.frozen import TamperedError
    from launcher.frozen.launch_file import path_of, read_attestation

    if not (path := path_of(folder, "launch")).is_file():
        return None, None
    try:
        outcome = cast(Any, read_attestation(path, digest))["outcome"]
    except TamperedError as error:
        say(f"forerun: the report has no outcome of the main run: {error}")
        return None, None
    return outcome["event"], outcome["validation_loss_nats"]


_KINDS_WITHOUT_EVIDENCE = ("accepted", "driver", DRIVEN)
"""Kinds of records that do not change what any gate finds."""
_NEXT_RUNS_KEY = "next_runs"
"""Key under which the next runs are cached with the findings; it is removed from the report."""
FINDING = "computing verdicts, fit and forecast"
"""Label of the progress shown while findings are computed."""


def body_of(study: Study, ledger: Ledger, findings: StudyFindings | None = None) -> dict[str, Json]:
    """Return `report.json` of a study as its ledger is now. It holds no time and no path.

    Args:
        study: The study as recorded.
        ledger: The ledger as just read.
        findings: Findings from `gather`; None to gather them here, or to take them from the cache
            of an earlier call (`finding_cache`).
    """
    return body_and_next(study, ledger, findings)[0]


def body_and_next(
    study: Study, ledger: Ledger, findings: StudyFindings | None = None
) -> tuple[dict[str, Json], dict[str, Json] | None]:
    """Return `report.json`, and the runs that would decide the gates that cannot tell.

    The runs (`launcher.study.next_runs`) are for people, and not part of the report. Arguments as
    for `body_of`.
    """

    def compute() -> tuple[dict[str, Json], list[Path] | None]:
        computed_findings = gather(study, ledger) if findings is None else findings
        body = report_body(study, ledger, computed_findings)
        body[_NEXT_RUNS_KEY] = next_runs(
            study, ledger, computed_findings, accepted(ledger, computed_findings.gates)
        )
        if study.factory is not None or (
            computed_findings.choice is not None and body["digest"] is None
        ):
            # Not cached: it depends on the user's code, or a message about a lost curve is due on
            # every call.
            return body, None
        rungs = () if body["decision"] is None else computed_findings.rungs
        files = [
            curve_path(study.study_dir, rung.id) for rung in rungs if rung.loss_nats is not None
        ]
        noise_files = (noise_path(study.study_dir, spec.id) for spec in computed_findings.ladder)
        return body, [*files, *(path for path in noise_files if path.exists())]

    body = cached(study.study_dir, key_of(study, ledger), compute, anew=findings is not None)
    after = cast(dict[str, Json] | None, body.pop(_NEXT_RUNS_KEY))
    gates = tuple(canon.decode(Gate, gate) for gate in cast(list[Json], body["gates"]))
    return body | {
        # Acceptances come from the ledger, not from the cache.
        "accepted": accepted(ledger, gates),
        "main_run": None
        if body["digest"] is None
        else main_run(study, ledger, str(body["digest"])),
        "has_logbook": (study.study_dir / LOGBOOK_FILE).is_file(),
    }, after


def report_body(study: Study, ledger: Ledger, findings: StudyFindings) -> dict[str, Json]:
    """Return the part of `report.json` that comes from the study's records.

    `body_and_next` adds what lies beside them: main run and logbook.
    """
    results = ledger.results()
    decision = _make_decision(study, findings) if findings.choice is not None else None
    return {
        "schema_version": 1,
        "question": study.question,
        "corpus": {
            "data_id": study.manifest.data_id,
            "tokenizer": study.manifest.tokenizer,
            "vocab_size": study.manifest.vocab_size,
            "num_documents": study.manifest.num_documents,
            "num_train_tokens": study.manifest.num_tokens("train"),
            "num_validation_tokens": study.manifest.num_tokens("validation"),
        },
        "progress": progress(study, ledger, findings),
        "calibration": _build_calibration_section(ledger),
        "coordinates": findings.coordinates,
        "wider": findings.wider,
        "search": None
        if findings.searched is None
        else search_body(study, ledger, findings.searched),
        "transfer": None
        if findings.transferred is None or findings.verdicts is None
        else transfer_body(study, findings.transferred, findings.verdicts, results),
        "ladder": _build_ladder_section(study, findings, results),
        "fit": None
        if findings.fit is None
        else fit_body(
            findings.fit, None if findings.choice is None else findings.choice.prediction
        ),
        "frontier": _build_frontier_section(study, findings),
        "choice": _build_choice_section(study, findings),
        "noise_scale": noise_body(study, findings.ladder, findings.choice),
        "gates": canon.to_json(findings.gates),
        "accepted": accepted(ledger, findings.gates),
        "decision": None if decision is None else canon.to_json(decision),
        "digest": None if decision is None else decision.digest,
        "own_run": own_run(study, findings.transferred, findings.choice)
        if findings.transferred is not None and findings.choice is not None
        else None,
        "spend": _build_spend_section(study, ledger, findings.choice),
        "ledger_head": ledger.head_hash,
    }


def _make_decision(study: Study, findings: StudyFindings) -> Decision | None:
    """Return the decision; None, with a printed message, if a curve or code that it needs is lost.

    `freeze` refuses in that case.
    """
    from launcher.frozen.frozen import FrozenError
    from proxies.core.programs import FactoryChangedError, FactoryError
    from sweeps.store.errors import CurveCorrupt

    try:
        return decision_of(study, findings)
    except (CurveCorrupt, FrozenError, FactoryError, FactoryChangedError) as error:
        say(f"forerun: the report has no launch config: {error}")
        return None


def progress(study: Study, ledger: Ledger, findings: StudyFindings) -> dict[str, Json]:
    """Return the number of ended runs, and of runs requested so far, by stage.

    A stage that has not been reached is absent.
    """
    results = ledger.results()
    stages: dict[str, Json] = {"search": [*num_asked(study, ledger)]}
    if findings.searched is not None:
        ids = {spec.id for test in asked(study, ledger) for spec in test.specs}
        stages["transfer"] = [len(ids & results.keys()), len(ids)]
    if findings.transferred is not None:
        ids = {
            spec.id for spec in stage_specs(study, decide.ladder_specs(study, findings.transferred))
        }
        stages["ladder"] = [len(ids & results.keys()), len(ids)]
    return stages


def accepted(ledger: Ledger, gates: tuple[Gate, ...]) -> dict[str, Json]:
    """Return the accepted gates with the reasons given for them.

    An acceptance holds while the gate's outcome is the same, and either no evidence was recorded
    after it, or the gate's reason is the same in every number and word. A new version of forerun
    that words reasons differently therefore does not revoke an acceptance.
    """
    reasons: dict[str, Json] = {}
    by_name = {gate.name: gate for gate in gates}
    newest = max(
        (record.seq for record in ledger.stream() if record.kind not in _KINDS_WITHOUT_EVIDENCE),
        default=0,
    )
    for record in ledger.records("accepted"):
        assert isinstance(record.body, dict)
        gate = by_name.get(str(record.body["gate"]))
        if gate is None or gate.outcome != record.body["outcome"]:
            continue
        if record.seq > newest or gate.reason == record.body["found"]:
            reasons[gate.name] = record.body["reason"]
    return reasons


def _build_ladder_section(
    study: Study, findings: StudyFindings, results: Mapping[str, RunResult]
) -> Json:
    """Return section `ladder`: rungs and checks of their rates; null until all rungs have ended."""
    if findings.fit is None:
        return None
    from scaling_fits.forecast.uncertainty import predict
    from scaling_fits.laws.law import CannotTellError

    rungs: list[Json] = []
    for spec in findings.ladder:
        params = study.num_params(spec.shape)
        try:
            expected = predict(findings.fit, params, spec.num_tokens).loss_nats
        except CannotTellError:
            expected = None
        rungs.append(
            {
                "width": spec.shape.width,
                "num_layers": spec.shape.num_layers,
                "params": params,
                "tokens": spec.num_tokens,
                "flops": 6.0 * params * spec.num_tokens,
                "loss_nats": results[spec.id].loss_nats,
                "fitted_nats": expected,
            }
        )
    branches = branches_body(study, findings.ladder, results)
    return {
        "rungs": rungs,
        "branches": branches,
        **checks_body(study, findings.checks, findings.gates),
    }


def _build_frontier_section(study: Study, findings: StudyFindings) -> Json:
    """Return section `frontier`: the best loss at each compute, up to the budget.

    Each point is a forecast for one new run of the optimal size.
    """
    if findings.fit is None or findings.choice is None:
        return None
    from scaling_fits.allocation.allocate import allocate

    points: list[Json] = []
    for flops in frontier_flops(findings.fit, study.plan.target.budget_flops):
        allocation = allocate(findings.fit, flops)
        points.append(
            {
                "flops": allocation.flops,
                "params": allocation.params,
                "loss_nats": allocation.loss_nats,
                "interval": canon.to_json(allocation.interval),
            }
        )
    return points


def _build_choice_section(study: Study, findings: StudyFindings) -> Json:
    if findings.choice is None:
        return None
    from scaling_fits.summary import allocation_summary, prediction_summary

    choice = findings.choice
    prediction, params = prediction_summary(choice.prediction), study.num_params(choice.shape)
    embedding_params = count_params(choice.shape).total - count_params(choice.shape).non_embedding
    return {
        "budget_flops": study.plan.target.budget_flops,
        "allocation": allocation_summary(choice.allocation, choice.batch_tokens),
        "shape": canon.to_json(choice.shape),
        "aspect": aspect_body(choice),
        "params": params,
        "params_non_embedding": max(0, params - embedding_params),
        "num_steps": choice.num_steps,
        "tokens": choice.num_tokens,
        "flops_causal": _compute_causal_flops(choice),
        "prediction": {
            **prediction,
            "warnings": [*forecast_warnings(findings.gates), *choice.prediction.warnings],
        },
    }


def _build_spend_section(study: Study, ledger: Ledger, choice: Choice | None) -> dict[str, Json]:
    """Return section `spend`: the cost of the runs, also as a share of the main run.

    The coordinate check, lost executions, and runs that another study paid for are not counted.
    """
    results = ledger.own_results()
    flops = sum(result.flops for result in results)
    return {
        "num_runs": len(results),
        "num_imported": len(ledger.imported()),
        "by_status": {**Counter(str(result.status) for result in results)},
        "flops_causal": flops,
        "worker_seconds": sum(result.seconds for result in results),
        "share_of_target": flops
        / (
            planned_main_run(study).flops["causal"]
            if choice is None
            else _compute_causal_flops(choice)
        ),
    }


def _compute_causal_flops(choice: Choice) -> float:
    return float(flops_per_token(choice.shape)) * choice.num_tokens


def _build_calibration_section(ledger: Ledger) -> list[Json]:
    """Return section `calibration`: every choice in the ledger's order, with its measurements.

    It is empty if the plan gives the numbers.
    """
    body: list[Json] = []
    for calibration in calibrations(ledger):
        question, figure = calibration.asked, calibration.figure
        record = cast(dict[str, Json], canon.to_json(calibration))
        body.append(
            {
                "part": question.part,
                "width": question.shape.width,
                "num_layers": question.shape.num_layers,
                "batch_tokens": question.batch_tokens,
                "mode": mode_name(calibration.chosen, question.given),
                "why": calibration.why,
                "trial_steps_per_second": None if figure is None else figure.trial_steps_per_second,
                "planned_seconds": None if figure is None else figure.planned_seconds,
                "device": calibration.device,
                "num_workers": calibration.num_workers,
                "numerics": record["chosen"],
                "figures": record["figures"],
            }
        )
    return body
