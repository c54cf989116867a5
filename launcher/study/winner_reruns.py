"""A second run of a search's winning trial elsewhere, compared with the first; its outcome is a
gate of freezing.

If the same bits are promised and the second run gives another result, one of two machines computes
wrongly. The study then stops, because it is not known which numbers are right. The outcome is
recorded in the ledger, so a driver that follows a killed one continues with it. No torch, no Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from launcher.base.talk import say
from launcher.experiments.transferred_values import searched
from launcher.frozen.launch_file import CheckOutcome
from launcher.plan.study import Study
from launcher.study.gates import Gate, refuse_failed, worst
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.notation import format_nats
from proxies.core.spec import RunSpec
from sweeps.run.driver import HANG_SECONDS
from sweeps.run.kinds import where
from sweeps.run.reruns import carried_out, compare
from sweeps.store.errors import PoolDead
from sweeps.store.sites import HOST, PROCESS

if TYPE_CHECKING:
    from sweeps.run.pool import Pool
    from sweeps.store.ledger import Ledger

REPLAYED = "replayed"
"""Kind of the record of a second run's outcome; its key is the run's id."""
GATE = "replays_agree"


def replay_search(
    study: Study,
    ledger: Ledger,
    workers: Callable[[], Pool],
    bank_key: Callable[[RunSpec], str],
    check: Callable[[], None],
) -> None:
    """Run the winning trial again if the plan asks for it, and record the outcome.

    Args:
        study: Study whose search has ended.
        ledger: Ledger, open for writing.
        workers: Returns the idle pool; called only if there is something to run.
        bank_key: Returns the key that runs must share to train in one bank.
        check: Raises the error that ends the work; everything recorded stays.

    Raises:
        GateError: The trial gave another result, now or before, and nobody accepted that.
        PoolDead, DiskFull: The workers are gone, or the disk is full.
    """
    if study.replays_winner and not ledger.records(REPLAYED):
        search = searched(study, ledger)
        spec = study.trial(search.points[search.best_trial])
        say(f"replays: running the winning trial, run {spec.id[:12]}, again elsewhere")
        pool, first = workers(), ledger.results()[spec.id]
        outcome = carried_out(
            pool,
            spec,
            _choose_worker(first.environment, pool, where(pool, check)),
            bank_key=bank_key(spec),
            num_microbatches=int(first.environment.get("num_microbatches", "1")),
            max_attempts=study.plan.cluster.max_attempts,
            hang_seconds=HANG_SECONDS,
            check=check,
        )
        if isinstance(outcome, str):
            body: dict[str, Json] = {"outcome": "cannot_tell", "reason": outcome}
        else:
            body = cast(dict[str, Json], canon.to_json(compare(spec, first, outcome)))
        ledger.append(REPLAYED, spec.id, {"run_id": spec.id, **body})
        say(f"replays: {_describe_replay(ledger.records(REPLAYED)[-1].body)}")
    refuse_failed(study, ledger, replay_gates(study, ledger))


def _choose_worker(
    first_environment: Mapping[str, str], pool: Pool, sites: Mapping[int, Mapping[str, str]]
) -> int:
    """Return a worker on another host than the first run's; if there is none, one in a process that
    is started anew.
    """
    if not sites:
        raise PoolDead("replays: no worker reported its host; run the same command again to resume")
    worker = min(sites, key=lambda index: sites[index][HOST] == first_environment.get(HOST))
    if sites[worker][PROCESS] == first_environment.get(PROCESS):
        pool.restart(worker)
    return worker


def _describe_replay(body: Any) -> str:
    """Return the outcome of a replay in words."""
    trial = f"the winning trial, run {body['run_id'][:12]}"
    if "hosts" not in body:
        return f"{trial}: cannot tell: {body['reason']}"
    hosts = " and ".join(host or "an unnamed host" for host in body["hosts"])
    if body["outcome"] == "agrees":
        return f"{trial}: agrees, run on {hosts}: {body['reason']}"
    difference = (
        "" if body["end_nats"] is None else f" by {format_nats(body['end_nats'])} nats in the end"
    )
    word = "DIFFERS" if body["outcome"] == "differs" else "cannot tell: differs"
    return f"{trial}: {word} between {hosts}{difference}: {body['reason']}"


def replays_body(ledger: Ledger) -> dict[str, Json] | None:
    """Return the recorded replays for the report; None if there are none."""
    replays = [record.body for record in ledger.records(REPLAYED)]
    return {"replays": replays} if replays else None


def sentences(body: Any) -> list[str]:
    """Return the outcomes of the replays in `replays_body` in words."""
    return [
        f"replay of {_describe_replay(replay)}" for replay in (body or {"replays": []})["replays"]
    ]


def replay_gates(study: Study, ledger: Ledger) -> tuple[Gate, ...]:
    """Return the gate of the replay; empty if no replay was asked for."""
    replays: Any = [record.body for record in ledger.records(REPLAYED)]
    if not study.replays_winner and not replays:
        return ()
    outcomes: dict[str, CheckOutcome] = {
        "agrees": "passed",
        "differs": "failed",
        "cannot_tell": "cannot_tell",
    }
    outcome = worst([outcomes[body["outcome"]] for body in replays] or ["cannot_tell"])
    reasons = sentences({"replays": replays}) or [
        "the winning trial was not run again yet: run `forerun sweep PLAN`"
    ]
    return (Gate(name=GATE, outcome=outcome, reason="; ".join(reasons)),)
