"""Logging of a main run to W&B while it trains, kept out of the training processes.

The run's metrics are the truth; every launch writes the log anew. A thread of the supervisor writes
it, through a wandb process that ends with the supervisor, however that ends. A failure of the log
is reported and affects nothing else.
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
"""Seconds between two reads of the metrics."""
FINISH_SECONDS = 120.0
"""Maximum seconds for finishing the log after the run has ended; well within SLURM's grace."""
_POLL_SECONDS = 0.1
_STOP_SECONDS = 10.0
"""Maximum seconds to wait for the thread after its wandb process was stopped."""
_MAX_MESSAGE_CHARACTERS = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkOutcome:
    """The result of logging a main run."""

    text: str
    """Result in a sentence."""
    path: str | None = None
    """Folder of the run, which `wandb sync` takes if it was logged offline."""
    url: str | None = None
    num_rows: int = 0
    whole: bool = False
    """Whether every row was written."""


class LogSink:
    """Context manager that shows the run in `run_dir` in W&B; afterwards `outcome` has the result.

    A signal that arrives while the log finishes cuts it short. Logs of earlier launches are
    removed, so only the one supervisor that holds the folder may enter it.
    """

    def __init__(
        self, run_dir: Path, decision: Decision, mode: Mode, failures: Sequence[str] = ()
    ) -> None:
        """Store what to log.

        Args:
            run_dir: Folder of the main run.
            decision: The frozen decision.
            mode: Mode of wandb.
            failures: Names of gates that failed and were accepted.
        """
        self.outcome: SinkOutcome | None = None
        self._run_dir, self._decision, self._mode = run_dir.absolute(), decision, mode
        self._failures, self._over = failures, threading.Event()
        self._job: WandbProcess | None = None
        self._thread = threading.Thread(target=self._log_run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        """Wait until the remaining rows are written, for a limited time or until a signal comes."""
        signalled, deadline = Flag(), time.monotonic() + FINISH_SECONDS
        with hearing(lambda _: signalled.set()):
            self._over.set()
            while (
                self._thread.is_alive() and not signalled.is_set() and time.monotonic() < deadline
            ):
                self._thread.join(_POLL_SECONDS)
            if not self._thread.is_alive():
                return
            reason = (
                "a signal came before it had written the rest"
                if signalled.is_set()
                else f"it did not end within {format_duration(FINISH_SECONDS)}"
            )
            if self._job is not None:
                self._job.stop()
            self._thread.join(_STOP_SECONDS)
            self.outcome = SinkOutcome(text=f"incomplete: {reason}")

    def _log_run(self) -> None:
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
        except Exception as error:  # Whatever it is, it must not end the run.
            is_known = isinstance(error, DashboardError | OSError)
            problem = str(error) if is_known else f"{type(error).__name__}: {error}"
        problem = redacted(problem)[:_MAX_MESSAGE_CHARACTERS]
        if not self._over.is_set():
            say(f"forerun: logging to wandb ended early; the run continues: {problem}")
        self.outcome = SinkOutcome(text=f"incomplete: {problem}")
