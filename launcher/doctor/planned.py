"""What one plan asks of this machine, held against what is here. Its own mistakes are `validate`'s to tell."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from launcher.doctor.findings import Finding, fail, ok, warn
from launcher.doctor.folders import nearest

HEAD_SECONDS = 3.0
"""For the head of a Ray cluster to take a connection."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFacts:
    """What a plan asks for, and what there is of it."""

    path: str
    problems: tuple[str, ...]
    """Of the plan itself; nothing else is known where there are any."""
    corpus: str = ""
    corpus_problem: str = ""
    address: str = ""
    """Of a Ray cluster; empty: proxies run on this machine."""
    head_answers: bool = True
    num_workers: int = 1
    """At least so many at once."""
    num_ranks: int = 1
    worker_cpus: float = 0.0
    worker_gpus: float = 0.0
    disk_bytes: float = 0.0
    """At most, of all stages."""
    free_bytes: int = 0
    num_cores: int = 0
    num_gpus: int = 0


def look_at_plan(path: Path, study_dir: Path, overrides: tuple[str, ...], num_gpus: int) -> PlanFacts:
    """The facts of a plan; `num_gpus`: that torch can use here."""
    from launcher.calibration.speeds import Speeds
    from launcher.calibration.study_cost import stages_of
    from launcher.plan.file import PlanError, load_plan
    from launcher.study.opening import plan_study
    from proxies.data.tokens import DataError
    from sweeps.run.cores import num_cores

    try:
        plan = load_plan(path, overrides)
    except PlanError as error:
        return PlanFacts(path=str(path), problems=tuple(error.problems))
    corpus = path.parent / plan.data.path if plan.data.path else None
    problem, disk_bytes = "", 0.0
    try:
        study = plan_study(path, study_dir, overrides, source_sha256="0" * 64)
        disk_bytes = sum(stage.disk_bytes.high for stage in stages_of(study, Speeds()))
    except PlanError as error:
        return PlanFacts(path=str(path), problems=tuple(error.problems))
    except DataError as error:
        problem = str(error)
    cluster = plan.cluster
    return PlanFacts(
        path=str(path), problems=(), corpus="" if corpus is None else str(corpus), corpus_problem=problem,
        address=cluster.address, head_answers=_head_answers(cluster.address), num_workers=cluster.num_workers or 1,
        num_ranks=plan.proxy.num_ranks, worker_cpus=cluster.worker_cpus, worker_gpus=cluster.worker_gpus,
        disk_bytes=disk_bytes, free_bytes=shutil.disk_usage(nearest(study_dir)).free, num_cores=num_cores(),
        num_gpus=num_gpus,
    )  # fmt: skip


def judge_plan(facts: PlanFacts) -> list[Finding]:
    """One line of each thing that it asks for."""
    if facts.problems:
        num, first = len(facts.problems), facts.problems[0]
        said = first if num == 1 else f"{num} problems, {first} for one"
        return [fail("plan", said, f"forerun validate {facts.path} names all")]
    return [
        ok("plan", facts.path),
        *([judge_corpus(facts)] if facts.corpus or facts.corpus_problem else []),
        judge_workers(facts),
        judge_room(facts),
    ]


def judge_corpus(facts: PlanFacts) -> Finding:
    """Whether what it trains on is there."""
    if facts.corpus_problem:
        return fail("plan, data", facts.corpus_problem, f"forerun tokenize SOURCE... --out {facts.corpus}")
    return ok("plan, data", facts.corpus)


def judge_workers(facts: PlanFacts) -> Finding:
    """Whether its workers find cores and GPUs."""
    name, edit = "plan, workers", f"forerun doctor {facts.path} --set cluster."
    if facts.address:
        if not facts.head_answers:
            said = f"the Ray cluster at {facts.address} takes no connection"
            return fail(name, said, "ray start --head there, or --set 'cluster.address=\"\"' for this machine alone")
        return ok(name, f"the Ray cluster at {facts.address} is asked for room when it is joined")
    num = facts.num_workers * facts.num_ranks
    gpus, cpus = num * facts.worker_gpus, num * facts.worker_cpus
    takes = f"{num} workers of {facts.worker_cpus:g} cores" + (f" and {facts.worker_gpus:g} GPUs" if gpus else "")
    if gpus > facts.num_gpus:
        said = f"{takes} want {gpus:g} GPUs, torch can use {facts.num_gpus} here"
        return fail(name, said, f"{edit}worker_gpus=0, or a machine with them, or cluster.address of a Ray cluster")
    if cpus > facts.num_cores:
        said = f"{takes} want {cpus:g} cores, {facts.num_cores} are here"
        return fail(name, said, f"{edit}num_workers=0, which takes as many as there is room for")
    if facts.num_gpus and not facts.worker_gpus:
        said = f"{facts.num_gpus} GPUs are here, and no worker takes one"
        return warn(name, said, f"{edit}worker_gpus=1, or a share as 0.25")
    return ok(name, f"{takes}: there is room")


def judge_room(facts: PlanFacts) -> Finding:
    """Whether its files find room on the disk."""
    name, free = "plan, disk", f"{facts.free_bytes / 1e9:,.1f} GB are free"
    said = f"the study writes at most {facts.disk_bytes / 1e6:,.1f} MB beside checkpoints, {free}"
    if facts.disk_bytes > facts.free_bytes:
        return fail(name, said, "name a larger disk with --study")
    return ok(name, said)


def _head_answers(address: str) -> bool:
    """Whether a head listens at `host:port`; `auto` is found when it is joined."""
    from sweeps.ray.nodes import answers

    return ":" not in address or answers(address, HEAD_SECONDS)
