"""The workers of a study, as its plan asks for them: in this process, on this machine, or on a
cluster.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher.base.talk import say
from launcher.plan.study import Study
from proxies.core import canon
from proxies.core.plain_files import require_plain
from proxies.data.tokens import MANIFEST, read_manifest, shard_problems
from sweeps.run.pool import InlinePool, Pool
from sweeps.store.ledger import LEDGER_NAME

_LIBRARIES = ("torch", "numpy", "ray")
_ROOMS = ("proxies", "sweeps", "launcher")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCheck:
    """What this driver has; called on a node, it lists what is otherwise there."""

    versions: dict[str, str]
    """Versions of Python and of the libraries that decide a run's numbers."""
    source_sha256: str
    """The hash of our own code."""
    corpus: str
    """Folder; empty where a command brings its own data."""
    manifest_sha256: str
    study_dir: str
    code_dir: str
    """Folder of the user's own modules or trainer; empty where the plan names none."""

    def __call__(self) -> list[str]:
        """The node's problems, in words; none if it can run the study."""
        problems = [
            f"{name} {there or 'is missing'} there, {here} here: results would depend on the node"
            for name, here in self.versions.items()
            if (there := versions().get(name, "")) != here
        ]
        if source_sha256() != self.source_sha256:
            problems.append("another version of forerun is there: install the same on every node")
        if not os.access(Path(self.study_dir) / LEDGER_NAME, os.R_OK | os.W_OK):
            problems.append(
                f"the study folder {self.study_dir} is not there, or may not be written to"
            )
        if self.code_dir and not Path(self.code_dir).is_dir():
            problems.append(f"your code's folder {self.code_dir} is not there")
        return problems + self._corpus_problems()

    def _corpus_problems(self) -> list[str]:
        folder = Path(self.corpus)
        if not self.corpus:
            return []
        try:
            require_plain(folder / MANIFEST)
        except OSError as error:
            return [f"the corpus is not there: {folder / MANIFEST}: {error.strerror}"]
        if canon.file_sha256(folder / MANIFEST) != self.manifest_sha256:
            return [f"another corpus is there: {folder / MANIFEST} differs"]
        return [
            f"the corpus is not whole: {problem}"
            for problem in shard_problems(folder, read_manifest(folder))
        ]


def node_check(study: Study) -> NodeCheck:
    """What nodes must have for a study."""
    own = study.factory is not None or study.plan.command is not None
    return NodeCheck(
        versions=versions(),
        source_sha256=source_sha256(),
        corpus=str(study.corpus or ""),
        manifest_sha256=canon.file_sha256(study.corpus / MANIFEST) if study.corpus else "",
        study_dir=str(study.study_dir.resolve()),
        code_dir=str(study.code_dir) if own else "",
    )


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that decide a run's numbers; a missing one
    is left out.
    """
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def source_sha256() -> str:
    """Hash our own source files as they lie here."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(path for room in _ROOMS for path in (root / room).rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0{canon.file_sha256(path)}\n".encode())
    return digest.hexdigest()


def start_pool(study: Study, check_stop: Callable[[], None]) -> Pool:
    """The workers that the plan asks for.

    Raises PoolDead, ClusterUnfit, and what `check_stop` does.
    """
    from launcher.workers.host import HostFactory

    plan, cluster = study.plan, study.plan.cluster
    factory = HostFactory(
        corpus=str(study.corpus or ""),
        weights=plan.data.weights or None,
        code_dir=str(study.code_dir),
        study_dir=str(study.study_dir.resolve()),
        timeout_seconds=plan.proxy.timeout_seconds,
        gpu_share=cluster.worker_gpus,
        own_trainer=plan.command is not None,
    )
    if cluster.backend == "inline":
        return InlinePool(factory)
    from sweeps.ray.nodes import WorkerPlacement
    from sweeps.ray.pool import RayPool

    if not cluster.address and "RAY_ADDRESS" in os.environ:
        say("RAY_ADDRESS is set but not used: `--set cluster.address=auto` joins that cluster")
    say(f"joining Ray at {cluster.address}" if cluster.address else "starting Ray on this machine")
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
        node_check=node_check(study) if cluster.address else None,
        check_stop=check_stop,
    )
    say(pool.where)
    return pool
