"""Drills that disturb a run while it trains: a rank is killed, a rank hangs, the loss is NaN, a
scheduler sends SIGTERM, or the disk is full.
"""

from __future__ import annotations

import os
from pathlib import Path

from forerun._launcher.main_run.checkpoint_folders import (
    CHECKPOINTS,
    CheckpointError,
    list_complete_checkpoints,
)
from forerun._launcher.main_run.rehearsal.faults import Fault, FaultKind, get_mark_path
from forerun._launcher.main_run.rehearsal.registry import Observation
from forerun._launcher.main_run.rehearsal.rehearsal_folder import RehearsalFolder, read_losses
from forerun._launcher.main_run.supervisor.hang_detector import FLOOR_SECONDS
from forerun._launcher.main_run.trainer import checkpoints
from forerun._proxies.core.canon import Json
from forerun._proxies.core.failures import find_cause
from forerun._proxies.core.notation import format_counted

BETWEEN_SAVES, AFTER_SAVE = 10, 9
"""Numbers of updates before a fault. The copy has a warmup of 4 steps and saves after every 4
(`scaled_config`). So the first number lies between the second and the third checkpoint, past the
warmup, and the second number is one update after the second checkpoint."""


def kill_rank(rehearsal: RehearsalFolder) -> Observation:
    """Kill a rank between gradients and update; the job is restarted and ends with the same
    weights.
    """
    event_text = "a rank was killed (SIGKILL)"
    return _strike_and_restart(rehearsal, "killed-rank", "kill", FLOOR_SECONDS, event_text)


def hang_rank(rehearsal: RehearsalFolder) -> Observation:
    """Let a rank hang; the supervisor notices, kills the job, and restarts it."""
    seconds = rehearsal.hang_seconds
    event_text = f"a rank hung; the job was killed after {seconds:g} s without a step"
    return _strike_and_restart(rehearsal, "hang", "hang", seconds, event_text)


def _strike_and_restart(
    rehearsal: RehearsalFolder, name: str, kind: FaultKind, hang_seconds: float, event_text: str
) -> Observation:
    """Observe a run, called `name`, in which a fault strikes once; it must be restarted once and
    end as the uninterrupted run did.
    """
    run_dir = rehearsal.clear_run(name)
    fault = Fault(kind=kind, step=BETWEEN_SAVES)
    outcome = rehearsal.run(run_dir, fault, max_restarts=1, hang_seconds=hang_seconds)
    struck, update = get_mark_path(run_dir, kind).exists(), fault.step + 1
    seen: dict[str, Json] = {
        "event": outcome.event,
        "num_restarts": outcome.num_restarts,
        "struck": struck,
        "struck_before_update": update,
    }
    sentence = f"{event_text} before update {update}"
    if outcome.event != "finished":
        sentence += f"; the run {outcome.event}: {outcome.reason}"
        return Observation(False, sentence, seen)
    difference = rehearsal.compare(rehearsal.train_reference(), run_dir)
    seen["num_tensors_differing"] = difference.num_differing
    sentence += f", {outcome.num_restarts} restart; at the end {difference.sentence}"
    passed = struck and outcome.num_restarts == 1 and difference.bitwise
    return Observation(passed, sentence, seen)


def inject_nan(rehearsal: RehearsalFolder) -> Observation:
    """Let a forward pass give NaN; the run stops before the update, with a good checkpoint."""
    run_dir = rehearsal.clear_run("nan")
    outcome = rehearsal.run(run_dir, Fault(kind="nan", step=AFTER_SAVE))
    newest, is_whole = _find_newest(rehearsal, run_dir)
    same = is_whole and rehearsal.compare(rehearsal.train_reference(), run_dir, newest).bitwise
    num_updates = max(read_losses(run_dir), default=0)
    stopped = (outcome.event, outcome.exit_code, num_updates) == ("aborted", 3, AFTER_SAVE)
    quality = "complete and bitwise the uninterrupted run's" if same else "damaged"
    return Observation(
        stopped and same,
        f"NaN in the forward pass of update {AFTER_SAVE + 1}: {outcome.event}, exit "
        f"{outcome.exit_code}, {format_counted(num_updates, 'update')} done; the checkpoint of "
        f"step {newest} is {quality}",
        {
            "event": outcome.event,
            "exit_code": outcome.exit_code,
            "num_updates": num_updates,
            "newest_checkpoint": newest,
        },
    )


def send_sigterm(rehearsal: RehearsalFolder) -> Observation:
    """Send SIGTERM as a scheduler does; the run saves at once, exits 130, and resumes from
    there.
    """
    run_dir = rehearsal.clear_run("sigterm")
    outcome = rehearsal.run(
        run_dir, Fault(kind="sigterm", step=AFTER_SAVE, supervisor_pid=os.getpid())
    )
    newest, is_whole = _find_newest(rehearsal, run_dir)
    bitwise = _resumes_bitwise(rehearsal, run_dir, is_whole)
    saved = is_whole and newest == outcome.step and newest > AFTER_SAVE
    return Observation(
        (outcome.event, outcome.exit_code) == ("interrupted", 130) and saved and bitwise,
        f"SIGTERM at update {AFTER_SAVE + 1}: {outcome.event}, exit {outcome.exit_code}, saved "
        f"after step {newest}; resumed, {_describe_end(bitwise)}",
        {
            "event": outcome.event,
            "exit_code": outcome.exit_code,
            "saved_after_step": newest,
            "resumed_bitwise": bitwise,
        },
    )


def fill_disk(rehearsal: RehearsalFolder) -> Observation:
    """Leave no disk space for a checkpoint. The run must end with a message that names the disk,
    and resume once there is space.
    """
    run_dir = rehearsal.clear_run("disk-full")
    outcome = rehearsal.run(run_dir, Fault(kind="disk_full", step=AFTER_SAVE))
    cause = find_cause(outcome.reason)
    is_named = cause is not None and cause[0] == "disk_full"
    newest, is_whole = _find_newest(rehearsal, run_dir)
    bitwise = _resumes_bitwise(rehearsal, run_dir, is_whole)
    reason = outcome.reason.splitlines()[-1] if outcome.reason else "no reason given"
    return Observation(
        outcome.exit_code != 0 and is_named and bitwise,
        f"no disk space for the checkpoint after step {AFTER_SAVE + 1}: {outcome.event} "
        f"({reason}); the checkpoint of step {newest} is {'complete' if is_whole else 'damaged'}; "
        f"with free space again, {_describe_end(bitwise)}",
        {
            "event": outcome.event,
            "exit_code": outcome.exit_code,
            "newest_checkpoint": newest,
            "told": is_named,
            "resumed_bitwise": bitwise,
        },
    )


def _find_newest(rehearsal: RehearsalFolder, run_dir: Path) -> tuple[int, bool]:
    """Return the step of a run's newest checkpoint, and whether it is undamaged; 0 and false if
    there is none.
    """
    folders = list_complete_checkpoints(run_dir / CHECKPOINTS)
    if not folders:
        return 0, False
    newest = max(folders)
    try:
        checkpoints.check_checkpoint(folders[newest], rehearsal.decision.digest)
    except CheckpointError:
        return newest, False
    return newest, True


def _resumes_bitwise(rehearsal: RehearsalFolder, run_dir: Path, is_whole: bool) -> bool:
    """Start a run again; return whether it ends with the weights of the uninterrupted run.

    A run whose newest checkpoint is damaged (`is_whole` is false) is not started.
    """
    return (
        is_whole
        and rehearsal.run(run_dir).event == "finished"
        and rehearsal.compare(rehearsal.train_reference(), run_dir).bitwise
    )


def _describe_end(bitwise: bool) -> str:
    if bitwise:
        return "it ends bitwise equal to the uninterrupted run"
    return "it does not end equal to the uninterrupted run"
