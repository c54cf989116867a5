"""The folder of a rehearsal of the embedded trainer, which starts runs under the real supervisor.

Each run has a folder of its own below it. The runs train the copy, a small config that stands for
the real one. Drills compare the checkpoints of two runs. The uninterrupted run and the cut run
(stopped after each of `CUTS` and resumed) are trained once, by the first drill that needs them.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from forerun._launcher.main_run import metrics_file
from forerun._launcher.main_run.checkpoint_folders import CHECKPOINTS, list_complete_checkpoints
from forerun._launcher.main_run.frozen.frozen import Decision
from forerun._launcher.main_run.frozen.launch_file import write_launch
from forerun._launcher.main_run.rehearsal.faults import Fault, get_mark_path
from forerun._launcher.main_run.rehearsal.rank import MODULE, format_fault_options
from forerun._launcher.main_run.rehearsal.registry import CUTS, HANG_SECONDS
from forerun._launcher.main_run.supervisor.attempt import Signals
from forerun._launcher.main_run.supervisor.hang_detector import FLOOR_SECONDS, SilenceLimits
from forerun._launcher.main_run.supervisor.launch import LaunchOutcome, launch
from forerun._launcher.main_run.trainer import checkpoints
from forerun._proxies.core.canon import Json
from forerun._proxies.core.errors import InputError
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.spec import RunSpec

LOG_FILE = "supervisor.log"
"""Messages of the supervisor of the drills' runs."""


# ---- Comparing checkpoints ----


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointDifference:
    """The difference of two checkpoints."""

    num_tensors: int = 0
    num_differing: int = 0
    """Number of tensors that are not the same bit by bit."""
    weights_share: float = math.inf
    """Norm of the difference of all weights, divided by the norm of the weights; infinite if the
    checkpoints have tensors of other names or shapes, or numbers that are not finite."""

    @property
    def bitwise(self) -> bool:
        """Whether the checkpoints are the same."""
        return self.num_tensors > 0 and self.num_differing == 0

    @property
    def sentence(self) -> str:
        """The difference in words."""
        if not self.num_tensors:
            return "there is no checkpoint to compare"
        tensors = format_counted(self.num_tensors, "tensor")
        if self.bitwise:
            return f"all {tensors} of weights and moments bitwise equal"
        share = f"{self.weights_share:.2g}"
        return f"{self.num_differing} of {tensors} differ, weights by {share} of their norm"


def compare_tensors(first: dict[str, Tensor], second: dict[str, Tensor]) -> CheckpointDifference:
    """Compare the tensors of two checkpoints, by name."""
    names = first.keys() | second.keys()
    empty = torch.empty(0)
    differing = [
        name for name in names if not torch.equal(first.get(name, empty), second.get(name, empty))
    ]
    weights = [name for name in names if name.startswith("model.")]
    share = math.inf
    first_shapes, second_shapes = (
        {name: tensor.shape for name, tensor in tensors.items()} for tensors in (first, second)
    )
    if first_shapes == second_shapes:
        squared_difference = sum(
            float((first[name].double() - second[name].double()).square().sum()) for name in weights
        )
        squared_norm = sum(float(first[name].double().square().sum()) for name in weights)
        if math.isfinite(squared_difference) and squared_norm > 0:
            share = math.sqrt(squared_difference / squared_norm)
    return CheckpointDifference(
        num_tensors=len(names), num_differing=len(differing), weights_share=share
    )


def flip_a_bit(folder: Path) -> str:
    """Change one bit in the middle of a checkpoint's largest file; return the file's name."""
    file = max(filter(Path.is_file, folder.iterdir()), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return file.name


# ---- Runs ----


class UnexpectedEndError(InputError):
    """A run without a fault did not reach its end, so the drills have nothing to compare with."""


class _CountedSignals(Signals):
    """Signals that are counted, because one of them may come from the drill itself."""

    def __init__(self) -> None:
        super().__init__()
        self.num_signals = 0

    def receive(self, number: int) -> None:
        """Count a signal."""
        self.num_signals += 1
        super().receive(number)


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsalFolder:
    """The folder of one rehearsal, with its configs and corpus."""

    real: Decision
    """The config that is rehearsed."""
    decision: Decision
    """The copy: the config that is trained in the drills."""
    spec: RunSpec | None
    """The run of the copy as a proxy; None if the copy has the real shape."""
    folder: Path
    """Folder of all runs, which may be removed when the rehearsal is over."""
    corpus: Path
    """Folder of the small part of the corpus on which the copy trains."""
    frozen_dir: Path
    """Folder of the real config and its attestations."""
    code_dir: Path = Path()
    """Folder of the code of a user's own model."""
    hang_seconds: float = HANG_SECONDS
    """Seconds without a step after which the run of the hang drill counts as hung."""
    faults: Sequence[Fault] = ()
    """Faults in every run, with which tests make a wrong trainer."""

    @property
    def num_steps(self) -> int:
        """Number of steps that the copy trains."""
        return self.decision.learning_rate.schedule.num_steps

    def describe_copy(self) -> dict[str, Json]:
        """Return what the attestation says of the copy."""
        shape = self.decision.shape
        return {
            "kind": "full" if self.spec is None else "scaled",
            "digest": self.decision.digest,
            "stands_for": self.real.digest,
            "layers": shape.num_layers,
            "width": shape.width,
            "seq_len": shape.seq_len,
            "num_steps": self.num_steps,
            "batch_tokens": self.decision.batch_tokens,
            "num_ranks": self.decision.parallelism.num_ranks,
        }

    def run(
        self,
        run_dir: Path,
        *faults: Fault,
        stop_after: int | None = None,
        max_restarts: int = 0,
        hang_seconds: float = FLOOR_SECONDS,
    ) -> LaunchOutcome:
        """Start or resume a run, which is killed after `hang_seconds` without a step.

        Args:
            run_dir: Folder of the run.
            faults: Faults of this start, in addition to those of every run.
            stop_after: Step after which the run saves and stops; None for the last step.
            max_restarts: Maximum number of restarts without a new checkpoint.
            hang_seconds: Seconds without a step after which the run counts as hung.

        Raises:
            KeyboardInterrupt: The user ended it.
        """
        config = write_launch(self.folder / "frozen", self.decision)
        signals = _CountedSignals()
        with (
            (self.folder / LOG_FILE).open("a", encoding="utf-8") as log,
            contextlib.redirect_stderr(log),
            self._hide_gpus(),
        ):
            print("==", run_dir.name, *(fault.kind for fault in faults), file=log)
            outcome = launch(
                config,
                self.corpus,
                run_dir,
                stop_after,
                max_restarts,
                program=(MODULE, *format_fault_options([*self.faults, *faults])),
                limits=SilenceLimits(floor_seconds=hang_seconds),
                signals=signals,
                code_dir=self.code_dir,
            )
        # Any signal beyond those that a fault has sent is the user's.
        sends_signal = any(fault.kind == "sigterm" for fault in faults)
        num_sent = int(sends_signal and get_mark_path(run_dir, "sigterm").exists())
        if signals.num_signals > num_sent or (outcome.event == "interrupted" and not num_sent):
            raise KeyboardInterrupt
        return outcome

    @property
    def on_cpu(self) -> bool:
        """Whether the ranks train on the CPU: this machine has fewer GPUs than the copy ranks."""
        return torch.cuda.device_count() < self.decision.parallelism.num_ranks

    @contextlib.contextmanager
    def _hide_gpus(self) -> Iterator[None]:
        """Hide the GPUs from processes that are started within, if the ranks train on the CPU."""
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        if self.on_cpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        try:
            yield
        finally:
            if before is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = before
            elif self.on_cpu:
                del os.environ["CUDA_VISIBLE_DEVICES"]

    def clear_run(self, name: str) -> Path:
        """Return the folder of a run, after removing what an interrupted drill left of it."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return self.folder / name

    def train_reference(self) -> Path:
        """Train the uninterrupted run unless an earlier call did; return its folder."""
        return self._train_once("reference", (None,))

    def train_cut_run(self) -> Path:
        """Train the cut run unless an earlier call did; return its folder.

        The cut run stops after each of `CUTS` steps and is resumed in new processes.
        """
        return self._train_once("cut", (*CUTS, None))

    def _train_once(self, name: str, stops: tuple[int | None, ...]) -> Path:
        """Train a run unless it is finished, and return its folder.

        Args:
            name: Name of the run.
            stops: Steps after which each start of the run stops; None for the last step.
        """
        if is_finished(self.folder / name):
            return self.folder / name
        run_dir = self.clear_run(name)
        for stop_after in stops:
            outcome = self.run(run_dir, stop_after=stop_after)
            if outcome.event not in ("finished", "stopped"):
                raise UnexpectedEndError(
                    f"the run {name!r}, which has no fault, ended early: {outcome.event}: "
                    f"{outcome.reason}"
                )
        return run_dir

    def fork_run(self, source: Path, step: int, name: str) -> Path:
        """Make a run with copies of the checkpoints of another run up to `step`; return its
        folder.
        """
        run_dir = self.clear_run(name)
        for saved_step, folder in list_complete_checkpoints(source / CHECKPOINTS).items():
            if saved_step <= step:
                shutil.copytree(folder, run_dir / CHECKPOINTS / folder.name)
        return run_dir

    def compare(self, first: Path, second: Path, step: int | None = None) -> CheckpointDifference:
        """Compare two runs' checkpoints of a step; None for the last step."""
        folders = [
            checkpoints.get_checkpoint_folder(run_dir / CHECKPOINTS, step or self.num_steps)
            for run_dir in (first, second)
        ]
        if not all(folder.is_dir() for folder in folders):
            return CheckpointDifference()
        return compare_tensors(*map(checkpoints.read_saved_tensors, folders))


# ---- Records of a run ----


def read_losses(run_dir: Path) -> dict[int, float]:
    """Return a run's training losses in nats by step."""
    lines = [line for line in metrics_file.read_lines(run_dir) if "train_loss_nats" in line]
    return {int(str(line["step"])): float(str(line["train_loss_nats"])) for line in lines}


def read_validation_loss(run_dir: Path) -> float:
    """Return the validation loss in nats at a run's end; infinite if there is none."""
    ending = metrics_file.read_ending(run_dir)
    loss = None if ending is None else ending.validation_loss_nats
    return math.inf if loss is None else loss


def is_finished(run_dir: Path) -> bool:
    """Return whether a run has reached its schedule's end."""
    ending = metrics_file.read_ending(run_dir)
    return ending is not None and ending.event == "finished"
