"""The status of a study at this moment, from its ledger and its driver's `live.json` alone.

It is quick to compute and judges nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import cast, get_args

from launcher.plan.plan import Plan
from launcher.study.gates import coordinate_gate
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.spec import Run, Status
from sweeps.run.budget import BudgetCaps, Spent, is_driven, spent
from sweeps.run.lost_runs import LOST
from sweeps.store.ledger import Ledger
from sweeps.store.live import DriverState
from sweeps.store.lock import is_held

STATUSES: tuple[str, ...] = get_args(Status)


def now_body(
    study_dir: Path, live: DriverState | None, ledger: Ledger, plan: Plan
) -> dict[str, Json]:
    """Return the ended runs, the running ones, the spend, and the caps of a study.

    Args:
        study_dir: The study's folder.
        live: The driver's last state. Read it before the ledger: otherwise a record that the driver
            writes in between is missed, and the spend would fall between two calls.
        ledger: The ledger as just read.
        plan: The study's plan.
    """
    is_driven_now, caps = is_held(study_dir), plan.cluster.caps
    runs = ledger.runs()
    return {
        "num_runs": _count_by_status(runs),
        "num_imported": len(ledger.imported()),
        "num_lost_executions": len(ledger.records(LOST)),
        "coordinates": _summarize_coordinate_checks(ledger, plan.proxy.parametrization),
        "by_width": [
            _summarize_width(width, runs)
            for width in sorted({run.spec.shape.width for run in runs})
        ],
        "at_work": is_driven_now,
        "driver": None if live is None else _describe_driver(live, is_driven_now),
        "spent": canon.to_json(spent_now(ledger, live, caps)),
        "caps": canon.to_json(caps),
        "target_flops": plan.target.budget_flops,
    }


def _summarize_coordinate_checks(ledger: Ledger, parametrization: str) -> dict[str, Json]:
    """Return the gate's outcome of the coordinate checks so far, and each check's own outcome.

    The gate's outcome is null before the first check.
    """
    checks = cast(dict[str, dict[str, Json]], ledger.records_for_plan("coordinates"))
    return {
        "parametrization": parametrization,
        "outcome": coordinate_gate(checks, parametrization).outcome if checks else None,
        "checks": {name: check["outcome"] for name, check in checks.items()},
    }


def _count_by_status(runs: Sequence[Run]) -> dict[str, Json]:
    counts = Counter[str](run.result.status for run in runs)
    return {status: counts[status] for status in STATUSES}


def _summarize_width(width: int, runs: Sequence[Run]) -> dict[str, Json]:
    runs_at_width = [run for run in runs if run.spec.shape.width == width]
    finished = [run for run in runs_at_width if run.result.loss_nats is not None]
    best = min(finished, key=lambda run: cast(float, run.result.loss_nats), default=None)
    return {
        "width": width,
        **_count_by_status(runs_at_width),
        "best": None
        if best is None
        else {
            "run_id": best.spec.id,
            "loss_nats": best.result.loss_nats,
            "learning_rate": best.spec.hparams.learning_rate,
            "num_steps": best.result.num_steps,
            "num_layers": best.spec.shape.num_layers,
        },
    }


def _describe_driver(live: DriverState, is_driven_now: bool | None) -> dict[str, Json]:
    """Return the driver's last state, and whether that driver still works."""
    return {
        **cast(dict[str, Json], canon.to_json(live)),
        "at_work": is_driven_now is not False and live.at_work,
    }


def spent_now(ledger: Ledger, live: DriverState | None, caps: BudgetCaps) -> Spent:
    """Return the spend of a study, including the hours that its driver has not yet recorded.

    Args:
        ledger: The ledger as just read.
        live: The driver's last state, read before the ledger; None if there is none.
        caps: The plan's caps.
    """
    if live is None or is_driven(ledger, live.driver, live.stretch):
        return spent(ledger, caps)
    return spent(ledger, caps, more=(live.seconds, live.by_kind))
