"""Calibration of a study: for every shape and batch of its plan, workers measure modes (ways to
compute, which differ in threads, compilation, and trials side by side), a rule chooses one
(`mode_choice`), and the ledger records the choice.

A shape is measured when the first stage that runs it begins, for the work of all stages. A recorded
choice is never measured again, because the study's runs depend on it. This module does not import
torch.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from forerun._launcher.main_run.progress_output import print_progress
from forerun._launcher.study.calibration.mode_choice import (
    MeasureModes,
    ModeMeasurements,
    choose_mode,
)
from forerun._launcher.study.calibration.stage_runs import list_stage_runs
from forerun._launcher.study.plan.calibration_records import (
    Calibration,
    ModeRequest,
    Part,
    PlannedWork,
    describe_mode,
)
from forerun._launcher.study.plan.study import Study
from forerun._proxies.core import canon
from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.errors import ForerunError
from forerun._proxies.core.failures import Cause
from forerun._proxies.core.notation import format_counted, format_duration
from forerun._proxies.core.shape import Shape
from forerun._proxies.core.spec import Numerics, RunSpec
from forerun._proxies.training.calibration import CalibrationProbe, CalibrationResult
from forerun._scaling_fits.allocation.shapes import WidthCount
from forerun._sweeps.run.device_kinds import ask_device_kinds, format_device_kinds
from forerun._sweeps.run.pool import Pool, probe_all_workers
from forerun._sweeps.store.errors import LedgerCorrupt, RunsFail
from forerun._sweeps.store.ledger import CALIBRATION, Ledger

COUNTED = "counted"
"""Kind of the ledger's records of the counts of the user's own model code, one for each depth."""
FAST_FLOPS = 75e9
"""FLOPs per second of a fast core on a proxy, with which the planned work is estimated before
anything is measured.
"""
MIN_PLANNED_SECONDS = 10.0
"""Minimum planned work in seconds for a measurement. With less work, a measurement would take as
long as it saves.
"""
PROBE_SHARE, MIN_PROBE_SECONDS, MAX_PROBE_SECONDS = 0.02, 1.0, 5.0
"""Duration of the rounds of one probe: a share of the planned work, within these limits in
seconds.
"""
MAX_SILENCE_SECONDS = 300.0
"""Seconds without an answer after which a worker is restarted; building, and compiling without a
cache, take a minute or two.
"""
MEMORY_SHARE = 0.9
"""Share of a worker's memory (`cluster.worker_memory_gib`) that a measured mode may take; the rest
is a reserve.
"""


class UnmeasurableError(ForerunError):
    """A single run with whole batches takes too much memory or time for every worker."""


_TOO_LARGE: tuple[Cause, ...] = ("out_of_memory", "lost_worker", "hung")
"""Causes of failure that show that a run takes too much memory or time. A lost worker is one of
them, because the system kills a process that takes too much memory, without a message.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Runs of a plan that have the same shape and batch, and so the same mode."""

    asked: ModeRequest
    """Request for the mode of the runs."""
    example: RunSpec
    """One of the runs."""
    phases: tuple[tuple[int, tuple[int, ...]], ...]
    """Phases of all stages; see `forerun._launcher.study.plan.calibration_records.PlannedWork`."""
    stages: tuple[str, ...]
    """Stages that have runs of the group, in order."""

    @property
    def step_flops(self) -> float:
        """FLOPs of one step of one run."""
        return self.example.flops / self.example.schedule.num_steps

    @property
    def flops(self) -> float:
        """FLOPs of all runs of the group."""
        return self.step_flops * sum(sum(steps) for _, steps in self.phases)


def group_runs(study: Study) -> list[Group]:
    """Return every group of the plan's stages, smaller models first. Coordinate checks run alone
    and are in no group.

    The groups depend only on the plan, not on earlier choices. So no choice depends on which verb
    was called first.
    """
    study = dataclasses.replace(study, chosen={})
    stages: dict[tuple[Part, Shape, int], dict[str, list[RunSpec]]] = {}
    seen: set[str] = set()
    for stage in list_stage_runs(study):
        for spec in stage.runs if stage.name != "check" else ():
            # All runs of the search are represented by one spec; each other run occurs once.
            if stage.name == "sweep" or spec.id not in seen:
                seen.add(spec.id)
                runs_by_stage = stages.setdefault((stage.part, spec.shape, spec.batch_tokens), {})
                runs_by_stage.setdefault(stage.name, []).append(spec)
    max_parallel = {"sweep": study.plan.search.parallelism}  # other stages start all runs at once
    groups = [
        Group(
            asked=study.build_mode_request(*key),
            example=next(iter(by_stage.values()))[0],
            phases=tuple(
                (max_parallel.get(name, len(runs)), tuple(run.schedule.num_steps for run in runs))
                for name, runs in by_stage.items()
            ),
            stages=tuple(by_stage),
        )
        for key, by_stage in stages.items()
    ]
    return sorted(groups, key=lambda group: (group.step_flops, group.asked.part == "ladder"))


def read_calibrations(ledger: Ledger) -> tuple[Calibration, ...]:
    """Return the calibrations that the ledger has recorded, in order.

    Raises:
        LedgerCorrupt: a record is not a valid calibration.
    """
    records = ledger.read_records(CALIBRATION)
    try:
        return tuple(canon.decode(Calibration, record.body) for record in records)
    except (canon.CanonError, SpecError) as error:
        raise LedgerCorrupt(f"a calibration record of the ledger is not valid ({error})") from error


def apply_calibrations(study: Study, ledger: Ledger) -> Study:
    """Return the study with the choices that its ledger has recorded, and the counts of the user's
    own code.
    """
    chosen = {
        calibration.asked.key: calibration.chosen for calibration in read_calibrations(ledger)
    }
    recorded = cast(dict[str, dict[str, float]], ledger.read_records_for_plan(COUNTED))
    counts = {int(depth): WidthCount(**body) for depth, body in recorded.items()}
    return dataclasses.replace(study, chosen=chosen, counts=counts)


def calibrate(
    study: Study,
    ledger: Ledger,
    stage: str,
    workers: Callable[[], Pool],
    check_stop: Callable[[], None],
) -> Study:
    """Choose and record the modes of a stage's runs that the plan leaves open and the ledger does
    not have.

    Args:
        study: the study with its recorded choices.
        ledger: open for writing.
        stage: the stage that begins; shapes that only other stages run stay open.
        workers: returns the pool, idle; called only if there is something to choose.
        check_stop: raises to end the work; recorded choices stay.

    Returns:
        The study with the new choices.

    Raises:
        RunsFail: no worker could train a run of a group at all.
        PoolDead, DiskFull: see `forerun._sweeps.store.errors`.
    """
    if not (study.plan.list_open_choices("proxy") or study.plan.list_open_choices("ladder")):
        return study
    done = {record.key for record in ledger.read_records(CALIBRATION)}
    open_ = [
        group for group in group_runs(study) if group.asked.open and group.asked.key not in done
    ]
    if missing := [group for group in open_ if stage in group.stages]:
        if later := len(open_) - len(missing):
            print_progress(
                f"calibration: shapes of other stages stay open ({later}) until these begin"
            )
        for calibration in _choose_modes(
            study, missing, read_calibrations(ledger), workers(), check_stop
        ):
            check_stop()
            ledger.append(CALIBRATION, calibration.asked.key, calibration)
            reason = f": {calibration.why}" if calibration.why else ""
            print_progress(
                f"calibration: {_describe_group(calibration.asked)}: "
                f"{describe_mode(calibration.chosen, calibration.asked.given)}{reason}"
            )
    return apply_calibrations(study, ledger)


def _describe_group(asked: ModeRequest) -> str:
    """Describe the group of a request for a message."""
    part, shape = "rungs of " if asked.part == "ladder" else "", asked.shape
    return (
        f"{part}width {shape.width}, {format_counted(shape.num_layers, 'layer')}, "
        f"{asked.batch_tokens} tokens a step"
    )


def _choose_modes(
    study: Study,
    groups: Sequence[Group],
    before: Sequence[Calibration],
    pool: Pool,
    check_stop: Callable[[], None],
) -> Iterator[Calibration]:
    """Yield the choice for each group in turn.

    Measurements of the same runs on the same kinds of workers, made `before` or for another group,
    are used again.
    """
    kinds = ask_device_kinds(pool, check_stop)
    if len(set(kinds)) > 1:
        print_progress(
            f"calibration: workers: {format_device_kinds(kinds)}; one choice for all, by the "
            "rate and the memory of each kind"
        )
    known_kinds = _list_known(kinds)
    recorded = _find_reusable(before, known_kinds)
    measurements_by_id: dict[str, ModeMeasurements] = {}
    threads = max(1, int(study.plan.cluster.worker_cpus))
    for group in groups:
        asked, work = group.asked, PlannedWork(kinds=known_kinds, phases=group.phases)
        seconds = group.flops / FAST_FLOPS / pool.num_workers
        measurement_id = _make_measurement_id(asked)
        is_measured = measurement_id in measurements_by_id or measurement_id in recorded
        # Too little work to measure
        if seconds < MIN_PLANNED_SECONDS and not is_measured:
            duration = format_duration(max(1.0, seconds))
            reason = f"these workers need only about {duration} for the planned runs"
            yield _keep_given(asked, pool.num_workers, reason)
            continue
        # Measure, unless the same runs were measured before
        if not is_measured:
            num_workers = format_counted(pool.num_workers, "worker")
            print_progress(f"calibration: {_describe_group(asked)}: measuring on {num_workers}")
        if measurement_id not in measurements_by_id:
            probe_seconds = min(MAX_PROBE_SECONDS, max(MIN_PROBE_SECONDS, PROBE_SHARE * seconds))
            ask = make_measure_modes(study, group.example, pool, kinds, probe_seconds, check_stop)
            measurements_by_id[measurement_id] = ModeMeasurements(
                asked.given, ask, recorded.get(measurement_id)
            )
        try:
            yield choose_mode(asked, work, measurements_by_id[measurement_id], threads)
        except UnmeasurableError as error:
            # The run itself may still succeed: its batches may be split, and no probe's deadline
            # applies to it
            reason = f"a single run takes too much memory or time to be measured ({error})"
            yield _keep_given(asked, pool.num_workers, reason)


def _find_reusable(
    calibrations: Sequence[Calibration], kinds: Sequence[str]
) -> dict[str, Calibration]:
    """Return the calibrations that were measured on the same kinds of workers, by measurement."""
    return {
        _make_measurement_id(calibration.asked): calibration
        for calibration in calibrations
        if calibration.figures
        and {kind.kind: kind.num_workers for kind in calibration.kinds} == Counter(kinds)
    }


def _keep_given(asked: ModeRequest, num_workers: int, reason: str) -> Calibration:
    """Return a calibration that keeps the given mode without measuring."""
    return Calibration(
        asked=asked,
        chosen=asked.given,
        why=f"not measured: {reason}",
        device="",
        num_workers=num_workers,
    )


def _list_known(kinds: Sequence[str]) -> tuple[str, ...]:
    """Return the kinds without empty ones, or all if every one is empty. A worker whose GPU does
    not open has an empty kind.
    """
    return tuple(kind for kind in kinds if kind) or tuple(kinds)


def _make_measurement_id(asked: ModeRequest) -> str:
    """Return an id of the measurement for a request. Two groups may share it, one of the ladder and
    one of other stages.
    """
    return canon.compute_content_id([asked.shape, asked.batch_tokens, asked.given])


def make_measure_modes(
    study: Study,
    example: RunSpec,
    pool: Pool,
    kinds: Sequence[str],
    seconds: float,
    check_stop: Callable[[], None],
) -> MeasureModes:
    """Return a function that has all workers of an idle pool measure modes at once.

    Args:
        study: the study.
        example: a run of the group.
        pool: the pool, idle.
        kinds: kind of each worker's device.
        seconds: duration of the rounds of one probe.
        check_stop: raises to end the work.
    """
    cluster = study.plan.cluster

    def ask(modes: tuple[Numerics, ...]) -> Sequence[CalibrationResult]:
        probe = CalibrationProbe(
            spec=example,
            modes=modes,
            seconds=seconds,
            worker_cpus=cluster.worker_cpus,
            worker_gpus=cluster.worker_gpus,
            most_bytes=int(MEMORY_SHARE * cluster.worker_memory_gib * 2**30),
        )
        answers, errors = _send_probe(pool, probe, kinds, check_stop)
        known = set(_list_known(kinds))
        answers = [answer for answer in answers if answer.kind in known]
        silent = known - {answer.kind for answer in answers}  # a mode must run on every kind
        if silent and len(modes) == 1:
            problems = [(cause, problem) for kind, cause, problem in errors if kind in silent]
            if all(cause in _TOO_LARGE for cause, _ in problems):
                raise UnmeasurableError(problems[-1][1])
            devices = f" with {' or '.join(sorted(silent))}" if len(set(kinds)) > 1 else ""
            raise RunsFail(
                f"calibration: no worker{devices} could train a run of width "
                f"{example.shape.width}: {problems[-1][1]}. Fix that, then run the same command "
                "again"
            )
        return [] if silent else answers

    return ask


def _send_probe(
    pool: Pool, probe: CalibrationProbe, kinds: Sequence[str], check_stop: Callable[[], None]
) -> tuple[list[CalibrationResult], list[tuple[str, Cause, str]]]:
    """Send a probe to all workers.

    Returns:
        The answers, and (kind, cause, problem) of each worker that gave none; those are restarted.
    """
    answers, errors = list[CalibrationResult](), list[tuple[str, Cause, str]]()
    # A probe with longer rounds takes longer to answer.
    silence_seconds = MAX_SILENCE_SECONDS + 10 * probe.seconds
    for report in probe_all_workers(
        pool, {"modes": canon.to_json(probe)}, silence_seconds, check_stop
    ):
        kind = kinds[report.worker]
        if report.answer is not None:
            answers.append(
                dataclasses.replace(canon.decode(CalibrationResult, report.answer), kind=kind)
            )
        else:
            problem = report.error or "it did not answer"
            errors.append((kind, report.cause, problem))
            print_progress(f"calibration: worker {report.worker}: {problem}; it was restarted")
    return answers, errors
