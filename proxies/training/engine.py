"""The base class of all engines. An engine trains runs in slots, each slot with one run at a time.

The loop of an engine launches optimizer steps ahead of their reports, so that a GPU never waits for
Python. The report of a step, its losses and gradient norms, tells the host whether a run goes on.
Reading it at once would leave a GPU idle until the next step is launched. So on a GPU, the next
step is launched before the report of a step is read. The results are the same: the device itself
makes no update when a loss or gradient is not finite, and when the loop returns, the reports of all
launched steps have been read.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from forerun._proxies.core.spec import DIVERGED_ABOVE_NATS, Curve, EndedRun, RunResult, RunSpec
from forerun._proxies.training.gradient_noise import GradientNoiseProbe
from forerun._proxies.training.run_progress import RunProgress, get_environment
from forerun._proxies.training.slot_state import SlotState, capture_state

_LaunchedStep = tuple[dict[int, RunProgress], "StepReport"]
"""A step that has been launched: its runs by slot, and its report [2, K]."""


def get_default_steps_ahead(device: torch.device) -> int:
    """Return how many steps are launched before a report is read: 1 on a GPU, 0 on a CPU."""
    return 1 if device.type == "cuda" else 0


def pin_memory(values: Tensor, device: torch.device) -> Tensor:
    """Return values in memory from which they can be copied to a device without waiting.

    For a GPU this is pinned memory. The copy must be `non_blocking`; torch keeps the pinned memory
    until the copy is done.
    """
    return values.pin_memory() if device.type == "cuda" else values


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy values to a device without making the host wait."""
    return pin_memory(values, device).to(device, non_blocking=True)


class StepReport:
    """The losses and gradient norms of a step, which are being copied to the host."""

    def __init__(self, values: Tensor) -> None:
        """Start to copy values of any shape, after the work that their device already has."""
        self._values = values.to("cpu", non_blocking=True)  # from a GPU into pinned memory
        self._copied: torch.cuda.Event | None = None
        if values.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(values.device))

    def read(self) -> Any:
        """Return the values as nested lists.

        Waits for the copy only, not for work that was launched after it.
        """
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()


class Engine(ABC):
    """Trains runs in slots, step by step.

    Args:
        device: Device to train on; None for the GPU if there is one.
        num_microbatches: Minimum number of passes that a batch is split into; the result is the
            same up to rounding.
        steps_ahead: Number of steps that are launched before a report is read; None for 1 on a
            GPU, 0 on a CPU.
        diverged_above_nats: Excess over ln(vocabulary), in nats, at which the loss of a run after
            its warmup counts as diverged.
    """

    def __init__(
        self,
        device: torch.device | str | None,
        num_microbatches: int,
        steps_ahead: int | None,
        diverged_above_nats: float = DIVERGED_ABOVE_NATS,
    ) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.noise: GradientNoiseProbe | None = None
        """Collects the gradient noise of the runs, if the caller sets it."""
        self._steps_ahead = (
            get_default_steps_ahead(self.device) if steps_ahead is None else steps_ahead
        )
        self._num_microbatches, self._diverged_above_nats = num_microbatches, diverged_above_nats
        self._lap_began = 0.0

    @property
    @abstractmethod
    def _runs(self) -> dict[int, RunProgress]:
        """Runs by occupied slot."""

    @abstractmethod
    def _get_tensors(self, index: int) -> Mapping[str, Tensor]:
        """Return the tensors of a slot's state by name, not copied."""

    @abstractmethod
    def _launch_step(self, ahead: int) -> Tensor:
        """Launch the step after `ahead` steps whose reports are not read yet.

        Returns:
            Losses and gradient norms by slot, [2, K].
        """

    @abstractmethod
    def _validate(self) -> list[float]:
        """Return the validation loss of every slot, [K], in nats."""

    @abstractmethod
    def admit(self, index: int, spec: RunSpec, state: SlotState | None = None) -> None:
        """Start a run in a free slot, from its initial weights or from a saved state."""

    @abstractmethod
    def evict(self, index: int) -> None:
        """Free a slot, also in the middle of a run."""

    @property
    def steps(self) -> dict[int, int]:
        """Optimizer steps done, by occupied slot."""
        return {index: run.step for index, run in self._runs.items()}

    @property
    def environment(self) -> dict[str, str]:
        """Everything except the spec that the arithmetic of this engine depends on."""
        return get_environment(self.device)

    def get_state(self, index: int) -> SlotState:
        """Return the state of the run in a slot, which it can resume from."""
        return capture_state(self._runs[index], self.device, self._get_tensors(index))

    def pause_at(self, index: int, step: int | None) -> None:
        """Set the step at which the run in a slot pauses.

        `advance` does nothing while a run has done that many steps or more; None removes the pause.
        """
        self._runs[index].pause_step = step

    def make_pruned_result(
        self, index: int, num_steps: int, reason: str
    ) -> tuple[RunResult, Curve]:
        """Return the result and curve of a run as if it was pruned after `num_steps`.

        The engine does not change.
        """
        run = self._runs[index]
        return run.make_result("pruned", self.device, reason=reason, num_steps=num_steps)

    def advance(self, num_steps: int, seconds: float = math.inf) -> list[EndedRun]:
        """Make optimizer steps, until a run ends or has to pause.

        All launched steps have been read on return. If launching a step raises an error while an
        unread step before it ended a run, the error is dropped: without steps ahead, that step
        would not have been launched.

        Args:
            num_steps: Maximum number of steps.
            seconds: Time limit for starting new steps, in seconds.

        Returns:
            The runs that ended; none if a run has to pause.
        """
        self._lap_began = time.perf_counter()
        deadline = time.monotonic() + seconds
        unread: deque[_LaunchedStep] = deque()
        ended: list[EndedRun] = []

        def read_down_to(max_unread: int) -> None:
            while len(unread) > max_unread:
                ended.extend(self._finish_step(*unread.popleft()))

        for _ in range(num_steps):
            # Before gradient noise is measured, read the reports of all earlier steps: a run that
            # has diverged has none.
            if unread and self._needs_noise(len(unread)):
                read_down_to(0)
            if ended or not self._may_launch(len(unread)) or time.monotonic() > deadline:
                break
            try:
                unread.append((self._runs, StepReport(self._launch_step(len(unread)))))
            except Exception:
                read_down_to(0)
                if not ended:
                    raise
                break
            read_down_to(self._steps_ahead)
        read_down_to(0)
        return ended

    def _may_launch(self, ahead: int) -> bool:
        runs = self._runs.values()
        return bool(runs) and all(run.can_step(ahead) for run in runs)

    def _needs_noise(self, ahead: int) -> bool:
        """Return whether gradient noise is measured before the step after `ahead` unread steps."""
        noise, runs = self.noise, self._runs.values()
        return noise is not None and any(
            noise.get_num_passes(run.spec, run.step + ahead, self._num_microbatches) for run in runs
        )

    def _finish_step(self, runs: dict[int, RunProgress], report: StepReport) -> list[EndedRun]:
        """Read the report of a step, end the runs that it ends, and free their slots."""
        losses, norms = report.read()
        # Leave out runs that ended in the step before.
        runs = {i: run for i, run in runs.items() if self._runs.get(i) is run}
        reasons = {
            i: run.record(losses[i], norms[i], self._diverged_above_nats) for i, run in runs.items()
        }
        done = [i for i, run in runs.items() if not reasons[i] and run.is_finished]
        validation = self._validate() if done else []
        began, self._lap_began = self._lap_began, time.perf_counter()
        ended = []
        for i, run in runs.items():
            run.seconds += (self._lap_began - began) / len(runs)
            if reasons[i]:
                result = run.make_result("diverged", self.device, reason=reasons[i])
            elif i in done:
                result = run.make_result("finished", self.device, validation_nats=validation[i])
            else:
                continue
            ended.append(EndedRun(i, *result))
            self.evict(i)
        return ended
