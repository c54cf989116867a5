"""The workers of a study, and the record of the device time that they take.

The plan places workers in this process, on this machine, or on a cluster.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from forerun._launcher.main_run.progress_output import print_progress
from forerun._launcher.study.plan.study import Study
from forerun._proxies.core import canon
from forerun._proxies.core.plain_files import require_plain
from forerun._proxies.data.tokens import MANIFEST, find_corpus_problems, read_manifest
from forerun._sweeps.run.budget import StudyBudget, record_work
from forerun._sweeps.run.caps import BudgetCaps
from forerun._sweeps.run.pool import InlinePool, Pool
from forerun._sweeps.store.errors import SweepError
from forerun._sweeps.store.ledger import LEDGER_NAME, Ledger
from forerun._sweeps.store.live_state import (
    DriverState,
    RunningRun,
    StudyState,
    read_live,
    write_live,
)
from forerun._sweeps.store.lock import get_process_start

_LIBRARIES = ("torch", "numpy", "ray")
"""Libraries that must have the same version on every node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCheck:
    """The software and files of the driver's machine. Called on a node, it returns the differences
    between that node and the driver's machine.
    """

    versions: dict[str, str]
    """Versions of Python and of the libraries that decide a run's numbers."""
    source_sha256: str
    """Hash of forerun's own source files."""
    corpus: str
    """Folder of the corpus; empty if a command has its own data."""
    manifest_sha256: str
    study_dir: str
    code_dir: str
    """Folder of the user's own modules or trainer; empty if the plan names none."""

    def __call__(self) -> list[str]:
        """Return the node's problems in words; empty if it can run the study."""
        node_versions = find_versions()
        problems = [
            f"{name} {node_versions.get(name, 'is missing')} there, {driver_version} here: results "
            "would depend on the node"
            for name, driver_version in self.versions.items()
            if node_versions.get(name) != driver_version
        ]
        if canon.hash_sources() != self.source_sha256:
            problems.append("another version of forerun is there: install the same on every node")
        if not os.access(Path(self.study_dir) / LEDGER_NAME, os.R_OK | os.W_OK):
            problems.append(
                f"the study folder {self.study_dir} is not there, or may not be written to"
            )
        if self.code_dir and not Path(self.code_dir).is_dir():
            problems.append(f"your code's folder {self.code_dir} is not there")
        return problems + self._find_corpus_problems()

    def _find_corpus_problems(self) -> list[str]:
        folder = Path(self.corpus)
        if not self.corpus:
            return []
        try:
            require_plain(folder / MANIFEST)
        except OSError as error:
            return [f"the corpus is not there: {folder / MANIFEST}: {error.strerror}"]
        if canon.hash_file(folder / MANIFEST) != self.manifest_sha256:
            return [f"another corpus is there: {folder / MANIFEST} differs"]
        return [
            f"the corpus is not whole: {problem}"
            for problem in find_corpus_problems(folder, read_manifest(folder))
        ]


def build_node_check(study: Study) -> NodeCheck:
    """Return the check that nodes of a study must pass."""
    has_user_code = study.factory is not None or study.plan.command is not None
    return NodeCheck(
        versions=find_versions(),
        source_sha256=canon.hash_sources(),
        corpus=str(study.corpus or ""),
        manifest_sha256=canon.hash_file(study.corpus / MANIFEST) if study.corpus else "",
        study_dir=str(study.study_dir.resolve()),
        code_dir=str(study.code_dir) if has_user_code else "",
    )


def find_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that decide a run's numbers. Missing
    libraries are left out.
    """
    versions_by_name = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions_by_name[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions_by_name


def start_pool(study: Study, check_stop: Callable[[], None]) -> Pool:
    """Start the workers that the plan asks for.

    Raises:
        PoolDead, ClusterUnfit: The workers cannot be started.
        Exception: Whatever `check_stop` raises.
    """
    from forerun._launcher.study.workers.host import HostFactory

    plan, cluster = study.plan, study.plan.cluster
    factory = HostFactory(
        corpus=str(study.corpus or ""),
        weights=plan.data.weights or None,
        code_dir=str(study.code_dir),
        study_dir=str(study.study_dir.resolve()),
        timeout_seconds=plan.proxy.timeout_seconds,
        gpu_share=cluster.worker_gpus,
        has_user_trainer=plan.command is not None,
    )
    if cluster.backend == "inline":
        return InlinePool(factory)
    from forerun._sweeps.ray.nodes import WorkerPlacement
    from forerun._sweeps.ray.pool import RayPool

    if not cluster.address and "RAY_ADDRESS" in os.environ:
        print_progress(
            "RAY_ADDRESS is set but not used: `--set cluster.address=auto` joins that cluster"
        )
    print_progress(
        f"joining Ray at {cluster.address}" if cluster.address else "starting Ray on this machine"
    )
    check_stop()
    place = WorkerPlacement(
        address=cluster.address,
        worker_cpus=cluster.worker_cpus,
        worker_gpus=cluster.worker_gpus,
        worker_memory_gib=cluster.worker_memory_gib,
    )
    pool = RayPool(
        cluster.num_workers,
        factory,
        place=place,
        node_check=build_node_check(study) if cluster.address else None,
        check_stop=check_stop,
    )
    print_progress(pool.where)
    return pool


# ---- Device time ----

STATE_SECONDS = 1.0
"""Seconds between two updates of the state that `forerun status` reads."""


def record_killed_driver(study_dir: Path, ledger: Ledger) -> None:
    """Record the device time of a driver that was killed before it could do so, from the last state
    that it wrote.
    """
    state = read_live(study_dir)
    if state is not None and state.driver < _get_driver_number(ledger):
        record_work(ledger, state.driver, state.stretch, state.seconds, state.by_kind)


def _get_driver_number(ledger: Ledger) -> int:
    """Return the number of the driver that has opened the ledger, counted from 0."""
    return len(ledger.read_records("driver")) - 1


class SpendTracker:
    """The record of device time spent by this driver; created once there are devices to pay for."""

    def __init__(
        self, study_dir: Path, ledger: Ledger, caps: BudgetCaps, num_devices: Mapping[str, float]
    ) -> None:
        """Begin the account of this driver.

        Args:
            study_dir: Folder of the study.
            ledger: Ledger, open for writing.
            caps: Maximum spend of the study.
            num_devices: Number of devices of this driver, by kind.
        """
        self._study_dir, self._ledger = study_dir, ledger
        self._driver = _get_driver_number(ledger)
        self.budget = StudyBudget(caps, ledger, num_devices=num_devices)
        self._stretch = 0
        self._looked = -STATE_SECONDS

    def write_state(
        self,
        stage: str,
        running: tuple[RunningRun, ...],
        num_queued: int,
        left_seconds: float | None,
        state: Callable[[], StudyState],
    ) -> None:
        """Write the current state for `forerun status`, at most about once per second."""
        now = time.monotonic()
        if now - self._looked < STATE_SECONDS:
            return
        self._looked = now
        seconds, by_kind = self.budget.unrecorded
        write_live(
            self._study_dir,
            DriverState(
                driver=self._driver,
                pid=os.getpid(),
                born=get_process_start(os.getpid()),
                host=socket.gethostname(),
                stage=stage,
                stretch=self._stretch,
                seconds=seconds,
                device_seconds=sum(by_kind.values()),
                by_kind=by_kind,
                left_seconds=left_seconds,
                study=state(),
                num_queued=num_queued,
                running=running,
                at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            ),
        )

    def record_spend(self) -> None:
        """Record the device time since the last call. On a full disk, or if another driver took
        over, this fails silently: the error was reported already.
        """
        with contextlib.suppress(SweepError):
            self.budget.record_spend(self._driver, self._stretch)
            self._stretch += 1
