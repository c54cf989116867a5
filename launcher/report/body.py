"""`report.json`: everything the findings say as plain numbers, from which every figure and answer
is drawn.
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
    """Return the main run in `report.json`; None if nothing is known of one.

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
        event, loss = _launched(folder, digest)
    if (record := ledger.find(CONCLUDED, digest)) is not None:
        event, loss = "finished", cast(Any, record.body)["actual_nats"]
    if not lines and event is None:
        return None
    steps, losses = (
        [cast(Any, line[key]) for line in lines] for key in ("step", "train_loss_nats")
    )
    return {"steps": steps, "train_loss_nats": losses, "validation_loss_nats": loss, "event": event}


def _launched(folder: Path, digest: str) -> tuple[Any, Any]:
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


_NO_EVIDENCE = ("accepted", "driver", DRIVEN)
"""Kinds of records that change nothing that a gate finds."""
_NEXT = "next_runs"
"""Kept with the findings, and no key of the report."""
FINDING = "computing verdicts, fit and forecast"


def body_of(study: Study, ledger: Ledger, found: StudyFindings | None = None) -> dict[str, Json]:
    """`report.json` of a study as its ledger is now: every number the report shows. No clock, no
    path.

    Args:
        study: as it is recorded.
        ledger: as just read.
        found: what `gather` gave; None: gathered here, or taken from what an earlier call kept
            (`finding_cache`).
    """
    return body_and_next(study, ledger, found)[0]


def body_and_next(
    study: Study, ledger: Ledger, found: StudyFindings | None = None
) -> tuple[dict[str, Json], dict[str, Json] | None]:
    """`body_of`, and which runs would decide what cannot tell (`launcher.study.next_runs`), for
    people alone.
    """

    def compute() -> tuple[dict[str, Json], list[Path] | None]:
        gathered = gather(study, ledger) if found is None else found
        body = report_body(study, ledger, gathered)
        body[_NEXT] = next_runs(study, ledger, gathered, accepted(ledger, gathered.gates))
        if study.factory is not None or (gathered.choice is not None and body["digest"] is None):
            # made of the user's code, or of a curve that is lost, which is to be said each time
            return body, None
        rungs = () if body["decision"] is None else gathered.rungs
        files = [
            curve_path(study.study_dir, rung.id) for rung in rungs if rung.loss_nats is not None
        ]
        looked_at = (noise_path(study.study_dir, spec.id) for spec in gathered.ladder)
        return body, [*files, *(path for path in looked_at if path.exists())]

    body = cached(study.study_dir, key_of(study, ledger), compute, anew=found is not None)
    after = cast(dict[str, Json] | None, body.pop(_NEXT))
    gates = tuple(canon.decode(Gate, gate) for gate in cast(list[Json], body["gates"]))
    return body | {
        "accepted": accepted(ledger, gates),  # by the ledger, whatever was kept
        "main_run": None
        if body["digest"] is None
        else main_run(study, ledger, str(body["digest"])),
        "has_logbook": (study.study_dir / LOGBOOK_FILE).is_file(),
    }, after


def report_body(study: Study, ledger: Ledger, found: StudyFindings) -> dict[str, Json]:
    """What a study's records say, of `report.json`: all but what lies beside them."""
    results = ledger.results()
    decision = _decision(study, found) if found.choice is not None else None
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
        "progress": progress(study, ledger, found),
        "calibration": _calibration(ledger),
        "coordinates": found.coordinates,
        "wider": found.wider,
        "search": None if found.searched is None else search_body(study, ledger, found.searched),
        "transfer": None
        if found.transferred is None or found.verdicts is None
        else transfer_body(study, found.transferred, found.verdicts, results),
        "ladder": _ladder(study, found, results),
        "fit": None
        if found.fit is None
        else fit_body(found.fit, None if found.choice is None else found.choice.prediction),
        "frontier": _frontier(study, found),
        "choice": _choice(study, found),
        "noise_scale": noise_body(study, found.ladder, found.choice),
        "gates": canon.to_json(found.gates),
        "accepted": accepted(ledger, found.gates),
        "decision": None if decision is None else canon.to_json(decision),
        "digest": None if decision is None else decision.digest,
        "own_run": own_run(study, found.transferred, found.choice)
        if found.transferred is not None and found.choice is not None
        else None,
        "spend": _spend(study, ledger, found.choice),
        "ledger_head": ledger.head_hash,
    }


def _decision(study: Study, found: StudyFindings) -> Decision | None:
    """The decision; None where a curve or code that it needs is lost: that is printed, and `freeze`
    refuses.
    """
    from launcher.frozen.frozen import FrozenError
    from proxies.core.programs import FactoryChangedError, FactoryError
    from sweeps.store.errors import CurveCorrupt

    try:
        return decision_of(study, found)
    except (CurveCorrupt, FrozenError, FactoryError, FactoryChangedError) as error:
        say(f"forerun: the report has no launch config: {error}")
        return None


def progress(study: Study, ledger: Ledger, found: StudyFindings) -> dict[str, Json]:
    """Runs with an outcome, of runs asked for so far, by stage; a stage that is not reached yet is
    not there.
    """
    results = ledger.results()
    stages: dict[str, Json] = {"search": [*num_asked(study, ledger)]}
    if found.searched is not None:
        ids = {spec.id for test in asked(study, ledger) for spec in test.specs}
        stages["transfer"] = [len(ids & results.keys()), len(ids)]
    if found.transferred is not None:
        ids = {
            spec.id for spec in stage_specs(study, decide.ladder_specs(study, found.transferred))
        }
        stages["ladder"] = [len(ids & results.keys()), len(ids)]
    return stages


def accepted(ledger: Ledger, gates: tuple[Gate, ...]) -> dict[str, Json]:
    """Closed gates that someone accepted, with the reason given: an acceptance is of what the gate
    found then.

    That is the same outcome of the same records; after other records, the same in every number and
    word. So another version, which may word a reason otherwise, takes back no acceptance.
    """
    given: dict[str, Json] = {}
    by_name = {gate.name: gate for gate in gates}
    newest = max(
        (record.seq for record in ledger.stream() if record.kind not in _NO_EVIDENCE), default=0
    )
    for record in ledger.records("accepted"):
        assert isinstance(record.body, dict)
        gate = by_name.get(str(record.body["gate"]))
        if gate is None or gate.outcome != record.body["outcome"]:
            continue
        if record.seq > newest or gate.reason == record.body["found"]:
            given[gate.name] = record.body["reason"]
    return given


def _ladder(study: Study, found: StudyFindings, results: Mapping[str, RunResult]) -> Json:
    """The ladder's rungs in its order, and those that were checked; null before all of them have
    ended.
    """
    if found.fit is None:
        return None
    from scaling_fits.forecast.uncertainty import predict
    from scaling_fits.laws.law import CannotTellError

    rungs: list[Json] = []
    for spec in found.ladder:
        params = study.num_params(spec.shape)
        try:
            expected = predict(found.fit, params, spec.num_tokens).loss_nats
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
    branches = branches_body(study, found.ladder, results)
    return {"rungs": rungs, "branches": branches, **checks_body(study, found.checks, found.gates)}


def _frontier(study: Study, found: StudyFindings) -> Json:
    """Best loss against compute, from the smallest rung to the budget, each for one new run of the
    optimal size.
    """
    if found.fit is None or found.choice is None:
        return None
    from scaling_fits.allocation.allocate import allocate

    points: list[Json] = []
    for flops in frontier_flops(found.fit, study.plan.target.budget_flops):
        at = allocate(found.fit, flops)
        points.append(
            {
                "flops": at.flops,
                "params": at.params,
                "loss_nats": at.loss_nats,
                "interval": canon.to_json(at.interval),
            }
        )
    return points


def _choice(study: Study, found: StudyFindings) -> Json:
    if found.choice is None:
        return None
    from scaling_fits.summary import allocation_summary, prediction_summary

    choice = found.choice
    prediction, params = prediction_summary(choice.prediction), study.num_params(choice.shape)
    tables = count_params(choice.shape).total - count_params(choice.shape).non_embedding
    return {
        "budget_flops": study.plan.target.budget_flops,
        "allocation": allocation_summary(choice.allocation, choice.batch_tokens),
        "shape": canon.to_json(choice.shape),
        "aspect": aspect_body(choice),
        "params": params,
        "params_non_embedding": max(0, params - tables),
        "num_steps": choice.num_steps,
        "tokens": choice.num_tokens,
        "flops_causal": _causal_flops(choice),
        "prediction": {
            **prediction,
            "warnings": [*forecast_warnings(found.gates), *choice.prediction.warnings],
        },
    }


def _spend(study: Study, ledger: Ledger, choice: Choice | None) -> dict[str, Json]:
    """What the runs cost, as numbers and as a share of the main run; the coordinate check, lost
    attempts and what another study paid for are not counted.
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
        / (planned_main_run(study).flops["causal"] if choice is None else _causal_flops(choice)),
    }


def _causal_flops(choice: Choice) -> float:
    return float(flops_per_token(choice.shape)) * choice.num_tokens


def _calibration(ledger: Ledger) -> list[Json]:
    """Every choice in the ledger's order, with what it was chosen from; none of a plan whose
    numbers are given.
    """
    body: list[Json] = []
    for found in calibrations(ledger):
        asked, best = found.asked, found.figure
        record = cast(dict[str, Json], canon.to_json(found))
        body.append(
            {
                "part": asked.part,
                "width": asked.shape.width,
                "num_layers": asked.shape.num_layers,
                "batch_tokens": asked.batch_tokens,
                "mode": mode_name(found.chosen, asked.given),
                "why": found.why,
                "trial_steps_per_second": None if best is None else best.trial_steps_per_second,
                "planned_seconds": None if best is None else best.planned_seconds,
                "device": found.device,
                "num_workers": found.num_workers,
                "numerics": record["chosen"],
                "figures": record["figures"],
            }
        )
    return body
