"""The rule that chooses how a group of runs is computed, from what workers measured. It reads no
clock, and imports no torch itself.

A mode is one way to compute (`Numerics`): the number of threads, compilation, CUDA graphs, and the
number of slots of a bank. A bank trains several trials as one batched model, one in each slot.

A mode is judged by the seconds that the planned runs would take with it: building, compiling, and
the steps of every bank, including empty slots. A mode that pays only in a long search is therefore
chosen only for a long search, and slots that would stay empty are never chosen. If workers have
several kinds of device, one mode is chosen for all of them, because a run's numbers depend on it.
Each kind counts with its own rate, and the mode must train, and fit in memory, on every kind.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forerun._launcher.study.plan.calibration_records import (
    MAX_SLOTS,
    Calibration,
    KindTiming,
    ModeRequest,
    ModeTiming,
    PlannedWork,
    WorkerKind,
    average_rates,
    describe_mode,
)
from forerun._proxies.core.notation import format_duration, format_factor, format_percent
from forerun._proxies.core.spec import Numerics
from forerun._proxies.training.calibration import (
    MIN_DOUBLING_SPEEDUP,
    MIN_MODE_SPEEDUP,
    CalibrationResult,
    ModeRate,
    bound_median,
)

COMPILE_SECONDS = 40.0
"""Assumed seconds of torch.compile without a cache, before they are measured. Compiling a proxy
takes 20 to 60 s on one core.
"""


COMPILE_SHARE = 0.1
"""Maximum duration of one compilation, as a share of the planned work. If it is longer, compiling
is not tried, because the measurement compiles once more.
"""


COMBINED_OPTIONS: dict[str, object] = {"fused_loss": True, "cuda_graphs": True, "compiled": True}
"""Options that are tried together on a GPU.

Each alone may gain nothing, while one trial with all of them was an H100's fastest mode at every
size measured (`benchmarks/README.md`). They are tried with the current number of slots, and with
one, which takes less memory.
"""


MeasureModes = Callable[[tuple[Numerics, ...]], Sequence[CalibrationResult]]
"""Function that has all workers measure some modes at the same time, and returns their answers. The
answers are empty if no worker of some kind survived.
"""


@dataclass(kw_only=True, slots=True)
class _Measurements:
    """Measurements of one mode."""

    ratios: dict[str, list[float]] = field(default_factory=dict)
    """Ratios to the rates of the plain mode, by kind of worker."""
    rates: dict[str, list[ModeRate]] = field(default_factory=dict)
    """Rates by kind of worker."""
    refused: str = ""
    """Reason why the mode does not train; empty if it does."""


class ModeMeasurements:
    """Measurements so far of one shape and batch, by kind of worker; each mode is measured once."""

    def __init__(
        self, plain: Numerics, ask: MeasureModes, earlier: Calibration | None = None
    ) -> None:
        """Start with earlier measurements, if there are any.

        Args:
            plain: the mode with which all others are compared.
            ask: has the workers measure modes.
            earlier: what the same workers measured before.
        """
        self.plain, self._ask = plain, ask
        self._measured: dict[Numerics, _Measurements] = {}
        self._known = {figure.mode: figure for figure in (earlier.figures if earlier else ())}
        self.device = earlier.device if earlier else ""
        self.free_bytes = {
            kind.kind: kind.free_bytes for kind in (earlier.kinds if earlier else ())
        }

    @property
    def modes(self) -> tuple[Numerics, ...]:
        """Modes that were measured or refused."""
        return tuple(dict.fromkeys((*self._known, *self._measured)))

    def measure(self, mode: Numerics, best: Numerics | None = None) -> None:
        """Measure a mode, unless that was done before.

        The plain mode and the best one so far are measured in the same rounds, so that the rates
        can be compared.
        """
        if mode in self.modes:
            return
        answers = self._ask(tuple(dict.fromkeys((self.plain, best or self.plain, mode))))
        if not answers:
            measurements = self._measured.setdefault(mode, _Measurements())
            measurements.refused = "every worker of one kind failed with it"
            return
        self.device = answers[0].device
        for answer in answers:
            kind = answer.kind
            self.free_bytes[kind] = min(
                self.free_bytes.get(kind, answer.free_bytes), answer.free_bytes
            )
            plain = answer.rates[0].trial_steps_per_second
            for rate in answer.rates:
                measurements = self._measured.setdefault(rate.mode, _Measurements())
                measurements.refused = measurements.refused or rate.refused
                measurements.rates.setdefault(kind, []).append(rate)
                ratios = [a / b for a, b in zip(rate.trial_steps_per_second, plain, strict=False)]
                measurements.ratios.setdefault(kind, []).extend(ratios)

    def get_refusal(self, mode: Numerics) -> str:
        """Return why a mode does not train on every kind of worker or was not measured; empty if it
        trains.
        """
        if mode in self._known:
            return self._known[mode].refused
        measurements = self._measured.get(mode)
        return "not measured" if measurements is None else measurements.refused

    def get_timings(self, mode: Numerics) -> dict[str, KindTiming]:
        """Return the timings of a mode that trains, by kind of worker."""
        if mode in self._known:
            return {timing.kind: timing for timing in self._known[mode].by_kind}
        plain = None if mode == self.plain else self.get_timings(self.plain)
        return {
            kind: self._compute_timing(mode, kind, plain[kind] if plain else None)
            for kind in self._measured[mode].rates
        }

    def _compute_timing(self, mode: Numerics, kind: str, plain: KindTiming | None) -> KindTiming:
        """Return the timing of a mode on one kind of worker.

        Rates of one mode vary from minute to minute, so the rate is the plain mode's rate times the
        measured ratio.
        """
        rates, ratios = self._measured[mode].rates[kind], self._measured[mode].ratios[kind]
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
            else measured_rates * 3  # all three quartiles of a single rate are that rate
        )
        return KindTiming(
            kind=kind,
            trial_steps_per_second=median_rate,
            interval=(min(low, median_rate), max(high, median_rate)),
            ratio=ratio,
            least_ratio=bound_median(ratios),
            first_seconds=statistics.median(rate.first_seconds for rate in rates),
            again_seconds=statistics.median(rate.again_seconds for rate in rates),
            peak_bytes=max(rate.peak_bytes for rate in rates),
        )

    def compute_bank_seconds(
        self, mode: Numerics, work: PlannedWork, num_slots: int | None = None
    ) -> float:
        """Return the seconds of the steps of all banks for the planned work.

        Args:
            mode: the mode.
            work: the planned work.
            num_slots: another number of slots, with which a bank's step is assumed to take as long
                as with the mode's own number; None for the mode's own.
        """
        timings = self.get_timings(mode)
        rates = [timings[kind].trial_steps_per_second for kind in work.kinds]
        fastest = max(rates)
        steps = work.count_bank_steps(
            num_slots or mode.num_slots, [fastest / rate for rate in rates]
        )
        return steps * mode.num_slots / fastest

    def make_mode_timing(self, mode: Numerics, work: PlannedWork) -> ModeTiming:
        """Return all figures of a mode that was measured or refused."""
        if refused := self.get_refusal(mode):
            return ModeTiming(mode=mode, refused=refused)
        by_kind, plain = self.get_timings(mode), self.get_timings(self.plain)
        workers = [by_kind[kind] for kind in work.kinds]
        weights = [plain[kind].trial_steps_per_second for kind in work.kinds]
        rate, low, high = average_rates(workers)
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
            + self.compute_bank_seconds(mode, work),
            by_kind=tuple(by_kind[kind] for kind in dict.fromkeys(work.kinds)),
        )


def choose_mode(
    asked: ModeRequest, work: PlannedWork, measurements: ModeMeasurements, max_threads: int = 1
) -> Calibration:
    """Choose the numerics with which the planned runs take the least time; a plainer mode wins
    unless another is clearly faster.

    Args:
        asked: the request: the runs, and what may be chosen.
        work: the planned work.
        measurements: measurements so far, which also have workers measure further modes.
        max_threads: maximum number of threads of one worker.
    """
    measurements.measure(asked.given)
    search = _ModeSearch(asked, work, measurements)
    chooses_slots = "num_slots" in asked.open
    best = search.double_slots(asked.given) if chooses_slots else asked.given
    for change in _list_changes(asked, measurements.device, max_threads):
        best = search.try_change(best, change)
    if chooses_slots and best.num_slots > 1 and measurements.device == "cuda":
        # Compiling or CUDA graphs may leave room for more slots, or make one slot enough
        best = search.try_one_slot(search.double_slots(best))
    figures = tuple(measurements.make_mode_timing(mode, work) for mode in measurements.modes)
    kinds = tuple(
        WorkerKind(
            kind=kind, num_workers=work.kinds.count(kind), free_bytes=measurements.free_bytes[kind]
        )
        for kind in dict.fromkeys(work.kinds)
    )
    return Calibration(
        asked=asked,
        chosen=best,
        why=search.explain(best),
        device=measurements.device,
        num_workers=work.num_workers,
        figures=figures,
        kinds=kinds,
    )


def _list_changes(asked: ModeRequest, device: str, max_threads: int) -> list[dict[str, object]]:
    """Return the changes that may make a mode faster, in the order in which they are tried."""
    changes: list[dict[str, object]] = []
    if "num_slots" in asked.open and device == "cuda":
        changes += [{"fused_loss": True}, {"cuda_graphs": True}]
        if "compiled" in asked.open:
            changes += [COMBINED_OPTIONS, {"num_slots": 1, **COMBINED_OPTIONS}]
    if "num_slots" in asked.open and device != "cuda":
        changes += [{"num_threads": 2**power} for power in range(1, max_threads.bit_length())]
    if "compiled" in asked.open:
        changes.append({"compiled": True})
    return changes


class _ModeSearch:
    """The search for the fastest mode of one group of runs."""

    def __init__(
        self, asked: ModeRequest, work: PlannedWork, measurements: ModeMeasurements
    ) -> None:
        self._asked, self._work, self._measurements = asked, work, measurements

    def _get_planned_seconds(self, mode: Numerics) -> float:
        return self._measurements.make_mode_timing(mode, self._work).planned_seconds

    def double_slots(self, start: Numerics) -> Numerics:
        """Double the slots while that pays; return the start unless the end is clearly better."""
        best = start
        while (
            wider := dataclasses.replace(best, num_slots=2 * best.num_slots)
        ).num_slots <= MAX_SLOTS:
            if (
                not self._can_pay(best, wider, start)
                or not self._can_double_slots(best)
                or not self._is_worth_compiling(wider, best)
            ):
                break
            self._measurements.measure(wider, best)
            if not self._is_faster(wider, best, MIN_DOUBLING_SPEEDUP):
                break
            best = wider
        return best if self._is_faster(best, start, MIN_MODE_SPEEDUP) else start

    def _is_faster(self, mode: Numerics, simpler: Numerics, min_speedup: float) -> bool:
        """Return whether a mode is faster than a simpler one by the share `min_speedup`, even at
        its lowest plausible rate.
        """
        if self._measurements.get_refusal(mode):
            return False
        figure = self._measurements.make_mode_timing(mode, self._work)
        uncertainty_seconds = self._measurements.compute_bank_seconds(mode, self._work) * (
            figure.ratio / figure.least_ratio - 1
        )
        return (figure.planned_seconds + uncertainty_seconds) * (
            1 + min_speedup
        ) < self._get_planned_seconds(simpler)

    def _can_pay(self, best: Numerics, wider: Numerics, start: Numerics) -> bool:
        """Return whether twice the slots would pay if a bank's step took no longer with them."""
        bank_seconds = self._measurements.compute_bank_seconds(best, self._work)
        shorter = self._measurements.compute_bank_seconds(best, self._work, wider.num_slots)
        planned_seconds = self._get_planned_seconds(best)
        # Planned seconds with twice the slots, if every step took as long as now
        optimistic_seconds = shorter / bank_seconds * planned_seconds
        return optimistic_seconds * (
            1 + MIN_DOUBLING_SPEEDUP
        ) < planned_seconds and optimistic_seconds * (
            1 + MIN_MODE_SPEEDUP
        ) < self._get_planned_seconds(start)

    def _can_double_slots(self, best: Numerics) -> bool:
        """Return whether twice the slots fit in the memory of every kind of worker. The memory is
        extrapolated from that of this number of slots, and of half of it.
        """
        narrower = dataclasses.replace(best, num_slots=max(1, best.num_slots // 2))
        knows_narrower = best.num_slots > 2 and not self._measurements.get_refusal(narrower)
        timings = self._measurements.get_timings(best)
        narrower_timings = self._measurements.get_timings(narrower) if knows_narrower else {}
        for kind, free in self._measurements.free_bytes.items():
            peak_bytes = timings[kind].peak_bytes
            # Bytes of half of the slots. Twice the slots need two more halves.
            half_bytes = (
                peak_bytes - narrower_timings[kind].peak_bytes if knows_narrower else peak_bytes / 2
            )
            if free and peak_bytes + 2 * max(0.0, half_bytes) > free:
                return False
        return True

    def try_change(self, best: Numerics, change: dict[str, object]) -> Numerics:
        """Return the mode with a change if that is clearly faster, else the mode as it is."""
        changed: Numerics = dataclasses.replace(best, **change)  # type: ignore[arg-type]
        if changed == best or not self._is_worth_compiling(changed, best):
            return best
        self._measurements.measure(changed, best)
        return changed if self._is_faster(changed, best, MIN_MODE_SPEEDUP) else best

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
        self._measurements.measure(alone, best)
        is_refused = bool(self._measurements.get_refusal(alone))
        return best if is_refused or self._is_faster(best, alone, MIN_MODE_SPEEDUP) else alone

    def explain(self, best: Numerics) -> str:
        """Return the reason for the choice, in a sentence."""
        plain = self._asked.given
        if best == plain:
            if len(self._measurements.modes) == 1:
                return ""
            return f"nothing is clearly faster by {format_percent(MIN_MODE_SPEEDUP)}"
        factor = format_factor(self._measurements.make_mode_timing(best, self._work).ratio)
        duration = format_duration(self._get_planned_seconds(best))
        plain_duration = format_duration(self._get_planned_seconds(plain))
        return (
            f"{factor} times as fast as {describe_mode(plain, plain)}, {duration} of planned work "
            f"instead of {plain_duration}"
        )
