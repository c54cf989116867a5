"""The winning trial of a search run again elsewhere and compared; also as a gate of freezing.

A second execution that gives something else, where the same bits are promised, says that one of two
machines computes wrongly. The study then stops: it does not know which of its numbers to believe.
What came of it is in the ledger, so a driver that was killed before goes on with it. No torch, no
Ray.
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
"""Kind of the record of what came of a second execution; its key: the run's id."""
GATE = "replays_agree"


def replay_search(
    study: Study,
    ledger: Ledger,
    workers: Callable[[], Pool],
    bank_key: Callable[[RunSpec], str],
    check: Callable[[], None],
) -> None:
    """Run the winning trial again if the plan asks for it, and record what came of it.

    Args:
        study: its search has ended.
        ledger: open for writing.
        workers: the pool, idle; asked for only where something is to run.
        bank_key: what runs must agree on to share a bank.
        check: raises what ends the work; what was recorded stands.

    Raises:
        GateError: the trial gave something else, now or before, and nobody accepted that.
        PoolDead, DiskFull: as named.
    """
    if study.replays_winner and not ledger.records(REPLAYED):
        found = searched(study, ledger)
        spec = study.trial(found.points[found.best_trial])
        say(f"replays: running the winning trial, run {spec.id[:12]}, again elsewhere")
        pool, first = workers(), ledger.results()[spec.id]
        again = carried_out(
            pool,
            spec,
            _elsewhere(first.environment, pool, where(pool, check)),
            bank_key=bank_key(spec),
            num_microbatches=int(first.environment.get("num_microbatches", "1")),
            max_attempts=study.plan.cluster.max_attempts,
            hang_seconds=HANG_SECONDS,
            check=check,
        )
        if isinstance(again, str):
            body: dict[str, Json] = {"outcome": "cannot_tell", "reason": again}
        else:
            body = cast(dict[str, Json], canon.to_json(compare(spec, first, again)))
        ledger.append(REPLAYED, spec.id, {"run_id": spec.id, **body})
        say(f"replays: {_sentence(ledger.records(REPLAYED)[-1].body)}")
    refuse_failed(study, ledger, replay_gates(study, ledger))


def _elsewhere(first: Mapping[str, str], pool: Pool, sites: Mapping[int, Mapping[str, str]]) -> int:
    """A worker of another host than the first time, or else in a process started anew."""
    if not sites:
        raise PoolDead("replays: no worker reported its host; run the same command again to resume")
    worker = min(sites, key=lambda index: sites[index][HOST] == first.get(HOST))
    if sites[worker][PROCESS] == first.get(PROCESS):
        pool.restart(worker)
    return worker


def _sentence(body: Any) -> str:
    """What came of the replay."""
    which = f"the winning trial, run {body['run_id'][:12]}"
    if "hosts" not in body:
        return f"{which}: cannot tell: {body['reason']}"
    hosts = " and ".join(host or "an unnamed host" for host in body["hosts"])
    if body["outcome"] == "agrees":
        return f"{which}: agrees, run on {hosts}: {body['reason']}"
    end = "" if body["end_nats"] is None else f" by {format_nats(body['end_nats'])} nats in the end"
    word = "DIFFERS" if body["outcome"] == "differs" else "cannot tell: differs"
    return f"{which}: {word} between {hosts}{end}: {body['reason']}"


def replays_body(ledger: Ledger) -> dict[str, Json] | None:
    """What came of the replay; None where none was made."""
    made = [record.body for record in ledger.records(REPLAYED)]
    return {"replays": made} if made else None


def sentences(body: Any) -> list[str]:
    """The same in words."""
    return [f"replay of {_sentence(each)}" for each in (body or {"replays": []})["replays"]]


def replay_gates(study: Study, ledger: Ledger) -> tuple[Gate, ...]:
    """The gate of the replay: none where none was ever asked for."""
    made: Any = [record.body for record in ledger.records(REPLAYED)]
    if not study.replays_winner and not made:
        return ()
    outcomes: dict[str, CheckOutcome] = {
        "agrees": "passed",
        "differs": "failed",
        "cannot_tell": "cannot_tell",
    }
    found = worst([outcomes[body["outcome"]] for body in made] or ["cannot_tell"])
    said = sentences({"replays": made}) or [
        "the winning trial was not run again yet: run `forerun sweep PLAN`"
    ]
    return (Gate(name=GATE, outcome=found, reason="; ".join(said)),)
