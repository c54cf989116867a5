"""Plans for real situations: what `forerun init --preset NAME` writes. Standard library only.

Each is a file of `preset_files`. Sizes follow published practice, named beside each; the shares of
the main run that they cost are what `forerun estimate` counts. None of these plans has been run on
its GPUs by this project.
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
    """A situation, and the plan for it."""

    about: str
    gpu: str
    """Name in the reference table; empty: none."""
    num_gpus: int
    budget_flops: float
    """The main run's budget where nobody gave another."""
    values: Values
    head: tuple[str, ...] = ()


def slurm_options(num_gpus: int) -> tuple[str, ...]:
    """Return options of `sbatch` for whole nodes; partition and account are the user's own to
    add.
    """
    nodes, each = max(1, num_gpus // NODE_GPUS), min(num_gpus, NODE_GPUS)
    return (f"--nodes={nodes}", f"--gpus-per-node={each}", "--cpus-per-task=64", "--time=24:00:00")


def _preset(name: str) -> Preset:
    """A preset by its file, on top of the file that it names as its `base`."""
    own = _read(name)
    base = _read(own["base"]) if "base" in own else {}
    head = own.get("head", [])
    return Preset(
        about=own["about"],
        gpu=own["gpu"],
        num_gpus=own["num_gpus"],
        budget_flops=own["budget_flops"],
        values=_joined(base.get("plan", {}), own.get("plan", {})),
        head=(head[0], *NOT_MEASURED, *head[1:]) if head else (),
    )


@functools.cache
def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((_FILES / f"{name}.toml").read_text(encoding="utf-8"))


def _joined(*parts: dict[str, dict[str, object]]) -> Values:
    """Sections key by key, the later part's values winning; lists as the plan has them."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: {
            key: tuple(value) if isinstance(value, list) else value
            for part in parts
            for key, value in part.get(name, {}).items()
        }
        for name in names
    }


PRESETS: Mapping[str, Preset] = MappingProxyType({name: _preset(name) for name in _NAMES})


def preset_for(memory_gb: float, num_gpus: int) -> str:
    """The preset that is nearest to so many GPUs of such a memory."""
    if num_gpus > NODE_GPUS:
        return "slurm"
    return "gpu-24gb" if num_gpus == 1 and memory_gb < 40 else "8xh100"


def layout(num_gpus: int) -> dict[str, object]:
    """Degrees of `[launch]` over so many GPUs: a node's share the model, nodes are replicas."""
    return {
        "data_parallel_shard": min(num_gpus, NODE_GPUS),
        "data_parallel_replicate": max(1, num_gpus // NODE_GPUS),
    }
