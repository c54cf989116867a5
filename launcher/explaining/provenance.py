"""What freezing keeps of a study for `forerun explain`, so that a config far from its study still says where from.

It is a part of the evidence, not of the decision: the digest does not know it.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any, cast

from proxies.core import canon
from proxies.core.canon import Json

if TYPE_CHECKING:
    from launcher.plan.plan import Plan
    from launcher.plan.study import Study
    from launcher.study.evidence import Findings

KEPT = ("choice", "ladder", "next_runs")
"""Parts of the report that are kept whole."""
PLACES = {"cluster": True, "data": {"path"}, "proxy": {"code_path"}}
"""What a plan says of one machine: no field comes from it."""


def plan_record(plan: Plan) -> dict[str, Json]:
    """Every key of a plan but those about places and machines."""
    return cast(dict[str, Json], json.loads(plan.model_dump_json(exclude=cast(Any, PLACES))))


def provenance(study: Study, found: Findings, body: dict[str, Json]) -> dict[str, Json]:
    """The plan, the search's choice, the runs of every stage by id, and what the ladder led to.

    Args:
        study: as it was begun.
        found: with a choice.
        body: of the report.
    """
    from launcher.experiments.rungs import checked_rungs

    assert found.searched is not None and found.transferred is not None
    checks = [spec.id for checked in checked_rungs(study, found.ladder) for spec in checked.extra]
    tests: list[Json] = [
        {
            "hyperparameter": test.hyperparameter,
            "axis": test.axis,
            "ids": [*dict.fromkeys(spec.id for spec in test.specs)],
        }
        for test in found.transferred.tests
    ]
    return {
        "plan": plan_record(study.plan),
        "search": _search(study, found, cast(dict[str, Any], body["search"])),
        "point": canon.to_json(found.transferred.point),
        "runs": {
            "search": [*dict.fromkeys(study.trial(point).id for point in found.searched.points)],
            "transfer": tests,
            "ladder": [spec.id for spec in found.ladder],
            "ladder_checks": [*dict.fromkeys(checks)],
        },
        **{key: body[key] for key in KEPT},
    }


def _search(study: Study, found: Findings, body: dict[str, Any]) -> dict[str, Json]:
    """The search without its trials one by one: those are in the ledger."""
    assert found.searched is not None
    best = next(trial for trial in body["trials"] if trial["index"] == body["best_trial"])
    return {
        "sampler": body["sampler"],
        "num_trials": len(body["trials"]),
        "by_status": canon.to_json(dict(Counter(trial["status"] for trial in body["trials"]))),
        "best_trial": body["best_trial"],
        "best_run": study.trial(found.searched.points[found.searched.best_trial]).id,
        "best_loss_nats": best["loss_nats"],
        "best": body["best"],
        "ranges": body["ranges"],
        "open_edges": body["open_edges"],
        "replicates": body["replicates"],
        "ties": body["ties"],
    }
