"""Calibration of a study: for every shape and batch of its plan, workers measure modes, a rule
chooses one, and the ledger records the choice.

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

from launcher.base.talk import say
from launcher.calibration.mode_choice import Ask, Bench, choose
from launcher.calibration.stage_runs import runs_of
from launcher.plan.calibration_records import (
    Calibration,
    ModeRequest,
    Part,
    PlannedWork,
    mode_name,
)
from launcher.plan.study import Study
from proxies.core import canon
from proxies.core.checks import SpecError
from proxies.core.errors import ForerunError
from proxies.core.failures import Cause
from proxies.core.notation import counted, format_duration
from proxies.core.shape import Shape
from proxies.core.spec import Numerics, RunSpec
from proxies.training.calibration import Answer, CalibrationProbe
from scaling_fits.allocation.shapes import WidthCount
from sweeps.run.kinds import kinds_of, kinds_text
from sweeps.run.pool import Pool, ask_all
from sweeps.store.errors import LedgerCorrupt, RunsFail
from sweeps.store.ledger import CALIBRATION, Ledger

COUNTED = "counted"
"""Kind of the ledger's records of the counts of the user's own model code, one for each depth."""
FAST_FLOPS = 75e9
"""FLOPs per second that a fast core reaches on a proxy; sizes the planned work before anything is
measured.
"""
LEAST_SECONDS = 10.0
"""Minimum planned work in seconds for a measurement: measuring less would take what it saves."""
PROBE_SHARE, LEAST_PROBE_SECONDS, MOST_PROBE_SECONDS = 0.02, 1.0, 5.0
"""Duration of the rounds of one probe: a share of the planned work, within these limits in
seconds.
"""
SILENT_SECONDS = 300.0
"""Seconds without an answer after which a worker is restarted; building, and compiling without a
cache, take a minute or two.
"""
MEMORY_SHARE = 0.9


class UnmeasurableError(ForerunError):
    """A single run with whole batches takes too much memory or time for every worker."""


_TOO_MUCH: tuple[Cause, ...] = ("out_of_memory", "lost_worker", "hung")
"""Causes that show this: the system kills a process that takes too much memory without a
message.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Runs of a plan that compute alike."""

    asked: ModeRequest
    example: RunSpec
    phases: tuple[tuple[int, tuple[int, ...]], ...]
    """Phases of all stages; see `launcher.plan.calibration_records.PlannedWork`."""
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


def groups_of(study: Study) -> list[Group]:
    """Return every group of the plan's stages, smaller models first. Checks run alone and are in no
    group.

    The groups depend only on the plan, whatever was chosen already, so no choice depends on which
    verb came first.
    """
    study = dataclasses.replace(study, chosen={})
    stages: dict[tuple[Part, Shape, int], dict[str, list[RunSpec]]] = {}
    seen: set[str] = set()
    for stage in runs_of(study):
        part: Part = "ladder" if stage.name == "ladder" else "proxy"
        for spec in stage.runs if stage.name != "check" else ():
            # All runs of the search are represented by one spec; each other run occurs once.
            if stage.name == "sweep" or spec.id not in seen:
                seen.add(spec.id)
                runs_by_stage = stages.setdefault((part, spec.shape, spec.batch_tokens), {})
                runs_by_stage.setdefault(stage.name, []).append(spec)
    max_parallel = {"sweep": study.plan.search.parallelism}
    groups = [
        Group(
            asked=study.asked(*key),
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


def calibrations(ledger: Ledger) -> tuple[Calibration, ...]:
    """Return the calibrations that the ledger has recorded, in order.

    Raises:
        LedgerCorrupt: a record is not a valid calibration.
    """
    records = ledger.records(CALIBRATION)
    try:
        return tuple(canon.decode(Calibration, record.body) for record in records)
    except (canon.CanonError, SpecError) as error:
        raise LedgerCorrupt(f"a calibration record of the ledger is not valid ({error})") from error


def calibrated(study: Study, ledger: Ledger) -> Study:
    """Return the study with the choices that its ledger has recorded, and the counts of the user's
    own code.
    """
    chosen = {calibration.asked.key: calibration.chosen for calibration in calibrations(ledger)}
    recorded = cast(dict[str, dict[str, float]], ledger.records_for_plan(COUNTED))
    counts = {int(depth): WidthCount(**body) for depth, body in recorded.items()}
    return dataclasses.replace(study, chosen=chosen, counts=counts)


def calibrate(
    study: Study,
    ledger: Ledger,
    stage: str,
    workers: Callable[[], Pool],
    check_stop: Callable[[], None],
) -> Study:
    """Choose and record the modes that the plan leaves open for a stage's runs and the ledger
    lacks.

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
        PoolDead, DiskFull: see `sweeps.store.errors`.
    """
    if not (study.plan.choices("proxy") or study.plan.choices("ladder")):
        return study
    done = {record.key for record in ledger.records(CALIBRATION)}
    open_ = [
        group for group in groups_of(study) if group.asked.open and group.asked.key not in done
    ]
    if missing := [group for group in open_ if stage in group.stages]:
        if later := len(open_) - len(missing):
            say(f"calibration: shapes of other stages stay open ({later}) until these begin")
        for calibration in _choose_modes(
            study, missing, calibrations(ledger), workers(), check_stop
        ):
            check_stop()
            ledger.append(CALIBRATION, calibration.asked.key, calibration)
            reason = f": {calibration.why}" if calibration.why else ""
            say(
                f"calibration: {_describe_group(calibration.asked)}: "
                f"{mode_name(calibration.chosen, calibration.asked.given)}{reason}"
            )
    return calibrated(study, ledger)


def _describe_group(asked: ModeRequest) -> str:
    """Describe the group of a request for a message."""
    part, shape = "rungs of " if asked.part == "ladder" else "", asked.shape
    return (
        f"{part}width {shape.width}, {counted(shape.num_layers, 'layer')}, {asked.batch_tokens} "
        "tokens a step"
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
    kinds = kinds_of(pool, check_stop)
    if len(set(kinds)) > 1:
        say(
            f"calibration: workers: {kinds_text(kinds)}; one choice for all, by the rate and the "
            "memory of each kind"
        )
    known_kinds = _list_known(kinds)
    recorded = _find_reusable(before, known_kinds)
    benches: dict[str, Bench] = {}
    threads = max(1, int(study.plan.cluster.worker_cpus))
    for group in groups:
        asked, work = group.asked, PlannedWork(kinds=known_kinds, phases=group.phases)
        seconds = group.flops / FAST_FLOPS / pool.num_workers
        measurement_id = _make_measurement_id(asked)
        is_measured = measurement_id in benches or measurement_id in recorded
        # Too little work to measure
        if seconds < LEAST_SECONDS and not is_measured:
            duration = format_duration(max(1.0, seconds))
            reason = f"the planned runs are some {duration} of work for these workers"
            yield _keep_given(asked, pool.num_workers, reason)
            continue
        # Measure, unless the same runs were measured before
        if not is_measured:
            num_workers = counted(pool.num_workers, "worker")
            say(f"calibration: {_describe_group(asked)}: measuring on {num_workers}")
        if measurement_id not in benches:
            share = min(MOST_PROBE_SECONDS, max(LEAST_PROBE_SECONDS, PROBE_SHARE * seconds))
            ask = asking(study, group.example, pool, kinds, share, check_stop)
            benches[measurement_id] = Bench(asked.given, ask, recorded.get(measurement_id))
        try:
            yield choose(asked, work, benches[measurement_id], threads)
        except UnmeasurableError as error:
            # The run itself may still succeed: its batches may be split, and no probe's deadline
            # applies to it
            reason = f"one run alone was too much to try ({error})"
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
    """Return the kinds that are known, or all if none is: a worker whose GPU does not open has no
    kind.
    """
    return tuple(kind for kind in kinds if kind) or tuple(kinds)


def _make_measurement_id(asked: ModeRequest) -> str:
    """Return an id of what is measured for a request; groups of two parts of the plan may
    share it.
    """
    return canon.content_id([asked.shape, asked.batch_tokens, asked.given])


def asking(
    study: Study,
    example: RunSpec,
    pool: Pool,
    kinds: Sequence[str],
    seconds: float,
    check_stop: Callable[[], None],
) -> Ask:
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

    def ask(modes: tuple[Numerics, ...]) -> Sequence[Answer]:
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
            if all(cause in _TOO_MUCH for cause, _ in problems):
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
) -> tuple[list[Answer], list[tuple[str, Cause, str]]]:
    """Send a probe to all workers.

    Returns:
        The answers, and (kind, cause, problem) of each worker that gave none; those are restarted.
    """
    answers, errors = list[Answer](), list[tuple[str, Cause, str]]()
    data = cast(dict[str, canon.Json], canon.to_json(probe))
    for report in ask_all(pool, data, SILENT_SECONDS + 10 * probe.seconds, check_stop):
        kind = kinds[report.worker]
        if report.answer is not None:
            answers.append(dataclasses.replace(canon.decode(Answer, report.answer), kind=kind))
        else:
            problem = report.error or "it did not answer"
            errors.append((kind, report.cause, problem))
            say(f"calibration: worker {report.worker}: {problem}; it was restarted")
    return answers, errors
