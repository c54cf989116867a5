"""The status of a study at this moment, from its ledger and its driver's `live.json` alone.

The status is quick to compute: nothing is fitted for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from forerun._launcher.main_run.frozen.launch_file import CheckOutcome
from forerun._launcher.study.experiments.coordinate_record import read_coordinate_checks
from forerun._launcher.study.plan.plan import Plan
from forerun._launcher.study.stages.gates import judge_coordinates
from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.spec import Run, Status
from forerun._sweeps.run.budget import Spend, compute_spend, is_work_recorded
from forerun._sweeps.run.caps import BudgetCaps
from forerun._sweeps.run.retries import FAILURE_RECORD
from forerun._sweeps.store.ledger import Ledger
from forerun._sweeps.store.live_state import DriverState
from forerun._sweeps.store.lock import is_held

STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True, kw_only=True, slots=True)
class BestRun:
    """The run with the lowest loss at one width."""

    run_id: str
    loss_nats: float
    learning_rate: float
    num_steps: int
    num_layers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WidthStatus:
    """The ended runs of one width: their numbers by status, and the best of them."""

    width: int
    finished: int
    diverged: int
    pruned: int
    failed: int
    best: BestRun | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinateStatus:
    """The coordinate checks so far."""

    parametrization: str
    outcome: CheckOutcome | None
    """Outcome of the gate; None before the first check."""
    checks: dict[str, str]
    """Outcome of each check by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyStatus:
    """The ended runs, the running ones, the spend, and the caps of a study."""

    num_runs: dict[Status, int]
    """Number of ended runs by status."""
    num_imported: int
    num_lost_executions: int
    coordinates: CoordinateStatus
    by_width: tuple[WidthStatus, ...]
    at_work: bool | None
    """Whether a driver of the study is at work; None if that cannot be known."""
    driver: DriverState | None
    """Last state that a driver wrote; None before there was one."""
    driver_at_work: bool | None
    """Whether that driver still works; None if it is on another host, or there was none."""
    spent: Spend
    caps: BudgetCaps
    target_flops: float

    def to_json(self) -> dict[str, Json]:
        """Return the status as JSON."""
        body = cast(dict[str, Any], canon.to_json(self))
        at_work = body.pop("driver_at_work")
        if self.driver is not None:
            body["driver"]["at_work"] = at_work
        return body


def build_status(
    study_dir: Path, live: DriverState | None, ledger: Ledger, plan: Plan
) -> StudyStatus:
    """Return the status of a study at this moment.

    Args:
        study_dir: The study's folder.
        live: The driver's last state. Read it before the ledger: otherwise a record that the driver
            writes in between is missed, and the spend would fall between two calls.
        ledger: The ledger as just read.
        plan: The study's plan.
    """
    is_driven_now, caps = is_held(study_dir), plan.cluster.caps
    runs, checks = ledger.read_runs(), read_coordinate_checks(ledger)
    parametrization = plan.proxy.parametrization
    return StudyStatus(
        num_runs=_count_by_status(runs),
        num_imported=len(ledger.read_imported_ids()),
        num_lost_executions=len(ledger.read_records(FAILURE_RECORD)),
        coordinates=CoordinateStatus(
            parametrization=parametrization,
            outcome=judge_coordinates(checks, parametrization).outcome if checks else None,
            checks={name: check.outcome for name, check in checks.items()},
        ),
        by_width=tuple(
            _summarize_width(width, runs)
            for width in sorted({run.spec.shape.width for run in runs})
        ),
        at_work=is_driven_now,
        driver=live,
        # A free lock proves that no driver works. Otherwise the driver's last state tells.
        driver_at_work=is_driven_now is not False and live.is_at_work if live else None,
        spent=summarize_spend(ledger, live, caps),
        caps=caps,
        target_flops=plan.target.budget_flops,
    )


def _count_by_status(runs: Sequence[Run]) -> dict[Status, int]:
    counts = Counter(run.result.status for run in runs)
    return {status: counts[status] for status in STATUSES}


def _summarize_width(width: int, runs: Sequence[Run]) -> WidthStatus:
    runs_at_width = [run for run in runs if run.spec.shape.width == width]
    finished = [
        BestRun(
            run_id=run.spec.id,
            loss_nats=loss,
            learning_rate=run.spec.hparams.learning_rate,
            num_steps=run.result.num_steps,
            num_layers=run.spec.shape.num_layers,
        )
        for run in runs_at_width
        if (loss := run.result.loss_nats) is not None
    ]
    best = min(finished, key=lambda run: run.loss_nats, default=None)
    return WidthStatus(width=width, **_count_by_status(runs_at_width), best=best)


def summarize_spend(ledger: Ledger, live: DriverState | None, caps: BudgetCaps) -> Spend:
    """Return the spend of a study, including the hours that its driver has not yet recorded.

    Args:
        ledger: The ledger as just read.
        live: The driver's last state, read before the ledger; None if there is none.
        caps: The plan's caps.
    """
    if live is None or is_work_recorded(ledger, live.driver, live.stretch):
        return compute_spend(ledger, caps)
    return compute_spend(ledger, caps, unrecorded=(live.seconds, live.by_kind))
