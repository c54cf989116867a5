"""The main run in W&B and TensorBoard while it trains, kept up to date beside the run, never by its ranks.

The run's metrics are the truth; what shows them is made anew by every launch. Each dashboard is written by a thread of
the supervisor's, W&B's through a process of wandb's that ends when the supervisor does, in whatever way. One that fails
is told of, and hurts nothing else.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from launcher.base.flag import Flag
from launcher.base.talk import say
from launcher.base.wandb_calls import DashboardError, Job, Mode
from launcher.dashboards.main_run import main_run
from launcher.dashboards.records import RunRecord
from launcher.dashboards.tensorboard import write_growing
from launcher.dashboards.wandb_writer import Place, writing
from launcher.frozen.frozen import Decision
from launcher.supervisor.attempt import hearing
from proxies.core.redaction import redacted

LOOK_SECONDS = 1.0
"""Between two looks at the metrics."""
FINISH_SECONDS = 120.0
"""How long a mirror may take for what is left once the run has ended; well within SLURM's grace."""
_POLL_SECONDS = 0.1
_LAST_SECONDS = 10.0
"""For its end, once it was stopped."""
_MOST_SAID = 400
Mirror = Literal["wandb", "tensorboard"]
_Shown = tuple[Path, str | None, int]
"""What was written, where W&B shows it, and how many rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mirrored:
    """What became of a mirror."""

    name: Mirror
    text: str
    """In a sentence."""
    path: str | None
    """A run's folder, which `wandb sync` takes if it was logged offline; or an event file."""
    url: str | None
    num_rows: int
    whole: bool
    """Whether all that was told is there."""


@contextlib.contextmanager
def mirrored(
    run_dir: Path, decision: Decision, found: list[Mirrored], *, wandb: Mode | None = None,
    tensorboard_dir: Path | None = None,
) -> Iterator[None]:  # fmt: skip
    """Within, the run in `run_dir` is shown where asked for; afterwards `found` says what became of it.

    A signal that comes while the mirrors finish cuts them short. What earlier launches showed is taken away: to be
    entered by the one supervisor that has the folder.
    """
    over, run_dir = threading.Event(), run_dir.absolute()
    run = main_run(decision, run_dir, is_over=lambda: over.wait(LOOK_SECONDS))
    mirrors: list[_Mirror] = []
    if wandb is not None:
        mirrors.append(_Mirror("wandb", over, partial(_to_wandb, run, run_dir, wandb)))
    if tensorboard_dir is not None:
        mirrors.append(_Mirror("tensorboard", over, partial(_to_tensorboard, run, tensorboard_dir.absolute())))
    try:
        yield
    finally:
        signalled = Flag()
        with hearing(lambda _: signalled.set()):
            over.set()
            deadline = time.monotonic() + FINISH_SECONDS
            found += [mirror.ended(signalled, deadline) for mirror in mirrors]


def _to_wandb(run: RunRecord, run_dir: Path, mode: Mode, jobs: list[Job]) -> _Shown:
    with writing(run_dir, mode, Place(), dies_with_us=False) as writer:
        jobs.append(writer.job)
        return writer.write(run)


def _to_tensorboard(run: RunRecord, log_dir: Path, jobs: list[Job]) -> _Shown:
    path, num_rows = write_growing(log_dir, run)
    return path, None, num_rows


class _Mirror:
    """A thread that shows a run until that is over."""

    def __init__(self, name: Mirror, over: threading.Event, show: Callable[[list[Job]], _Shown]) -> None:
        self._name, self._over, self._show = name, over, show
        self._jobs: list[Job] = []
        self._shown: _Shown | None = None
        self._problem = ""
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._shown = self._show(self._jobs)
        except OSError as error:
            self._problem = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        except DashboardError as error:
            self._problem = str(error)
        except Exception as error:  # whatever it is, it is told with the others
            self._problem = f"{type(error).__name__}: {error}"
        self._problem = redacted(self._problem)[:_MOST_SAID]
        if not self._over.is_set():
            say(f"forerun: the {self._name} mirror ended early, the run goes on: {self._problem}")

    def ended(self, signalled: Flag, deadline: float) -> Mirrored:
        """Wait until all that is left was told; what takes longer is ended, or at once when a signal comes."""
        while self._thread.is_alive() and not signalled.is_set() and time.monotonic() < deadline:
            self._thread.join(_POLL_SECONDS)
        late = ""
        if self._thread.is_alive():
            late = "a signal came while it told what was left"
            late = late if signalled.is_set() else f"it did not end within {FINISH_SECONDS:.0f} s"
            for job in self._jobs:
                job.stop()
            self._thread.join(_LAST_SECONDS)
        if late or self._shown is None:
            return Mirrored(name=self._name, text=f"not whole: {late or self._problem}", path=None, url=None,
                            num_rows=0, whole=False)  # fmt: skip
        path, url, num_rows = self._shown
        return Mirrored(name=self._name, text=f"{num_rows} rows in {path}", path=str(path), url=url,
                        num_rows=num_rows, whole=True)  # fmt: skip
