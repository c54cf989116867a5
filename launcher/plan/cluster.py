"""Section `[cluster]` of a plan: where proxies run. No part of the question: it may change on resume."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from launcher.plan.keys import Count, Section, must
from sweeps.run.budget import Caps

Cap = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]

LEAST_SHARE = 0.01
"""The smallest share of a GPU: below it no worker has room for CUDA itself, and Ray counts in 1/10,000."""
_OURS = ("--ntasks", "--ntasks-per-node", "--signal", "--requeue", "--no-requeue", "--open-mode", "--export", "-n")
_ADDRESS = re.compile(r"|auto|([\w.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
_SLURM_OPTION = re.compile(r"(--[a-z][a-z0-9-]*|-[A-Za-z])([= ][ -~]+)?")
_Address = Annotated[str, must(_ADDRESS.fullmatch, "host:port of the head, or auto, is wanted")]
_SlurmOption = Annotated[
    str,
    must(_SLURM_OPTION.fullmatch, "one option of sbatch is wanted, as --nodes=4"),
    must(lambda option: re.split("[= ]", option)[0] not in _OURS, "the script's own to set"),
]
_GPUS = must(lambda number: number == 0 or LEAST_SHARE <= number <= 1 or (number > 1 and number.is_integer()),
             f"0, a share of one of at least {LEAST_SHARE}, or a whole number, is wanted")  # fmt: skip


class ClusterSection(Section):
    """Where proxies run."""

    backend: Literal["ray", "inline"] = Field("ray", description="ray: workers; inline: this process.")
    address: _Address = Field(
        "", description="Of an existing Ray cluster, host:port or auto; empty: workers on this machine alone."
    )
    num_workers: Annotated[int, Field(ge=0, le=10**6)] = Field(
        0,
        description="Ray workers, one thread each; 0: as many as there is room for.",
    )
    worker_cpus: Annotated[float, Field(gt=0, le=10**4)] = Field(1.0, description="CPU cores a worker takes.")
    worker_gpus: Annotated[float, Field(ge=0, le=10**4), _GPUS] = Field(
        0.0,
        description="GPUs a worker takes; below 1 several share one, dealt out evenly, each held to its share of its "
        "memory.",
    )
    worker_memory_gib: Annotated[float, Field(ge=0, le=10**6)] = Field(
        0.0, description="Memory a worker takes, for placing it; 0: not counted."
    )
    slurm_options: tuple[_SlurmOption, ...] = Field(
        (), description='For `forerun run --sbatch FILE`: lines of #SBATCH, as "--nodes=4", "--time=08:00:00".'
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
