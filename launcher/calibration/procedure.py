"""The calibration of a study: for every shape and batch of its plan, workers measure, a rule
chooses, the ledger keeps.

A shape is measured when the first stage begins that runs it, for the work of all stages. What is
recorded is never measured again: it is part of which runs the study asks for. No torch.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from launcher.base.talk import say
from launcher.calibration.mode_choice import Ask, Bench, choose
from launcher.calibration.study_cost import runs_of
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
"""Kind of the ledger's records of what the user's own code counts, one for each depth."""
FAST_FLOPS = 75e9
"""A second, of a worker: what a fast core makes of a proxy. Work is sized by it before anything is
measured."""
LEAST_SECONDS = 10.0
"""Less planned work is not measured: measuring would take what it saves."""
PROBE_SHARE, LEAST_PROBE_SECONDS, MOST_PROBE_SECONDS = 0.02, 1.0, 5.0
"""Time for the rounds of one probe: a share of the planned work, within these."""
SILENT_SECONDS = 300.0
"""A worker that has not answered by then is started anew: building, and compiling from nothing,
take a minute or two."""
MEMORY_SHARE = 0.9


class UnmeasurableError(ForerunError):
    """One run alone, its batches whole, is too much for every worker: of memory, or of time."""


_TOO_MUCH: tuple[Cause, ...] = ("out_of_memory", "lost_worker", "hung")
"""How that shows: the system ends a process that takes too much memory, without a word."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The runs of a plan that compute alike."""

    asked: ModeRequest
    example: RunSpec
    phases: tuple[tuple[int, tuple[int, ...]], ...]
    """Of all stages: see `launcher.plan.calibration_records.PlannedWork`."""
    stages: tuple[str, ...]
    """That run some of it, in order."""

    @property
    def step_flops(self) -> float:
        """FLOPs of one step of one run."""
        return self.example.flops / self.example.schedule.num_steps

    @property
    def flops(self) -> float:
        """FLOPs of all its runs."""
        return self.step_flops * sum(sum(steps) for _, steps in self.phases)


def groups_of(study: Study) -> list[Group]:
    """Every group of the plan's stages, smaller models first; checks, which run alone, are in none.

    They are the plan's alone, whatever was chosen already: so no choice depends on which verb came
    first.
    """
    study = dataclasses.replace(study, chosen={})
    stages: dict[tuple[Part, Shape, int], dict[str, list[RunSpec]]] = {}
    seen: set[str] = set()
    for stage in runs_of(study):
        part: Part = "ladder" if stage.name == "ladder" else "proxy"
        for spec in stage.runs if stage.name != "check" else ():
            # The search's runs are stood for by one; of the others, each is run once.
            if stage.name == "sweep" or spec.id not in seen:
                seen.add(spec.id)
                alike = stages.setdefault((part, spec.shape, spec.batch_tokens), {})
                alike.setdefault(stage.name, []).append(spec)
    most = {"sweep": study.plan.search.parallelism}
    groups = [
        Group(
            asked=study.asked(*of),
            example=next(iter(by_stage.values()))[0],
            phases=tuple(
                (most.get(name, len(runs)), tuple(run.schedule.num_steps for run in runs))
                for name, runs in by_stage.items()
            ),
            stages=tuple(by_stage),
        )
        for of, by_stage in stages.items()
    ]
    return sorted(groups, key=lambda group: (group.step_flops, group.asked.part == "ladder"))


def calibrations(ledger: Ledger) -> tuple[Calibration, ...]:
    """What the ledger holds, in its order. Raises LedgerCorrupt where that is nothing a plan could
    have left open.
    """
    records = ledger.records(CALIBRATION)
    try:
        return tuple(canon.decode(Calibration, record.body) for record in records)
    except (canon.CanonError, SpecError) as error:
        raise LedgerCorrupt(f"a calibration record of the ledger is not valid ({error})") from error


def calibrated(study: Study, ledger: Ledger) -> Study:
    """The study with what its ledger says was chosen, and counted of the user's own code."""
    chosen = {found.asked.key: found.chosen for found in calibrations(ledger)}
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
    """Choose, and record, what the plan leaves open of a stage's runs and the ledger lacks; the
    study with it.

    Args:
        study: as its ledger has it.
        ledger: open for writing.
        stage: that begins; what only others run stays open.
        workers: the pool, idle; asked for only where there is something to choose.
        check_stop: raises what ends the work; what was recorded stands.

    Raises:
        RunsFail: no worker could train a run of a group at all.
        PoolDead, DiskFull: as named.
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
        for found in _choices(study, missing, calibrations(ledger), workers(), check_stop):
            check_stop()
            ledger.append(CALIBRATION, found.asked.key, found)
            why = f": {found.why}" if found.why else ""
            say(
                f"calibration: {_of(found.asked)}: "
                f"{mode_name(found.chosen, found.asked.given)}{why}"
            )
    return calibrated(study, ledger)


def _of(asked: ModeRequest) -> str:
    part, shape = "rungs of " if asked.part == "ladder" else "", asked.shape
    return (
        f"{part}width {shape.width}, {counted(shape.num_layers, 'layer')}, {asked.batch_tokens} "
        "tokens a step"
    )


def _choices(
    study: Study,
    groups: Sequence[Group],
    before: Sequence[Calibration],
    pool: Pool,
    check_stop: Callable[[], None],
) -> Iterator[Calibration]:
    """The choice for each group in turn; what was measured on such workers of the same runs, as
    part of another group, now or `before`, is not measured again.
    """
    kinds = kinds_of(pool, check_stop)
    if len(set(kinds)) > 1:
        say(
            f"calibration: workers: {kinds_text(kinds)}; one choice for all, by the rate and the "
            "memory of each kind"
        )

    def unmeasured(asked: ModeRequest, why: str) -> Calibration:
        return Calibration(
            asked=asked,
            chosen=asked.given,
            why=f"not measured: {why}",
            device="",
            num_workers=pool.num_workers,
        )

    named = _named(kinds)
    found = {
        _alike(one.asked): one
        for one in before
        if one.figures and {each.kind: each.num_workers for each in one.kinds} == Counter(named)
    }
    benches: dict[str, Bench] = {}
    threads = max(1, int(study.plan.cluster.worker_cpus))
    for group in groups:
        asked, work = group.asked, PlannedWork(kinds=named, phases=group.phases)
        seconds = group.flops / FAST_FLOPS / pool.num_workers
        alike = _alike(asked)
        if seconds < LEAST_SECONDS and alike not in benches and alike not in found:
            yield unmeasured(
                asked,
                f"the planned runs are some {format_duration(max(1.0, seconds))} of work for these "
                "workers",
            )
        else:
            share = min(MOST_PROBE_SECONDS, max(LEAST_PROBE_SECONDS, PROBE_SHARE * seconds))
            if alike not in benches:
                if alike not in found:
                    say(
                        f"calibration: {_of(asked)}: measuring on "
                        f"{counted(pool.num_workers, 'worker')}"
                    )
                ask = asking(study, group.example, pool, kinds, share, check_stop)
                benches[alike] = Bench(asked.given, ask, found.get(alike))
            try:
                yield choose(asked, work, benches[alike], threads)
            except (
                UnmeasurableError
            ) as error:  # when it is run, its batches may be split, and nobody waits for it
                yield unmeasured(asked, f"one run alone was too much to try ({error})")


def _named(kinds: Sequence[str]) -> tuple[str, ...]:
    """Those that are known, if any: a worker whose GPU does not open speaks for none."""
    return tuple(kind for kind in kinds if kind) or tuple(kinds)


def _alike(asked: ModeRequest) -> str:
    """Names what is measured: groups of two parts of the plan may share it."""
    return canon.content_id([asked.shape, asked.batch_tokens, asked.given])


def asking(
    study: Study,
    example: RunSpec,
    pool: Pool,
    kinds: Sequence[str],
    seconds: float,
    check_stop: Callable[[], None],
) -> Ask:
    """What has all workers of an idle pool measure modes at once; `kinds`: by worker, that of its
    device.
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
        answers, errors = _asked(pool, probe, kinds, check_stop)
        known = set(_named(kinds))
        answers = [answer for answer in answers if answer.kind in known]
        silent = known - {answer.kind for answer in answers}  # a mode is for every kind
        if silent and len(modes) == 1:
            theirs = [(cause, problem) for kind, cause, problem in errors if kind in silent]
            if all(cause in _TOO_MUCH for cause, _ in theirs):
                raise UnmeasurableError(theirs[-1][1])
            of = f" with {' or '.join(sorted(silent))}" if len(set(kinds)) > 1 else ""
            raise RunsFail(
                f"calibration: no worker{of} could train a run of width {example.shape.width}: "
                f"{theirs[-1][1]}. Fix "
                "that, then run the same command again"
            )
        return [] if silent else answers

    return ask


def _asked(
    pool: Pool, probe: CalibrationProbe, kinds: Sequence[str], check_stop: Callable[[], None]
) -> tuple[list[Answer], list[tuple[str, Cause, str]]]:
    """The answers of those workers that give one, and why others do not, with their kinds; these
    are started anew.
    """
    answers, errors = list[Answer](), list[tuple[str, Cause, str]]()
    asked = cast(dict[str, canon.Json], canon.to_json(probe))
    for report in ask_all(pool, asked, SILENT_SECONDS + 10 * probe.seconds, check_stop):
        kind = kinds[report.worker]
        if report.answer is not None:
            answers.append(dataclasses.replace(canon.decode(Answer, report.answer), kind=kind))
        else:
            problem = report.error or "it did not answer"
            errors.append((kind, report.cause, problem))
            say(f"calibration: worker {report.worker}: {problem}; it was restarted")
    return answers, errors
