"""The main run in W&B while it trains, kept up to date beside the run, never by its ranks.

The run's metrics are the truth; every launch writes the log anew. A thread of the supervisor's
writes it, through a process of wandb's that ends when the supervisor does, in whatever way. If it
fails, that is reported, and hurts nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.base.signals import Flag
from launcher.base.talk import say
from launcher.base.wandb_calls import DashboardError, Mode, WandbProcess
from launcher.dashboards.main_run import main_run
from launcher.dashboards.wandb_writer import WandbTarget, writing
from launcher.frozen.frozen import Decision
from launcher.supervisor.attempt import hearing
from proxies.core.notation import counted, format_duration
from proxies.core.redaction import redacted

LOOK_SECONDS = 1.0
"""Between two looks at the metrics."""
FINISH_SECONDS = 120.0
"""How long the log may take to finish once the run has ended; well within SLURM's grace."""
_POLL_SECONDS = 0.1
_LAST_SECONDS = 10.0
"""For its end, once it was stopped."""
_MOST_SAID = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkOutcome:
    """What became of the log."""

    text: str
    """In a sentence."""
    path: str | None = None
    """The run's folder, which `wandb sync` takes if it was logged offline."""
    url: str | None = None
    num_rows: int = 0
    whole: bool = False
    """Whether all rows are there."""


class LogSink:
    """Within, the run in `run_dir` is shown in W&B; afterwards `outcome` says what became of it.

    A signal that comes while the log finishes cuts it short. What earlier launches showed is taken
    away: to be entered by the one supervisor that has the folder.
    """

    def __init__(
        self, run_dir: Path, decision: Decision, mode: Mode, failures: Sequence[str] = ()
    ) -> None:
        """Store what to show; `failures` are gates that failed and were accepted."""
        self.outcome: SinkOutcome | None = None
        self._run_dir, self._decision, self._mode = run_dir.absolute(), decision, mode
        self._failures, self._over = failures, threading.Event()
        self._job: WandbProcess | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        """Wait until the rest is written; what takes longer is ended, or at once when a signal
        comes.
        """
        signalled, deadline = Flag(), time.monotonic() + FINISH_SECONDS
        with hearing(lambda _: signalled.set()):
            self._over.set()
            while (
                self._thread.is_alive() and not signalled.is_set() and time.monotonic() < deadline
            ):
                self._thread.join(_POLL_SECONDS)
            if not self._thread.is_alive():
                return
            late = "a signal came before it had written the rest"
            late = (
                late
                if signalled.is_set()
                else f"it did not end within {format_duration(FINISH_SECONDS)}"
            )
            if self._job is not None:
                self._job.stop()
            self._thread.join(_LAST_SECONDS)
            self.outcome = SinkOutcome(text=f"incomplete: {late}")

    def _work(self) -> None:
        try:
            run = main_run(
                self._decision,
                self._run_dir,
                is_over=lambda: self._over.wait(LOOK_SECONDS),
                failures=self._failures,
            )
            with writing(self._run_dir, self._mode, WandbTarget(), dies_with_us=False) as writer:
                self._job = writer.job
                path, url, num_rows = writer.write(run)
            self.outcome = SinkOutcome(
                text=f"{counted(num_rows, 'row')} in {path}",
                path=str(path),
                url=url,
                num_rows=num_rows,
                whole=True,
            )
            return
        except Exception as error:  # whatever it is, it is reported
            told = isinstance(error, DashboardError | OSError)
            problem = str(error) if told else f"{type(error).__name__}: {error}"
        problem = redacted(problem)[:_MOST_SAID]
        if not self._over.is_set():
            say(f"forerun: logging to wandb ended early; the run continues: {problem}")
        self.outcome = SinkOutcome(text=f"incomplete: {problem}")
