"""A study's runs as W&B is told of them: one for every proxy, from ledger and curve, and one for every main run.

What a proxy's trainer did not record is not there: norms of weights, update ratios, and loss or speed along the way
but for the training loss and the gradient's norm.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base import metrics
from launcher.dashboards.mirror_rows import MirrorRows
from launcher.dashboards.record import Record, Wanted, study_id, tags_of
from launcher.frozen.frozen import Decision
from launcher.plan.study import Study
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.flops import count_params
from proxies.core.spec import DIVERGED_ABOVE_NATS, Run, RunResult, RunSpec
from sweeps.store.curves import load_curve
from sweeps.store.ledger import Ledger

if TYPE_CHECKING:
    from launcher.frozen.frozen import CurvePoint

_SHAPE = ("width", "num_layers", "num_heads", "num_kv_heads", "ffn_width", "vocab_size", "seq_len")
_ID_DIGITS = 16
_OF_PROXIES_TOO = ("train_loss_nats", "grad_norm", "validation_loss_nats")
"""Of a main run told under `main_run/` once more: a chart of W&B's takes a name from every run that has it."""


def stages_of(study: Study, ledger: Ledger) -> dict[str, list[str]]:
    """By run id the stages and jobs that asked for it, the first one first: `search/trial`, `transfer/control` ..."""
    from launcher.experiments.rungs import stage_specs
    from launcher.experiments.searching import ended_losses, growth, replicated, ties, trial_points
    from launcher.experiments.transferred import StageMissingError, asked, transferred
    from launcher.plan.study import NoFinishedTrialError
    from launcher.study import decide

    found: dict[str, list[str]] = {}

    def add(specs: Sequence[RunSpec], job: str) -> None:
        for spec in specs:
            if job not in (jobs := found.setdefault(spec.id, [])):
                jobs.append(job)

    add([study.trial(point) for point in trial_points(ledger)], "search/trial")
    try:
        losses = ended_losses(study, ledger)
        again = replicated(study, ledger, losses) if losses is not None else None
        add(again.specs if again else (), "search/replicate")
        decided = ties(study, ledger, losses) if losses is not None and growth(study, ledger, losses) is None else None
        add(decided.specs if decided else (), "search/convention")
        for test in asked(study, ledger):
            add([spec for spec, _ in test.arm.specs], "transfer/valley")
            add([spec for spec, _ in test.control.specs] if test.control else [], "transfer/control")
        rungs = decide.ladder_specs(study, transferred(study, ledger))
        add(rungs, "ladder/rung")
        add(stage_specs(study, rungs), "ladder/check")
    except (StageMissingError, NoFinishedTrialError):
        pass
    return found


def proxy_runs(study: Study, ledger: Ledger) -> list[Wanted]:
    """Every run with an outcome, in the order of commitment: of one that was pruned, then run whole, the whole."""
    jobs, results, first = stages_of(study, ledger), ledger.results(), ledger.first_results()
    imported, mine = ledger.imported(), study_id(study.question)
    runs = {run.spec.id: run for run in ledger.runs() if run.result is results.get(run.spec.id, run.result)}
    return [
        _proxy(study, run, jobs.get(run_id, ["other/run"]), first[run_id].status, run_id in imported, mine)
        for run_id, run in runs.items()
    ]


def _proxy(study: Study, run: Run, jobs: list[str], first_status: str, imported: bool, mine: str) -> Wanted:
    spec, result = run.spec, run.result
    stage, job = jobs[0].split("/")
    arm = spec.parametrization.name
    folder = study.study_dir
    record = Record(
        run_id=canon.content_id([mine, spec.id])[:_ID_DIGITS],
        name=f"{stage} {arm} w{spec.shape.width} {spec.id[:8]}",
        config=_settings(spec, mine) | {"stage": stage, "job": job, "imported": imported},
        summary=_outcome(spec, result), group=stage, job_type=job, over="step",
        tags=tuple(dict.fromkeys((*tags_of(mine), arm, *(name.split("/")[0] for name in jobs), result.status,
                                  first_status))),
    )  # fmt: skip
    return Wanted(record=record, rows=lambda: _steps(folder, spec, result), rows_id=result.curve_id)


def _settings(spec: RunSpec, mine: str) -> dict[str, Json]:
    hparams = {key: value for key, value in asdict(spec.hparams).items() if value is not None}
    schedule = spec.schedule
    return {
        "study": mine, "run_id": spec.id, "arm": spec.parametrization.name,
        **{name: getattr(spec.shape, name) for name in _SHAPE}, "base_width": spec.base_shape.width,
        "params": count_params(spec.shape).total, **hparams,
        "log2_learning_rate": math.log2(spec.hparams.learning_rate), "schedule": schedule.kind,
        "num_steps": schedule.num_steps, "warmup_steps": schedule.warmup_steps,
        "warmup_fraction": schedule.warmup_steps / schedule.num_steps, "batch_tokens": spec.batch_tokens,
        "num_tokens": spec.num_tokens, "planned_flops": float(spec.flops), "seed": spec.seed,
        "dtype": spec.numerics.dtype, "num_slots": spec.numerics.num_slots, "data_id": spec.data_id,
    }  # fmt: skip


def _outcome(spec: RunSpec, result: RunResult) -> dict[str, Json]:
    """`objective_nats` is finite also of a run that diverged, and not above what counts as that; one that was pruned
    or failed has none.
    """
    cap = math.log(spec.shape.vocab_size) + DIVERGED_ABOVE_NATS
    objective = cap if result.status == "diverged" else result.loss_nats
    found: dict[str, Json] = {
        "status": result.status, "diverged": result.status == "diverged",
        "objective_nats": None if objective is None else min(objective, cap),
        "validation_loss_nats": result.loss_nats, "last_train_loss_nats": result.last_train_loss_nats,
        "num_steps_done": result.num_steps, "tokens_done": result.tokens, "flops": float(result.flops),
        "worker_seconds": result.seconds,
        "tokens_per_second": result.tokens / result.seconds if result.seconds else None,
    }  # fmt: skip
    return {key: value for key, value in found.items() if value is not None}


def _steps(study_dir: Path, spec: RunSpec, result: RunResult) -> list[dict[str, float]]:
    """A row a logged step; the last of a finished run has its validation loss too.

    Raises:
        CurveCorrupt: the file is not what was recorded.
    """
    curve = load_curve(study_dir, result)
    rows: list[dict[str, float]] = [
        {"step": step, "tokens": spec.tokens_by(step), "train_loss_nats": loss}
        for step, loss in zip(curve.steps, curve.train_loss_nats, strict=True)
    ]
    for row, norm in zip(rows, curve.grad_norm, strict=False):
        row["grad_norm"] = norm
    if result.loss_nats is not None:
        if not rows or rows[-1]["step"] < result.num_steps:
            rows.append({"step": result.num_steps, "tokens": spec.tokens_by(result.num_steps)})
        rows[-1]["validation_loss_nats"] = result.loss_nats
    return rows


def main_runs(study: Study, decisions: Sequence[Decision]) -> list[Wanted]:
    """Of every frozen config that was launched into its usual place its main run, as its metrics are now."""
    found = []
    for decision in decisions:
        run_dir = study.study_dir / "frozen" / decision.digest / "run"
        path = run_dir / metrics.METRICS_FILE
        if path.is_file():
            with path.open("rb") as file:
                found.append(_main_run(decision, run_dir, study_id(study.question),
                                       hashlib.file_digest(file, "sha256").hexdigest()))  # fmt: skip
    return found


def _main_run(decision: Decision, run_dir: Path, mine: str, sha256: str) -> Wanted:
    ending = metrics.read_ending(run_dir)
    ended: dict[str, Json] = {} if ending is None else {"ended": ending.event, "num_steps_done": ending.step}
    if ending is not None and ending.validation_loss_nats is not None:
        ended["validation_loss_nats"] = ending.validation_loss_nats
    run_id = decision.digest[:_ID_DIGITS]
    record = Record(
        run_id=run_id, name=f"run {run_id[:8]}", config={**main_settings(decision), "study": mine}, summary=ended,
        group="main run", job_type="main run", tags=tags_of(mine), over="step",
    )  # fmt: skip
    return Wanted(record=record, rows=lambda: _main_rows(decision, run_dir), rows_id=sha256)


def main_settings(decision: Decision) -> dict[str, Json]:
    """Numbers and choices from fixed lists alone: no path, no name that a person gave."""
    predicted = decision.predicted
    return {
        "digest": decision.digest, "shape": canon.to_json(decision.shape), "batch_tokens": decision.batch_tokens,
        "num_tokens": decision.num_tokens, "num_steps": decision.learning_rate.schedule.num_steps,
        "num_ranks": decision.parallelism.num_ranks, "precision": decision.precision, "seed": decision.seed,
        "clip_norm": decision.clip_norm, "predicted_loss_nats": predicted.loss_nats,
        "predicted_low_nats": predicted.low_nats, "predicted_high_nats": predicted.high_nats,
    }  # fmt: skip


def _main_rows(decision: Decision, run_dir: Path) -> Iterator[dict[str, float]]:
    """Every number of the metrics, the expected band beside the loss, and how many spikes there were so far."""
    from launcher.trainer.spikes import Detector

    detector, num_spikes, take, rows = Detector(decision.spikes), 0, 1, MirrorRows(run_dir)
    while True:
        for row in rows.read():
            take += row.goes_back
            told = {"step": row.step, "take": take, **row.columns}
            told |= {f"main_run/{name}": row.columns[name] for name in _OF_PROXIES_TOO if name in row.columns}
            if (loss := row.columns.get("train_loss_nats")) is not None:
                detector.see(loss)
                num_spikes += detector.num_above == 1
                told |= {"num_loss_spikes": num_spikes, **band_at(decision.predicted.curve, row.step)}
            yield told
        if rows.at_end:
            return


def band_at(curve: Sequence[CurvePoint], step: int) -> dict[str, float]:
    """Expected loss at a step and the ends of its band, on straight lines over log(step); none outside of the curve."""
    at = bisect_left([point.step for point in curve], step)
    if at == len(curve) or (at == 0 and curve[0].step != step):
        return {}
    after, before = curve[at], curve[max(0, at - 1)]
    share = math.log(step / before.step) / math.log(after.step / before.step) if after.step != before.step else 0.0

    def between(name: str) -> float:
        low, high = getattr(before, name), getattr(after, name)
        return float(low + share * (high - low))

    names = {"expected_loss_nats": "loss_nats", "expected_low_nats": "low_nats", "expected_high_nats": "high_nats"}
    return {told: between(name) for told, name in names.items()}


def read_frozen(study_dir: Path) -> list[Decision]:
    """Every config that was frozen of a study, by digest.

    Raises:
        FrozenError, TamperedError: one is not what its digest names.
    """
    from launcher.frozen.launch_file import LAUNCH_FILE, read_launch

    files = sorted((study_dir / "frozen").glob(f"*/{LAUNCH_FILE}"))
    return [read_launch(file) for file in files]
