"""Where the drills play: starts runs of the copy under the real supervisor, and compares what they
leave.

A run's folder lies below the stage's; the uninterrupted run and the run that was cut are made once,
by the first drill that asks.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from launcher.base import metrics
from launcher.base.run_files import CHECKPOINTS, complete_folders
from launcher.base.watchdog import FLOOR_SECONDS, Limits
from launcher.frozen.frozen import Decision
from launcher.frozen.launch_file import write_launch
from launcher.rehearsal.faults import Fault, fired
from launcher.rehearsal.rank import MODULE, arguments
from launcher.rehearsal.registry import CUTS, HANG_SECONDS
from launcher.rehearsal.scaled_config import ScaledConfig
from launcher.supervisor.attempt import Signals
from launcher.supervisor.launch import LaunchOutcome, launch
from launcher.trainer import checkpoints
from proxies.core.errors import InputError
from proxies.core.notation import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointDifference:
    """Two checkpoints."""

    num_tensors: int
    num_differing: int
    """That are not the same bit by bit."""
    weights_share: float
    """Norm of the difference of all weights over the norm of the weights; infinite where not the
    same tensors are there, or one is not finite."""

    @property
    def bitwise(self) -> bool:
        """Whether they are the same."""
        return self.num_tensors > 0 and self.num_differing == 0

    @property
    def told(self) -> str:
        """In words."""
        if not self.num_tensors:
            return "there is no checkpoint to compare"
        if self.bitwise:
            return f"all {counted(self.num_tensors, 'tensor')} of weights and moments bitwise equal"
        return (
            f"{self.num_differing} of {counted(self.num_tensors, 'tensor')} differ, weights by "
            f"{self.weights_share:.2g} of their norm"
        )


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> CheckpointDifference:
    """How far two checkpoints' tensors are apart."""
    names = sorted(set(one) | set(other))
    shared = [
        name
        for name in names
        if name in one and name in other and one[name].shape == other[name].shape
    ]
    differing = len(names) - sum(torch.equal(one[name], other[name]) for name in shared)
    weights = [name for name in shared if name.startswith("model.")]
    share = math.inf
    if len(shared) == len(names) and weights:
        gap = sum(float((one[n].double() - other[n].double()).square().sum()) for n in weights)
        size = sum(float(one[n].double().square().sum()) for n in weights)
        share = math.sqrt(gap / size) if math.isfinite(gap) and size > 0 else math.inf
    return CheckpointDifference(
        num_tensors=len(names), num_differing=differing, weights_share=share
    )


LOG_FILE = "supervisor.log"
"""What the supervisor of the drills' runs printed."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class _CountedSignals(Signals):
    """Counts the signals: one of them may be the drill's own."""

    def __init__(self) -> None:
        super().__init__()
        self.num_signals = 0

    def hear(self, number: int) -> None:
        """One more."""
        self.num_signals += 1
        super().hear(number)


class UnexpectedEndError(InputError):
    """A run without a fault that did not come to its end: there is nothing to compare the others
    with.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsalFolder:
    """One rehearsal's place."""

    real: Decision
    scaled: ScaledConfig
    folder: Path
    """All of it may be removed when the rehearsal is over."""
    corpus: Path
    """The cut that the copy trains on."""
    frozen_dir: Path
    """Where the real config lies, with its attestations."""
    code_dir: Path = Path()
    """Where the code of a user's own model lies."""
    hang_seconds: float = HANG_SECONDS
    faults: Sequence[Fault] = field(default=())
    """In every run but those that all else is compared with."""

    @property
    def decision(self) -> Decision:
        """The config of the copy."""
        return self.scaled.decision

    @property
    def num_steps(self) -> int:
        """How many steps the copy trains."""
        return self.decision.learning_rate.schedule.num_steps

    def run(
        self,
        name: str,
        *faults: Fault,
        stop_after: int | None = None,
        max_restarts: int = 0,
        hang_seconds: float = FLOOR_SECONDS,
    ) -> LaunchOutcome:
        """Start or resume the run of that name; one without a step for `hang_seconds` is killed.

        Raises:
            KeyboardInterrupt: the user ended it.
        """
        config = write_launch(self.folder / "frozen", self.decision)
        self.folder.mkdir(parents=True, exist_ok=True)
        signals = _CountedSignals()
        with (
            (self.folder / LOG_FILE).open("a", encoding="utf-8") as log,
            contextlib.redirect_stderr(log),
            self._devices(),
        ):
            print(f"== {' '.join((name, *(fault.kind for fault in faults)))}", file=log)
            outcome = launch(
                config,
                self.corpus,
                self.path(name),
                stop_after,
                max_restarts,
                program=(MODULE, *arguments([*self.faults, *faults])),
                limits=Limits(floor_seconds=hang_seconds),
                signals=signals,
                code_dir=self.code_dir,
            )
        num_own = sum(
            fault.kind == "sigterm" and fired(self.path(name), "sigterm").exists()
            for fault in faults
        )
        if signals.num_signals > num_own or (outcome.event == "interrupted" and not num_own):
            raise KeyboardInterrupt
        return outcome

    @property
    def on_cpu(self) -> bool:
        """Whether this machine has fewer GPUs than the copy has ranks: then its ranks are to see
        none.
        """
        return torch.cuda.device_count() < self.decision.parallelism.num_ranks

    @contextlib.contextmanager
    def _devices(self) -> Iterator[None]:
        """Within, what is started sees the devices that its ranks are for."""
        before = os.environ.get(_VISIBLE)
        if self.on_cpu:
            os.environ[_VISIBLE] = ""
        try:
            yield
        finally:
            if self.on_cpu:
                os.environ.pop(_VISIBLE)
                os.environ.update({} if before is None else {_VISIBLE: before})

    def path(self, name: str) -> Path:
        """The folder of a run."""
        return self.folder / name

    def fresh(self, name: str) -> str:
        """The name, its folder removed: what a drill that was broken off left there says
        nothing.
        """
        shutil.rmtree(self.path(name), ignore_errors=True)
        return name

    def reference(self) -> str:
        """The uninterrupted run on the copy's own ranks."""
        name = "reference"
        if not self.ended(name):
            self.fresh(name)
            self._must_end(name, self.run(name))
        return name

    def cut(self) -> str:
        """The run that ended at every one of `CUTS`, and began again in new processes."""
        name = "cut"
        if self.ended(name):
            return name
        self.fresh(name)
        for cut in (*CUTS, None):
            self._must_end(name, self.run(name, stop_after=cut))
        return name

    def forked(self, source: str, step: int, name: str) -> str:
        """A new run whose only checkpoints are those that a run had when `step` steps were done."""
        root = self.path(self.fresh(name)) / CHECKPOINTS
        root.mkdir(parents=True)
        for at, folder in complete_folders(self.path(source) / CHECKPOINTS).items():
            if at <= step:
                shutil.copytree(folder, root / folder.name)
        return name

    def apart(self, one: str, other: str, step: int | None = None) -> CheckpointDifference:
        """How far the weights and moments of two runs' checkpoints are apart; of the last step
        unless told.
        """
        at = self.num_steps if step is None else step
        folders = [
            checkpoints.folder_of(self.path(name) / CHECKPOINTS, at) for name in (one, other)
        ]
        if not all(folder.is_dir() for folder in folders):
            return CheckpointDifference(num_tensors=0, num_differing=0, weights_share=math.inf)
        return apart(*map(checkpoints.saved_tensors, folders))

    def losses(self, name: str) -> dict[int, float]:
        """Step -> training loss, nats."""
        lines = [line for line in metrics.read(self.path(name)) if "train_loss_nats" in line]
        return {int(str(line["step"])): float(str(line["train_loss_nats"])) for line in lines}

    def validation_loss(self, name: str) -> float:
        """At the run's end, nats; infinite where it tells none."""
        ending = metrics.read_ending(self.path(name))
        told = None if ending is None else ending.validation_loss_nats
        return math.inf if told is None else told

    def ended(self, name: str) -> bool:
        """Whether the run of that name has come to its schedule's end."""
        ending = metrics.read_ending(self.path(name))
        return ending is not None and ending.event == "finished"

    def _must_end(self, name: str, outcome: LaunchOutcome) -> None:
        if outcome.event not in ("finished", "stopped"):
            raise UnexpectedEndError(
                f"the run {name!r}, which has no fault, ended early: {outcome.event}: "
                f"{outcome.reason}"
            )


def checkpoint_folders(run_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return [*complete_folders(run_dir / CHECKPOINTS).values()][::-1]


def flip_a_bit(folder: Path) -> str:
    """Change one bit in the middle of a checkpoint's largest file; returns the file's name."""
    file = max(
        (path for path in folder.iterdir() if path.is_file()), key=lambda path: path.stat().st_size
    )
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return file.name
