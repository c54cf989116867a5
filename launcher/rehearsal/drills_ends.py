"""Drills about ends that are not the schedule's: NaN, a full disk, a scheduler's signal."""

from __future__ import annotations

import os

from launcher.base.checkpoint_folders import CHECKPOINTS, Refused, complete_folders
from launcher.rehearsal.plants import Plant
from launcher.rehearsal.results import DrillResult, judged
from launcher.rehearsal.stage import Stage
from launcher.trainer import checkpoints
from proxies.core.canon import Json
from proxies.core.failures import cause_in

STRUCK_STEP = 9
"""Two updates after a checkpoint."""


def nan(stage: Stage) -> DrillResult:
    """A forward pass that gives NaN: stopped before the update, the last checkpoint as it was."""
    run = stage.fresh("nan")
    outcome = stage.run(run, Plant(fault="nan", step=STRUCK_STEP))
    newest, whole = _newest(stage, run)
    same = bool(newest) and stage.apart(stage.reference(), run, newest).bitwise
    trained = max(stage.losses(run), default=0)
    holds = (outcome.event, outcome.exit_code) == ("aborted", 3) and trained == STRUCK_STEP and whole and same
    return judged(
        "nan", holds,
        f"NaN in the forward pass of update {STRUCK_STEP + 1}: {outcome.event}, exit {outcome.exit_code}, "
        f"{trained} updates made; the checkpoint of step {newest} is "
        + ("whole and bitwise the uninterrupted run's" if whole and same else "damaged"),
        seen={"event": outcome.event, "exit_code": outcome.exit_code, "num_updates": trained,
              "newest_checkpoint": newest},
        limit=f"aborted with exit 3 after {STRUCK_STEP} updates, the last checkpoint intact",
        advice="a batch that gives NaN is stepped on, or saved: the weights would be lost with it",
    )  # fmt: skip


def disk_full(stage: Stage) -> DrillResult:
    """No room for a checkpoint: ends in words, the older one intact; with room again it goes on."""
    run = stage.fresh("disk-full")
    outcome = stage.run(run, Plant(fault="disk_full", step=STRUCK_STEP))
    found = cause_in(outcome.reason)
    told = found is not None and found[0] == "disk_full"
    newest, whole = _newest(stage, run)
    seen: dict[str, Json] = {"event": outcome.event, "exit_code": outcome.exit_code, "newest_checkpoint": newest,
                             "told": told}  # fmt: skip
    after = stage.run(run) if whole else None
    bitwise = after is not None and after.event == "finished" and stage.apart(stage.reference(), run).bitwise
    seen["resumed_bitwise"] = bitwise
    reason = outcome.reason.splitlines()[-1] if outcome.reason else "no word why"
    return judged(
        "disk_full", outcome.exit_code != 0 and told and bitwise,
        f"no room for the checkpoint after step {STRUCK_STEP + 1}: {outcome.event} ({reason}); the checkpoint of step "
        f"{newest} is {'whole' if whole else 'damaged'}; with room again "
        + ("it ends bitwise as the uninterrupted run" if bitwise else "it does not come to the same end"),
        seen=seen, limit="an end in words, an intact older checkpoint, a bitwise resume",
        advice="a full disk would cost more than the time since the last save: look at the save's error handling",
    )  # fmt: skip


def sigterm(stage: Stage) -> DrillResult:
    """A scheduler's SIGTERM: saved at once, exit 130, and gone on from there."""
    run = stage.fresh("sigterm")
    outcome = stage.run(run, Plant(fault="sigterm", step=STRUCK_STEP, supervisor_pid=os.getpid()))
    newest, whole = _newest(stage, run)
    after = stage.run(run) if whole else None
    bitwise = after is not None and after.event == "finished" and stage.apart(stage.reference(), run).bitwise
    saved = whole and newest == outcome.step and newest > STRUCK_STEP
    return judged(
        "sigterm", (outcome.event, outcome.exit_code) == ("interrupted", 130) and saved and bitwise,
        f"SIGTERM at update {STRUCK_STEP + 1}: {outcome.event}, exit {outcome.exit_code}, saved after step {newest}; "
        + ("gone on, bitwise the uninterrupted run" if bitwise else "it does not come to the same end"),
        seen={"event": outcome.event, "exit_code": outcome.exit_code, "saved_after_step": newest,
              "resumed_bitwise": bitwise},
        limit="exit 130, a checkpoint of the step it ended at, a bitwise resume",
        advice="a scheduler's end of time would lose work: the ranks must save when they are told to end",
    )  # fmt: skip


def _newest(stage: Stage, run: str) -> tuple[int, bool]:
    """The newest checkpoint's step, and whether it is whole by its hashes; 0 where there is none."""
    newest = max(complete_folders(stage.path(run) / CHECKPOINTS), default=0)
    if not newest:
        return 0, False
    refused: list[Refused] = []
    try:
        found = checkpoints.newest_good(stage.path(run) / CHECKPOINTS, stage.decision.digest, refused)
    except checkpoints.CheckpointError:
        return newest, False
    return newest, found is not None and found.step == newest and not refused
