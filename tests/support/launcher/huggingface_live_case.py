"""Readers of the checkpoints that the Hugging Face Trainer leaves."""

import json
from pathlib import Path

import numpy as np


def read_history(export_dir: Path) -> np.ndarray:
    """Return the step, loss, and gradient norm of each step, as in the newest checkpoint."""
    newest = list_checkpoints(export_dir)[-1]
    rows = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return np.array([[row["step"], row["loss"], row["grad_norm"]] for row in rows if "loss" in row])


def list_checkpoints(export_dir: Path) -> list[Path]:
    """Return the Trainer's checkpoints, oldest first."""
    return sorted(
        export_dir.glob("outputs/*/checkpoint-*"),
        key=lambda path: int(path.name.rpartition("-")[2]),
    )
