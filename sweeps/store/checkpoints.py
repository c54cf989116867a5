"""Folders of the saved states of unfinished runs: `checkpoints/<run id>/`, written by workers and
removed by the driver.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Container
from pathlib import Path

from forerun._sweeps.store.curves import require_run_id

CHECKPOINTS_DIR = "checkpoints"
# Name of a state, as in `forerun._proxies.training.slot_state`
_STATE = re.compile(r"step-(\d{8})-[0-9a-f]{64}\.safetensors")


def get_checkpoint_dir(study_dir: Path, run_id: str) -> Path:
    """Return the folder of a run's states.

    Raises:
        ValueError: `run_id` is not a sha256 in hex (and could name another place).
    """
    return study_dir / CHECKPOINTS_DIR / require_run_id(run_id)


def find_saved_step(study_dir: Path, run_id: str) -> int:
    """Return the optimizer steps done in the newest of a run's states, from its file name; 0 if
    there is none.
    """
    steps = [0]
    with contextlib.suppress(OSError):
        names = [path.name for path in get_checkpoint_dir(study_dir, run_id).iterdir()]
        steps += [int(match[1]) for name in names if (match := _STATE.fullmatch(name))]
    return max(steps)


def drop_checkpoints(study_dir: Path, run_id: str) -> None:
    """Remove the states of a run that has its outcome; failures are ignored, because states only
    take space.
    """
    with contextlib.suppress(OSError):
        shutil.rmtree(get_checkpoint_dir(study_dir, run_id))


def drop_stale_checkpoints(study_dir: Path, settled: Container[str]) -> None:
    """Remove the states of all runs in `settled`, which a killed driver or a worker that was given
    up may have left.
    """
    folder = study_dir / CHECKPOINTS_DIR
    for run_folder in list(folder.iterdir()) if folder.is_dir() else []:
        if run_folder.name in settled:
            drop_checkpoints(study_dir, run_folder.name)
