"""Logging of a main run to W&B while it trains, kept out of the training processes.

The run's metrics file is the truth, and every launch writes the log anew from it. A thread of the
supervisor writes the log through a wandb process. That process ends with the supervisor, even if
the supervisor is killed. A failure of the log is reported and does not affect the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun._launcher.main_run.frozen.frozen import Decision
from forerun._launcher.main_run.process_signals import SignalFlag
from forerun._launcher.main_run.progress_output import print_progress
from forerun._launcher.main_run.supervisor.attempt import listen_to_signals
from forerun._launcher.main_run.wandb_client import DashboardError, Mode, WandbProcess
from forerun._launcher.report.dashboards.main_run import build_main_run_record
from forerun._launcher.report.dashboards.wandb_writer import open_writer
from forerun._proxies.core.notation import format_counted, format_duration
from forerun._proxies.core.redaction import redact

POLL_SECONDS = 1.0
"""Seconds between two reads of the metrics."""
FINISH_SECONDS = 120.0
"""Maximum seconds for finishing the log after the run has ended; well within SLURM's grace."""
_JOIN_SECONDS = 0.1
"""Seconds between two looks at whether the thread has ended or a signal has come."""
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
    """Whether every row was written; the JSON of `forerun launch` has this name."""


class LogSink:
    """Context manager that logs a main run to W&B; afterwards `outcome` has the result.

    A signal that arrives while the log finishes cuts the log short. Logs of earlier launches are
    removed, so only the supervisor that holds the lock of the run's folder may enter the context.
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
        self._process: WandbProcess | None = None
        self._thread = threading.Thread(target=self._log_run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        """Wait until the remaining rows are written, for a limited time or until a signal comes."""
        signalled, deadline = SignalFlag(), time.monotonic() + FINISH_SECONDS
        with listen_to_signals(lambda _: signalled.set()):
            self._over.set()
            while (
                self._thread.is_alive() and not signalled.is_set() and time.monotonic() < deadline
            ):
                self._thread.join(_JOIN_SECONDS)
            if not self._thread.is_alive():
                return
            reason = (
                "a signal came before it had written the rest"
                if signalled.is_set()
                else f"it did not end within {format_duration(FINISH_SECONDS)}"
            )
            if self._process is not None:
                self._process.stop()
            self._thread.join(_STOP_SECONDS)
            self.outcome = SinkOutcome(text=f"incomplete: {reason}")

    def _log_run(self) -> None:
        """Write every row of the run, and set the outcome. This is the body of the thread."""
        try:
            run = build_main_run_record(
                self._decision,
                self._run_dir,
                is_over=lambda: self._over.wait(POLL_SECONDS),
                failures=self._failures,
            )
            with open_writer(self._run_dir, self._mode, dies_with_us=False) as writer:
                self._process = writer.process
                path, url, num_rows = writer.write(run)
            self.outcome = SinkOutcome(
                text=f"{format_counted(num_rows, 'row')} in {path}",
                path=str(path),
                url=url,
                num_rows=num_rows,
                whole=True,
            )
            return
        except Exception as error:  # No failure of the log may end the run.
            is_known = isinstance(error, DashboardError | OSError)
            problem = str(error) if is_known else f"{type(error).__name__}: {error}"
        problem = redact(problem)[:_MAX_MESSAGE_CHARACTERS]
        if not self._over.is_set():
            print_progress(f"forerun: logging to wandb ended early; the run continues: {problem}")
        self.outcome = SinkOutcome(text=f"incomplete: {problem}")
