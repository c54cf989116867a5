"""All that a dashboard gets of a study: a run for itself, one for every proxy, one for every main
run.

What a proxy's trainer did not record is not there: norms of weights, update ratios, and loss or
speed along the way but for the training loss and the gradient's norm.
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

_SHAPE = ("width", "num_layers", "num_heads", "num_kv_heads", "ffn_width", "vocab_size", "seq_len")


def study_runs(study_dir: Path) -> list[RunRecord]:
    """The runs of a study, finished or not, also while a driver is at work on it; it is only read.

    The first stands for the study itself; then come its proxies, and the main runs that lie in
    their usual place.

    Raises:
        SweepError, PlanError, DataError: it holds no study, or not a sound one.
        LinksOutError: links in it lead elsewhere.
        FrozenError, TamperedError: a config that was frozen of it is not what its digest names.
    """
    from launcher.report.body import body_of
    from launcher.study.study_folder import recorded

    study, ledger = recorded(study_dir)
    body = canon.parse(canon.pretty(body_of(study, ledger)))
    assert isinstance(body, dict)
    return [study_record(body), *proxy_runs(study, ledger), *main_runs(study)]


def main_runs(study: Study) -> list[RunRecord]:
    """Return the main run of every frozen config that was launched into its usual place, as its
    metrics are now.

    Raises:
        FrozenError, TamperedError: a config that was frozen of the study is not what its digest
            names.
    """
    from launcher.frozen.config_checks import require_sound
    from launcher.frozen.launch_file import LAUNCH_FILE, name_accepted_failures, read_launch

    files = sorted((study.study_dir / "frozen").glob(f"*/{LAUNCH_FILE}"))
    decisions = {file.parent / "run": read_launch(file) for file in files}
    for folder, decision in decisions.items():
        require_sound(folder.parent, decision.digest)
    mine = study_id(study.question)
    return [
        main_run(
            decision,
            folder,
            mine,
            failures=name_accepted_failures(folder.parent, decision.digest),
        )
        for folder, decision in decisions.items()
        if (folder / metrics.METRICS_FILE).is_file()
    ]


def stages_of(study: Study, ledger: Ledger) -> dict[str, str]:
    """By run id the stage and job that asked for it first: `search/trial`, `transfer/control`
    ...
    """
    from launcher.experiments.ladder import stage_specs
    from launcher.experiments.search import ended_losses, growth, replicated, ties, trial_points
    from launcher.experiments.sweep_grids import RatePair
    from launcher.experiments.transferred_values import StageMissingError, asked, transferred
    from launcher.study import decide

    found: dict[str, str] = {}

    def add(specs: Sequence[RunSpec], job: str) -> None:
        for spec in specs:
            found.setdefault(spec.id, job)

    found.update((study.trial_id(point), "search/trial") for point in trial_points(ledger))
    try:
        losses = ended_losses(study, ledger)
        again = replicated(study, ledger, losses) if losses is not None else None
        add(again.specs if again else (), "search/replicate")
        decided = (
            ties(study, ledger, losses)
            if losses is not None and growth(study, ledger, losses) is None
            else None
        )
        add(decided.specs if decided else (), "search/convention")
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
    return found


def proxy_runs(study: Study, ledger: Ledger) -> list[RunRecord]:
    """Every run with an outcome, in the order of commitment: of one that was pruned, then run
    whole, the whole.
    """
    jobs, results = stages_of(study, ledger), ledger.results()
    imported, mine = ledger.imported(), study_id(study.question)
    runs = {
        run.spec.id: run
        for run in ledger.runs()
        if run.result == results.get(run.spec.id, run.result)
    }
    return [
        _proxy(study, run, jobs.get(run_id, "other/run"), run_id in imported, mine)
        for run_id, run in runs.items()
    ]


def _proxy(study: Study, run: Run, asked_by: str, imported: bool, mine: str) -> RunRecord:
    spec, result = run.spec, run.result
    stage, job = asked_by.split("/")
    rate = f"lr {format_learning_rate(spec.hparams.learning_rate)}"
    return RunRecord(
        run_id=canon.content_id([mine, spec.id])[:ID_DIGITS],
        name=f"{stage} {spec.parametrization.name} w{spec.shape.width} {rate} {spec.id[:8]}",
        config=_settings(spec, mine) | {"stage": stage, "job": job, "imported": imported},
        summary=_outcome(spec, result),
        group=f"{study.study_dir.resolve().name} {stage}",
        job_type=job,
        rows=lambda: _steps(study.study_dir, spec, result),
        rows_id=result.curve_id,
    )


def _settings(spec: RunSpec, mine: str) -> dict[str, Json]:
    hparams = {key: value for key, value in asdict(spec.hparams).items() if value is not None}
    schedule = spec.schedule
    return {
        "study": mine,
        "run_id": spec.id,
        "arm": spec.parametrization.name,
        **{name: getattr(spec.shape, name) for name in _SHAPE},
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


def _outcome(spec: RunSpec, result: RunResult) -> dict[str, Json]:
    """`objective_nats` is finite also of a run that diverged, and not above what counts as that;
    one that was pruned or failed has none.
    """
    cap = math.log(spec.shape.vocab_size) + DIVERGED_ABOVE_NATS
    objective = cap if result.status == "diverged" else result.loss_nats
    found: dict[str, Json] = {
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
