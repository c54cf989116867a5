"""The cost of a study, computed from the plan before the first run: which runs its stages have, at
which speed workers train them, and what that takes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from launcher.calibration.stage_runs import StageRuns, runs_of
from launcher.estimates.layout import planned_parallelism
from launcher.estimates.machine import Span, added, exactly, gpu_hours
from launcher.estimates.main_run import MainRun
from launcher.estimates.utilization import PROXY_MFU
from launcher.experiments.transferred_values import target_guess
from launcher.plan.calibration_records import Calibration, ModeRequest, Part, WorkerKind, mean_rate
from launcher.plan.study import Study
from proxies.core.branches import own_flops
from proxies.core.canon import Json
from proxies.core.flops import flops_per_token
from proxies.core.noise_scale import look_passes
from proxies.core.notation import counted, format_significant
from proxies.core.optimizers import optimizer_flops
from proxies.core.shape import Shape
from proxies.core.spec import Run, RunSpec
from sweeps.run.pool import num_cores

# ---- Speed ----

WORKER_FLOPS = Span(
    value=30e9,
    low=10e9,
    high=75e9,
    source="a second, of a worker on one server core in float32; measured on proxies of widths 32 "
    "to 256",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """FLOPs per second of one worker, by shape and batch; for what was not measured, those of the
    nearest measured shape and batch.
    """

    measured: tuple[tuple[ModeRequest, Span], ...] = ()
    source: str = ""
    kinds: tuple[WorkerKind, ...] = ()
    """Workers of the study that was calibrated, which measured at the same time; empty if
    unknown.
    """
    assumed: Span = WORKER_FLOPS
    """Speed if nothing was measured."""

    def of(self, spec: RunSpec, part: Part = "proxy") -> Span:
        """Return the speed for runs like this one.

        Args:
            spec: the run.
            part: whether it belongs to the ladder or to another stage; their chosen modes may
                differ.
        """
        if not self.measured:
            # The optimizer takes time but is not counted in the run's FLOPs
            optimizer = optimizer_flops(spec.optimizer, spec.shape)
            trained = float(flops_per_token(spec.shape) * spec.batch_tokens)
            return replace(
                self.assumed.scaled(trained / (trained + optimizer)), source=self.assumed.source
            )

        def distance(asked: ModeRequest) -> tuple[float, bool, bool]:
            ratio = _count_step_flops(asked) / (flops_per_token(spec.shape) * spec.batch_tokens)
            unlike = (asked.shape, asked.batch_tokens) != (spec.shape, spec.batch_tokens)
            return abs(math.log(ratio)), unlike, asked.part != part

        _, span = min(self.measured, key=lambda pair: distance(pair[0]))
        return span

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


def speeds_of(calibrations: Sequence[Calibration], study: Study, source: str) -> Speeds:
    """Return the speeds that calibrations measured of their chosen modes, for the shapes and
    batches of this study; assumed speeds if there are none.

    The workers are those of the last calibration with measurements. A calibration that did not
    measure each of their kinds is left out, because no kind's speed is used for another.

    Args:
        calibrations: the calibrations, in order.
        study: the study.
        source: source of the measurements, for messages.
    """
    kinds = next(
        (calibration.kinds for calibration in reversed(calibrations) if calibration.kinds), ()
    )
    measured = []
    for calibration in calibrations:
        figure, asked = calibration.figure, calibration.asked
        if (
            figure is None
            or figure.refused
            or study.asked(asked.part, asked.shape, asked.batch_tokens) != asked
        ):
            continue
        by_kind = {timing.kind: timing for timing in figure.by_kind}
        if kinds and by_kind.keys() >= {kind.kind for kind in kinds}:
            flops = _count_step_flops(asked)
            rate, low, high = mean_rate(
                [by_kind[kind.kind] for kind in kinds for _ in range(kind.num_workers)]
            )
            measured.append((asked, Span(value=rate * flops, low=low * flops, high=high * flops)))
    source = f"a second, of a worker: {source}"
    return Speeds(measured=tuple(measured), source=source, kinds=kinds if measured else ())


def _count_step_flops(asked: ModeRequest) -> float:
    """Return the FLOPs of one step."""
    return float(flops_per_token(asked.shape)) * asked.batch_tokens


AFTER_SECONDS = Span(
    value=20.0,
    low=8.0,
    high=60.0,
    source="assumed of the fit, the verdicts and the report; the upper end: on a machine that does "
    "other work too",
)
START_SECONDS = Span(
    value=20.0,
    low=5.0,
    high=120.0,
    source="assumed of Ray's start and of workers that import torch; the upper end as for "
    "AFTER_SECONDS",
)
RUN_SECONDS = Span(
    value=0.5,
    low=0.1,
    high=3.0,
    source="assumed, a run of one worker: the model is built, validated, saved, its outcome "
    "recorded",
)
COMMAND_SECONDS = Span(
    value=10.0,
    low=3.0,
    high=60.0,
    source="assumed, a run of your own trainer: its process starts, imports its framework, "
    "compiles, validates, saves",
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
    num_runs: tuple[int, int]
    """Minimum number of runs, and the number with all extensions that the plan allows. The second
    execution of a winner is not a run of its own.
    """
    flops: Span
    """Training FLOPs, counted `causal`, as in every record of a study."""
    core_hours: Span
    disk_bytes: Span
    looks_flops: float = 0.0
    """FLOPs of measuring the gradient noise, which are included in the hours and in no record."""

    def hours(self, num_workers: int) -> Span:
        """Return the hours on `num_workers` workers, none of them idle."""
        return self.core_hours.scaled(1 / num_workers)

    def gpu_hours(self, peak_flops: float, measured_gpus: float = 0.0) -> Span:
        """Return the GPU-hours.

        Args:
            peak_flops: peak FLOPs per second of one GPU, for an assumed speed.
            measured_gpus: GPUs of each worker whose speed was measured; 0: the speed is assumed.
        """
        if measured_gpus:
            return self.core_hours.scaled(measured_gpus)
        return gpu_hours(added([self.flops, exactly(self.looks_flops)]), peak_flops, PROXY_MFU)


def num_workers(study: Study, known: int = 0) -> int:
    """Return the number of workers of the study.

    This is the plan's number, or the number `known` from earlier work, or as many as fit on this
    machine's cores, each with at least one core.
    """
    cluster = study.plan.cluster
    room = int(num_cores() / max(1.0, cluster.worker_cpus))
    return 1 if cluster.backend == "inline" else cluster.num_workers or known or max(1, room)


def stages_of(study: Study, speeds: Speeds) -> list[StageCost]:
    """Return the cost of every stage in order.

    A run that two stages request is executed once, and counted in the first.
    """
    return [_compute_stage_cost(stage, speeds) for stage in runs_of(study)]


def total_of(stages: Iterable[StageCost]) -> StageCost:
    """Return the total cost. Checks are included in the cost but not in the number of runs, as in
    the ledger and `status`.
    """
    every = list(stages)
    counts = [stage.num_runs for stage in every if stage.name != "check"]
    return StageCost(
        name="total",
        num_runs=(sum(least for least, _ in counts), sum(most for _, most in counts)),
        flops=added(stage.flops for stage in every),
        core_hours=added(stage.core_hours for stage in every),
        disk_bytes=added(stage.disk_bytes for stage in every),
        looks_flops=sum(stage.looks_flops for stage in every),
    )


def own_seconds(study: Study, runs: Iterable[Run] = (), speeds: Speeds | None = None) -> Span:
    """Return the seconds that each run of the study takes apart from its training.

    For a user's command they are measured once runs of it have finished: the median of the seconds
    that a run took beyond the estimate of its training.

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
    trained = [_compute_core_hours([run.spec], speeds, "proxy").scaled(3600.0) for run in finished]
    seconds = [run.result.seconds for run in finished]
    low, value, high = (
        max(0.0, median(map(operator.sub, seconds, ends)))
        for ends in zip(*((span.high, span.value, span.low) for span in trained), strict=True)
    )
    source = (
        "measured, the start of your trainer's process: over "
        f"{counted(len(finished), 'run')}, less their training"
    )
    return Span(value=value, low=low, high=high, source=source)


def wall_hours(
    stages: Iterable[StageCost], num_workers: int, run_seconds: Span = RUN_SECONDS
) -> Span:
    """Return the time from the command to the report: the runs, Ray's start, checks, fits and
    reports. The lower ends add up to the lower end, and the upper ends to the upper end.

    Checks are counted as on one worker: their sizes run one after another, and only seeds run in
    parallel.

    Args:
        stages: stages to run.
        num_workers: number of workers.
        run_seconds: seconds of each run apart from its training (`own_seconds`).
    """
    every = list(stages)
    trained = added(stage.hours(1 if stage.name == "check" else num_workers) for stage in every)
    runs = [stage.num_runs for stage in every if stage.name != "check"]
    least, most = (sum(ends) / num_workers for ends in zip(*runs, strict=True))
    each = Span(
        value=run_seconds.value * least, low=run_seconds.low * least, high=run_seconds.high * most
    )
    more = added([START_SECONDS, each, AFTER_SECONDS]).scaled(1 / 3600.0)
    total = added([trained, more])
    return Span(
        value=total.value,
        low=total.low,
        high=total.high,
        source=f"the hours of the runs on {counted(num_workers, 'worker')}, those of checks on "
        "one, and "
        f"{format_significant(run_seconds.value)} s a run ({run_seconds.source}), "
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

    def told(self) -> dict[str, Json]:
        """Return the cost as JSON data, as verbs print it."""
        usd = None if self.usd is None else self.usd.told()
        return {
            "kind": self.kind,
            "num_workers": self.num_workers,
            "gpu_hours": self.gpu_hours.told(),
            "usd": usd,
        }


def kind_costs(
    on_gpu: Span, kinds: Sequence[WorkerKind], price: Callable[[str], Span | None]
) -> list[KindCost]:
    """Divide the GPU-hours of all workers by kind; every worker is held equally long, and none is
    idle.

    Args:
        on_gpu: GPU-hours of all workers.
        kinds: kinds of workers; empty: one unknown kind.
        price: returns the dollars for an hour of a GPU of a kind; None if unknown.
    """
    every = kinds or (WorkerKind(kind="", num_workers=1, free_bytes=0),)
    total = sum(kind.num_workers for kind in every)
    costs = []
    for worker_kind in every:
        hours, usd = on_gpu.scaled(worker_kind.num_workers / total), price(worker_kind.kind)
        paid = None if usd is None else hours.times(usd)
        costs.append(
            KindCost(
                kind=worker_kind.kind,
                num_workers=worker_kind.num_workers,
                gpu_hours=hours,
                usd=paid,
            )
        )
    return costs


def dollars(costs: Sequence[KindCost]) -> Span | None:
    """Return the dollars of all kinds; None if the price of one is unknown."""
    known = [cost.usd for cost in costs if cost.usd is not None]
    return added(known) if len(known) == len(costs) else None


def worker_speed(study: Study, gpu: str, peak_flops: float) -> Speeds:
    """Return the assumed speed of a worker with GPUs (`cluster.worker_gpus`) on proxies.

    Args:
        study: the study.
        gpu: name of the GPU.
        peak_flops: peak FLOPs per second of one GPU.
    """
    gpus = study.plan.cluster.worker_gpus
    return Speeds(
        assumed=replace(
            PROXY_MFU.scaled(gpus * peak_flops),
            source=f"a second, of a worker with {gpus:g} {gpu} at the share of the peak below",
        )
    )


def planned_main_run(study: Study) -> MainRun:
    """Return the main run that the budget suggests before any fit: 20 tokens a parameter
    (Chinchilla, arXiv 2203.15556).
    """
    target, launch = target_guess(study), study.plan.launch
    shape = study.shape(target.width).at_depth(target.depth)
    return MainRun(
        shape=shape,
        num_tokens=target.duration,
        batch_tokens=target.batch,
        precision=launch.precision,
        layout=planned_parallelism(launch),
        optimizer=study.plan.proxy.optimizer,
    )


def _compute_stage_cost(stage: StageRuns, speeds: Speeds) -> StageCost:
    """Return the cost of one stage."""
    runs, every = stage.runs, [*stage.runs, *stage.more]
    flops, disk = _sum_flops(runs), _sum_disk_bytes(runs)
    part: Part = "ladder" if stage.name == "ladder" else "proxy"
    hours, more = (
        _compute_core_hours(runs, speeds, part),
        _compute_core_hours(stage.more, speeds, part),
    )
    looks_flops = _count_noise_flops(runs) if part == "ladder" else 0.0
    hours = hours.scaled(1 + looks_flops / flops) if flops else hours
    return StageCost(
        name=stage.name,
        num_runs=(len(runs) - stage.num_again, len(every) - stage.num_again),
        flops=Span(value=flops, low=flops, high=_sum_flops(every)),
        core_hours=Span(value=hours.value, low=hours.low, high=hours.high + more.high),
        disk_bytes=Span(value=disk, low=disk, high=_sum_disk_bytes(every)),
        looks_flops=looks_flops,
    )


def _count_noise_flops(runs: Iterable[RunSpec]) -> float:
    """Return the FLOPs of measuring the gradient noise of runs (`proxies.core.noise_scale`)."""
    flops = 0.0
    for run in runs:
        passes = -(-run.batch_sequences // run.pass_sequences(1))
        looks = (
            look_passes(run.schedule.num_steps, passes)
            if run.factory is None and run.command is None
            else {}
        )
        flops += run.flops * sum(looks.values()) / (run.schedule.num_steps * passes)
    return flops


def _compute_core_hours(runs: Iterable[RunSpec], speeds: Speeds, part: Part) -> Span:
    """Return the hours of one worker; runs of one shape and batch have the same speed."""
    groups: dict[tuple[Shape, int], list[RunSpec]] = {}
    for run in runs:
        groups.setdefault((run.shape, run.batch_tokens), []).append(run)
    spans = (
        exactly(_sum_flops(group)).over(speeds.of(group[0], part)) for group in groups.values()
    )
    return added(spans).scaled(1 / 3600.0)


def _sum_flops(runs: Iterable[RunSpec]) -> float:
    return float(sum(own_flops(runs)))


def _sum_disk_bytes(runs: Iterable[RunSpec]) -> float:
    return float(sum(RUN_BYTES + STEP_BYTES * run.schedule.num_steps for run in runs))
