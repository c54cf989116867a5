"""Where the states of unfinished runs lie: `checkpoints/<run id>/`, written by workers, removed by
the driver.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Container
from pathlib import Path

from sweeps.store.curves import checked_id

CHECKPOINTS_DIR = "checkpoints"
# as `proxies.training.slot_state` names them
_STATE = re.compile(r"step-(\d{8})-[0-9a-f]{64}\.safetensors")


def checkpoint_dir(study_dir: Path, run_id: str) -> Path:
    """The folder of a run's states.

    Raises:
        ValueError: `run_id` is not a sha256 in hex (and so could name another place).
    """
    return study_dir / CHECKPOINTS_DIR / checked_id(run_id)


def saved_step(study_dir: Path, run_id: str) -> int:
    """Optimizer steps done in the newest of a run's states, by its name; 0 where there is none."""
    steps = [0]
    with contextlib.suppress(OSError):
        names = [path.name for path in checkpoint_dir(study_dir, run_id).iterdir()]
        steps += [int(found[1]) for name in names if (found := _STATE.fullmatch(name))]
    return max(steps)


def drop_checkpoints(study_dir: Path, run_id: str) -> None:
    """Remove the states of a run that has its outcome, as far as that can be done: they only take
    room.
    """
    with contextlib.suppress(OSError):
        shutil.rmtree(checkpoint_dir(study_dir, run_id))


def drop_stale_checkpoints(study_dir: Path, settled: Container[str]) -> None:
    """Remove the states of all runs in `settled`: a driver that was killed, or a worker given up,
    may leave some.
    """
    folder = study_dir / CHECKPOINTS_DIR
    for each in list(folder.iterdir()) if folder.is_dir() else []:
        if each.name in settled:
            drop_checkpoints(study_dir, each.name)
