"""Replays of a search: the winning trial and some drawn by lot are run again elsewhere, and what differs is acted on.

Every execution is a record with its curve on disk before it, so that a driver that was killed goes on with those that
are missing. Which trials, and what is wanted next, follows from the ledger. No torch, no Ray.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from launcher.base.talk import say
from launcher.experiments.searching import trial_points
from launcher.experiments.transferred import searched
from launcher.plan.study import PLAN_FILE, Study
from launcher.study.rerun_view import DRAWN, REPLAYED, told
from proxies.core import canon
from proxies.core.spec import RunResult, RunSpec
from sweeps.run.drive import HANG_SECONDS
from sweeps.run.pool import Pool
from sweeps.run.rerun_verdict import Ran, Verdict, Wanted, judge, unjudged
from sweeps.run.reruns import Reruns, Task, where
from sweeps.store.curves import load_curve, store_curve
from sweeps.store.errors import PoolDead, SweepError
from sweeps.store.ledger import Ledger
from sweeps.store.quarantine import QUARANTINED, suspects
from sweeps.store.sites import HOST, PROCESS

RERUN = "rerun"
"""Kind of the records of executions, key: `<run id>/<n>`."""
REPLAYS_DIR = "replays"
"""In the study's folder: `replays/<n>/curves/<run id>.parquet`, of a run's n-th execution beyond the first."""

Site = Mapping[str, str]


class CorruptHostError(SweepError):
    """Two executions of one run differ by more than arithmetic can."""

    def __init__(self, said: str, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(said)


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """A trial that is run again, and its executions so far."""

    spec: RunSpec
    why: str
    first: Ran
    again: tuple[Ran, ...]
    nudged: tuple[Ran, ...]
    num_reruns: int
    """Executions beyond the first that were recorded, lost ones too."""
    given_up: str = ""
    """Why an execution could not be had."""

    def verdict(self, sites: Sequence[Site] | None) -> Verdict | Wanted:
        """What is said of it, or wanted; `sites`: of the workers, None: some are believed to be anywhere."""
        if self.given_up:
            return unjudged(self.first, self.given_up)
        known = {self.first.host, *(ran.host for ran in self.again[:1])}
        more = sites is None or any(site[HOST] not in known for site in sites)
        return judge(self.spec, self.first, self.again, self.nudged, more_hosts=more)


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
) -> bool:  # fmt: skip
    """Run again what is missing of it, and judge; whether a host was found that must get no more work.

    Args:
        study: its search has ended.
        ledger: open for writing.
        workers: the pool, idle; asked for only where something is to run.
        bank_key: what runs must agree on to share a bank.
        steps_per_call: optimizer steps between a worker's reports.
        check: raises what ends the work; what was recorded stands.

    Raises:
        CorruptHostError: two executions differ, and it is not known which is wrong, or runs of this study are suspect.
        CurveCorrupt, PoolDead, DiskFull: as named.
    """
    chosen = drawn(study, ledger)
    for run_id, why in chosen.items():
        if ledger.find(DRAWN, run_id) is None:
            ledger.append(DRAWN, run_id, {"why": why})
            say(f"replays: run {run_id[:12]} ({why}) is run again elsewhere")
    sites = None
    if any(isinstance(each.verdict(None), Wanted) for each in replays(study, ledger)):
        sites = _carry_out(study, ledger, workers(), bank_key, steps_per_call, check)
    return _conclude(study, ledger, sites)


def _carry_out(
    study: Study, ledger: Ledger, pool: Pool, bank_key: Callable[[RunSpec], str], steps_per_call: int,
    check: Callable[[], None],
) -> list[Site]:  # fmt: skip
    """Run what is wanted until nothing is; where the workers are."""
    while True:
        sites = where(pool, check)
        if not sites:
            raise PoolDead("replays: no worker says where it is; run the same command again to resume")
        tasks = _tasks(replays(study, ledger), pool, sites)
        if not tasks:
            return list(sites.values())
        under_way = Reruns(
            pool, tasks, num_slots_for=lambda spec: spec.numerics.num_slots, bank_key_for=bank_key,
            steps_per_call=steps_per_call, max_attempts=study.plan.cluster.max_attempts, hang_seconds=HANG_SECONDS,
        )  # fmt: skip
        for task, ran in under_way.ended(check):
            _record(study, ledger, task, ran)


def _tasks(all_replays: Sequence[Replay], pool: Pool, sites: Mapping[int, Site]) -> list[Task]:
    """What is wanted next, each on a worker; one whose process has run it before gets a new process, if it can."""
    tasks: list[Task] = []
    for replay in all_replays:
        wanted = replay.verdict(list(sites.values()))
        if isinstance(wanted, Verdict):
            continue
        done = {ran.process for ran in (replay.first, *replay.again)}

        def cost(
            worker: int, wanted: Wanted = wanted, done: set[str] = done, run_id: str = replay.spec.id
        ) -> tuple[bool, bool, int, str]:
            host, process = sites[worker][HOST], sites[worker][PROCESS]
            far = host != wanted.near if wanted.near else host in wanted.away_from
            lot = canon.content_id([run_id, host])  # or it would always be the first host that is another
            return far, process in done, sum(task.worker == worker for task in tasks), lot

        fit = [worker for worker in sites if not (wanted.strictly and sites[worker][HOST] in wanted.away_from)]
        worker = min(fit, key=cost)
        if wanted.replay == "again" and sites[worker][PROCESS] in done and all(t.worker != worker for t in tasks):
            pool.restart(worker)
        parts = int(replay.first.result.environment.get("num_microbatches", "1"))
        tasks.append(Task(spec=replay.spec, replay=wanted.replay, worker=worker, num_microbatches=parts))
    return tasks


def _record(study: Study, ledger: Ledger, task: Task, ran: Ran | str) -> None:
    """Keep an execution: its curve first, so that no record lacks one."""
    run_id, number = task.spec.id, 0
    while ledger.find(RERUN, f"{run_id}/{number}") is not None:
        number += 1
    body: dict[str, canon.Json] = {"replay": task.replay, "lost": ran if isinstance(ran, str) else "", "result": None}
    if not isinstance(ran, str):
        folder = study.study_dir / REPLAYS_DIR / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        store_curve(folder, run_id, ran.curve)
        body["result"] = canon.to_json(ran.result)
    ledger.append(RERUN, f"{run_id}/{number}", body)


def _conclude(study: Study, ledger: Ledger, sites: Sequence[Site] | None) -> bool:
    """Record what came of each replay; whether that put a host into quarantine. Raises CorruptHostError."""
    num_hosts = len(ledger.records(QUARANTINED))
    differing: list[tuple[Replay, Verdict]] = []
    for replay in replays(study, ledger):
        verdict = replay.verdict(sites)
        assert isinstance(verdict, Verdict)
        key = f"{replay.spec.id}/{replay.num_reruns}"
        if ledger.find(REPLAYED, key) is None:
            body = cast(dict[str, canon.Json], canon.to_json(verdict))
            ledger.append(REPLAYED, key, {"run_id": replay.spec.id, "why": replay.why, **body})
            say(f"replays: {told(replay.spec.id, replay.why, body)}")
        if verdict.odd_host and ledger.find(QUARANTINED, verdict.odd_host) is None:
            ledger.append(QUARANTINED, verdict.odd_host, {"run_id": replay.spec.id, "reason": verdict.reason})
        differing += [(replay, verdict)] if verdict.outcome == "differs" else []
    if any(suspects(ledger).values()) or not all(verdict.odd_host for _, verdict in differing):
        raise _corrupt(study, ledger, differing)
    return len(ledger.records(QUARANTINED)) > num_hosts


def _corrupt(study: Study, ledger: Ledger, differing: Sequence[tuple[Replay, Verdict]]) -> CorruptHostError:
    """What was found, and what to do."""
    lines = [told(each.spec.id, each.why, canon.to_json(verdict)) for each, verdict in differing]
    folder, hosts = study.study_dir, suspects(ledger)
    lines += [
        f"{host} is in quarantine: nothing runs there any more, and {len(specs)} runs that ended there are suspect"
        for host, specs in hosts.items()
    ]
    if any(hosts.values()):
        lines.append(
            f"`forerun run {folder / PLAN_FILE} --study ANOTHER --fork {folder}` goes on without those runs and "
            "without that machine; `forerun status` names them"
        )
        return CorruptHostError("\n".join(lines), exit_code=3)
    lines.append("with workers on a third host (cluster.address), the same command has it run there too, and tells")
    return CorruptHostError("\n".join(lines), exit_code=4)


def replays(study: Study, ledger: Ledger) -> list[Replay]:
    """Every trial drawn so far, in order, with its executions.

    Raises:
        CurveCorrupt: the curve of an execution is not what it was.
    """
    specs = {study.trial(point).id: study.trial(point) for point in trial_points(ledger)}
    return [
        _replay(study, ledger, specs[record.key], str(cast(dict[str, Any], record.body)["why"]))
        for record in ledger.records(DRAWN)
        if record.key in specs
    ]


def _replay(study: Study, ledger: Ledger, spec: RunSpec, why: str) -> Replay:
    first = ledger.results()[spec.id]
    runs: dict[str, list[Ran]] = {"again": [], "nudged": []}
    given_up = ""
    number = 0
    while (record := ledger.find(RERUN, f"{spec.id}/{number}")) is not None:
        body = cast(dict[str, Any], record.body)
        if body["lost"]:
            given_up = body["lost"]
        else:
            result = canon.decode(RunResult, body["result"])
            curve = load_curve(study.study_dir / REPLAYS_DIR / str(number), result)
            runs[body["replay"]].append(Ran(result=result, curve=curve))
        number += 1
    return Replay(
        spec=spec, why=why, first=Ran(result=first, curve=load_curve(study.study_dir, first)),
        again=tuple(runs["again"]), nudged=tuple(runs["nudged"]), num_reruns=number, given_up=given_up,
    )  # fmt: skip
