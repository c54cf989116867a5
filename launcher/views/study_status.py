"""The status of a study at this moment, from its ledger and its driver's `live.json` alone: quick, and no judgement."""

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


def now_body(study_dir: Path, live: DriverState | None, ledger: Ledger, plan: Plan) -> dict[str, Json]:
    """What has ended, what is running, what it took, what is left.

    Args:
        study_dir: the study's folder.
        live: the driver's last look, read before the ledger was: else what the driver recorded in between is lost,
            and what a study took would sink between two calls.
        ledger: as just read.
        plan: the study's.
    """
    held, caps = is_held(study_dir), plan.cluster.caps
    runs = ledger.runs()
    return {
        "num_runs": _by_status(runs),
        "num_imported": len(ledger.imported()),
        "num_lost_executions": len(ledger.records(LOST)),
        "coordinates": _checks(ledger, plan.proxy.parametrization),
        "by_width": [_at_width(width, runs) for width in sorted({run.spec.shape.width for run in runs})],
        "at_work": held,
        "driver": None if live is None else _driver(live, held),
        "spent": canon.to_json(spent_now(ledger, live, caps)),
        "caps": canon.to_json(caps),
        "target_flops": plan.target.budget_flops,
    }


def _checks(ledger: Ledger, parametrization: str) -> dict[str, Json]:
    """Return the gate's outcome of the coordinate checks made so far, and each one's own; null before the first."""
    checks = cast(dict[str, dict[str, Json]], ledger.records_for_plan("coordinates"))
    return {
        "parametrization": parametrization,
        "outcome": coordinate_gate(checks, parametrization).outcome if checks else None,
        "checks": {name: check["outcome"] for name, check in checks.items()},
    }


def _by_status(runs: Sequence[Run]) -> dict[str, Json]:
    counts = Counter[str](run.result.status for run in runs)
    return {status: counts[status] for status in STATUSES}


def _at_width(width: int, runs: Sequence[Run]) -> dict[str, Json]:
    here = [run for run in runs if run.spec.shape.width == width]
    finished = [run for run in here if run.result.loss_nats is not None]
    best = min(finished, key=lambda run: cast(float, run.result.loss_nats), default=None)
    return {
        "width": width,
        **_by_status(here),
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


def _driver(live: DriverState, held: bool | None) -> dict[str, Json]:
    """The last look, and whether that driver is still there."""
    return {**cast(dict[str, Json], canon.to_json(live)), "at_work": held is not False and live.at_work}


def spent_now(ledger: Ledger, live: DriverState | None, caps: BudgetCaps) -> Spent:
    """The ledger's count, with the hours of a driver that has not recorded its own yet; arguments as `now_body`'s."""
    if live is None or is_driven(ledger, live.driver, live.stretch):
        return spent(ledger, caps)
    return spent(ledger, caps, more=(live.seconds, live.by_kind))
