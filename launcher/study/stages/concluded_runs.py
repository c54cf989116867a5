"""Main runs that have ended, with the forecasts made for them. They are rows of `forerun fit
STUDY`, and the errors of their forecasts scale later intervals.

A study's own forecast, and so the digest that it froze, never depends on its main run. This module
does not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forerun._launcher.main_run.frozen.concluded_run import ConcludedRun, NotConcludedError
from forerun._proxies.core import canon
from forerun._proxies.core.notation import format_factor
from forerun._scaling_fits.forecast.conclusive import compute_interval_scale
from forerun._sweeps.store.ledger import Ledger

if TYPE_CHECKING:
    from forerun._scaling_fits.forecast.uncertainty import FittedRuns

CONCLUDED = "concluded"
"""Kind of the ledger's records of concluded runs."""


def load_concluded_runs(ledger: Ledger) -> list[ConcludedRun]:
    """Return the study's concluded runs, oldest first.

    Raises:
        CanonError: This version cannot read a record.
    """
    return [
        canon.decode(ConcludedRun, record.body, f"concluded {record.key[:16]}")
        for record in ledger.read_records(CONCLUDED)
    ]


def record_concluded(study_dir: Path, run: ConcludedRun, data_id: str) -> ConcludedRun:
    """Record a concluded run in a study's ledger, and return it as recorded.

    Recording a run again changes nothing.

    Args:
        study_dir: Folder of the study.
        run: The run.
        data_id: Id of the data that the run's config was frozen for.

    Raises:
        ConcludedOtherwiseError: The run was recorded before, with another loss.
        NotConcludedError: The study was made with other data.
        SweepError, PlanError, DataError: The ledger cannot be written.
    """
    from forerun._launcher.study.stages.study_folder import open_ledger, read_recorded_study

    if (known := Ledger.read(study_dir).find(CONCLUDED, run.digest)) is not None:
        recorded = canon.decode(ConcludedRun, known.body)
        run.require_same_loss(recorded.actual_nats, study_dir)
        return recorded
    study = read_recorded_study(study_dir)
    if study.manifest.data_id != data_id:
        raise NotConcludedError(
            f"{study_dir} was made with other data than this config: name the config's study with "
            "--study"
        )
    with open_ledger(study) as ledger:
        ledger.append(CONCLUDED, run.digest, run)
    return run


def scale_intervals(fit: FittedRuns, runs: Sequence[ConcludedRun]) -> FittedRuns:
    """Return the fit with intervals as wide as the errors of earlier forecasts require, and with a
    warning that says so.
    """
    if not runs:
        return fit
    misses = [run.forecast_outcome.z for run in runs]
    scale = compute_interval_scale(misses, fit.level)
    sentence = (
        f"the fit includes {len(misses)} concluded main runs; their forecasts missed by up to "
        f"{max(map(abs, misses)):.2g} standard deviations, so intervals of a loss are "
        f"{format_factor(scale)} times as wide as the fit's own"
    )
    return dataclasses.replace(fit, record_scale=scale, warnings=(*fit.warnings, sentence))
