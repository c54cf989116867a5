"""How a study stands this moment, from its ledger and its driver's `live.json` alone: quick, and no judgement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from launcher.plan.plan import Plan
from proxies.core import canon
from proxies.core.canon import Json
from sweeps.run.budget import Caps, Spent, spent
from sweeps.store.glance import STATUSES, Glance, Outcome
from sweeps.store.live import Live, read_live
from sweeps.store.lock import is_held


def now_body(study_dir: Path, glance: Glance, plan: Plan) -> dict[str, Json]:
    """What has ended, what is running, what it took, what is left; glance and plan are the study's, as just read."""
    live, held = read_live(study_dir), is_held(study_dir)
    caps = plan.cluster.caps
    runs = glance.outcomes
    return {
        "chain": canon.to_json(glance.checked),
        "num_runs": _by_status(runs),
        "num_imported": sum(run.imported for run in runs),
        "num_lost_executions": glance.num_lost,
        "by_width": [_at_width(width, runs) for width in sorted({run.width for run in runs})],
        "at_work": held,
        "driver": None if live is None else _driver(live, held),
        "spent": canon.to_json(_spent(glance, live, caps)),
        "caps": canon.to_json(caps),
        "target_flops": plan.target.budget_flops,
    }


def _by_status(runs: Sequence[Outcome]) -> dict[str, Json]:
    counts = Counter(run.status for run in runs)
    return {status: counts[status] for status in STATUSES}


def _at_width(width: int, runs: Sequence[Outcome]) -> dict[str, Json]:
    here = [run for run in runs if run.width == width]
    finished = [run for run in here if run.loss_nats is not None]
    best = min(finished, key=lambda run: cast(float, run.loss_nats), default=None)
    return {
        "width": width,
        **_by_status(here),
        "best": None
        if best is None
        else {
            "run_id": best.run_id,
            "loss_nats": best.loss_nats,
            "learning_rate": best.learning_rate,
            "num_steps": best.num_steps,
            "num_layers": best.num_layers,
        },
    }


def _driver(live: Live, held: bool | None) -> dict[str, Json]:
    """The last look, and whether that driver is still there."""
    return {**cast(dict[str, Json], canon.to_json(live)), "at_work": held is not False and live.at_work}


def _spent(glance: Glance, live: Live | None, caps: Caps) -> Spent:
    """The ledger's count, with the hours of a driver that has not recorded its own yet."""
    if live is None or f"{live.driver}/{live.stretch}" in {record.key for record in glance.driven}:
        return spent(glance, caps.usd_per_device_hour)
    return spent(glance, caps.usd_per_device_hour, more=(live.seconds, live.device_seconds))
