"""The winning trial of a search, and some drawn by lot, run again elsewhere and compared; also as a gate of freezing.

A second execution that gives something else, where the same bits are promised, says that one of two machines computes
wrongly. The study then stops: it does not know which of its numbers to believe. Which trials are run again, and what
came of them, is in the ledger, so a driver that was killed goes on with those that are missing. No torch, no Ray.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from launcher.base.talk import say
from launcher.experiments.transferred import searched
from launcher.frozen.attestations import CheckOutcome
from launcher.plan.study import Study
from launcher.study.gates import Gate
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.spec import RunSpec
from sweeps.run.drive import HANG_SECONDS
from sweeps.run.reruns import Task, carried_out, compare, where
from sweeps.store.errors import PoolDead, SweepError
from sweeps.store.sites import HOST, PROCESS

if TYPE_CHECKING:
    from sweeps.run.pool import Pool
    from sweeps.store.ledger import Ledger

DRAWN, REPLAYED = "drawn", "replayed"
"""Kinds of records, key: the run's id: a trial that is to be run again, and why; what came of it."""
GATE = "replays_agree"
_ADVICE = (
    "one of these machines computes wrongly, and every run that ended there may be wrong: test them, take the faulty "
    "one out, and begin a new study"
)
_APART = {
    "host": "on another host",
    "process": "in another process of the same host: a fault of the host itself would not show",
    "nothing": "in the same process: only a fault that comes and goes would show",
    "unknown": "elsewhere, as far as is known",
}


class ReplayDiffersError(SweepError):
    """Two executions of one run differ by more than arithmetic can."""

    exit_code = 3


def drawn(study: Study, ledger: Ledger) -> dict[str, str]:
    """Run id -> `winner` or `random`, of the trials to run again; the search has ended.

    The lot falls by the hash of the plan's record and what finished: a resumed study draws the same.
    """
    found, results = searched(study, ledger), ledger.first_results()
    ids = [study.trial(point).id for point in found.points]
    winner = ids[found.best_trial]
    finished = sorted({run_id for run_id in ids if results[run_id].status == "finished"} - {winner})
    lot = random.Random(canon.content_id([ledger.records()[0].hash, finished]))
    lot.shuffle(finished)
    number = study.num_replays
    return ({winner: "winner"} if number else {}) | dict.fromkeys(finished[: max(0, number - 1)], "random")


def replay_search(
    study: Study, ledger: Ledger, workers: Callable[[], Pool], bank_key: Callable[[RunSpec], str], steps_per_call: int,
    check: Callable[[], None],
) -> None:  # fmt: skip
    """Run again what is missing, and record what came of it.

    Args:
        study: its search has ended.
        ledger: open for writing.
        workers: the pool, idle; asked for only where something is to run.
        bank_key: what runs must agree on to share a bank.
        steps_per_call: optimizer steps between a worker's reports.
        check: raises what ends the work; what was recorded stands.

    Raises:
        ReplayDiffersError: a trial gave something else, now or before.
        PoolDead, DiskFull: as named.
    """
    specs = {(spec := study.trial(point)).id: spec for point in searched(study, ledger).points}
    for run_id, why in drawn(study, ledger).items():
        if ledger.find(DRAWN, run_id) is None:
            ledger.append(DRAWN, run_id, {"why": why})
            say(f"replays: run {run_id[:12]} ({why}) is run again elsewhere")
    missing = [record.key for record in ledger.records(DRAWN) if ledger.find(REPLAYED, record.key) is None]
    if missing:
        pool = workers()
        tasks = _tasks([specs[run_id] for run_id in missing], ledger, pool, where(pool, check))
        for task, again in carried_out(
            pool, tasks, bank_key_for=bank_key, steps_per_call=steps_per_call,
            max_attempts=study.plan.cluster.max_attempts, hang_seconds=HANG_SECONDS, check=check,
        ):  # fmt: skip
            first = ledger.results()[task.spec.id]
            if isinstance(again, str):
                body: dict[str, Json] = {"outcome": "cannot_tell", "reason": again}
            else:
                body = cast(dict[str, Json], canon.to_json(compare(task.spec, first, again)))
            why = cast(Any, ledger.find(DRAWN, task.spec.id)).body["why"]
            ledger.append(REPLAYED, task.spec.id, {"run_id": task.spec.id, "why": why, **body})
            say(f"replays: {_sentence(ledger.records(REPLAYED)[-1].body)}")
    differing = [_sentence(record.body) for record in ledger.records(REPLAYED) if _outcome(record.body) == "differs"]
    if differing:
        raise ReplayDiffersError("\n".join([*differing, _ADVICE]))


def _tasks(specs: Sequence[RunSpec], ledger: Ledger, pool: Pool, sites: Mapping[int, Mapping[str, str]]) -> list[Task]:
    """Each run on a worker of another host than the first time, or else in a process started anew."""
    if not sites:
        raise PoolDead("replays: no worker says where it is; run the same command again to resume")
    tasks: list[Task] = []
    for spec in specs:
        first = ledger.results()[spec.id].environment

        def cost(worker: int, first: Mapping[str, str] = first) -> tuple[bool, int]:
            return sites[worker][HOST] == first.get(HOST), sum(task.worker == worker for task in tasks)

        worker = min(sites, key=cost)
        if sites[worker][PROCESS] == first.get(PROCESS) and all(task.worker != worker for task in tasks):
            pool.restart(worker)
        tasks.append(Task(spec=spec, worker=worker, num_microbatches=int(first.get("num_microbatches", "1"))))
    return tasks


def _outcome(body: Any) -> str:
    return str(body["outcome"])


def _sentence(body: Any) -> str:
    """What came of one replay."""
    which = f"{'the winning trial' if body['why'] == 'winner' else 'a trial drawn by lot'}, run {body['run_id'][:12]}"
    if "hosts" not in body:
        return f"{which}: cannot tell: {body['reason']}"
    hosts = " and ".join(host or "an unnamed host" for host in body["hosts"])
    if body["outcome"] == "agrees":
        return f"{which}: agrees, run again {_APART[body['apart']]} ({hosts}): {body['reason']}"
    end = "" if body["end_nats"] is None else f" by {body['end_nats']:.3g} nats in the end"
    word = "DIFFERS" if body["outcome"] == "differs" else "cannot tell: differs"
    return f"{which}: {word} between {hosts}{end}: {body['reason']}"


def replays_body(ledger: Ledger) -> dict[str, Json] | None:
    """Of every trial drawn what came of it; None where nothing was asked for."""
    made = {record.key: record.body for record in ledger.records(REPLAYED)}
    ids = [record.key for record in ledger.records(DRAWN)]
    return {"replays": [made.get(run_id, {"run_id": run_id, "outcome": None}) for run_id in ids]} if ids else None


def sentences(body: Any) -> list[str]:
    """The same in words."""
    return [
        f"replay of run {each['run_id'][:12]}: not made yet: `forerun sweep PLAN` does"
        if each["outcome"] is None
        else f"replay of {_sentence(each)}"
        for each in (body or {"replays": []})["replays"]
    ]


def replay_gates(study: Study, ledger: Ledger) -> tuple[Gate, ...]:
    """The gate of the replays: none where none was ever asked for."""
    body: Any = replays_body(ledger)
    if not study.num_replays and body is None:
        return ()
    outcomes = {each["outcome"] for each in body["replays"]} if body else {None}
    found: CheckOutcome = "passed"
    if outcomes & {"cannot_tell", None}:
        found = "cannot_tell"
    if "differs" in outcomes:
        found = "failed"
    said = sentences(body) or ["no trial was run again yet: `forerun sweep PLAN` does"]
    return (Gate(name=GATE, outcome=found, reason="; ".join(said)),)
