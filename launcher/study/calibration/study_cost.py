"""The cost of a study, computed from the plan before the first run: the number of runs of its
stages, the speed of its workers, and the FLOPs, hours, dollars, and bytes on disk that these give.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from forerun._launcher.main_run.estimates.layout import read_parallelism
from forerun._launcher.main_run.estimates.machine import (
    Span,
    add_spans,
    compute_gpu_hours,
    make_exact,
)
from forerun._launcher.main_run.estimates.main_run import MainRun
from forerun._launcher.main_run.estimates.utilization import PROXY_MFU
from forerun._launcher.study.calibration.stage_runs import StageRuns, list_stage_runs
from forerun._launcher.study.experiments.transfer_results import guess_target_sizes
from forerun._launcher.study.plan.calibration_records import (
    Calibration,
    ModeRequest,
    Part,
    WorkerKind,
    average_rates,
)
from forerun._launcher.study.plan.study import Study
from forerun._proxies.core.branches import compute_own_flops
from forerun._proxies.core.canon import Json
from forerun._proxies.core.flops import compute_flops_per_token
from forerun._proxies.core.notation import format_counted, format_significant
from forerun._proxies.core.optimizers import compute_optimizer_flops
from forerun._proxies.core.shape import Shape
from forerun._proxies.core.spec import Run, RunSpec
from forerun._sweeps.run.cores import count_cores

# ---- Speed ----

WORKER_FLOPS = Span(
    value=30e9,
    low=10e9,
    high=75e9,
    source="a second, of a worker on one server core in float32; measured on proxies of widths 32 "
    "to 256",
)
"""FLOPs per second of a worker that is assumed before anything is measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """FLOPs per second of one worker, by shape and batch. A shape or batch that was not measured
    has the speed of the nearest one that was.
    """

    measured: tuple[tuple[ModeRequest, Span], ...] = ()
    """Pairs of the runs that were measured, and their speed."""
    source: str = ""
    """Source of the measurements, for messages."""
    kinds: tuple[WorkerKind, ...] = ()
    """Workers of the calibrated study, all of which measured at the same time; empty if unknown."""
    assumed: Span = WORKER_FLOPS
    """Speed if nothing was measured."""

    def estimate_speed(self, spec: RunSpec, part: Part = "proxy") -> Span:
        """Return the speed for runs like this one.

        Args:
            spec: the run.
            part: whether it belongs to the ladder or to another stage; their chosen modes may
                differ.
        """
        if not self.measured:
            # The optimizer takes time but is not counted in the run's FLOPs
            optimizer = compute_optimizer_flops(spec.optimizer, spec.shape)
            trained = float(compute_flops_per_token(spec.shape) * spec.batch_tokens)
            return replace(
                self.assumed.scale(trained / (trained + optimizer)), source=self.assumed.source
            )

        def distance(asked: ModeRequest) -> tuple[float, bool, bool]:
            ratio = _count_step_flops(asked) / (
                compute_flops_per_token(spec.shape) * spec.batch_tokens
            )
            is_other = (asked.shape, asked.batch_tokens) != (spec.shape, spec.batch_tokens)
            return abs(math.log(ratio)), is_other, asked.part != part

        return min(self.measured, key=lambda pair: distance(pair[0]))[1]

    @property
    def num_workers(self) -> int:
        """Number of workers of all kinds; 0 if unknown."""
        return sum(kind.num_workers for kind in self.kinds)

    @property
    def over_all(self) -> Span:
        """Median measured speed with the lowest and the highest, and their source."""
        if not self.measured:
            return self.assumed
        spans = sorted((span for _, span in self.measured), key=lambda span: span.value)
        low, high = min(span.low for span in spans), max(span.high for span in spans)
        return Span(value=spans[len(spans) // 2].value, low=low, high=high, source=self.source)


def collect_speeds(calibrations: Sequence[Calibration], study: Study, source: str) -> Speeds:
    """Return the speeds that calibrations measured for their chosen modes; assumed speeds if no
    calibration fits this study.

    The workers are those of the last calibration with measurements. A calibration is left out if it
    did not measure each of their kinds, because the speed of one kind does not stand for another.

    Args:
        calibrations: the calibrations, in order.
        study: the study.
        source: source of the measurements, for messages.
    """
    all_kinds = [calibration.kinds for calibration in calibrations if calibration.kinds]
    kinds = all_kinds[-1] if all_kinds else ()
    measured = []
    for calibration in calibrations:
        figure, asked = calibration.figure, calibration.asked
        timings = {timing.kind: timing for timing in figure.by_kind} if figure else {}
        is_known = kinds and timings.keys() >= {kind.kind for kind in kinds}
        if (
            is_known
            and study.build_mode_request(asked.part, asked.shape, asked.batch_tokens) == asked
        ):
            workers = [timings[kind.kind] for kind in kinds for _ in range(kind.num_workers)]
            rate, low, high = (_count_step_flops(asked) * rate for rate in average_rates(workers))
            measured.append((asked, Span(value=rate, low=low, high=high)))
    return Speeds(
        measured=tuple(measured),
        source=f"a second, of a worker: {source}",
        kinds=kinds if measured else (),
    )


def _count_step_flops(asked: ModeRequest) -> float:
    """Return the FLOPs of one step of one run."""
    return float(compute_flops_per_token(asked.shape)) * asked.batch_tokens


# ---- Cost ----

AFTER_SECONDS = Span(
    value=20.0,
    low=8.0,
    high=60.0,
    source="assumed for the fit, the verdicts, and the report; the upper end: on a machine that "
    "does other work too",
)
"""Seconds after the last run: the fit, the verdicts, and the report."""
START_SECONDS = Span(
    value=20.0,
    low=5.0,
    high=120.0,
    source="assumed for Ray's start and for workers that import torch; the upper end: on a machine "
    "that does other work too",
)
"""Seconds before the first run: Ray starts, and workers import torch."""
RUN_SECONDS = Span(
    value=0.5,
    low=0.1,
    high=3.0,
    source="assumed for a run apart from its training: the model is built, validated, and saved, "
    "and the outcome is recorded",
)
"""Seconds of one run of forerun's trainer apart from its training."""
COMMAND_SECONDS = Span(
    value=10.0,
    low=3.0,
    high=60.0,
    source="assumed for a run of your own trainer apart from its training: its process starts, "
    "imports its framework, compiles, validates, and saves",
)
"""Seconds of one run of a user's trainer apart from its training. Not measured on users' trainers;
a process that imports torch takes about 6 CPU-seconds to start.
"""

STEP_BYTES, RUN_BYTES = 20, 4500
"""Bytes on disk of one row of a curve, and of a run apart from its rows, in its file and in the
ledger; measured on the demo.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """Cost of one stage's runs."""

    name: str
    """Name of the stage."""
    num_runs: tuple[int, int]
    """Minimum number of runs, and the number with all extensions that the plan allows. The second
    execution of a winner is not a run of its own.
    """
    flops: Span
    """Training FLOPs by the convention `causal`, as in every record of a study."""
    core_hours: Span
    """Hours of one worker."""
    disk_bytes: Span

    def hours(self, num_workers: int) -> Span:
        """Return the hours on `num_workers` workers, none of them idle."""
        return self.core_hours.scale(1 / num_workers)

    def gpu_hours(self, peak_flops: float, measured_gpus: float = 0.0) -> Span:
        """Return the GPU-hours.

        Args:
            peak_flops: peak FLOPs per second of one GPU; used if the speed was not measured.
            measured_gpus: number of GPUs of a worker if its speed was measured, else 0.
        """
        if measured_gpus:
            return self.core_hours.scale(measured_gpus)
        return compute_gpu_hours(self.flops, peak_flops, PROXY_MFU)


def count_workers(study: Study, known: int = 0) -> int:
    """Return the number of workers of the study.

    This is the plan's number, or the number `known` from earlier work, or as many as fit on this
    machine's cores, each with at least one core.
    """
    cluster = study.plan.cluster
    room = int(count_cores() / max(1.0, cluster.worker_cpus))
    return 1 if cluster.backend == "inline" else cluster.num_workers or known or max(1, room)


def compute_stage_costs(study: Study, speeds: Speeds) -> list[StageCost]:
    """Return the cost of every stage in order.

    A run that two stages ask for is executed once. This estimate counts it in both.
    """
    return [_compute_stage_cost(stage, speeds) for stage in list_stage_runs(study)]


def sum_stage_costs(stages: Iterable[StageCost]) -> StageCost:
    """Return the total cost. Checks are included in the cost but not in the number of runs, as in
    the ledger and `status`.
    """
    all_stages = list(stages)
    counts = [stage.num_runs for stage in all_stages if stage.name != "check"]
    return StageCost(
        name="total",
        num_runs=(sum(least for least, _ in counts), sum(most for _, most in counts)),
        flops=add_spans(stage.flops for stage in all_stages),
        core_hours=add_spans(stage.core_hours for stage in all_stages),
        disk_bytes=add_spans(stage.disk_bytes for stage in all_stages),
    )


def estimate_run_overhead(
    study: Study, runs: Iterable[Run] = (), speeds: Speeds | None = None
) -> Span:
    """Return the seconds that each run of the study takes apart from its training.

    For a user's command, these seconds are measured from its finished runs: the median of the time
    of a run minus the estimated time of its training.

    Args:
        study: the study.
        runs: runs that its ledger has recorded.
        speeds: speeds of its workers; None: assumed speeds.
    """
    if study.plan.command is None:
        return RUN_SECONDS
    finished = [
        run
        for run in runs
        if run.spec.command == study.plan.command and run.result.status == "finished"
    ]
    if not finished:
        return COMMAND_SECONDS
    speeds = speeds or Speeds()
    trained = [_compute_core_hours([run.spec], speeds, "proxy").scale(3600.0) for run in finished]
    seconds = [run.result.seconds for run in finished]
    # The overhead is lowest if training took the longest, so the ends change places.
    low, value, high = (
        max(0.0, median(map(operator.sub, seconds, ends)))
        for ends in zip(*((span.high, span.value, span.low) for span in trained), strict=True)
    )
    source = (
        f"measured over {format_counted(len(finished), 'run')} of your own trainer: their time "
        "minus that of their training"
    )
    return Span(value=value, low=low, high=high, source=source)


def estimate_wall_hours(
    stages: Iterable[StageCost], num_workers: int, run_seconds: Span = RUN_SECONDS
) -> Span:
    """Return the hours from the command to the report: the runs, Ray's start, checks, fits and
    reports. The lower ends of the parts add up to the lower end of the result, and so do the upper
    ends.

    Checks are counted as if one worker ran them: their sizes run one after another, and only seeds
    run in parallel.

    Args:
        stages: stages to run.
        num_workers: number of workers.
        run_seconds: seconds of each run apart from its training (`estimate_run_overhead`).
    """
    all_stages = list(stages)
    trained = add_spans(
        stage.hours(1 if stage.name == "check" else num_workers) for stage in all_stages
    )
    runs = [stage.num_runs for stage in all_stages if stage.name != "check"]
    least, most = (sum(ends) / num_workers for ends in zip(*runs, strict=True))
    each = Span(
        value=run_seconds.value * least, low=run_seconds.low * least, high=run_seconds.high * most
    )
    overhead = add_spans([START_SECONDS, each, AFTER_SECONDS]).scale(1 / 3600.0)
    total = add_spans([trained, overhead])
    return Span(
        value=total.value,
        low=total.low,
        high=total.high,
        source=f"the hours of the runs on {format_counted(num_workers, 'worker')}, those of checks "
        f"on one, and {format_significant(run_seconds.value)} s a run ({run_seconds.source}), "
        f"{START_SECONDS.value:g} s for Ray's start, {AFTER_SECONDS.value:g} s for fits "
        "and the report; the upper end: all extensions, on a machine that does other work too",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class KindCost:
    """The part of a study's GPU-hours that workers of one kind take."""

    kind: str
    """Kind of device; empty if the kinds are unknown."""
    num_workers: int
    gpu_hours: Span
    usd: Span | None
    """Dollars; None if the price is unknown."""

    def to_json(self) -> dict[str, Json]:
        """Return the cost as JSON data, as verbs print it."""
        usd = None if self.usd is None else self.usd.to_json()
        return {
            "kind": self.kind,
            "num_workers": self.num_workers,
            "gpu_hours": self.gpu_hours.to_json(),
            "usd": usd,
        }


def divide_cost_by_kind(
    on_gpu: Span, kinds: Sequence[WorkerKind], price: Callable[[str], Span | None]
) -> list[KindCost]:
    """Divide the GPU-hours of all workers by kind of worker. Every worker counts for the same time,
    and none is idle.

    Args:
        on_gpu: GPU-hours of all workers.
        kinds: kinds of workers; empty: one unknown kind.
        price: returns the dollars for an hour of a GPU of a kind; None if unknown.
    """
    all_kinds = kinds or (WorkerKind(kind="", num_workers=1, free_bytes=0),)
    total = sum(worker_kind.num_workers for worker_kind in all_kinds)
    costs = []
    for worker_kind in all_kinds:
        hours = on_gpu.scale(worker_kind.num_workers / total)
        usd = price(worker_kind.kind)
        costs.append(
            KindCost(
                kind=worker_kind.kind,
                num_workers=worker_kind.num_workers,
                gpu_hours=hours,
                usd=None if usd is None else hours.multiply(usd),
            )
        )
    return costs


def sum_dollars(costs: Sequence[KindCost]) -> Span | None:
    """Return the dollars of all kinds; None if the price of one is unknown."""
    known = [cost.usd for cost in costs if cost.usd is not None]
    return add_spans(known) if len(known) == len(costs) else None


def assume_worker_speed(study: Study, gpu: str, peak_flops: float) -> Speeds:
    """Return the assumed speed of a worker with GPUs (`cluster.worker_gpus`) on proxies.

    Args:
        study: the study.
        gpu: name of the GPU.
        peak_flops: peak FLOPs per second of one GPU.
    """
    gpus = study.plan.cluster.worker_gpus
    return Speeds(
        assumed=replace(
            PROXY_MFU.scale(gpus * peak_flops),
            source=f"a second, of a worker with {gpus:g} {gpu} at the share of the peak below",
        )
    )


def plan_main_run(study: Study) -> MainRun:
    """Return the main run that the budget suggests before any fit: 20 tokens a parameter
    (Chinchilla, arXiv 2203.15556).
    """
    target, launch = guess_target_sizes(study), study.plan.launch
    shape = study.build_shape(target.width).at_depth(target.depth)
    return MainRun(
        shape=shape,
        num_tokens=target.duration,
        batch_tokens=target.batch,
        precision=launch.precision,
        layout=read_parallelism(launch.model_dump()),
        optimizer=study.plan.proxy.optimizer,
    )


def _compute_stage_cost(stage: StageRuns, speeds: Speeds) -> StageCost:
    """Return the cost of one stage."""
    runs, all_runs = stage.runs, [*stage.runs, *stage.extensions]
    hours = _compute_core_hours(runs, speeds, stage.part)
    extension_hours = _compute_core_hours(stage.extensions, speeds, stage.part)
    return StageCost(
        name=stage.name,
        num_runs=(len(runs) - stage.num_replays, len(all_runs) - stage.num_replays),
        flops=_make_span(_sum_flops(runs), _sum_flops(all_runs)),
        core_hours=Span(value=hours.value, low=hours.low, high=hours.high + extension_hours.high),
        disk_bytes=_make_span(_sum_disk_bytes(runs), _sum_disk_bytes(all_runs)),
    )


def _make_span(value: float, high: float) -> Span:
    return Span(value=value, low=value, high=high)


def _compute_core_hours(runs: Iterable[RunSpec], speeds: Speeds, part: Part) -> Span:
    """Return the hours of one worker; runs of one shape and batch have the same speed."""
    groups: dict[tuple[Shape, int], list[RunSpec]] = {}
    for run in runs:
        groups.setdefault((run.shape, run.batch_tokens), []).append(run)
    spans = (
        make_exact(_sum_flops(group)).divide(speeds.estimate_speed(group[0], part))
        for group in groups.values()
    )
    return add_spans(spans).scale(1 / 3600.0)


def _sum_flops(runs: Iterable[RunSpec]) -> float:
    return float(sum(compute_own_flops(runs)))


def _sum_disk_bytes(runs: Iterable[RunSpec]) -> float:
    return float(sum(RUN_BYTES + STEP_BYTES * run.schedule.num_steps for run in runs))
