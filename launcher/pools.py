"""The workers of a study, as its plan asks for them: in this process, on this machine, or on a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from launcher.study import Study
from launcher.talk import say
from sweeps.pool import InlinePool, Pool
from sweeps.quarantine import quarantined, refuse_quarantined
from sweeps.sites import host

if TYPE_CHECKING:
    from sweeps.ledger import Ledger


def start_pool(study: Study, ledger: Ledger | None, check_stop: Callable[[], None]) -> Pool:
    """The workers that the plan asks for, none on a host that `ledger` has in quarantine.

    Raises PoolDead, ClusterUnfit, HostQuarantined, and what `check_stop` does.
    """
    from launcher.host import HostFactory

    plan, cluster = study.plan, study.plan.cluster
    factory = HostFactory(
        corpus=str(study.corpus or ""),
        weights=plan.data.weights or None,
        code_dir=str(study.code_dir),
        study_dir=str(study.study_dir.resolve()),
        timeout_seconds=plan.proxy.timeout_seconds,
        gpu_share=cluster.worker_gpus,
    )
    if ledger is not None and not cluster.address:
        refuse_quarantined(host(), ledger, cluster.trusted_hosts)
    if cluster.backend == "inline":
        return InlinePool(factory)
    from launcher.node_check import node_check
    from sweeps.pool_ray import RayPool
    from sweeps.ray_nodes import Place

    if not cluster.address and "RAY_ADDRESS" in os.environ:
        say("RAY_ADDRESS is set, and not used: `--set cluster.address=auto` joins that cluster")
    say(f"joining Ray at {cluster.address}" if cluster.address else "starting Ray on this machine")
    check_stop()
    found = () if ledger is None else quarantined(ledger)
    place = Place(
        address=cluster.address,
        worker_cpus=cluster.worker_cpus,
        worker_gpus=cluster.worker_gpus,
        worker_memory_gib=cluster.worker_memory_gib,
        num_ranks=plan.proxy.num_ranks,
        avoided=tuple(each for each in found if each not in cluster.trusted_hosts) if cluster.address else (),
    )
    pool = RayPool(
        cluster.num_workers, factory, place=place, node_check=node_check(study) if cluster.address else None,
        check_stop=check_stop,
    )  # fmt: skip
    say(pool.where)
    return pool
