"""The records of a calibration: the runs, the choice that was open for them, and the measurements
that decided it. This module reads no clock and does not import torch.

A mode is one way to compute runs, such as the number of threads, compilation, and the number of
slots of a bank, which trains several trials as one batched model.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from forerun._proxies.core import canon
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.shape import Shape
from forerun._proxies.core.spec import Numerics

Part = Literal["proxy", "ladder"]
"""Section of the plan that sets the number of slots of a run."""
OpenChoice = Literal["num_slots", "compiled"]
"""Key of the plan whose value `auto` leaves the choice to the calibration."""
MAX_SLOTS = 4096
"""Maximum number of slots of one bank in a plan or a calibration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeRequest:
    """Runs that share a mode of computing, and the parts of the mode that a calibration chooses."""

    part: Part
    shape: Shape
    batch_tokens: int
    given: Numerics
    """Mode that the plan sets; open parts have their plain value."""
    open: tuple[OpenChoice, ...]

    @property
    def key(self) -> str:
        """Key of the record of the choice."""
        return canon.compute_content_id(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedWork:
    """The runs for which a mode is chosen."""

    kinds: tuple[str, ...]
    """Kind of device of every worker, in the order in which workers get work
    (`forerun._sweeps.run.device_kinds`).
    """
    phases: tuple[tuple[int, tuple[int, ...]], ...]
    """Phases, one after another. Each is a pair of the maximum number of runs in flight, and the
    number of steps of each run, in the order in which the runs start.
    """

    @property
    def num_workers(self) -> int:
        """Number of workers of all kinds."""
        return len(self.kinds)

    def count_bank_steps(self, num_slots: int, slowness: Sequence[float]) -> float:
        """Return the time until all runs have ended if each run takes the first free slot, in steps
        of the fastest worker's bank.

        Args:
            num_slots: Slots of one worker.
            slowness: For each worker, the seconds of its step divided by the seconds of the fastest
                worker's step.
        """
        total = 0.0
        for max_parallel, runs in self.phases:
            # Heap of the slots, (time when it is free, worker, slowness); the list is sorted.
            slots = [
                (0.0, index, slow) for index, slow in enumerate(slowness) for _ in range(num_slots)
            ][: max(1, max_parallel)]
            for steps in runs:
                ends, index, slow = slots[0]
                heapq.heapreplace(slots, (ends + slow * steps, index, slow))
            total += max(slots)[0]
        return total

    @property
    def runs_per_worker(self) -> int:
        """Maximum number of runs of one worker if they are divided evenly."""
        return -(-sum(len(runs) for _, runs in self.phases) // self.num_workers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Measurements of one mode by workers. All are 0 if the mode was refused."""

    trial_steps_per_second: float = 0.0
    """Rate of one worker, summed over the trials of its bank, while all workers were measuring."""
    interval: tuple[float, float] = (0.0, 0.0)
    """Lower and upper quartile of that rate over the rounds."""
    ratio: float = 0.0
    """Median over the rounds of the rate relative to the plain mode in the same round."""
    least_ratio: float = 0.0
    """Lower bound of that ratio, at level 0.9."""
    first_seconds: float = 0.0
    """Seconds to build and compile an engine from scratch."""
    again_seconds: float = 0.0
    """Seconds to start another run in the same engine."""
    peak_bytes: int = 0
    """Maximum memory of any worker, in bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KindTiming(Timing):
    """Measurements by workers of one kind."""

    kind: str


def average_rates(workers: Sequence[KindTiming]) -> tuple[float, float, float]:
    """Return the mean rate of these workers in trial-steps per second, with its interval: (rate,
    low, high).
    """
    rates = [(worker.trial_steps_per_second, *worker.interval) for worker in workers]
    rate, low, high = (statistics.fmean(values) for values in zip(*rates, strict=True))
    return rate, low, high


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeTiming(Timing):
    """Measurements by workers of all kinds: the mean over the workers, and the time that the
    planned runs would take.

    `first_seconds`, `again_seconds` and `peak_bytes` are those of the kind with the largest values.
    """

    mode: Numerics
    planned_seconds: float = 0.0
    """Seconds that the planned runs would take with the mode."""
    refused: str = ""
    """Reason why the mode does not train; empty if it does."""
    by_kind: tuple[KindTiming, ...] = field(default=(), metadata=canon.UNLESS_DEFAULT)
    """Measurements by kind; empty if the mode was refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerKind:
    """Workers with the same kind of device."""

    kind: str
    """Name of the device."""
    num_workers: int
    free_bytes: int
    """Minimum free memory of one of these workers in bytes; 0 if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """A choice of a mode, with its measurements and its reason. The ledger records it, and a
    resumed study uses the recorded choice.
    """

    asked: ModeRequest
    chosen: Numerics
    """Mode that was chosen."""
    why: str
    """Reason for the choice, in words."""
    device: str
    """Name of the device; empty if nothing was measured."""
    num_workers: int
    figures: tuple[ModeTiming, ...] = ()
    """Measurements of every mode that was tried."""
    kinds: tuple[WorkerKind, ...] = field(default=(), metadata=canon.UNLESS_DEFAULT)
    """Kinds of the workers; empty if nothing was measured."""

    @property
    def figure(self) -> ModeTiming | None:
        """Measurements of the chosen mode; None if nothing was measured."""
        return next((figure for figure in self.figures if figure.mode == self.chosen), None)


def describe_mode(mode: Numerics, plain: Numerics) -> str:
    """Describe in words how a mode differs from the plain one."""
    slots = format_counted(mode.num_slots, "slot") if mode.num_slots > 1 else "one slot"
    differences = {
        "num_threads": format_counted(mode.num_threads, "thread"),
        "compiled": "compiled",
        "cuda_graphs": "CUDA graphs",
        "fused_loss": "fused loss",
        "matmul_precision": f"products in {mode.matmul_precision} precision",
    }
    return ", ".join(
        [
            slots,
            *(
                words
                for name, words in differences.items()
                if getattr(mode, name) != getattr(plain, name)
            ),
        ]
    )
