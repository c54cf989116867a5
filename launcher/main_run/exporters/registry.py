"""The registry of exporters, and what their modules have."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Protocol, runtime_checkable

from forerun._launcher.main_run.exporters.fidelity import FidelityReport
from forerun._launcher.main_run.frozen.frozen import Decision
from forerun._proxies.core.shape import Shape

EXPORTER_MODULES = {
    "native": "native",
    "torchtitan": "torchtitan",
    "huggingface": "huggingface",
    "megatron-lm": "megatron_lm",
    "olmo-core": "olmo_core",
    "command": "command",
}
"""Module in `trainers` that writes a trainer's files, by the name that users type."""


@runtime_checkable
class Exporter(Protocol):
    """A module of `trainers`.

    A module whose trainer does not do everything as frozen also has `predict_run(decision)`, which
    returns what the trainer will do (`forerun._launcher.main_run.exporters.comparison.RunNumbers`).
    """

    VERSIONS: tuple[str, ...]
    """Versions of the trainer that the module writes files for, the default last."""

    def export(self, decision: Decision, out_dir: Path, version: str) -> FidelityReport:
        """Write the trainer's files, and return what became of each leaf field of the decision.

        Raises:
            ExportError: The version is unknown, or the trainer cannot run the decision. The error
                lists every problem, and nothing is written.
            FrozenError: The groups do not fit the shape's parameters.
        """


@runtime_checkable
class ProvableExporter(Exporter, Protocol):
    """A module of `trainers` whose exports have a `prove.py`."""

    def parameter_names(self, shape: Shape) -> dict[str, str]:
        """Return the trainer's name of each parameter by forerun's name."""


def load_exporter(trainer: str) -> Exporter:
    """Import the module that writes the files of a trainer, a key of `EXPORTER_MODULES`."""
    module: object = importlib.import_module(
        f"forerun._launcher.main_run.exporters.trainers.{EXPORTER_MODULES[trainer]}"
    )
    assert isinstance(module, Exporter)
    return module
