"""Plans for typical situations, which `forerun init --preset NAME` writes. Standard library only.

Each preset is a file in `preset_files`. The sizes of a preset follow published practice, and its
file names the source. `forerun estimate` counts the cost of a plan as a share of the main run's.
This project has not run any of these plans on its GPUs.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

Values = Mapping[str, Mapping[str, object]]
"""Values of a plan, by section and key."""
NODE_GPUS = 8
"""Number of GPUs of a typical node."""
NOT_MEASURED = (
    "Not measured: this project has run no plan of this size on a GPU. Hours and dollars are",
    "arithmetic from published shares of the peak; `forerun estimate` lists what it assumes.",
    "Measure some steps first (docs/first-plan.md).",
)
_FILES = Path(__file__).parent / "preset_files"
_NAMES = ("cpu", "demo", "gpu-24gb", "8xh100", "slurm")


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A typical situation, and the plan for it."""

    about: str
    """Description of the situation, for the help."""
    gpu: str
    """Name of the GPU in the reference table; empty for none."""
    num_gpus: int
    budget_flops: float
    """Budget of the main run in FLOPs if the user gives none."""
    values: Values
    """Values that differ from the defaults of a plan."""
    head: tuple[str, ...] = ()
    """Lines of comment at the beginning of the plan."""


def build_slurm_options(num_gpus: int) -> tuple[str, ...]:
    """Return options of `sbatch` for whole nodes. The user adds partition and account."""
    nodes, gpus_per_node = max(1, num_gpus // NODE_GPUS), min(num_gpus, NODE_GPUS)
    return (
        f"--nodes={nodes}",
        f"--gpus-per-node={gpus_per_node}",
        "--cpus-per-task=64",
        "--time=24:00:00",
    )


def _load_preset(name: str) -> Preset:
    """Load a preset from its file, on top of the file that it names as its `base`."""
    preset = _read_file(name)
    plans = [_read_file(preset["base"])["plan"]] if "base" in preset else []
    plans += [preset["plan"]] if "plan" in preset else []
    values: dict[str, dict[str, object]] = {}
    for plan in plans:
        for section, keys in plan.items():
            values.setdefault(section, {}).update(
                {key: tuple(v) if isinstance(v, list) else v for key, v in keys.items()}
            )
    # The first line names the situation; the warning follows it.
    head = preset.get("head", [])
    return Preset(
        about=preset["about"],
        gpu=preset["gpu"],
        num_gpus=preset["num_gpus"],
        budget_flops=preset["budget_flops"],
        values=values,
        head=(head[0], *NOT_MEASURED, *head[1:]) if head else (),
    )


@functools.cache
def _read_file(name: str) -> dict[str, Any]:
    return tomllib.loads((_FILES / f"{name}.toml").read_text(encoding="utf-8"))


PRESETS: Mapping[str, Preset] = MappingProxyType({name: _load_preset(name) for name in _NAMES})


def choose_preset(memory_gb: float, num_gpus: int) -> str:
    """Return the name of the preset that is nearest to this number of GPUs with this memory."""
    if num_gpus > NODE_GPUS:
        return "slurm"
    # 40 GB is the memory of the smaller A100.
    return "gpu-24gb" if num_gpus == 1 and memory_gb < 40 else "8xh100"


def build_layout(num_gpus: int) -> dict[str, object]:
    """Return the data-parallel keys of `[launch]` for this number of GPUs: the GPUs of a node share
    the model, and nodes are replicas.
    """
    return {
        "data_parallel_shard": min(num_gpus, NODE_GPUS),
        "data_parallel_replicate": max(1, num_gpus // NODE_GPUS),
    }
