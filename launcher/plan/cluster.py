"""Section `[cluster]` of a plan: where proxies run. No part of the question: it may change on resume."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from launcher.plan.keys import Count, Section
from sweeps.run.budget import Caps

if TYPE_CHECKING:
    from launcher.plan.plan import Plan

Cap = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]

_ADDRESS = re.compile(r"auto|([\w.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
_SLURM_OPTION = re.compile(r"(--[a-z][a-z0-9-]*|-[A-Za-z])([= ][ -~]+)?")
LEAST_SHARE = 0.01
"""Of a GPU: below, no worker has room for CUDA itself, and Ray counts in 1/10,000."""
_OURS = ("--ntasks", "--ntasks-per-node", "--signal", "--requeue", "--no-requeue", "--open-mode", "--export", "-n")


class ClusterSection(Section):
    """Where proxies run."""

    backend: Literal["ray", "inline"] = Field("ray", description="ray: workers; inline: this process.")
    address: str = Field(
        "", description="Of an existing Ray cluster, host:port or auto; empty: workers on this machine alone."
    )
    num_workers: Annotated[int, Field(ge=0, le=10**6)] = Field(
        0,
        description="Ray workers, one thread each; 0: as many as there is room for. With "
        "proxy.num_ranks a worker is a group of so many, and what it takes is what each of them takes.",
    )
    worker_cpus: Annotated[float, Field(gt=0, le=10**4)] = Field(1.0, description="CPU cores a worker takes.")
    worker_gpus: Annotated[float, Field(ge=0, le=10**4)] = Field(
        0.0,
        description="GPUs a worker takes; below 1 several share one, dealt out evenly, each held to its share of its "
        "memory.",
    )
    worker_memory_gib: Annotated[float, Field(ge=0, le=10**6)] = Field(
        0.0, description="Memory a worker takes, for placing it; 0: not counted."
    )
    slurm_options: tuple[str, ...] = Field(
        (), description='For `forerun run --sbatch FILE`: lines of #SBATCH, as "--nodes=4", "--time=08:00:00".'
    )
    trusted_hosts: tuple[str, ...] = Field(
        (), description="Machines to use again that a replay had put into quarantine: mended since."
    )
    max_attempts: Count = Field(3, description="Times a run is tried that brings its worker down by itself.")
    max_runs: Annotated[int, Field(ge=0)] = Field(
        0, description="Most runs of the study, over all its drivers; 0: any."
    )
    max_flops: Cap = Field(0.0, description="Most training FLOPs of all proxies; 0: any.")
    max_hours: Cap = Field(0.0, description="Most hours with a driver at work; 0: any.")
    max_device_hours: Cap = Field(0.0, description="The same times the devices held; 0: any.")
    max_usd: Cap = Field(0.0, description="Most dollars, at usd_per_device_hour; 0: any.")
    usd_per_device_hour: Cap = Field(0.0, description="What a device costs; 0: not known.")

    def num_devices(self, num_workers: int) -> float:
        """What so many workers (or ranks of workers) hold: GPUs, or cores where they have none."""
        return num_workers * (self.worker_gpus or self.worker_cpus)

    @property
    def caps(self) -> Caps:
        """The most that the study may take."""
        return Caps(
            num_runs=self.max_runs or None,
            flops=self.max_flops or None,
            hours=self.max_hours or None,
            device_hours=self.max_device_hours or None,
            usd=self.max_usd or None,
            usd_per_device_hour=self.usd_per_device_hour or None,
        )


def cluster_problems(cluster: ClusterSection) -> list[str]:
    """What is wrong with the section, beyond single numbers."""
    problems = []
    if cluster.address and not _ADDRESS.fullmatch(cluster.address):
        problems.append(f"cluster.address = {cluster.address!r}: host:port of the head, or auto, is wanted")
    if cluster.address and cluster.backend != "ray":
        problems.append(f'cluster.address = {cluster.address!r} wants cluster.backend = "ray"')
    if 0 < cluster.worker_gpus < LEAST_SHARE:
        problems.append(f"cluster.worker_gpus = {cluster.worker_gpus:g}: 0, or {LEAST_SHARE} and more, is wanted")
    if cluster.worker_gpus > 1 and not cluster.worker_gpus.is_integer():
        problems.append(f"cluster.worker_gpus = {cluster.worker_gpus:g}: a share of one, or a whole number, is wanted")
    if cluster.max_usd and not cluster.usd_per_device_hour:
        problems.append(f"cluster.max_usd = {cluster.max_usd}: cluster.usd_per_device_hour is wanted with it")
    for option in cluster.slurm_options:
        if not _SLURM_OPTION.fullmatch(option):
            problems.append(f"cluster.slurm_options: {option!r}: one option of sbatch is wanted, as --nodes=4")
        elif re.split("[= ]", option)[0] in _OURS:
            problems.append(f"cluster.slurm_options: {option!r} is the script's own to set")
    return problems


def rank_problems(plan: Plan) -> list[str]:
    """What several ranks a run want of the rest of the plan."""
    proxy, cluster, ranks = plan.proxy, plan.cluster, f"proxy.num_ranks = {plan.proxy.num_ranks}"
    if proxy.num_ranks == 1:
        return []
    problems = []
    if cluster.backend != "ray":
        problems.append(f'{ranks} wants cluster.backend = "ray": a rank is a process of its own')
    if cluster.worker_gpus not in (0, 1):
        problems.append(
            f"cluster.worker_gpus = {cluster.worker_gpus:g}: with {ranks} a rank takes 1 GPU, or 0 (a core)"
        )
    if own := proxy.factory or proxy.command:
        problems.append(f"{ranks}: {own!r} is not ours to shard; cluster.worker_gpus gives a command several GPUs")
    batches = {
        "proxy.batch_tokens": proxy.batch_tokens,
        "ladder.batch_tokens": plan.ladder.batch_tokens,
        **{f"transfer.batches, {ratio:g} times": round(ratio * proxy.batch_tokens) for ratio in plan.transfer.batches},
    }
    for name, batch_tokens in batches.items():
        sequences = batch_tokens // plan.batch_stages // plan.model.seq_len
        if sequences % proxy.num_ranks:
            problems.append(f"{name}: {ranks} does not divide the {sequences} sequences of a batch")
    return problems


def rank_needs(plan: Plan, num_cores: int) -> list[str]:
    """What a worker of several ranks takes, and what room this machine has for it, in words; else nothing.

    `num_cores`: of this machine.
    """
    cluster, num_ranks = plan.cluster, plan.proxy.num_ranks
    if num_ranks == 1:
        return []
    cpus, gpus = num_ranks * cluster.worker_cpus, num_ranks * cluster.worker_gpus
    takes = f"{cpus:g} CPUs" + (f" and {gpus:g} GPUs" if gpus else "")
    room = (
        f"the cluster at {cluster.address} is asked for room when it is joined"
        if cluster.address
        else f"this machine's {num_cores} cores have room for {int(num_cores / cpus) or 'no such run'}"
        + (" at a time" if num_cores >= cpus else "")
        + (", and its GPUs are counted when Ray starts" if gpus else "")
    )
    return [f"proxy.num_ranks = {num_ranks}: a run takes {takes}, on one node where one has them; {room}"]
