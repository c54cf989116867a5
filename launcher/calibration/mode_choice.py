"""Choice of the numerics for a group of runs from what workers measured. Only the rule: no clock,
no torch.

A mode is judged by the seconds that the planned runs would take with it: building, compiling, and
the steps of every bank, including empty slots. A mode that pays only in a long search is therefore
chosen only there, and slots that would stay empty never are. If workers have several kinds of
device, one mode is chosen for all of them, because a run's numbers depend on it: each kind counts
with its own rate, and the mode must train, and fit in memory, on every kind.
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
"""Assumed duration of torch.compile without a cache, in seconds, before it is measured; a proxy
takes 20 to 60 s on one core.
"""


COMPILE_SHARE = 0.1
"""Compiling is tried only if it takes a smaller share of the planned work than this, because it has
to be done twice.
"""


TOGETHER: dict[str, object] = {"fused_loss": True, "cuda_graphs": True, "compiled": True}
"""Options that are tried together on a GPU.

Each alone may gain nothing, while one trial with all of them was an H100's fastest mode at every
size measured (`benchmarks/README.md`). They are tried with the current number of slots, and with
one, which takes less memory.
"""


Ask = Callable[[tuple[Numerics, ...]], Sequence[Answer]]
"""Function that has every worker measure these modes at once, and returns their answers; empty if a
kind of worker did not survive it.
"""


@dataclass(kw_only=True, slots=True)
class _Measurements:
    """Measurements of one mode."""

    ratios: dict[str, list[float]] = field(default_factory=dict)
    """Ratios to the rates of the plain mode, by kind of worker."""
    rates: dict[str, list[Rate]] = field(default_factory=dict)
    """Rates by kind of worker."""
    refused: str = ""
    """Reason why the mode does not train; empty if it does."""


class Bench:
    """Measurements so far of one shape and batch, by kind of worker; each mode is measured once."""

    def __init__(self, plain: Numerics, ask: Ask, earlier: Calibration | None = None) -> None:
        """Start with earlier measurements, if there are any.

        Args:
            plain: the mode with which all others are compared.
            ask: has the workers measure modes.
            earlier: what the same workers measured before.
        """
        self.plain, self._ask = plain, ask
        self._seen: dict[Numerics, _Measurements] = {}
        self._known = {figure.mode: figure for figure in (earlier.figures if earlier else ())}
        self.device = earlier.device if earlier else ""
        self.free_bytes = {
            kind.kind: kind.free_bytes for kind in (earlier.kinds if earlier else ())
        }

    @property
    def modes(self) -> tuple[Numerics, ...]:
        """Modes that were measured or refused."""
        return tuple(dict.fromkeys((*self._known, *self._seen)))

    def measure(self, *modes: Numerics) -> None:
        """Ensure that the last of the modes is measured, together with the plain mode and the
        others.
        """
        if modes[-1] in self.modes:
            return
        requested = tuple(dict.fromkeys((self.plain, *modes)))
        answers = self._ask(requested)
        if not answers:
            measurements = self._seen.setdefault(modes[-1], _Measurements())
            measurements.refused = "no worker survived it, or none of some kind"
            return
        self.device = answers[0].device
        for answer in answers:
            kind = answer.kind
            self.free_bytes[kind] = min(
                self.free_bytes.get(kind, answer.free_bytes), answer.free_bytes
            )
            plain = answer.rates[0].trial_steps_per_second
            for rate in answer.rates:
                measurements = self._seen.setdefault(rate.mode, _Measurements())
                measurements.refused = measurements.refused or rate.refused
                measurements.rates.setdefault(kind, []).append(rate)
                ratios = [a / b for a, b in zip(rate.trial_steps_per_second, plain, strict=False)]
                measurements.ratios.setdefault(kind, []).extend(ratios)

    def refused(self, mode: Numerics) -> str:
        """Return why a mode does not train on every kind of worker or was not measured; empty if it
        trains.
        """
        if mode in self._known:
            return self._known[mode].refused
        seen = self._seen.get(mode)
        return "not measured" if seen is None else seen.refused

    def by_kind(self, mode: Numerics) -> dict[str, KindTiming]:
        """Return the measurements of a mode that trains, by kind of worker."""
        if mode in self._known:
            return {timing.kind: timing for timing in self._known[mode].by_kind}
        plain = None if mode == self.plain else self.by_kind(self.plain)
        return {
            kind: self._compute_timing(mode, kind, plain[kind] if plain else None)
            for kind in self._seen[mode].rates
        }

    def _compute_timing(self, mode: Numerics, kind: str, plain: KindTiming | None) -> KindTiming:
        """Return the timing of a mode on one kind of worker.

        Rates of one mode vary from minute to minute, so the rate is the plain mode's rate times the
        measured ratio.
        """
        rates, ratios = self._seen[mode].rates[kind], self._seen[mode].ratios[kind]
        measured_rates = [value for rate in rates for value in rate.trial_steps_per_second]
        ratio = statistics.median(ratios)
        median_rate = (
            statistics.median(measured_rates)
            if plain is None
            else plain.trial_steps_per_second * ratio
        )
        low, _, high = (
            statistics.quantiles(measured_rates, n=4, method="inclusive")
            if len(measured_rates) > 1
            else measured_rates * 3
        )
        return KindTiming(
            kind=kind,
            trial_steps_per_second=median_rate,
            interval=(min(low, median_rate), max(high, median_rate)),
            ratio=ratio,
            least_ratio=surely(ratios),
            first_seconds=statistics.median(rate.first_seconds for rate in rates),
            again_seconds=statistics.median(rate.again_seconds for rate in rates),
            peak_bytes=max(rate.peak_bytes for rate in rates),
        )

    def bank_seconds(
        self, mode: Numerics, work: PlannedWork, num_slots: int | None = None
    ) -> float:
        """Return the seconds of the steps of all banks.

        Args:
            mode: the mode.
            work: the planned work.
            num_slots: number of slots, assuming that a step takes no longer than with the mode's
                own.
        """
        timings = self.by_kind(mode)
        rates = [timings[kind].trial_steps_per_second for kind in work.kinds]
        fastest = max(rates)
        steps = work.bank_steps(num_slots or mode.num_slots, [fastest / rate for rate in rates])
        return steps * mode.num_slots / fastest

    def figure(self, mode: Numerics, work: PlannedWork) -> ModeTiming:
        """Return all figures of a mode that was measured or refused."""
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
        weights = [plain[kind].trial_steps_per_second for kind in work.kinds]
        rate, low, high = mean_rate(workers)
        first = max(timing.first_seconds for timing in workers)
        again = max(timing.again_seconds for timing in workers)
        return ModeTiming(
            mode=mode,
            trial_steps_per_second=rate,
            interval=(low, high),
            ratio=statistics.fmean([timing.ratio for timing in workers], weights),
            least_ratio=statistics.fmean([timing.least_ratio for timing in workers], weights),
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
    """Choose the numerics with which the planned runs take the least time; a plainer mode wins
    unless another is clearly faster.

    Args:
        asked: the request: the runs, and what may be chosen.
        work: the planned work.
        bench: measures modes.
        most_threads: maximum number of threads of one worker.
    """
    bench.measure(asked.given)
    search = _ModeSearch(asked, work, bench)
    chooses_slots = "num_slots" in asked.open
    best = search.climb(asked.given) if chooses_slots else asked.given
    for change in _list_changes(asked, bench.device, most_threads):
        best = search.try_change(best, change)
    if chooses_slots and best.num_slots > 1 and bench.device == "cuda":
        # Compiling or CUDA graphs may leave room for more slots, or make one slot enough
        best = search.try_one_slot(search.climb(best))
    figures = tuple(bench.figure(mode, work) for mode in bench.modes)
    kinds = tuple(
        WorkerKind(kind=kind, num_workers=work.kinds.count(kind), free_bytes=bench.free_bytes[kind])
        for kind in dict.fromkeys(work.kinds)
    )
    return Calibration(
        asked=asked,
        chosen=best,
        why=search.explain(best),
        device=bench.device,
        num_workers=work.num_workers,
        figures=figures,
        kinds=kinds,
    )


def _list_changes(asked: ModeRequest, device: str, most_threads: int) -> list[dict[str, object]]:
    """Return the changes that may make a mode faster, in the order in which they are tried."""
    changes: list[dict[str, object]] = []
    if "num_slots" in asked.open and device == "cuda":
        changes += [{"fused_loss": True}, {"cuda_graphs": True}]
        changes += [TOGETHER, {"num_slots": 1, **TOGETHER}] if "compiled" in asked.open else []
    if "num_slots" in asked.open and device != "cuda":
        changes += [{"num_threads": 2**power} for power in range(1, most_threads.bit_length())]
    if "compiled" in asked.open:
        changes.append({"compiled": True})
    return changes


class _ModeSearch:
    """The search for the fastest mode of one group of runs."""

    def __init__(self, asked: ModeRequest, work: PlannedWork, bench: Bench) -> None:
        self._asked, self._work, self._bench = asked, work, bench

    def _get_planned_seconds(self, mode: Numerics) -> float:
        return self._bench.figure(mode, self._work).planned_seconds

    def climb(self, start: Numerics) -> Numerics:
        """Double the slots while that pays; return the start unless the end is clearly better."""
        best = start
        while (
            wider := dataclasses.replace(best, num_slots=2 * best.num_slots)
        ).num_slots <= MOST_SLOTS:
            if (
                not self._can_pay(best, wider, start)
                or not self._can_double_slots(best)
                or not self._is_worth_compiling(wider, best)
            ):
                break
            self._bench.measure(best, wider)
            if not self._is_faster(wider, best, STEP):
                break
            best = wider
        return best if self._is_faster(best, start, MARGIN) else start

    def _is_faster(self, mode: Numerics, than: Numerics, by: float) -> bool:
        """Return whether a mode is faster than a simpler one by the share `by`, even at its lowest
        plausible rate.
        """
        if self._bench.refused(mode):
            return False
        figure = self._bench.figure(mode, self._work)
        uncertainty_seconds = self._bench.bank_seconds(mode, self._work) * (
            figure.ratio / figure.least_ratio - 1
        )
        return (figure.planned_seconds + uncertainty_seconds) * (
            1 + by
        ) < self._get_planned_seconds(than)

    def _can_pay(self, best: Numerics, wider: Numerics, start: Numerics) -> bool:
        """Return whether twice the slots would pay if a bank's step took no longer with them."""
        shorter = self._bench.bank_seconds(best, self._work, wider.num_slots)
        optimistic = (
            shorter / self._bench.bank_seconds(best, self._work) * self._get_planned_seconds(best)
        )
        return optimistic * (1 + STEP) < self._get_planned_seconds(best) and optimistic * (
            1 + MARGIN
        ) < self._get_planned_seconds(start)

    def _can_double_slots(self, best: Numerics) -> bool:
        """Return whether twice the slots fit in the memory of every kind of worker, extrapolated
        from what this number of slots and half of it took.
        """
        narrower = dataclasses.replace(best, num_slots=max(1, best.num_slots // 2))
        knows_narrower = best.num_slots > 2 and not self._bench.refused(narrower)
        timings = self._bench.by_kind(best)
        narrower_timings = self._bench.by_kind(narrower) if knows_narrower else {}
        for kind, free in self._bench.free_bytes.items():
            peak_bytes = timings[kind].peak_bytes
            slope = (
                peak_bytes - narrower_timings[kind].peak_bytes if knows_narrower else peak_bytes / 2
            )
            if free and peak_bytes + 2 * max(0.0, slope) > free:
                return False
        return True

    def try_change(self, best: Numerics, change: dict[str, object]) -> Numerics:
        """Return the mode with a change if that is clearly faster, else the mode as it is."""
        changed: Numerics = dataclasses.replace(best, **change)  # type: ignore[arg-type]
        if changed == best:
            return best
        if not self._is_worth_compiling(changed, best):
            return best
        self._bench.measure(best, changed)
        return changed if self._is_faster(changed, best, MARGIN) else best

    def _is_worth_compiling(self, mode: Numerics, best: Numerics) -> bool:
        """Return whether compiling a mode is cheap compared with the planned work in the best mode
        so far; true if the mode is not compiled.
        """
        return (
            not mode.compiled or self._get_planned_seconds(best) * COMPILE_SHARE >= COMPILE_SECONDS
        )

    def try_one_slot(self, best: Numerics) -> Numerics:
        """Return the mode with one slot, unless its current number of slots is clearly faster."""
        alone = dataclasses.replace(best, num_slots=1)
        self._bench.measure(best, alone)
        return best if self._bench.refused(alone) or self._is_faster(best, alone, MARGIN) else alone

    def explain(self, best: Numerics) -> str:
        """Return the reason for the choice, in a sentence."""
        plain = self._asked.given
        if best == plain:
            return "nothing is clearly faster by a tenth" if len(self._bench.modes) > 1 else ""
        factor = format_factor(self._bench.figure(best, self._work).ratio)
        duration = format_duration(self._get_planned_seconds(best))
        plain_duration = format_duration(self._get_planned_seconds(plain))
        return (
            f"{factor} times as fast as {mode_name(plain, plain)}, {duration} of planned work in "
            f"place of {plain_duration}"
        )
