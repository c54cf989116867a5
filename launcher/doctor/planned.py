"""What one plan asks of this machine, held against what is here. Its own mistakes are `validate`'s to tell."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.doctor.findings import Finding, fail, ok, warn
from launcher.doctor.folders import nearest

if TYPE_CHECKING:
    from launcher.plan.cluster import ClusterSection

HEAD_SECONDS = 3.0
"""For the head of a Ray cluster to take a connection."""


def check_plan(path: Path, study_dir: Path, overrides: tuple[str, ...], num_gpus: int) -> list[Finding]:
    """One line of each thing that a plan asks for; `num_gpus`: that torch can use here."""
    from launcher.calibration.speeds import Speeds
    from launcher.calibration.study_cost import stages_of
    from launcher.plan.file import PlanError, load_plan
    from launcher.study.opening import plan_study
    from proxies.data.tokens import DataError
    from sweeps.run.cores import num_cores

    try:
        plan = load_plan(path, overrides)
        found = [ok("plan", str(path)), judge_workers(plan.cluster, num_cores(), num_gpus, path)]
        corpus = path.parent / plan.data.path
        try:
            study = plan_study(path, study_dir, overrides, source_sha256="0" * 64)
        except DataError as error:
            return [*found, fail("plan, data", str(error), f"forerun tokenize SOURCE... --out {corpus}")]
    except PlanError as error:
        num, first = len(error.problems), error.problems[0]
        said = first if num == 1 else f"{num} problems, {first} for one"
        return [fail("plan", said, f"forerun validate {path} names all")]
    data = [ok("plan, data", str(corpus))] if plan.data.path else []
    writes = sum(stage.disk_bytes.high for stage in stages_of(study, Speeds()))
    return [*found, *data, judge_disk(writes, shutil.disk_usage(nearest(study_dir)).free)]


def judge_workers(cluster: ClusterSection, num_cores: int, num_gpus: int, plan_path: Path) -> Finding:
    """Whether its workers find cores and GPUs."""
    from sweeps.ray.nodes import answers

    name, edit, address = "plan, workers", f"forerun doctor {plan_path} --set cluster.", cluster.address
    if address:
        if ":" in address and not answers(address, HEAD_SECONDS):  # `auto` is found when it is joined
            said = f"the Ray cluster at {address} takes no connection"
            return fail(name, said, "ray start --head there, or --set 'cluster.address=\"\"' for this machine alone")
        return ok(name, f"the Ray cluster at {address} is asked for room when it is joined")
    num = cluster.num_workers or 1
    gpus, cpus = num * cluster.worker_gpus, num * cluster.worker_cpus
    takes = f"{num} workers of {cluster.worker_cpus:g} cores" + (f", {cluster.worker_gpus:g} GPUs" if gpus else "")
    if gpus > num_gpus:
        said = f"{takes} need {gpus:g} GPUs, torch can use {num_gpus} here"
        return fail(name, said, f"{edit}worker_gpus=0, or a machine with them, or cluster.address of a Ray cluster")
    if cpus > num_cores:
        said = f"{takes} need {cpus:g} cores, {num_cores} are here"
        return fail(name, said, f"{edit}num_workers=0, which takes as many as there is room for")
    if num_gpus and not cluster.worker_gpus:
        said = f"{num_gpus} GPUs are here, and no worker takes one"
        return warn(name, said, f"{edit}worker_gpus=1, or a share as 0.25")
    return ok(name, f"{takes}: there is room")


def judge_disk(disk_bytes: float, free_bytes: int) -> Finding:
    """Whether its files find room on the disk."""
    said = f"the study writes at most {disk_bytes / 1e6:,.1f} MB beside checkpoints, {free_bytes / 1e9:,.1f} GB free"
    if disk_bytes > free_bytes:
        return fail("plan, disk", said, "name a larger disk with --study")
    return ok("plan, disk", said)
