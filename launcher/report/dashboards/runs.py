"""The runs of a study that a dashboard shows: the study itself, every proxy, and every main run.

The rows of a proxy hold what its trainer recorded: training loss and gradient norm. The trainer
does not record weight norms, update ratios, or validation losses and speeds during the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from forerun._launcher.main_run import metrics_file
from forerun._launcher.report.dashboards.main_run import build_main_run_record
from forerun._launcher.report.dashboards.run_record import (
    ID_DIGITS,
    RunRecord,
    build_study_record,
    compute_study_id,
)
from forerun._launcher.study.plan.study import NoFinishedTrialError, Study
from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.flops import count_params
from forerun._proxies.core.hyperparameters import WARMUP
from forerun._proxies.core.notation import format_learning_rate
from forerun._proxies.core.spec import DIVERGED_ABOVE_NATS, Run, RunResult, RunSpec
from forerun._sweeps.store.curves import load_curve
from forerun._sweeps.store.ledger import Ledger

_SHAPE_FIELDS = (
    "width",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "ffn_width",
    "vocab_size",
    "seq_len",
)


def list_study_runs(study_dir: Path) -> list[RunRecord]:
    """Return the records of a study's runs, finished or not, without writing to the study.

    A driver may be at work on it. The first record stands for the study itself; then come its
    proxies, and the main runs in their usual place.

    Raises:
        SweepError, PlanError, DataError: The folder holds no study, or a damaged one.
        LinksOutError: Links in the study point outside it.
        FrozenError, TamperedError: A frozen config of the study does not match its digest.
    """
    from forerun._launcher.report.page.report_builder import build_report
    from forerun._launcher.study.stages.study_folder import open_recorded_study

    study, ledger = open_recorded_study(study_dir)
    return [
        build_study_record(build_report(study, ledger)),
        *list_proxy_runs(study, ledger),
        *list_main_runs(study),
    ]


def list_main_runs(study: Study) -> list[RunRecord]:
    """Return the main run of every frozen config that was launched into its usual place.

    Raises:
        FrozenError, TamperedError: A frozen config of the study does not match its digest.
    """
    from forerun._launcher.main_run.frozen.config_checks import require_sound
    from forerun._launcher.main_run.frozen.launch_file import (
        LAUNCH_FILE,
        name_accepted_failures,
        read_launch,
    )

    files = sorted((study.study_dir / "frozen").glob(f"*/{LAUNCH_FILE}"))
    decisions = {file.parent / "run": read_launch(file) for file in files}
    for folder, decision in decisions.items():
        require_sound(folder.parent, decision.digest)
    id_of_study = compute_study_id(study.question)
    return [
        build_main_run_record(
            decision,
            folder,
            id_of_study,
            failures=name_accepted_failures(folder.parent, decision.digest),
        )
        for folder, decision in decisions.items()
        if (folder / metrics_file.METRICS_FILE).is_file()
    ]


def find_stages(study: Study, ledger: Ledger) -> dict[str, str]:
    """Return, by run id, the stage that first requested the run, and the run's purpose there.

    The value is one string, such as `search/trial` or `ladder/check`: the stage, and the purpose
    that W&B shows as the run's `job_type`. W&B holds these strings from earlier uploads, so they
    must not change.
    """
    from forerun._launcher.study.experiments.ladder import build_stage_runs
    from forerun._launcher.study.experiments.search import SearchState
    from forerun._launcher.study.experiments.transfer_results import (
        StageMissingError,
        list_tests_with_runs,
        load_transfer_result,
    )
    from forerun._launcher.study.stages import main_run_choice

    stages: dict[str, str] = {}

    # Stages are added in the order in which a study requests them: the first one keeps a run.
    def add(specs: Sequence[RunSpec], job: str) -> None:
        for spec in specs:
            stages.setdefault(spec.id, job)

    search = SearchState(study, ledger)
    stages.update((study.get_trial_id(point), "search/trial") for point in search.points)
    for job, specs in search.extra_runs.items():
        add(specs, f"search/{job}")
    try:
        for test in list_tests_with_runs(study, ledger):
            add(
                [spec for spec, _ in test.grid.specs], "transfer/valley"
            )  # An older name of a loss basin
            if test.control:
                add([spec for spec, _ in test.control.specs], "transfer/control")
        rungs = main_run_choice.build_ladder_runs(study, load_transfer_result(study, ledger))
        add(rungs, "ladder/rung")
        add(build_stage_runs(study, rungs), "ladder/check")
    except (StageMissingError, NoFinishedTrialError):
        pass  # The later stages have not requested runs yet.
    return stages


def list_proxy_runs(study: Study, ledger: Ledger) -> list[RunRecord]:
    """Return the record of every run with an outcome, in the order of the ledger.

    The ledger has two outcomes of a run that was pruned and later trained completely. The record
    then has the complete outcome.
    """
    jobs, results = find_stages(study, ledger), ledger.get_results()
    imported, id_of_study = ledger.read_imported_ids(), compute_study_id(study.question)
    runs = {
        run.spec.id: run
        for run in ledger.read_runs()
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
        run_id=canon.compute_content_id([id_of_study, spec.id])[:ID_DIGITS],
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

    `objective_nats` is the loss, at most the loss above which a run counts as diverged; a diverged
    run has that limit. A run that was pruned or failed has no `objective_nats`.
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
        {"step": step, "tokens": spec.count_tokens_by(step), "train_loss_nats": loss}
        for step, loss in zip(curve.steps, curve.train_loss_nats, strict=True)
    ]
    for row, norm in zip(rows, curve.grad_norm, strict=False):
        row["grad_norm"] = norm
    if result.loss_nats is not None:
        if not rows or rows[-1]["step"] < result.num_steps:
            rows.append(
                {"step": result.num_steps, "tokens": spec.count_tokens_by(result.num_steps)}
            )
        rows[-1]["validation_loss_nats"] = result.loss_nats
    return rows
