"""The nodes of a Ray cluster: does its head answer, how many workers fit, can they run the study?

Ray itself comes in as an argument, from the only module that imports it (`sweeps.ray.pool`).
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from proxies.core.notation import counted
from sweeps.store.errors import ClusterUnfit

CONNECT_SECONDS = 5.0
RPC_SECONDS = 5.0
CHECK_SECONDS = 60.0  # the first task on a node starts a worker there
SETTLE_SECONDS = 5.0
"""Seconds without growth after which free resources are taken as they are (`measure_resources`)."""
_POLL_SECONDS = 0.05

NodeCheck = Callable[[], list[str]]
"""What a node is asked before it gets work: its problems, none if all is well. Picklable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPlacement:
    """Where workers run, and what each takes of it."""

    address: str = ""
    """`host:port` of a cluster's head, or `auto`; empty: a cluster of our own, on this machine."""
    worker_cpus: float = 1.0
    worker_gpus: float = 0.0
    """A share of a device below 1, or a whole number."""
    worker_memory_gib: float = 0.0
    """0: not asked for."""

    @property
    def needs(self) -> dict[str, float]:
        """What one worker needs, as Ray names resources."""
        needs = {
            "CPU": self.worker_cpus,
            "GPU": self.gpu_share,
            "memory": self.worker_memory_gib * 2**30,
        }
        return {name: amount for name, amount in needs.items() if amount > 0}

    @property
    def shares_gpus(self) -> bool:
        """Whether several workers may sit on one GPU."""
        return 0 < self.worker_gpus < 1

    @property
    def gpu_share(self) -> float:
        """GPUs of one worker as Ray counts them, in 1/10,000, rounded down: seven sevenths must
        fit.
        """
        return math.floor(self.worker_gpus * 10_000 + 1e-6) / 10_000

    def __str__(self) -> str:
        each = ", ".join(
            f"memory {self.worker_memory_gib:g} GiB" if name == "memory" else f"{name} {amount:g}"
            for name, amount in self.needs.items()
        )
        return f"{each} each"


def answers(head: str, seconds: float = CONNECT_SECONDS) -> bool:
    """Whether a server listens at `host:port`."""
    host, _, port = head.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except (OSError, ValueError):
        return False
    return True


def found_head(ray: Any, address: str) -> str:
    """`host:port` of the head of an existing cluster, once it has answered our token.

    Raises:
        ClusterUnfit: there is none, it does not answer, or it refuses us.
    """
    try:
        head = str(ray._private.services.canonicalize_bootstrap_address_or_die(address))
    except (ConnectionError, ValueError, OSError) as error:
        raise ClusterUnfit(
            f"cluster.address = {address!r}: {str(error).splitlines()[0]}"
        ) from error
    if not answers(head):
        raise ClusterUnfit(
            f"cluster.address = {address!r}: nothing answers at {head}: is the cluster running?"
        )
    try:
        alive_nodes(ray._raylet.GcsClient(address=head))
    except ray.exceptions.AuthenticationError as error:
        raise ClusterUnfit(
            f"cluster.address = {address!r}: {head} refuses this token: set RAY_AUTH_MODE=token, "
            "and RAY_AUTH_TOKEN "
            "or RAY_AUTH_TOKEN_PATH, to the values with which the cluster was started"
        ) from error
    except ray.exceptions.RayError as error:
        raise ClusterUnfit(
            f"cluster.address = {address!r}: {head} is not the head of a Ray cluster ({error})"
        ) from error
    return head


def alive_nodes(gcs: Any, seconds: float = RPC_SECONDS) -> dict[str, str]:
    """Node id -> address, of the nodes that the head believes alive. Raises RayError if it does not
    say in time.
    """
    nodes = gcs.get_all_node_info(timeout=seconds)
    alive = {
        node_id.hex(): str(node.node_manager_address)
        for node_id, node in nodes.items()
        if node.state == 0
    }
    return dict(sorted(alive.items(), key=lambda item: item[1]))


def room(resources: Mapping[str, Mapping[str, float]], place: WorkerPlacement) -> int:
    """How many workers fit. None is split over two nodes, nor is a share of a GPU over two GPUs.

    Args:
        resources: node id -> resource -> amount.
        place: what a worker takes.
    """
    return sum(node_room(node, place) for node in resources.values())


def node_room(node: Mapping[str, float], place: WorkerPlacement) -> int:
    """How many workers fit on one node, given its resources."""
    slack = 1 + 1e-9  # fractions: ten tenths are one
    needs = {
        name: amount
        for name, amount in place.needs.items()
        if name != "GPU" or not place.shares_gpus
    }
    most = [math.floor(node.get(name, 0.0) * slack / amount) for name, amount in needs.items()]
    if place.shares_gpus:
        most.append(sum(math.floor(part * slack / place.gpu_share) for part in devices(node)))
    return min(most)


def devices(node: Mapping[str, float]) -> list[float]:
    """The GPUs of a node, each as the part of it that is free: whole ones first."""
    whole, part = divmod(node.get("GPU", 0.0), 1.0)
    return [1.0] * int(whole) + ([round(part, 4)] if part >= 1e-4 else [])


Resources = dict[str, dict[str, float]]
"""Node id -> resource -> amount."""


def measure_resources(
    ray: Any, place: WorkerPlacement, num_workers: int, check: Callable[[], None]
) -> tuple[Resources, Resources]:
    """Return all resources and the free ones; where every worker that fits is wanted, once no more
    become free.

    The head learns late that a driver has ended and its resources are free again: a driver that
    starts at once would count less room than there is, and keep fewer workers to its end.

    Args:
        ray: the module, connected.
        place: what a worker takes.
        num_workers: the number wanted; 0: as many as fit.
        check: called at each look: raises what ends the wait.
    """
    total: Resources = ray._private.state.total_resources_per_node()
    num_wanted = 0 if num_workers else room(total, place)
    most_room, grew_at = -1, time.monotonic()
    while True:
        check()
        free: Resources = ray._private.state.available_resources_per_node()
        now, current_room = time.monotonic(), room(free, place)
        if current_room > most_room:
            most_room, grew_at = current_room, now
        if current_room >= num_wanted or now - grew_at > SETTLE_SECONDS:
            return total, free
        time.sleep(_POLL_SECONDS)


def described(resources: Mapping[str, Mapping[str, float]], names: Mapping[str, str]) -> str:
    """What nodes have, in words.

    Args:
        resources: node id -> resource -> amount.
        names: node id -> address, of the nodes to tell of.
    """
    lines = []
    for node, address in names.items():
        has = resources.get(node, {})
        parts = [
            counted(has.get("CPU", 0), "CPU"),
            counted(has.get("GPU", 0), "GPU"),
            f"{has.get('memory', 0) / 2**30:.1f} GiB",
        ]
        lines.append(f"\n  {address}: {', '.join(parts)}")
    return "".join(lines)


def look(check: NodeCheck) -> list[str]:
    """The task that asks one node. A function of this module, so that a node without our code fails
    by name.
    """
    return check()


def _wait(
    ray: Any, references: list[Any], check_stop: Callable[[], None]
) -> tuple[list[Any], list[Any]]:
    """Those of the tasks that end in time, and the others; `check_stop` is called each second."""
    until, late = time.monotonic() + CHECK_SECONDS, references
    while late and time.monotonic() < until:
        _, late = ray.wait(late, num_returns=len(late), timeout=1.0)
        check_stop()
    return [each for each in references if each not in late], late


def check_nodes(
    ray: Any,
    nodes: Mapping[str, str],
    check: NodeCheck,
    environment: dict[str, str],
    check_stop: Callable[[], None],
) -> None:
    """Ask every node at once.

    Args:
        ray: the module, connected.
        nodes: id -> address.
        check: what is asked.
        environment: of the asking process, as workers will have it.
        check_stop: called each second while nodes answer: raises what ends that.

    Raises:
        ClusterUnfit: every node with problems, and those that do not answer in time.
    """
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    plain = {"num_cpus": 0, "max_retries": 0, "runtime_env": {"env_vars": environment}}
    task = ray.remote(look)
    asked = {
        task.options(**plain, scheduling_strategy=strategy(node, soft=False)).remote(check): address
        for node, address in nodes.items()
    }
    done, late = _wait(ray, list(asked), check_stop)
    problems = [f"{asked[reference]}: no answer within {CHECK_SECONDS:g} s" for reference in late]
    for reference in done:
        try:
            said = ray.get(reference, timeout=RPC_SECONDS)
        except ray.exceptions.RayError as error:
            last = [
                type(error).__name__,
                *(line.strip() for line in str(error).splitlines() if line.strip()),
            ][-1]
            said = [f"forerun does not run there: {last}"]
        problems += [f"{asked[reference]}: {problem}" for problem in said]
    if problems:
        listed = "".join(f"\n  {problem}" for problem in sorted(problems))
        raise ClusterUnfit(
            f"of {counted(len(nodes), 'node')} that were asked, these cannot run this "
            f"study:{listed}"
        )
