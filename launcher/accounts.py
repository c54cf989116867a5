"""What a driver spends, held against the plan's caps, and what it tells whoever looks on."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import time
from pathlib import Path

from sweeps.budget import Budget, Caps, record_driven
from sweeps.errors import SweepError
from sweeps.ledger import Ledger
from sweeps.live import Live, read_live, write_live
from sweeps.lock import born
from sweeps.progress import Running

LOOK_SECONDS = 1.0
"""Between two looks that `forerun status` can take."""


class Accounts:
    """Opened once there are devices to pay for."""

    def __init__(self, study_dir: Path, ledger: Ledger, caps: Caps, num_devices: float) -> None:
        """Take over what a killed driver had spent, as its last look tells; then count our own."""
        self._study_dir, self._ledger = study_dir, ledger
        self._driver = len(ledger.records("driver")) - 1
        last = read_live(study_dir)
        if last is not None and last.driver < self._driver:
            record_driven(ledger, last.driver, last.stretch, last.seconds, last.device_seconds)
        self.budget = Budget(caps, ledger, num_devices=num_devices)
        self._num_devices = num_devices
        self._stretch = 0
        self._looked = -LOOK_SECONDS

    def look(self, stage: str, running: tuple[Running, ...], num_queued: int, left_seconds: float | None) -> None:
        """Tell how things stand, about once a second at most."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        seconds = self.budget.seconds
        write_live(
            self._study_dir,
            Live(
                driver=self._driver,
                pid=os.getpid(),
                born=born(os.getpid()),
                host=socket.gethostname(),
                stage=stage,
                stretch=self._stretch,
                seconds=seconds,
                device_seconds=seconds * self._num_devices,
                left_seconds=left_seconds,
                num_queued=num_queued,
                running=running,
                at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            ),
        )

    def write_down(self) -> None:
        """Record what this driver took since it last did. On a full disk, or taken over, it cannot: said already."""
        with contextlib.suppress(SweepError):
            self.budget.write_down(self._driver, self._stretch)
            self._stretch += 1
