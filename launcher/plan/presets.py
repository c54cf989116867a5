"""Plans for typical situations, which `forerun init --preset NAME` writes. Standard library only.

Each preset is a file in `preset_files`. Sizes follow published practice, which is named next to
each. `forerun estimate` counts their share of the main run's cost. This project has not run any of
these plans on its GPUs.
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
NODE_GPUS = 8
NOT_MEASURED = (
    (
        "Not measured: this project has run no plan of this size on a GPU. Hours and dollars are "
        "arithmetic from published"
    ),
    (
        "shares of the peak; `forerun estimate` lists what it assumes. Measure some steps first "
        "(docs/first-plan.md)."
    ),
)
_FILES = Path(__file__).parent / "preset_files"
_NAMES = ("cpu", "demo", "gpu-24gb", "8xh100", "slurm")


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A typical situation, and the plan for it."""

    about: str
    gpu: str
    """Name of the GPU in the reference table; empty for none."""
    num_gpus: int
    budget_flops: float
    """Budget of the main run in FLOPs if the user gives none."""
    values: Values
    head: tuple[str, ...] = ()


def slurm_options(num_gpus: int) -> tuple[str, ...]:
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
    own = _read_file(name)
    base = _read_file(own["base"]) if "base" in own else {}
    head = own.get("head", [])
    return Preset(
        about=own["about"],
        gpu=own["gpu"],
        num_gpus=own["num_gpus"],
        budget_flops=own["budget_flops"],
        values=_merge_sections(base.get("plan", {}), own.get("plan", {})),
        head=(head[0], *NOT_MEASURED, *head[1:]) if head else (),
    )


@functools.cache
def _read_file(name: str) -> dict[str, Any]:
    return tomllib.loads((_FILES / f"{name}.toml").read_text(encoding="utf-8"))


def _merge_sections(*parts: dict[str, dict[str, object]]) -> Values:
    """Merge sections key by key; later values replace earlier ones. Lists become tuples, as in a
    plan.
    """
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: {
            key: tuple(value) if isinstance(value, list) else value
            for part in parts
            for key, value in part.get(name, {}).items()
        }
        for name in names
    }


PRESETS: Mapping[str, Preset] = MappingProxyType({name: _load_preset(name) for name in _NAMES})


def preset_for(memory_gb: float, num_gpus: int) -> str:
    """Return the name of the preset that is nearest to this number of GPUs with this memory."""
    if num_gpus > NODE_GPUS:
        return "slurm"
    return "gpu-24gb" if num_gpus == 1 and memory_gb < 40 else "8xh100"


def layout(num_gpus: int) -> dict[str, object]:
    """Return the data-parallel keys of `[launch]` for this number of GPUs: the GPUs of a node share
    the model, and nodes are replicas.
    """
    return {
        "data_parallel_shard": min(num_gpus, NODE_GPUS),
        "data_parallel_replicate": max(1, num_gpus // NODE_GPUS),
    }
