"""Nodes of a Ray cluster: whether the head answers, how many workers fit, and whether the nodes can
run the study.

Ray itself is passed as an argument, from the only module that imports it
(`forerun._sweeps.ray.pool`).
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from forerun._proxies.core.notation import format_counted
from forerun._sweeps.store.errors import ClusterUnfit

CONNECT_SECONDS = 5.0
"""Time limit in seconds for a connection to a server's socket."""
RPC_SECONDS = 5.0
"""Time limit in seconds for an answer of Ray's head."""
CHECK_SECONDS = 60.0
"""Time limit in seconds for a node check; the first task on a node starts a worker process."""
SETTLE_SECONDS = 5.0
"""Seconds without growth after which the free resources are taken as final (`measure_resources`).
"""
_POLL_SECONDS = 0.05

NodeCheck = Callable[[], list[str]]
"""Function that a node runs before it gets work: returns the node's problems, empty if there are
none. Picklable.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPlacement:
    """The cluster on which workers run, and the resources that each worker takes."""

    address: str = ""
    """`host:port` of a cluster's head, or `auto`; empty: start a cluster on this machine."""
    worker_cpus: float = 1.0
    worker_gpus: float = 0.0
    """GPUs of one worker: a share of one GPU below 1, or a whole number."""
    worker_memory_gib: float = 0.0
    """Memory of one worker in GiB; 0: not reserved."""

    @property
    def resources(self) -> dict[str, float]:
        """Resources that one worker takes, by Ray's names."""
        needs = {
            "CPU": self.worker_cpus,
            "GPU": self.gpu_share,
            "memory": self.worker_memory_gib * 2**30,
        }
        return {name: amount for name, amount in needs.items() if amount > 0}

    @property
    def shares_gpus(self) -> bool:
        """Whether several workers may run on one GPU."""
        return 0 < self.worker_gpus < 1

    @property
    def gpu_share(self) -> float:
        """GPUs of one worker in Ray's unit of 1/10,000, rounded down so that seven sevenths fit."""
        return math.floor(self.worker_gpus * 10_000 + 1e-6) / 10_000

    def __str__(self) -> str:
        amounts = ", ".join(
            f"memory {self.worker_memory_gib:g} GiB" if name == "memory" else f"{name} {amount:g}"
            for name, amount in self.resources.items()
        )
        return f"{amounts} each"


def is_listening(head: str, seconds: float = CONNECT_SECONDS) -> bool:
    """Return whether a server listens at `host:port`."""
    host, _, port = head.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except (OSError, ValueError):
        return False
    return True


def find_head(ray: Any, address: str) -> str:
    """Return `host:port` of the head of an existing cluster, after it has accepted the token.

    Args:
        ray: the module.
        address: `host:port`, or `auto`.

    Raises:
        ClusterUnfit: there is no cluster, or its head does not answer or refuses the token.
    """
    try:
        head = str(ray._private.services.canonicalize_bootstrap_address_or_die(address))
    except (ConnectionError, ValueError, OSError) as error:
        raise ClusterUnfit(
            f"cluster.address = {address!r}: {str(error).splitlines()[0]}"
        ) from error
    if not is_listening(head):
        raise ClusterUnfit(
            f"cluster.address = {address!r}: nothing answers at {head}: is the cluster running?"
        )
    try:
        list_alive_nodes(ray._raylet.GcsClient(address=head))
    except ray.exceptions.AuthenticationError as error:
        raise ClusterUnfit(
            f"cluster.address = {address!r}: {head} refuses this token: set RAY_AUTH_MODE=token, "
            "and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, to the values with which the cluster was "
            "started"
        ) from error
    except ray.exceptions.RayError as error:
        raise ClusterUnfit(
            f"cluster.address = {address!r}: {head} is not the head of a Ray cluster ({error})"
        ) from error
    return head


def list_alive_nodes(gcs: Any, seconds: float = RPC_SECONDS) -> dict[str, str]:
    """Return node id -> address of the nodes that the head considers alive.

    Raises:
        RayError: the head does not answer within `seconds`.
    """
    nodes = gcs.get_all_node_info(timeout=seconds)
    alive = {
        node_id.hex(): str(node.node_manager_address)
        for node_id, node in nodes.items()
        if node.state == 0  # ALIVE in Ray's GcsNodeInfo
    }
    return dict(sorted(alive.items(), key=lambda item: item[1]))


def count_workers_that_fit(
    resources: Mapping[str, Mapping[str, float]], place: WorkerPlacement
) -> int:
    """Return how many workers fit.

    No worker is split over two nodes, and no share of a GPU over two GPUs.

    Args:
        resources: node id -> resource -> amount.
        place: resources that each worker takes.
    """
    return sum(count_workers_on_node(node, place) for node in resources.values())


def count_workers_on_node(node: Mapping[str, float], place: WorkerPlacement) -> int:
    """Return how many workers fit on one node, given its resources."""
    slack = 1 + 1e-9  # rounding: ten tenths must make one
    needs = {
        name: amount
        for name, amount in place.resources.items()
        if name != "GPU" or not place.shares_gpus
    }
    limits = [math.floor(node.get(name, 0.0) * slack / amount) for name, amount in needs.items()]
    if place.shares_gpus:
        limits.append(
            sum(math.floor(part * slack / place.gpu_share) for part in list_free_gpus(node))
        )
    return min(limits)


def list_free_gpus(node: Mapping[str, float]) -> list[float]:
    """Return the free part of each GPU of a node: whole GPUs first, then the fraction."""
    num_whole, fraction = divmod(node.get("GPU", 0.0), 1.0)
    return [1.0] * int(num_whole) + ([round(fraction, 4)] if fraction >= 1e-4 else [])


Resources = dict[str, dict[str, float]]
"""Node id -> resource -> amount."""


def measure_resources(
    ray: Any, place: WorkerPlacement, num_workers: int, check: Callable[[], None]
) -> tuple[Resources, Resources]:
    """Return all resources and the free resources of the cluster.

    If as many workers as fit are requested, this waits until no more resources become free. The
    head learns late that a driver has ended. Without the wait, a driver that starts right after
    another one would count too little room and start too few workers.

    Args:
        ray: the module, connected.
        place: resources that each worker takes.
        num_workers: number of workers requested; 0: as many as fit.
        check: called in each iteration; raises to end the wait.
    """
    total: Resources = ray._private.state.total_resources_per_node()
    num_awaited = 0 if num_workers else count_workers_that_fit(total, place)
    max_fitting, grew_at = -1, time.monotonic()
    while True:
        check()
        free: Resources = ray._private.state.available_resources_per_node()
        now, num_fitting = time.monotonic(), count_workers_that_fit(free, place)
        if num_fitting > max_fitting:
            max_fitting, grew_at = num_fitting, now
        if num_fitting >= num_awaited or now - grew_at > SETTLE_SECONDS:
            return total, free
        time.sleep(_POLL_SECONDS)


def format_resources(resources: Mapping[str, Mapping[str, float]], names: Mapping[str, str]) -> str:
    """Return the resources of nodes as text, one line a node.

    Args:
        resources: node id -> resource -> amount.
        names: node id -> address of the nodes to describe.
    """
    lines = []
    for node, address in names.items():
        amounts = resources.get(node, {})
        parts = [
            format_counted(amounts.get("CPU", 0), "CPU"),
            format_counted(amounts.get("GPU", 0), "GPU"),
            f"{amounts.get('memory', 0) / 2**30:.1f} GiB",
        ]
        lines.append(f"\n  {address}: {', '.join(parts)}")
    return "".join(lines)


def run_node_check(check: NodeCheck) -> list[str]:
    """Run a node check: the task that is sent to a node.

    Its pickle names this module, so the error of a node without forerun names it too.
    """
    return check()


def _await_tasks(
    ray: Any, references: list[Any], check_stop: Callable[[], None]
) -> tuple[list[Any], list[Any]]:
    """Return the tasks that end in time, and the late ones; call `check_stop` each second."""
    deadline, late = time.monotonic() + CHECK_SECONDS, references
    while late and time.monotonic() < deadline:
        _, late = ray.wait(late, num_returns=len(late), timeout=1.0)
        check_stop()
    return [reference for reference in references if reference not in late], late


def check_nodes(
    ray: Any,
    nodes: Mapping[str, str],
    check: NodeCheck,
    environment: dict[str, str],
    check_stop: Callable[[], None],
) -> None:
    """Check every node at once.

    Args:
        ray: the module, connected.
        nodes: node id -> address.
        check: the function that each node runs.
        environment: environment variables of the process that runs the check, the same as a
            worker's.
        check_stop: called each second while nodes answer; raises to end the wait.

    Raises:
        ClusterUnfit: names every node with problems, and the nodes that do not answer in time.
    """
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    options = {"num_cpus": 0, "max_retries": 0, "runtime_env": {"env_vars": environment}}
    task = ray.remote(run_node_check)
    tasks = {
        task.options(**options, scheduling_strategy=strategy(node, soft=False)).remote(
            check
        ): address
        for node, address in nodes.items()
    }
    done, late = _await_tasks(ray, list(tasks), check_stop)
    problems = [f"{tasks[reference]}: no answer within {CHECK_SECONDS:g} s" for reference in late]
    for reference in done:
        try:
            node_problems = ray.get(reference, timeout=RPC_SECONDS)
        except ray.exceptions.RayError as error:
            last_line = (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
            node_problems = [f"forerun does not run there: {last_line}"]
        problems += [f"{tasks[reference]}: {problem}" for problem in node_problems]
    if problems:
        listed = "".join(f"\n  {problem}" for problem in sorted(problems))
        raise ClusterUnfit(
            f"of {format_counted(len(nodes), 'node')} that were checked, these cannot run this "
            f"study:{listed}"
        )
