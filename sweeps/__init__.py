"""Sweeps of many runs that lose no result and never repeat a finished run.

Enters:   a source of `RunSpec`s (a list, or a search), a pool of workers that host banks, a study
folder.
Leaves:   a ledger of hash-chained records and a curve file per run.
Promises: one outcome per run, durable once reported; an interrupted search continues with the same
points.
Refuses:  a damaged ledger, a changed plan, a second or stale driver, a full disk, an unbounded
wait.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun._sweeps.store.view import StudyView


def load(study: str | os.PathLike[str]) -> StudyView:
    """Load the runs of a study folder, for notebooks.

    `sweeps.load("study").trials()` is a DataFrame with one row per run.

    Raises:
        SweepError: the folder holds no study, or its ledger is damaged.
    """
    from pathlib import Path

    from forerun._sweeps.store.view import StudyView

    return StudyView(Path(study))
