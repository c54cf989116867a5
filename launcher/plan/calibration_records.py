"""The records of a calibration: what was to be chosen, for which work, from which figures. No
clock, no torch.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from proxies.core import canon
from proxies.core.notation import counted
from proxies.core.shape import Shape
from proxies.core.spec import Numerics

Part = Literal["proxy", "ladder"]
Open = Literal["num_slots", "compiled"]
MOST_SLOTS = 4096
"""The most that a plan or a calibration may ask for of one bank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeRequest:
    """Runs that share what they compute with, and what of that is to be chosen."""

    part: Part
    """The section of the plan that has their slots."""
    shape: Shape
    batch_tokens: int
    given: Numerics
    """As the plan says; what is open has its plain value."""
    open: tuple[Open, ...]

    @property
    def key(self) -> str:
        """Names the record of what was chosen."""
        return canon.content_id(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedWork:
    """The runs a choice is for."""

    kinds: tuple[str, ...]
    """Of every worker, in the order in which they are given work (`sweeps.run.kinds`)."""
    phases: tuple[tuple[int, tuple[int, ...]], ...]
    """One after the other: the most runs in flight, and the steps of each run in its order."""

    @property
    def num_workers(self) -> int:
        """Of all kinds."""
        return len(self.kinds)

    def bank_steps(self, num_slots: int, slowness: Sequence[float]) -> float:
        """Steps of banks of so many slots until all runs have ended, each run in the first slot
        that is free.

        Args:
            num_slots: of one worker.
            slowness: by worker, the seconds of its step in those of the fastest worker's, which is
                what is counted.
        """
        total = 0.0
        for most, runs in self.phases:
            slots = [
                (0.0, index, slow) for index, slow in enumerate(slowness) for _ in range(num_slots)
            ][: max(1, most)]
            for steps in runs:
                ends, index, slow = slots[0]
                heapq.heapreplace(slots, (ends + slow * steps, index, slow))
            total += max(slots)[0]
        return total

    @property
    def runs_per_worker(self) -> int:
        """At most."""
        return -(-sum(len(runs) for _, runs in self.phases) // self.num_workers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """What workers measured of a mode."""

    trial_steps_per_second: float
    """One worker's rate while all were measuring; 0: the mode was refused."""
    interval: tuple[float, float]
    """The range of the middle half of the rounds."""
    ratio: float
    """To the plain mode, in the same rounds: their median."""
    least_ratio: float
    """What that is not below, but in one case of ten."""
    first_seconds: float
    again_seconds: float
    peak_bytes: int
    """The most that any of them held."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KindTiming(Timing):
    """Of one kind."""

    kind: str


def mean_rate(workers: Sequence[KindTiming]) -> tuple[float, float, float]:
    """Trial-steps a second of the mean of these workers, with the ends of its interval: (rate, low,
    high).
    """
    each = [(worker.trial_steps_per_second, *worker.interval) for worker in workers]
    rate, low, high = (statistics.fmean(values) for values in zip(*each, strict=True))
    return rate, low, high


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeTiming(Timing):
    """Of all kinds: the mean over the workers; `first_seconds`, `again_seconds` and `peak_bytes` of
    the kind with the most. And what the planned runs would take.
    """

    mode: Numerics
    planned_seconds: float
    refused: str = ""
    by_kind: tuple[KindTiming, ...] = field(default=(), metadata=canon.UNLESS_DEFAULT)
    """Empty of a mode that was refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerKind:
    """Workers whose devices are alike."""

    kind: str
    """The device's name."""
    num_workers: int
    free_bytes: int
    """The least that one of them had for itself; 0 where nobody can tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What was chosen, from what, and why. A record of the ledger: it is never made again."""

    asked: ModeRequest
    chosen: Numerics
    why: str
    device: str
    """Empty where nothing was measured."""
    num_workers: int
    figures: tuple[ModeTiming, ...] = ()
    kinds: tuple[WorkerKind, ...] = field(default=(), metadata=canon.UNLESS_DEFAULT)
    """Of the workers; empty where nothing was measured."""

    @property
    def figure(self) -> ModeTiming | None:
        """What was measured of the mode that was chosen; None where nothing was."""
        return next((figure for figure in self.figures if figure.mode == self.chosen), None)


def mode_name(mode: Numerics, plain: Numerics) -> str:
    """What a mode has that the plain one has not, in words."""
    slots = counted(mode.num_slots, "slot") if mode.num_slots > 1 else "one slot"
    named = {
        "num_threads": counted(mode.num_threads, "thread"),
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
                for name, words in named.items()
                if getattr(mode, name) != getattr(plain, name)
            ),
        ]
    )
