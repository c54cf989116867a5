"""Section `[cluster]` of a plan: where proxies run. No part of the question: it may change on resume."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from launcher.plan_sections import Count, Section
from sweeps.budget import Caps

Cap = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]

_ADDRESS = re.compile(r"auto|([\w.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
_SLURM_OPTION = re.compile(r"(--[a-z][a-z0-9-]*|-[A-Za-z])([= ][ -~]+)?")
_OURS = ("--ntasks", "--ntasks-per-node", "--signal", "--requeue", "--no-requeue", "--open-mode", "--export", "-n")


class ClusterSection(Section):
    """Where proxies run."""

    backend: Literal["ray", "inline"] = Field("ray", description="ray: workers; inline: this process.")
    address: str = Field(
        "", description="Of an existing Ray cluster, host:port or auto; empty: workers on this machine alone."
    )
    num_workers: Annotated[int, Field(ge=0, le=10**6)] = Field(
        0, description="Ray workers, one thread each; 0: as many as there is room for."
    )
    worker_cpus: Annotated[float, Field(gt=0, le=10**4)] = Field(1.0, description="CPU cores a worker takes.")
    worker_gpus: Annotated[float, Field(ge=0, le=10**4)] = Field(
        0.0, description="GPUs a worker takes; below 1 workers share one, and must fit its memory together."
    )
    worker_memory_gib: Annotated[float, Field(ge=0, le=10**6)] = Field(
        0.0, description="Memory a worker takes, for placing it; 0: not counted."
    )
    slurm_options: tuple[str, ...] = Field(
        (), description='For `forerun run --sbatch FILE`: lines of #SBATCH, as "--nodes=4", "--time=08:00:00".'
    )
    max_attempts: Count = Field(3, description="Times a run is tried when its worker dies.")
    max_runs: Annotated[int, Field(ge=0)] = Field(
        0, description="Most runs of the study, over all its drivers; 0: any."
    )
    max_flops: Cap = Field(0.0, description="Most training FLOPs of all proxies; 0: any.")
    max_hours: Cap = Field(0.0, description="Most hours with a driver at work; 0: any.")
    max_device_hours: Cap = Field(0.0, description="The same times the devices held; 0: any.")
    max_usd: Cap = Field(0.0, description="Most dollars, at usd_per_device_hour; 0: any.")
    usd_per_device_hour: Cap = Field(0.0, description="What a device costs; 0: not known.")

    def num_devices(self, num_workers: int) -> float:
        """What so many workers hold: GPUs, or cores where they have none."""
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
