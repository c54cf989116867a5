"""Drills that break a run while it trains: a rank killed or stuck, NaN, a scheduler's signal, a
full disk.
"""

from __future__ import annotations

import os

from launcher.base.run_files import CHECKPOINTS, RefusedCheckpoint, complete_folders
from launcher.base.watchdog import FLOOR_SECONDS
from launcher.rehearsal.faults import Fault, fired
from launcher.rehearsal.registry import DrillResult, judged
from launcher.rehearsal.stage import RehearsalFolder
from launcher.trainer import checkpoints
from proxies.core.canon import Json
from proxies.core.failures import cause_in

BETWEEN_SAVES, AFTER_SAVE = 10, 9
"""Updates made before a fault: between two checkpoints, past the warmup; one after a checkpoint
that has one before."""


def killed_rank(stage: RehearsalFolder) -> DrillResult:
    """A rank killed between gradients and update: the job is started again, and its weights end the
    same.
    """
    fault = Fault(kind="kill", step=BETWEEN_SAVES)
    return _restarted(stage, "killed_rank", fault, FLOOR_SECONDS, "a rank was killed (SIGKILL)")


def hang(stage: RehearsalFolder) -> DrillResult:
    """A rank hangs: the supervisor notices, kills the job, starts it again."""
    seconds = stage.hang_seconds
    what = f"a rank hung; the job was killed after {seconds:g} s without a step"
    return _restarted(stage, "hang", Fault(kind="hang", step=BETWEEN_SAVES), seconds, what)


def _restarted(
    stage: RehearsalFolder, name: str, fault: Fault, hang_seconds: float, what: str
) -> DrillResult:
    run = stage.fresh(name.replace("_", "-"))
    outcome = stage.run(run, fault, max_restarts=1, hang_seconds=hang_seconds)
    happened, before = (
        fired(stage.path(run), fault.kind).exists(),
        f"{what} before update {fault.step + 1}",
    )
    seen: dict[str, Json] = {
        "event": outcome.event,
        "num_restarts": outcome.num_restarts,
        "struck": happened,
        "struck_before_update": fault.step + 1,
    }
    if outcome.event != "finished":
        return judged(name, False, f"{before}; the run {outcome.event}: {outcome.reason}", seen)
    apart = stage.apart(stage.reference(), run)
    seen["num_tensors_differing"] = apart.num_differing
    text = f"{before}, {outcome.num_restarts} restart; at the end {apart.told}"
    return judged(name, happened and outcome.num_restarts == 1 and apart.bitwise, text, seen)


def nan(stage: RehearsalFolder) -> DrillResult:
    """A forward pass that gives NaN: stopped before the update, the last checkpoint as it was."""
    run = stage.fresh("nan")
    outcome = stage.run(run, Fault(kind="nan", step=AFTER_SAVE))
    newest, whole = _newest(stage, run)
    same = bool(newest) and stage.apart(stage.reference(), run, newest).bitwise
    trained = max(stage.losses(run), default=0)
    return judged(
        "nan",
        (outcome.event, outcome.exit_code) == ("aborted", 3)
        and trained == AFTER_SAVE
        and whole
        and same,
        f"NaN in the forward pass of update {AFTER_SAVE + 1}: {outcome.event}, exit "
        f"{outcome.exit_code}, {trained} "
        f"updates done; the checkpoint of step {newest} is "
        + ("complete and bitwise the uninterrupted run's" if whole and same else "damaged"),
        {
            "event": outcome.event,
            "exit_code": outcome.exit_code,
            "num_updates": trained,
            "newest_checkpoint": newest,
        },
    )


def sigterm(stage: RehearsalFolder) -> DrillResult:
    """A scheduler's SIGTERM: saved at once, exit 130, and resumed from there."""
    run = stage.fresh("sigterm")
    outcome = stage.run(run, Fault(kind="sigterm", step=AFTER_SAVE, supervisor_pid=os.getpid()))
    newest, whole = _newest(stage, run)
    bitwise = _resumes(stage, run, whole)
    saved = whole and newest == outcome.step and newest > AFTER_SAVE
    return judged(
        "sigterm",
        (outcome.event, outcome.exit_code) == ("interrupted", 130) and saved and bitwise,
        f"SIGTERM at update {AFTER_SAVE + 1}: {outcome.event}, exit {outcome.exit_code}, saved "
        f"after step {newest}; "
        f"resumed, {_same_end(bitwise)}",
        {
            "event": outcome.event,
            "exit_code": outcome.exit_code,
            "saved_after_step": newest,
            "resumed_bitwise": bitwise,
        },
    )


def disk_full(stage: RehearsalFolder) -> DrillResult:
    """No disk space for a checkpoint: ends with a message, the older one intact; with free space it
    resumes.
    """
    run = stage.fresh("disk-full")
    outcome = stage.run(run, Fault(kind="disk_full", step=AFTER_SAVE))
    found = cause_in(outcome.reason)
    named = found is not None and found[0] == "disk_full"
    newest, whole = _newest(stage, run)
    bitwise = _resumes(stage, run, whole)
    reason = outcome.reason.splitlines()[-1] if outcome.reason else "no reason given"
    return judged(
        "disk_full",
        outcome.exit_code != 0 and named and bitwise,
        f"no disk space for the checkpoint after step {AFTER_SAVE + 1}: {outcome.event} "
        f"({reason}); the checkpoint of "
        f"step {newest} is {'complete' if whole else 'damaged'}; with free space again, "
        f"{_same_end(bitwise)}",
        {
            "event": outcome.event,
            "exit_code": outcome.exit_code,
            "newest_checkpoint": newest,
            "told": named,
            "resumed_bitwise": bitwise,
        },
    )


def _newest(stage: RehearsalFolder, run: str) -> tuple[int, bool]:
    """The newest checkpoint's step, and whether it is whole by its hashes; 0 where there is
    none.
    """
    newest = max(complete_folders(stage.path(run) / CHECKPOINTS), default=0)
    if not newest:
        return 0, False
    refused: list[RefusedCheckpoint] = []
    try:
        found = checkpoints.newest_good(
            stage.path(run) / CHECKPOINTS, stage.decision.digest, refused
        )
    except checkpoints.CheckpointError:
        return newest, False
    return newest, found is not None and found.step == newest and not refused


def _resumes(stage: RehearsalFolder, run: str, whole: bool) -> bool:
    """Whether the run, started again, ends bitwise as the uninterrupted one."""
    after = stage.run(run) if whole else None
    return (
        after is not None
        and after.event == "finished"
        and stage.apart(stage.reference(), run).bitwise
    )


def _same_end(bitwise: bool) -> str:
    return (
        "it ends bitwise equal to the uninterrupted run"
        if bitwise
        else "it does not end equal to the uninterrupted run"
    )
