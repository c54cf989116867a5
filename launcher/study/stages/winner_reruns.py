"""A second run of a search's winning trial on another worker, compared with the first. The outcome
is a gate of freezing.

If both runs must give the same bits and do not, one of two machines computes wrongly. The study
then stops, because it is not known which numbers are right. The outcome is recorded in the ledger,
so a driver that follows a killed one continues with it. This module imports neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from forerun._launcher.main_run.progress_output import print_progress
from forerun._launcher.study.experiments.transfer_results import load_search_result
from forerun._launcher.study.plan.study import Study, build_bank_key
from forerun._launcher.study.stages.gates import Gate, judge_findings, refuse_failed
from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.notation import format_nats
from forerun._sweeps.run.device_kinds import ask_places
from forerun._sweeps.run.driver import MAX_SILENCE_SECONDS
from forerun._sweeps.run.reruns import compare_executions, execute_again
from forerun._sweeps.store.errors import PoolDead
from forerun._sweeps.store.sites import HOST, PROCESS

if TYPE_CHECKING:
    from forerun._sweeps.run.pool import Pool
    from forerun._sweeps.store.ledger import Ledger

REPLAY_RECORD = "replayed"
"""Kind of the record of a second run's outcome; its key is the run's id."""
REPLAY_GATE = "replays_agree"


def replay_search(
    study: Study,
    ledger: Ledger,
    workers: Callable[[], Pool],
    check: Callable[[], None],
) -> None:
    """Run the winning trial again if the plan asks for it, and record the outcome.

    Args:
        study: Study whose search has ended.
        ledger: Ledger, open for writing.
        workers: Returns the idle pool; called only if there is something to run.
        check: Raises the error that ends the work; everything recorded stays.

    Raises:
        GateError: The trial gave another result, now or before, and nobody accepted that.
        PoolDead, DiskFull: The workers are gone, or the disk is full.
    """
    if study.replays_winner and not ledger.read_records(REPLAY_RECORD):
        search = load_search_result(study, ledger)
        spec = study.build_trial(search.points[search.best_trial])
        print_progress(f"replays: running the winning trial, run {spec.id[:12]}, again elsewhere")
        pool, first = workers(), ledger.get_results()[spec.id]
        outcome = execute_again(
            pool,
            spec,
            _choose_worker(first.environment, pool, ask_places(pool, check)),
            bank_key=build_bank_key(spec),
            num_microbatches=int(first.environment.get("num_microbatches", "1")),
            max_attempts=study.plan.cluster.max_attempts,
            hang_seconds=MAX_SILENCE_SECONDS,
            check=check,
        )
        if isinstance(outcome, str):
            body: dict[str, Json] = {"outcome": "cannot_tell", "reason": outcome}
        else:
            body = cast(dict[str, Json], canon.to_json(compare_executions(spec, first, outcome)))
        ledger.append(REPLAY_RECORD, spec.id, {"run_id": spec.id, **body})
        print_progress(f"replays: {_describe_replay(ledger.read_records(REPLAY_RECORD)[-1].body)}")
    refuse_failed(study, ledger, build_replay_gate(study, ledger))


def _choose_worker(
    first_environment: Mapping[str, str], pool: Pool, sites: Mapping[int, Mapping[str, str]]
) -> int:
    """Return a worker on another host than that of the first run. If there is no other host, return
    a worker in another process, which is restarted if need be.
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


def build_replays_body(ledger: Ledger) -> dict[str, Json] | None:
    """Return the recorded replays for the report; None if there are none."""
    replays = [record.body for record in ledger.read_records(REPLAY_RECORD)]
    return {"replays": replays} if replays else None


def describe_replays(replays: Iterable[Any]) -> list[str]:
    """Return the outcomes of replays in words."""
    return [f"replay of {_describe_replay(replay)}" for replay in replays]


def build_replay_gate(study: Study, ledger: Ledger) -> tuple[Gate, ...]:
    """Return the gate of the replay; empty if no replay was asked for."""
    replays: Any = [record.body for record in ledger.read_records(REPLAY_RECORD)]
    if not study.replays_winner and not replays:
        return ()
    reasons = describe_replays(replays) or [
        "the winning trial was not run again yet: run `forerun sweep PLAN`"
    ]
    outcomes = [body["outcome"] for body in replays] or ["cannot_tell"]
    return (judge_findings(REPLAY_GATE, outcomes, reasons),)
