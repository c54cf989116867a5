"""Drills that disturb a run while it trains: a rank killed or stuck, NaN, a scheduler's signal, a
full disk.
"""

from __future__ import annotations

import os

from forerun._launcher.main_run.checkpoint_folders import (
    CHECKPOINTS,
    CheckpointError,
    list_complete_checkpoints,
)
from forerun._launcher.main_run.rehearsal.faults import Fault, FaultKind, get_mark_path
from forerun._launcher.main_run.rehearsal.registry import DrillResult, make_result
from forerun._launcher.main_run.rehearsal.rehearsal_folder import RehearsalFolder
from forerun._launcher.main_run.supervisor.hang_detector import FLOOR_SECONDS
from forerun._launcher.main_run.trainer import checkpoints
from forerun._proxies.core.canon import Json
from forerun._proxies.core.failures import find_cause
from forerun._proxies.core.notation import format_counted

BETWEEN_SAVES, AFTER_SAVE = 10, 9
"""Numbers of updates made before a fault. The copy saves every `scaled_config.EVERY_STEPS` = 4
steps: the first number lies between two checkpoints, past the warmup; the second is one update
after the second checkpoint."""


def kill_rank(rehearsal: RehearsalFolder) -> DrillResult:
    """Kill a rank between gradients and update; the job is restarted and ends with the same
    weights.
    """
    event_text = "a rank was killed (SIGKILL)"
    return _strike_and_restart(rehearsal, "killed_rank", "kill", FLOOR_SECONDS, event_text)


def hang_rank(rehearsal: RehearsalFolder) -> DrillResult:
    """Let a rank hang; the supervisor notices, kills the job, and restarts it."""
    seconds = rehearsal.hang_seconds
    event_text = f"a rank hung; the job was killed after {seconds:g} s without a step"
    return _strike_and_restart(rehearsal, "hang", "hang", seconds, event_text)


def _strike_and_restart(
    rehearsal: RehearsalFolder, drill: str, kind: FaultKind, hang_seconds: float, event_text: str
) -> DrillResult:
    run = rehearsal.clear_run(drill.replace("_", "-"))
    fault = Fault(kind=kind, step=BETWEEN_SAVES)
    outcome = rehearsal.run(run, fault, max_restarts=1, hang_seconds=hang_seconds)
    struck, update = get_mark_path(rehearsal.get_run_dir(run), kind).exists(), fault.step + 1
    seen: dict[str, Json] = {
        "event": outcome.event,
        "num_restarts": outcome.num_restarts,
        "struck": struck,
        "struck_before_update": update,
    }
    sentence = f"{event_text} before update {update}"
    if outcome.event != "finished":
        sentence += f"; the run {outcome.event}: {outcome.reason}"
        return make_result(drill, False, sentence, seen)
    difference = rehearsal.compare(rehearsal.train_reference(), run)
    seen["num_tensors_differing"] = difference.num_differing
    sentence += f", {outcome.num_restarts} restart; at the end {difference.sentence}"
    passed = struck and outcome.num_restarts == 1 and difference.bitwise
    return make_result(drill, passed, sentence, seen)


def inject_nan(rehearsal: RehearsalFolder) -> DrillResult:
    """Let a forward pass give NaN; the run stops before the update, with a good checkpoint."""
    run = rehearsal.clear_run("nan")
    outcome = rehearsal.run(run, Fault(kind="nan", step=AFTER_SAVE))
    newest, is_whole = _find_newest(rehearsal, run)
    same = is_whole and rehearsal.compare(rehearsal.train_reference(), run, newest).bitwise
    num_updates = max(rehearsal.read_losses(run), default=0)
    stopped = (outcome.event, outcome.exit_code, num_updates) == ("aborted", 3, AFTER_SAVE)
    quality = "complete and bitwise the uninterrupted run's" if same else "damaged"
    return make_result(
        "nan",
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


def send_sigterm(rehearsal: RehearsalFolder) -> DrillResult:
    """Send SIGTERM as a scheduler does; the run saves at once, exits 130, and resumes from
    there.
    """
    run = rehearsal.clear_run("sigterm")
    outcome = rehearsal.run(run, Fault(kind="sigterm", step=AFTER_SAVE, supervisor_pid=os.getpid()))
    newest, is_whole = _find_newest(rehearsal, run)
    bitwise = _resumes_bitwise(rehearsal, run, is_whole)
    saved = is_whole and newest == outcome.step and newest > AFTER_SAVE
    return make_result(
        "sigterm",
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


def fill_disk(rehearsal: RehearsalFolder) -> DrillResult:
    """Leave no disk space for a checkpoint. The run must end with a message that names the disk,
    and resume once there is space.
    """
    run = rehearsal.clear_run("disk-full")
    outcome = rehearsal.run(run, Fault(kind="disk_full", step=AFTER_SAVE))
    cause = find_cause(outcome.reason)
    is_named = cause is not None and cause[0] == "disk_full"
    newest, is_whole = _find_newest(rehearsal, run)
    bitwise = _resumes_bitwise(rehearsal, run, is_whole)
    reason = outcome.reason.splitlines()[-1] if outcome.reason else "no reason given"
    return make_result(
        "disk_full",
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


def _find_newest(rehearsal: RehearsalFolder, run: str) -> tuple[int, bool]:
    """Return the step of a run's newest checkpoint (0 if it has none), and whether it is good."""
    folders = list_complete_checkpoints(rehearsal.get_run_dir(run) / CHECKPOINTS)
    if not folders:
        return 0, False
    newest = max(folders)
    try:
        checkpoints.check_checkpoint(folders[newest], rehearsal.decision.digest)
    except CheckpointError:
        return newest, False
    return newest, True


def _resumes_bitwise(rehearsal: RehearsalFolder, run: str, is_whole: bool) -> bool:
    """Return whether the run, started again, ends with the uninterrupted run's weights."""
    return (
        is_whole
        and rehearsal.run(run).event == "finished"
        and rehearsal.compare(rehearsal.train_reference(), run).bitwise
    )


def _describe_end(bitwise: bool) -> str:
    if bitwise:
        return "it ends bitwise equal to the uninterrupted run"
    return "it does not end equal to the uninterrupted run"
