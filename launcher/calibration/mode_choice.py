"""Which numerics a group of runs gets, by what workers measured of it. The rule alone: no clock, no
torch.

A mode is judged by the seconds that the planned runs would take with it: building, compiling, and
every bank's steps, an empty slot's too. So what pays only in a long search is taken only there, and
slots that nothing would fill never. Where workers are of several kinds of device, one mode is
chosen for all of them, since a run's numbers depend on it: each kind counts with its own rate, and
the mode has to train, and fit in memory, on each.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from launcher.plan.calibration_records import (
    MOST_SLOTS,
    Calibration,
    KindTiming,
    ModeRequest,
    ModeTiming,
    PlannedWork,
    WorkerKind,
    mean_rate,
    mode_name,
)
from proxies.core.notation import format_duration, format_factor
from proxies.core.spec import Numerics
from proxies.training.calibration import MARGIN, STEP, Answer, Rate, surely

COMPILE_SECONDS = 40.0
"""What torch.compile takes from nothing, before it is measured: 20 to 60 s of a proxy on one
core."""


COMPILE_SHARE = 0.1
"""Compiling is tried where it takes a smaller share of the planned work: it has to be compiled
twice."""


TOGETHER: dict[str, object] = {"fused_loss": True, "cuda_graphs": True, "compiled": True}
"""Tried at once on a GPU: each alone may gain nothing, while one trial with all of them was an
H100's fastest mode at every size measured (`benchmarks/NOTES.md`). With the slots there are, and
with one, which takes less memory.
"""


Ask = Callable[[tuple[Numerics, ...]], Sequence[Answer]]
"""Has every worker measure these modes at once; their answers. None: a kind of worker did not
survive it."""


@dataclass(kw_only=True, slots=True)
class _Measured:
    ratios: dict[str, list[float]] = field(default_factory=dict)
    """By kind of worker, as `rates`."""
    rates: dict[str, list[Rate]] = field(default_factory=dict)
    refused: str = ""


class Bench:
    """What has been measured so far of one shape and batch, by kind of worker; a mode is asked for
    once.
    """

    def __init__(self, plain: Numerics, ask: Ask, found: Calibration | None = None) -> None:
        """`plain`: the mode that all others are compared with. `found`: what the same workers
        measured before.
        """
        self.plain, self._ask = plain, ask
        self._seen: dict[Numerics, _Measured] = {}
        self._known = {figure.mode: figure for figure in (found.figures if found else ())}
        self.device = found.device if found else ""
        self.free_bytes = {kind.kind: kind.free_bytes for kind in (found.kinds if found else ())}

    @property
    def modes(self) -> tuple[Numerics, ...]:
        """Measured, or refused."""
        return tuple(dict.fromkeys((*self._known, *self._seen)))

    def measure(self, *modes: Numerics) -> None:
        """See to it that the last of the modes is measured, beside the plain one and the others."""
        if modes[-1] in self.modes:
            return
        asked = tuple(dict.fromkeys((self.plain, *modes)))
        answers = self._ask(asked)
        if not answers:
            self._seen.setdefault(
                modes[-1], _Measured()
            ).refused = "no worker survived it, or none of some kind"
            return
        self.device = answers[0].device
        for answer in answers:
            kind = answer.kind
            self.free_bytes[kind] = min(
                self.free_bytes.get(kind, answer.free_bytes), answer.free_bytes
            )
            plain = answer.rates[0].trial_steps_per_second
            for rate in answer.rates:
                seen = self._seen.setdefault(rate.mode, _Measured())
                seen.refused = seen.refused or rate.refused
                seen.rates.setdefault(kind, []).append(rate)
                ratios = [a / b for a, b in zip(rate.trial_steps_per_second, plain, strict=False)]
                seen.ratios.setdefault(kind, []).extend(ratios)

    def refused(self, mode: Numerics) -> str:
        """Why a mode does not train on every kind, or is not known."""
        if mode in self._known:
            return self._known[mode].refused
        seen = self._seen.get(mode)
        return "not measured" if seen is None else seen.refused

    def by_kind(self, mode: Numerics) -> dict[str, KindTiming]:
        """What was measured of a mode that trains."""
        if mode in self._known:
            return {timing.kind: timing for timing in self._known[mode].by_kind}
        plain = None if mode == self.plain else self.by_kind(self.plain)
        return {
            kind: self._timing(mode, kind, plain[kind] if plain else None)
            for kind in self._seen[mode].rates
        }

    def _timing(self, mode: Numerics, kind: str, plain: KindTiming | None) -> KindTiming:
        """Rates of one mode vary from minute to minute: only its ratio to the plain one counts."""
        rates, ratios = self._seen[mode].rates[kind], self._seen[mode].ratios[kind]
        own = [each for one in rates for each in one.trial_steps_per_second]
        ratio = statistics.median(ratios)
        rate = statistics.median(own) if plain is None else plain.trial_steps_per_second * ratio
        low, _, high = (
            statistics.quantiles(own, n=4, method="inclusive") if len(own) > 1 else own * 3
        )
        return KindTiming(
            kind=kind,
            trial_steps_per_second=rate,
            interval=(min(low, rate), max(high, rate)),
            ratio=ratio,
            least_ratio=surely(ratios),
            first_seconds=statistics.median(one.first_seconds for one in rates),
            again_seconds=statistics.median(one.again_seconds for one in rates),
            peak_bytes=max(one.peak_bytes for one in rates),
        )

    def bank_seconds(
        self, mode: Numerics, work: PlannedWork, num_slots: int | None = None
    ) -> float:
        """Seconds of all banks' steps; `num_slots`: as if a step took no longer with so many."""
        timings = self.by_kind(mode)
        rates = [timings[kind].trial_steps_per_second for kind in work.kinds]
        fastest = max(rates)
        steps = work.bank_steps(num_slots or mode.num_slots, [fastest / rate for rate in rates])
        return steps * mode.num_slots / fastest

    def figure(self, mode: Numerics, work: PlannedWork) -> ModeTiming:
        """Everything about a mode that was asked for."""
        if refused := self.refused(mode):
            return ModeTiming(
                mode=mode,
                trial_steps_per_second=0.0,
                interval=(0.0, 0.0),
                ratio=0.0,
                least_ratio=0.0,
                first_seconds=0.0,
                again_seconds=0.0,
                peak_bytes=0,
                planned_seconds=0.0,
                refused=refused,
            )
        by_kind, plain = self.by_kind(mode), self.by_kind(self.plain)
        workers = [by_kind[kind] for kind in work.kinds]
        share = [plain[kind].trial_steps_per_second for kind in work.kinds]
        rate, low, high = mean_rate(workers)
        first = max(timing.first_seconds for timing in workers)
        again = max(timing.again_seconds for timing in workers)
        return ModeTiming(
            mode=mode,
            trial_steps_per_second=rate,
            interval=(low, high),
            ratio=statistics.fmean([timing.ratio for timing in workers], share),
            least_ratio=statistics.fmean([timing.least_ratio for timing in workers], share),
            first_seconds=first,
            again_seconds=again,
            peak_bytes=max(timing.peak_bytes for timing in workers),
            planned_seconds=first
            + again * (work.runs_per_worker - 1)
            + self.bank_seconds(mode, work),
            by_kind=tuple(by_kind[kind] for kind in dict.fromkeys(work.kinds)),
        )


def choose(
    asked: ModeRequest, work: PlannedWork, bench: Bench, most_threads: int = 1
) -> Calibration:
    """The numerics that the planned runs take the least time with; a plainer one unless another is
    clearly faster.

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
        # compiled, or without its launches: room for more, or need of none
        best = rule.narrowed(rule.climb(best))
    figures = tuple(bench.figure(mode, work) for mode in bench.modes)
    kinds = tuple(
        WorkerKind(kind=kind, num_workers=work.kinds.count(kind), free_bytes=bench.free_bytes[kind])
        for kind in dict.fromkeys(work.kinds)
    )
    return Calibration(
        asked=asked,
        chosen=best,
        why=rule.why(best),
        device=bench.device,
        num_workers=work.num_workers,
        figures=figures,
        kinds=kinds,
    )


def _changes(asked: ModeRequest, device: str, most_threads: int) -> list[dict[str, object]]:
    """What else may be faster, in the order of trying."""
    changes: list[dict[str, object]] = []
    if "num_slots" in asked.open and device == "cuda":
        changes += [{"fused_loss": True}, {"cuda_graphs": True}]
        changes += [TOGETHER, {"num_slots": 1, **TOGETHER}] if "compiled" in asked.open else []
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
        """Twice the slots while that pays, if what it ends at is clearly better than where it
        began.
        """
        best = start
        while (
            wider := dataclasses.replace(best, num_slots=2 * best.num_slots)
        ).num_slots <= MOST_SLOTS:
            if (
                not self._may_pay(best, wider, start)
                or not self._fits(best)
                or not self._worth_compiling(wider, best)
            ):
                break
            self._bench.measure(best, wider)
            if not self._pays(wider, best, STEP):
                break
            best = wider
        return best if self._pays(best, start, MARGIN) else start

    def _pays(self, mode: Numerics, than: Numerics, by: float) -> bool:
        """Whether a mode is faster than a simpler one by so much, at the least that its rate may
        be.
        """
        if self._bench.refused(mode):
            return False
        figure = self._bench.figure(mode, self._work)
        slower = self._bench.bank_seconds(mode, self._work) * (
            figure.ratio / figure.least_ratio - 1
        )
        return (figure.planned_seconds + slower) * (1 + by) < self._seconds(than)

    def _may_pay(self, best: Numerics, wider: Numerics, start: Numerics) -> bool:
        """Whether it would if a bank's step took no longer with twice the slots."""
        shorter = self._bench.bank_seconds(best, self._work, wider.num_slots)
        optimistic = shorter / self._bench.bank_seconds(best, self._work) * self._seconds(best)
        return optimistic * (1 + STEP) < self._seconds(best) and optimistic * (
            1 + MARGIN
        ) < self._seconds(start)

    def _fits(self, best: Numerics) -> bool:
        """Whether every kind of worker has the memory of twice the slots, by what these and half of
        them held there.
        """
        narrower = dataclasses.replace(best, num_slots=max(1, best.num_slots // 2))
        known = best.num_slots > 2 and not self._bench.refused(narrower)
        held = self._bench.by_kind(best)
        before = self._bench.by_kind(narrower) if known else {}
        for kind, free in self._bench.free_bytes.items():
            most = held[kind].peak_bytes
            slope = most - before[kind].peak_bytes if known else most / 2
            if free and most + 2 * max(0.0, slope) > free:
                return False
        return True

    def tried(self, best: Numerics, change: dict[str, object]) -> Numerics:
        """The mode with a change, if that is clearly faster; else as it is."""
        changed: Numerics = dataclasses.replace(best, **change)  # type: ignore[arg-type]
        if changed == best:
            return best
        if not self._worth_compiling(changed, best):
            return best
        self._bench.measure(best, changed)
        return changed if self._pays(changed, best, MARGIN) else best

    def _worth_compiling(self, mode: Numerics, best: Numerics) -> bool:
        """Of a mode that would have to be, beside what is left to do by the best one so far."""
        return not mode.compiled or self._seconds(best) * COMPILE_SHARE >= COMPILE_SECONDS

    def narrowed(self, best: Numerics) -> Numerics:
        """One slot, unless those there are clearly faster."""
        alone = dataclasses.replace(best, num_slots=1)
        self._bench.measure(best, alone)
        return best if self._bench.refused(alone) or self._pays(best, alone, MARGIN) else alone

    def why(self, best: Numerics) -> str:
        """The choice in a sentence."""
        plain = self._asked.given
        if best == plain:
            return "nothing is clearly faster by a tenth" if len(self._bench.modes) > 1 else ""
        return (
            f"{format_factor(self._bench.figure(best, self._work).ratio)} times as fast as "
            f"{mode_name(plain, plain)}, {format_duration(self._seconds(best))} of planned work in "
            "place of "
            f"{format_duration(self._seconds(plain))}"
        )
