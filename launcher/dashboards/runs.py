"""All runs that a dashboard shows of a study: the study, every proxy, and every main run.

Rows hold what a proxy's trainer recorded: training loss and gradient norm. Weight norms, update
ratios, and validation losses or speeds along the way are not recorded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from launcher.base import metrics
from launcher.dashboards.main_run import main_run
from launcher.dashboards.records import ID_DIGITS, RunRecord, study_id, study_record
from launcher.plan.study import NoFinishedTrialError, Study
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.flops import count_params
from proxies.core.hyperparameters import WARMUP
from proxies.core.notation import format_learning_rate
from proxies.core.spec import DIVERGED_ABOVE_NATS, Run, RunResult, RunSpec
from sweeps.store.curves import load_curve
from sweeps.store.ledger import Ledger

_SHAPE_FIELDS = (
    "width",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "ffn_width",
    "vocab_size",
    "seq_len",
)


def study_runs(study_dir: Path) -> list[RunRecord]:
    """Return the records of a study's runs, finished or not, without writing to the study.

    A driver may be at work on it. The first record stands for the study itself; then come its
    proxies, and the main runs in their usual place.

    Raises:
        SweepError, PlanError, DataError: The folder holds no study, or a damaged one.
        LinksOutError: Links in the study point outside it.
        FrozenError, TamperedError: A frozen config of the study does not match its digest.
    """
    from launcher.report.body import body_of
    from launcher.study.study_folder import recorded

    study, ledger = recorded(study_dir)
    body = canon.parse(canon.pretty(body_of(study, ledger)))
    assert isinstance(body, dict)
    return [study_record(body), *proxy_runs(study, ledger), *main_runs(study)]


def main_runs(study: Study) -> list[RunRecord]:
    """Return the main run of every frozen config that was launched into its usual place.

    Raises:
        FrozenError, TamperedError: A frozen config of the study does not match its digest.
    """
    from launcher.frozen.config_checks import require_sound
    from launcher.frozen.launch_file import LAUNCH_FILE, name_accepted_failures, read_launch

    files = sorted((study.study_dir / "frozen").glob(f"*/{LAUNCH_FILE}"))
    decisions = {file.parent / "run": read_launch(file) for file in files}
    for folder, decision in decisions.items():
        require_sound(folder.parent, decision.digest)
    id_of_study = study_id(study.question)
    return [
        main_run(
            decision,
            folder,
            id_of_study,
            failures=name_accepted_failures(folder.parent, decision.digest),
        )
        for folder, decision in decisions.items()
        if (folder / metrics.METRICS_FILE).is_file()
    ]


def stages_of(study: Study, ledger: Ledger) -> dict[str, str]:
    """Return, by run id, the stage and job that first requested the run: `search/trial` ..."""
    from launcher.experiments.ladder import stage_specs
    from launcher.experiments.search import ended_losses, growth, replicated, ties, trial_points
    from launcher.experiments.sweep_grids import RatePair
    from launcher.experiments.transferred_values import StageMissingError, asked, transferred
    from launcher.study import decide

    stages: dict[str, str] = {}

    def add(specs: Sequence[RunSpec], job: str) -> None:
        for spec in specs:
            stages.setdefault(spec.id, job)

    stages.update((study.trial_id(point), "search/trial") for point in trial_points(ledger))
    try:
        losses = ended_losses(study, ledger)
        replication = replicated(study, ledger, losses) if losses is not None else None
        add(replication.specs if replication else (), "search/replicate")
        convention_ties = (
            ties(study, ledger, losses)
            if losses is not None and growth(study, ledger, losses) is None
            else None
        )
        add(convention_ties.specs if convention_ties else (), "search/convention")
        for test in asked(study, ledger):
            if isinstance(test, RatePair):
                add(test.specs, "transfer/pair")
                continue
            add([spec for spec, _ in test.condition.specs], "transfer/valley")
            add(
                [spec for spec, _ in test.control.specs] if test.control else [], "transfer/control"
            )
        rungs = decide.ladder_specs(study, transferred(study, ledger))
        add(rungs, "ladder/rung")
        add(stage_specs(study, rungs), "ladder/check")
    except (StageMissingError, NoFinishedTrialError):
        pass
    return stages


def proxy_runs(study: Study, ledger: Ledger) -> list[RunRecord]:
    """Return the record of every run with an outcome, in the order of commitment.

    A run that was pruned and later trained completely is recorded as the complete one.
    """
    jobs, results = stages_of(study, ledger), ledger.results()
    imported, id_of_study = ledger.imported(), study_id(study.question)
    runs = {
        run.spec.id: run
        for run in ledger.runs()
        if run.result == results.get(run.spec.id, run.result)
    }
    return [
        _build_proxy_record(
            study, run, jobs.get(run_id, "other/run"), run_id in imported, id_of_study
        )
        for run_id, run in runs.items()
    ]


def _build_proxy_record(
    study: Study, run: Run, stage_and_job: str, imported: bool, id_of_study: str
) -> RunRecord:
    spec, result = run.spec, run.result
    stage, job = stage_and_job.split("/")
    rate = f"lr {format_learning_rate(spec.hparams.learning_rate)}"
    return RunRecord(
        run_id=canon.content_id([id_of_study, spec.id])[:ID_DIGITS],
        name=f"{stage} {spec.parametrization.name} w{spec.shape.width} {rate} {spec.id[:8]}",
        config=_build_config(spec, id_of_study)
        | {"stage": stage, "job": job, "imported": imported},
        summary=_summarize_result(spec, result),
        group=f"{study.study_dir.resolve().name} {stage}",
        job_type=job,
        rows=lambda: _build_rows(study.study_dir, spec, result),
        rows_id=result.curve_id,
    )


def _build_config(spec: RunSpec, id_of_study: str) -> dict[str, Json]:
    hparams = {key: value for key, value in asdict(spec.hparams).items() if value is not None}
    schedule = spec.schedule
    return {
        "study": id_of_study,
        "run_id": spec.id,
        "arm": spec.parametrization.name,
        **{name: getattr(spec.shape, name) for name in _SHAPE_FIELDS},
        "base_width": spec.base_shape.width,
        "params": count_params(spec.shape).total,
        **hparams,
        "log2_learning_rate": math.log2(spec.hparams.learning_rate),
        "schedule": schedule.kind,
        "num_steps": schedule.num_steps,
        "warmup_steps": schedule.warmup_steps,
        WARMUP: schedule.warmup_steps / schedule.num_steps,
        "batch_tokens": spec.batch_tokens,
        "num_tokens": spec.num_tokens,
        "planned_flops": float(spec.flops),
        "seed": spec.seed,
        "dtype": spec.numerics.dtype,
        "num_slots": spec.numerics.num_slots,
        "data_id": spec.data_id,
    }


def _summarize_result(spec: RunSpec, result: RunResult) -> dict[str, Json]:
    """Return the summary of a run's result.

    `objective_nats` is finite even for a diverged run, and at most the loss that counts as
    diverged; a run that was pruned or failed has none.
    """
    cap = math.log(spec.shape.vocab_size) + DIVERGED_ABOVE_NATS
    objective = cap if result.status == "diverged" else result.loss_nats
    summary: dict[str, Json] = {
        "status": result.status,
        "diverged": result.status == "diverged",
        "objective_nats": None if objective is None else min(objective, cap),
        "validation_loss_nats": result.loss_nats,
        "last_train_loss_nats": result.last_train_loss_nats,
        "num_steps_done": result.num_steps,
        "tokens_done": result.tokens,
        "flops": float(result.flops),
        "worker_seconds": result.seconds,
        "tokens_per_second": result.tokens / result.seconds if result.seconds else None,
    }
    return {key: value for key, value in summary.items() if value is not None}


def _build_rows(study_dir: Path, spec: RunSpec, result: RunResult) -> list[dict[str, float]]:
    """Return one row per logged step; the last row of a finished run has its validation loss too.

    Raises:
        CurveCorrupt: The file does not match its record.
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
