"""What a study's stages will run, at which speed, and what that takes, counted from the plan before
the first run.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from launcher.estimates.layout import planned_parallelism
from launcher.estimates.machine import Span, added, exactly, gpu_hours
from launcher.estimates.main_run import MainRun
from launcher.estimates.utilization import PROXY_MFU
from launcher.experiments.conventions import num_tie_runs
from launcher.experiments.ladder import ladder_runs, stage_specs
from launcher.experiments.sweep_grids import first_runs, warmup_runs
from launcher.experiments.transferred_values import target_guess
from launcher.plan.calibration_records import Calibration, ModeRequest, Part, WorkerKind, mean_rate
from launcher.plan.study import Study
from proxies.core.branches import own_flops
from proxies.core.canon import Json
from proxies.core.flops import flops_per_token
from proxies.core.hyperparameters import warmup_of, with_warmup
from proxies.core.noise_scale import look_passes
from proxies.core.notation import counted, format_significant
from proxies.core.optimizers import optimizer_flops
from proxies.core.shape import Shape
from proxies.core.spec import Run, RunSpec
from sweeps.run.pool import num_cores
from sweeps.search.growth import PROBES
from sweeps.search.space import Params

# What workers make of proxies: as measured by a calibration, or as assumed of any core.

WORKER_FLOPS = Span(
    value=30e9,
    low=10e9,
    high=75e9,
    source="a second, of a worker on one server core in float32; measured on proxies of widths 32 "
    "to 256",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """FLOPs a second of one worker, by shape and batch; of what was not measured, those of the
    nearest that was.
    """

    measured: tuple[tuple[ModeRequest, Span], ...] = ()
    source: str = ""
    kinds: tuple[WorkerKind, ...] = ()
    """Workers of the study that was calibrated, measuring at once; empty: not known."""
    assumed: Span = WORKER_FLOPS
    """Where nothing was measured."""

    def of(self, spec: RunSpec, part: Part = "proxy") -> Span:
        """For runs like this one, of the ladder or of any other stage: what was chosen for each may
        differ.
        """
        if not self.measured:
            # which takes time, and is none of the run's FLOPs
            own = optimizer_flops(spec.optimizer, spec.shape)
            trained = float(flops_per_token(spec.shape) * spec.batch_tokens)
            return replace(
                self.assumed.scaled(trained / (trained + own)), source=self.assumed.source
            )

        def far(asked: ModeRequest) -> tuple[float, bool, bool]:
            ratio = _step_flops(asked) / (flops_per_token(spec.shape) * spec.batch_tokens)
            unlike = (asked.shape, asked.batch_tokens) != (spec.shape, spec.batch_tokens)
            return abs(math.log(ratio)), unlike, asked.part != part

        return min(self.measured, key=lambda each: far(each[0]))[1]

    @property
    def num_workers(self) -> int:
        """Of all kinds; 0: not known."""
        return sum(kind.num_workers for kind in self.kinds)

    @property
    def over_all(self) -> Span:
        """The lowest, the middle, the highest, with where they are from."""
        if not self.measured:
            return self.assumed
        spans = sorted((span for _, span in self.measured), key=lambda span: span.value)
        low, high = min(span.low for span in spans), max(span.high for span in spans)
        return Span(value=spans[len(spans) // 2].value, low=low, high=high, source=self.source)


def speeds_of(found: Sequence[Calibration], study: Study, source: str) -> Speeds:
    """Those that calibrations measured of what they chose, and that this study asks for; none: as
    assumed.

    Of workers as the last calibration had them: what one did not measure of each of their kinds is
    left out, for no kind's speed is another's.
    """
    kinds = next((one.kinds for one in reversed(found) if one.kinds), ())
    measured = []
    for one in found:
        figure, asked = one.figure, one.asked
        if (
            figure is None
            or figure.refused
            or study.asked(asked.part, asked.shape, asked.batch_tokens) != asked
        ):
            continue
        by_kind = {timing.kind: timing for timing in figure.by_kind}
        if kinds and by_kind.keys() >= {kind.kind for kind in kinds}:
            flops = _step_flops(asked)
            rate, low, high = mean_rate(
                [by_kind[kind.kind] for kind in kinds for _ in range(kind.num_workers)]
            )
            measured.append((asked, Span(value=rate * flops, low=low * flops, high=high * flops)))
    source = f"a second, of a worker: {source}"
    return Speeds(measured=tuple(measured), source=source, kinds=kinds if measured else ())


def _step_flops(asked: ModeRequest) -> float:
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
"""Not measured on users' trainers; a process that imports torch takes about 6 CPU-seconds to
start."""

STEP_BYTES, RUN_BYTES = 20, 4500
"""On disk: of a curve's row, and of a run beside it, in its file and in the ledger; measured on the
demo."""
MOST_ASKED = 2
"""Extra rates per size and round that a loss basin cut off at one end asks for; where runs diverge
it may be more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """One stage's runs."""

    name: str
    num_runs: tuple[int, int]
    """At least, and with all the extensions that the plan allows; a winner's second execution is
    none of its own."""
    flops: Span
    """Counted `causal`, as every record of a study."""
    core_hours: Span
    disk_bytes: Span
    looks_flops: float = 0.0
    """Beside those, of looks at the gradient noise: in the hours, and in no record."""

    def hours(self, num_workers: int) -> Span:
        """On so many workers, none idle."""
        return self.core_hours.scaled(1 / num_workers)

    def gpu_hours(self, peak_flops: float, measured_gpus: float = 0.0) -> Span:
        """Return GPU-hours of workers with so many GPUs each whose speed was measured; 0: by the
        peak, as assumed.
        """
        if measured_gpus:
            return self.core_hours.scaled(measured_gpus)
        return gpu_hours(added([self.flops, exactly(self.looks_flops)]), peak_flops, PROXY_MFU)


def num_workers(study: Study, known: int = 0) -> int:
    """Workers of the study: the plan's, or as many as it was `known` to have, or as fit on this
    machine's cores, none with less than a core.
    """
    cluster = study.plan.cluster
    room = int(num_cores() / max(1.0, cluster.worker_cpus))
    return 1 if cluster.backend == "inline" else cluster.num_workers or known or max(1, room)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRuns:
    """One stage's runs, as the plan asks for them before anything has ended."""

    name: str
    runs: list[RunSpec]
    more: list[RunSpec]
    """With all the extensions that the plan allows, beyond those."""
    num_again: int = 0
    """Of `runs`, second executions: they cost time and are no runs of the ledger."""


def runs_of(study: Study) -> list[StageRuns]:
    """The runs of every stage in order, some standing for others of their kind."""
    point, search = study.space.lowest, study.plan.search
    least, more = _transfer(study, point)
    # A command's activations cannot be seen, and are not checked.
    rows = (
        [row for runs in study.coordinate_checks.values() for row in runs]
        if study.plan.command is None
        else []
    )
    checks = [run for row in rows for run in row]
    trial, (ties, most_ties) = study.trial(point), num_tie_runs(study)
    return [
        StageRuns(name="check", runs=checks, more=[]),
        StageRuns(
            name="sweep",
            runs=[trial]
            * (search.num_trials + search.num_replicates + study.replays_winner + ties),
            more=[trial]
            * (search.max_extensions * max(search.extension_trials, PROBES) + most_ties - ties),
            num_again=int(study.replays_winner),
        ),
        StageRuns(name="transfer", runs=least, more=more),
        StageRuns(name="ladder", runs=stage_specs(study, ladder_runs(study, point)), more=[]),
    ]


def stages_of(study: Study, speeds: Speeds) -> list[StageCost]:
    """Every stage in order. A run that two stages ask for is made once, and counted in the
    first.
    """
    return [_stage(stage, speeds) for stage in runs_of(study)]


def total_of(stages: Iterable[StageCost]) -> StageCost:
    """All of them together; checks are in the cost and not in the runs, as the ledger and `status`
    count them.
    """
    every = list(stages)
    counts = [s.num_runs for s in every if s.name != "check"]
    return StageCost(
        name="total",
        num_runs=(sum(least for least, _ in counts), sum(most for _, most in counts)),
        flops=added(s.flops for s in every),
        core_hours=added(s.core_hours for s in every),
        disk_bytes=added(s.disk_bytes for s in every),
        looks_flops=sum(s.looks_flops for s in every),
    )


def own_seconds(study: Study, runs: Iterable[Run] = (), speeds: Speeds | None = None) -> Span:
    """Return the seconds that each run of the study takes beside its training.

    For a user's command they are measured once runs of it have finished: the median of the seconds
    that a run took beyond those of its training as estimated.

    Args:
        study: what is asked.
        runs: what its ledger has recorded.
        speeds: of its workers; None: as assumed.
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
    trained = [_core_hours([run.spec], speeds, "proxy").scaled(3600.0) for run in finished]
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
    """From the command to the report: the runs, and Ray's start, checks, fits and reports; ends
    with ends.

    Checks are counted as on one worker: their sizes follow one another, and seeds alone run side by
    side.

    Args:
        stages: what is run.
        num_workers: that run it.
        run_seconds: each run's own, beside its training (`own_seconds`).
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
    """Empty where the kinds are not known."""
    num_workers: int
    gpu_hours: Span
    usd: Span | None
    """None: no price is known."""

    def told(self) -> dict[str, Json]:
        """As verbs print it."""
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
    """GPU-hours of all workers by kind, none idle: every worker is held as long as the others. No
    kinds: one.

    `price`: dollars for an hour of a GPU of a kind.
    """
    every = kinds or (WorkerKind(kind="", num_workers=1, free_bytes=0),)
    total = sum(kind.num_workers for kind in every)
    found = []
    for each in every:
        hours, usd = on_gpu.scaled(each.num_workers / total), price(each.kind)
        paid = None if usd is None else hours.times(usd)
        found.append(
            KindCost(kind=each.kind, num_workers=each.num_workers, gpu_hours=hours, usd=paid)
        )
    return found


def dollars(costs: Sequence[KindCost]) -> Span | None:
    """Of all kinds; None where one's price is not known."""
    known = [cost.usd for cost in costs if cost.usd is not None]
    return added(known) if len(known) == len(costs) else None


def worker_speed(study: Study, gpu: str, peak_flops: float) -> Speeds:
    """What a worker with GPUs (`cluster.worker_gpus`) is assumed to make of proxies, of a peak for
    each, a second.
    """
    gpus = study.plan.cluster.worker_gpus
    return Speeds(
        assumed=replace(
            PROXY_MFU.scaled(gpus * peak_flops),
            source=f"a second, of a worker with {gpus:g} {gpu} at the share of the peak below",
        )
    )


def planned_main_run(study: Study) -> MainRun:
    """The main run that the budget suggests before any fit: 20 tokens a parameter (Chinchilla,
    arXiv 2203.15556).
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


def _transfer(study: Study, point: Params) -> tuple[list[RunSpec], list[RunSpec]]:
    """The grids as the first verdicts ask for them, and what extensions of each may add."""
    target = target_guess(study)
    # At the highest values: a warmup that is long at the base is the one that two rules carry
    # differently.
    compared, _ = warmup_runs(study, with_warmup(point, warmup_of(study.space.highest)), target, {})
    first = {spec.id: spec for spec in compared}
    more: list[RunSpec] = []
    for specs in first_runs(study, point, target).values():
        first |= {spec.id: spec for spec in specs}
        seeds = {
            (spec.shape, spec.num_tokens, spec.parametrization, spec.seed): spec for spec in specs
        }
        more += [*seeds.values()] * (MOST_ASKED * study.plan.transfer.max_extensions)
    return list(first.values()), more


def _stage(stage: StageRuns, speeds: Speeds) -> StageCost:
    runs, every = stage.runs, [*stage.runs, *stage.more]
    flops, disk = _flops(runs), _disk(runs)
    part: Part = "ladder" if stage.name == "ladder" else "proxy"
    hours, more = _core_hours(runs, speeds, part), _core_hours(stage.more, speeds, part)
    looks_flops = _looks_flops(runs) if part == "ladder" else 0.0
    hours = hours.scaled(1 + looks_flops / flops) if flops else hours
    return StageCost(
        name=stage.name,
        num_runs=(len(runs) - stage.num_again, len(every) - stage.num_again),
        flops=Span(value=flops, low=flops, high=_flops(every)),
        core_hours=Span(value=hours.value, low=hours.low, high=hours.high + more.high),
        disk_bytes=Span(value=disk, low=disk, high=_disk(every)),
        looks_flops=looks_flops,
    )


def _looks_flops(runs: Iterable[RunSpec]) -> float:
    """What looks at the gradient noise of runs take (`proxies.core.noise_scale`)."""
    looked = 0.0
    for run in runs:
        passes = -(-run.batch_sequences // run.pass_sequences(1))
        looks = (
            look_passes(run.schedule.num_steps, passes)
            if run.factory is None and run.command is None
            else {}
        )
        looked += run.flops * sum(looks.values()) / (run.schedule.num_steps * passes)
    return looked


def _core_hours(runs: Iterable[RunSpec], speeds: Speeds, part: Part) -> Span:
    """Return the hours of one worker; runs of one shape and batch are as fast as each other."""
    alike: dict[tuple[Shape, int], list[RunSpec]] = {}
    for run in runs:
        alike.setdefault((run.shape, run.batch_tokens), []).append(run)
    each = (exactly(_flops(those)).over(speeds.of(those[0], part)) for those in alike.values())
    return added(each).scaled(1 / 3600.0)


def _flops(runs: Iterable[RunSpec]) -> float:
    return float(sum(own_flops(runs)))


def _disk(runs: Iterable[RunSpec]) -> float:
    return float(sum(RUN_BYTES + STEP_BYTES * run.schedule.num_steps for run in runs))
