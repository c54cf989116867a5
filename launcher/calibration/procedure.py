"""The calibration of a study: for every shape and batch of its plan, workers measure, a rule chooses, the ledger keeps.

What is recorded is never measured again: it is part of which runs the study asks for. No torch.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from launcher.base.talk import duration, say
from launcher.calibration.study_cost import runs_of
from launcher.plan.calibration_records import (
    MOST_SLOTS,
    Calibration,
    ModeRequest,
    ModeTiming,
    Part,
    PlannedWork,
    mode_name,
)
from launcher.plan.study import Study
from proxies.core import canon
from proxies.core.checks import SpecError
from proxies.core.failures import Cause
from proxies.core.shape import Shape
from proxies.core.spec import Numerics, RunSpec
from proxies.training.calibration import MARGIN, STEP, Answer, CalibrationProbe, Rate, surely
from sweeps.run.pool import HostCall, Pool
from sweeps.store.errors import LedgerCorrupt, RunsFail
from sweeps.store.ledger import CALIBRATION, Ledger

# Which numerics a group of runs gets, by what workers measured of it. The rule alone: no clock, no torch.
#
# A mode is judged by the seconds that the planned runs would take with it: building, compiling, and every bank's steps,
# an empty slot's too. So what pays only in a long search is taken only there, and slots that nothing would fill never.

COMPILE_SECONDS = 40.0
"""What torch.compile takes from nothing, before it is measured: 20 to 60 s of a proxy on one core."""
COMPILE_SHARE = 0.1
"""Compiling is tried where it takes a smaller share of the planned work: it has to be compiled twice."""

Ask = Callable[[tuple[Numerics, ...]], Sequence[Answer]]
"""Has every worker measure these modes at once; their answers. None: nobody survived it."""


@dataclass(kw_only=True, slots=True)
class _Measured:
    ratios: list[float] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)
    refused: str = ""


class Bench:
    """What has been measured so far of one shape and batch; a mode is asked for once."""

    def __init__(self, plain: Numerics, ask: Ask) -> None:
        """`plain`: the mode that all others are held against."""
        self.plain, self._ask = plain, ask
        self._seen: dict[Numerics, _Measured] = {}
        self.device = ""
        self.free_bytes = 0

    @property
    def modes(self) -> tuple[Numerics, ...]:
        """Measured, or refused."""
        return tuple(self._seen)

    def measure(self, *modes: Numerics) -> None:
        """See to it that the last of the modes is measured, beside the plain one and the others."""
        if modes[-1] in self._seen:
            return
        asked = tuple(dict.fromkeys((self.plain, *modes)))
        answers = self._ask(asked)
        if not answers:
            self._seen.setdefault(modes[-1], _Measured()).refused = "no worker survived it"
            return
        self.device = answers[0].device
        self.free_bytes = min(answer.free_bytes for answer in answers)
        for answer in answers:
            plain = answer.rates[0].trial_steps_per_second
            for rate in answer.rates:
                seen = self._seen.setdefault(rate.mode, _Measured())
                seen.refused = seen.refused or rate.refused
                seen.rates.append(rate)
                seen.ratios += [a / b for a, b in zip(rate.trial_steps_per_second, plain, strict=False)]

    def refused(self, mode: Numerics) -> str:
        """Why a mode does not train, or is not known."""
        seen = self._seen.get(mode)
        return "not measured" if seen is None else seen.refused

    def ratio(self, mode: Numerics) -> float:
        """The mode's rate over the plain one's: the median of the rounds."""
        return statistics.median(self._seen[mode].ratios)

    def peak_bytes(self, mode: Numerics) -> int:
        """The most that any worker held."""
        return max((rate.peak_bytes for rate in self._seen[mode].rates), default=0)

    def figure(self, mode: Numerics, work: PlannedWork) -> ModeTiming:
        """Everything about a mode that was asked for."""
        seen, refused = self._seen[mode], self.refused(mode)
        if refused:
            return ModeTiming(
                mode=mode, trial_steps_per_second=0.0, interval=(0.0, 0.0), ratio=0.0, least_ratio=0.0,
                first_seconds=0.0, again_seconds=0.0, peak_bytes=0, planned_seconds=0.0, refused=refused,
            )  # fmt: skip
        plain = [rate for one in self._seen[self.plain].rates for rate in one.trial_steps_per_second]
        rate, ratio = statistics.median(plain) * self.ratio(mode), self.ratio(mode)
        own = [each for one in seen.rates for each in one.trial_steps_per_second]
        low, _, high = statistics.quantiles(own, n=4, method="inclusive") if len(own) > 1 else own * 3
        first = statistics.median(each.first_seconds for each in seen.rates)
        again = statistics.median(each.again_seconds for each in seen.rates)
        return ModeTiming(
            mode=mode, trial_steps_per_second=rate, interval=(min(low, rate), max(high, rate)), ratio=ratio,
            least_ratio=surely(seen.ratios), first_seconds=first, again_seconds=again,
            peak_bytes=self.peak_bytes(mode),
            planned_seconds=first + again * (work.runs_per_worker - 1)
            + work.bank_steps(mode.num_slots) * mode.num_slots / rate,
        )  # fmt: skip


def choose(asked: ModeRequest, work: PlannedWork, bench: Bench, most_threads: int = 1) -> Calibration:
    """The numerics that the planned runs take the least time with; a plainer one unless another is clearly faster.

    Args:
        asked: the runs.
        work: what they will do.
        bench: measures.
        most_threads: that one worker may use.
    """
    bench.measure(asked.given)
    rule = _Rule(asked, work, bench)
    several = "num_slots" in asked.open
    best = rule.climb(asked.given) if several else asked.given
    for change in _changes(asked, bench.device, most_threads):
        best = rule.tried(best, change)
    if several and best.num_slots > 1 and bench.device == "cuda":
        best = rule.narrowed(rule.climb(best))  # compiled, or without its launches: room for more, or need of none
    figures = tuple(bench.figure(mode, work) for mode in bench.modes)
    return Calibration(
        asked=asked, chosen=best, why=rule.why(best), device=bench.device,
        num_workers=work.num_workers, figures=figures,
    )  # fmt: skip


def _changes(asked: ModeRequest, device: str, most_threads: int) -> list[dict[str, object]]:
    """What else may be faster, in the order of trying."""
    changes: list[dict[str, object]] = []
    if "num_slots" in asked.open and device == "cuda":
        changes += [{"fused_loss": True}, {"cuda_graphs": True}]
    if "num_slots" in asked.open and device != "cuda":
        changes += [{"num_threads": 2**power} for power in range(1, most_threads.bit_length())]
    if "compiled" in asked.open:
        changes.append({"compiled": True})
    return changes


class _Rule:
    """One choice on its way."""

    def __init__(self, asked: ModeRequest, work: PlannedWork, bench: Bench) -> None:
        self._asked, self._work, self._bench = asked, work, bench

    def _seconds(self, mode: Numerics) -> float:
        return self._bench.figure(mode, self._work).planned_seconds

    def climb(self, start: Numerics) -> Numerics:
        """Twice the slots while that pays, if what it ends at is clearly better than where it began."""
        best = start
        while (wider := dataclasses.replace(best, num_slots=2 * best.num_slots)).num_slots <= MOST_SLOTS:
            if not self._may_pay(best, wider, start) or not self._fits(best):
                break
            self._bench.measure(best, wider)
            if not self._pays(wider, best, STEP):
                break
            best = wider
        return best if self._pays(best, start, MARGIN) else start

    def _pays(self, mode: Numerics, than: Numerics, by: float) -> bool:
        """Whether a mode is faster than a simpler one by so much, at the least that its rate may be."""
        if self._bench.refused(mode):
            return False
        figure = self._bench.figure(mode, self._work)
        steps = self._work.bank_steps(mode.num_slots) * mode.num_slots / figure.trial_steps_per_second
        slower = steps * (figure.ratio / figure.least_ratio - 1)
        return (figure.planned_seconds + slower) * (1 + by) < self._seconds(than)

    def _may_pay(self, best: Numerics, wider: Numerics, start: Numerics) -> bool:
        """Whether it would if a bank's step took no longer with twice the slots."""
        shorter = self._work.bank_steps(wider.num_slots) / self._work.bank_steps(best.num_slots)
        optimistic = shorter * self._seconds(best)
        return optimistic * (1 + STEP) < self._seconds(best) and optimistic * (1 + MARGIN) < self._seconds(start)

    def _fits(self, best: Numerics) -> bool:
        """Whether the memory of twice the slots, by what these and half of them held, is there."""
        held, free = self._bench.peak_bytes(best), self._bench.free_bytes
        narrower = dataclasses.replace(best, num_slots=max(1, best.num_slots // 2))
        known = best.num_slots > 2 and not self._bench.refused(narrower)
        slope = held - self._bench.peak_bytes(narrower) if known else held / 2
        wanted = held + 2 * max(0.0, slope)
        return not free or wanted <= free

    def tried(self, best: Numerics, change: dict[str, object]) -> Numerics:
        """The mode with a change, if that is clearly faster; else as it is."""
        changed: Numerics = dataclasses.replace(best, **change)  # type: ignore[arg-type]
        if changed == best:
            return best
        if "compiled" in change and self._seconds(best) * COMPILE_SHARE < COMPILE_SECONDS:
            return best
        self._bench.measure(best, changed)
        return changed if self._pays(changed, best, MARGIN) else best

    def narrowed(self, best: Numerics) -> Numerics:
        """One slot, unless those there are clearly faster."""
        alone = dataclasses.replace(best, num_slots=1)
        self._bench.measure(best, alone)
        return best if self._bench.refused(alone) or self._pays(best, alone, MARGIN) else alone

    def why(self, best: Numerics) -> str:
        """The choice in a sentence."""
        plain = self._asked.given
        if best == plain:
            return "nothing is surely faster by a tenth" if len(self._bench.modes) > 1 else ""
        return (
            f"{self._bench.ratio(best):.2f} times as fast as {mode_name(plain, plain)}, "
            f"{duration(self._seconds(best))} of planned work in place of {duration(self._seconds(plain))}"
        )


FAST_FLOPS = 75e9
"""A second, of a worker: what a fast core makes of a proxy. Work is sized by it before anything is measured."""
LEAST_SECONDS = 10.0
"""Less planned work is not measured: measuring would take what it saves."""
PROBE_SHARE, LEAST_PROBE_SECONDS, MOST_PROBE_SECONDS = 0.02, 1.0, 5.0
"""Time for the rounds of one probe: a share of the planned work, within these."""
SILENT_SECONDS = 300.0
"""A worker that has not answered by then is started anew: building, and compiling from nothing, take a minute or two.
"""
MEMORY_SHARE = 0.9
POLL_SECONDS = 0.5


class UnmeasurableError(Exception):
    """One run alone, its batches whole, is too much for every worker: of memory, or of time."""


_TOO_MUCH: tuple[Cause, ...] = ("out_of_memory", "lost_worker", "hung")
"""How that shows: the system ends a process that takes too much memory, without a word."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The runs of a plan that compute alike."""

    asked: ModeRequest
    example: RunSpec
    phases: tuple[tuple[int, tuple[int, ...]], ...]
    """See `launcher.plan.calibration_records.PlannedWork`."""

    @property
    def step_flops(self) -> float:
        """FLOPs of one step of one run."""
        return self.example.flops / self.example.schedule.num_steps

    @property
    def flops(self) -> float:
        """FLOPs of all its runs."""
        return self.step_flops * sum(sum(steps) for _, steps in self.phases)


def groups_of(study: Study) -> list[Group]:
    """Every group of the plan's stages, smaller models first; checks, which run alone, are in none."""
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
            asked=study.asked(*of), example=next(iter(by_stage.values()))[0],
            phases=tuple(
                (most.get(name, len(runs)), tuple(run.schedule.num_steps for run in runs))
                for name, runs in by_stage.items()
            ),
        )
        for of, by_stage in stages.items()
    ]  # fmt: skip
    return sorted(groups, key=lambda group: (group.step_flops, group.asked.part == "ladder"))


def calibrations(ledger: Ledger) -> tuple[Calibration, ...]:
    """What the ledger holds, in its order. Raises LedgerCorrupt where that is nothing a plan could have left open."""
    records = ledger.records(CALIBRATION)
    try:
        return tuple(canon.decode(Calibration, record.body) for record in records)
    except (canon.CanonError, SpecError) as error:
        raise LedgerCorrupt(f"a calibration of the ledger is none ({error})") from error


def calibrated(study: Study, ledger: Ledger) -> Study:
    """The study with what its ledger says was chosen."""
    return dataclasses.replace(study, chosen={found.asked.key: found.chosen for found in calibrations(ledger)})


def calibrate(study: Study, ledger: Ledger, workers: Callable[[], Pool], check_stop: Callable[[], None]) -> Study:
    """Choose, and record, what the study's plan leaves open and its ledger lacks; the study with it.

    Args:
        study: as its ledger has it.
        ledger: open for writing.
        workers: the pool, idle; asked for only where there is something to choose.
        check_stop: raises what ends the work; what was recorded stands.

    Raises:
        RunsFail: no worker could train a run of a group at all.
        PoolDead, DiskFull: as named.
    """
    if not (study.plan.choices("proxy") or study.plan.choices("ladder")):
        return study
    done = {record.key for record in ledger.records(CALIBRATION)}
    if missing := [group for group in groups_of(study) if group.asked.open and group.asked.key not in done]:
        for found in _choices(study, missing, workers(), check_stop):
            check_stop()
            ledger.append(CALIBRATION, found.asked.key, found)
            why = f": {found.why}" if found.why else ""
            say(f"calibration: {_of(found.asked)}: {mode_name(found.chosen, found.asked.given)}{why}")
    return calibrated(study, ledger)


def _of(asked: ModeRequest) -> str:
    part, shape = "rungs of " if asked.part == "ladder" else "", asked.shape
    return f"{part}width {shape.width}, {shape.num_layers} layers, {asked.batch_tokens} tokens a step"


def _choices(
    study: Study, groups: Sequence[Group], pool: Pool, check_stop: Callable[[], None]
) -> Iterator[Calibration]:  # fmt: skip
    """The choice for each group in turn; what one measured, a later one of the same runs need not."""

    def unmeasured(asked: ModeRequest, why: str) -> Calibration:
        return Calibration(
            asked=asked, chosen=asked.given, why=f"not measured: {why}", device="", num_workers=pool.num_workers
        )

    benches: dict[str, Bench] = {}
    threads = max(1, int(study.plan.cluster.worker_cpus))
    for group in groups:
        asked, work = group.asked, PlannedWork(num_workers=pool.num_workers, phases=group.phases)
        seconds = group.flops / FAST_FLOPS / pool.num_workers
        same = canon.content_id([asked.shape, asked.batch_tokens, asked.given])
        if seconds < LEAST_SECONDS and same not in benches:
            yield unmeasured(
                asked, f"the planned runs are some {duration(max(1.0, seconds))} of work for these workers"
            )
        else:
            share = min(MOST_PROBE_SECONDS, max(LEAST_PROBE_SECONDS, PROBE_SHARE * seconds))
            if same not in benches:
                workers = f"{pool.num_workers} worker{'s' if pool.num_workers > 1 else ''}"
                say(f"calibration: {_of(asked)}: measuring on {workers}")
                benches[same] = Bench(asked.given, asking(study, group.example, pool, share, check_stop))
            try:
                yield choose(asked, work, benches[same], threads)
            except UnmeasurableError as error:  # when it is run, its batches may be split, and nobody waits for it
                yield unmeasured(asked, f"one run alone was too much to try ({error})")


def asking(
    study: Study, example: RunSpec, pool: Pool, seconds: float, check_stop: Callable[[], None]
) -> Ask:  # fmt: skip
    """What has all workers of an idle pool measure modes at once."""
    cluster = study.plan.cluster

    def ask(modes: tuple[Numerics, ...]) -> Sequence[Answer]:
        probe = CalibrationProbe(
            spec=example, modes=modes, seconds=seconds, worker_cpus=cluster.worker_cpus,
            worker_gpus=cluster.worker_gpus, most_bytes=int(MEMORY_SHARE * cluster.worker_memory_gib * 2**30),
        )  # fmt: skip
        answers, errors = _asked(pool, probe, check_stop)
        if not answers and len(modes) == 1:
            if all(cause in _TOO_MUCH for cause, _ in errors):
                raise UnmeasurableError(errors[-1][1])
            raise RunsFail(
                f"calibration: no worker could train a run of width {example.shape.width}: {errors[-1][1]}. Mend what "
                "fails, and the same command begins again"
            )
        return answers

    return ask


def _asked(
    pool: Pool, probe: CalibrationProbe, check_stop: Callable[[], None]
) -> tuple[list[Answer], list[tuple[Cause, str]]]:
    """The answers of those workers that give one, and why others do not; these are started anew."""
    call = HostCall(
        bank_key="", num_slots=1, admit=(), max_steps=0, probe=cast(dict[str, canon.Json], canon.to_json(probe))
    )  # fmt: skip
    for worker in range(pool.num_workers):
        pool.start(worker, call)
    busy, answers, errors = set(range(pool.num_workers)), list[Answer](), list[tuple[Cause, str]]()
    until = time.monotonic() + SILENT_SECONDS + 10 * probe.seconds
    while busy:
        for report in pool.wait(POLL_SECONDS):
            busy.discard(report.worker)
            if report.error is None and report.answer is not None:
                answers.append(canon.decode(Answer, report.answer))
            else:
                problem = report.error or "it did not answer"
                errors.append((report.cause, problem))
                say(f"calibration: worker {report.worker}: {problem}; it starts anew")
                pool.restart(report.worker)
        check_stop()
        if busy and time.monotonic() > until:
            errors.append(("hung", f"no answer in {duration(SILENT_SECONDS)}"))
            for worker in busy:
                pool.restart(worker)
            break
    return answers, errors
