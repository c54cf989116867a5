"""Tests of the drills of a user's own trainer, with real processes."""

import dataclasses
import shlex
import sys

import pytest
from user_trainer_case import make_user_decision

from forerun._launcher.main_run.rehearsal.user_drills import (
    MAX_TRIES,
    kill_command,
    set_up_user_rehearsal,
)
from forerun._launcher.main_run.supervisor.user_launch import UserRunFolders

NUM_STEPS = 12
# This is the user's training script. Its first `fast_starts` starts without --resume write the
# whole log and end after `linger` seconds, so that a drill disturbs them too late or not at all.
# Later starts take 0.1 s a step.
TRAINER = """
import json, os, sys, time
from pathlib import Path
out, starts = Path(sys.argv[1]), Path("starts")
num_steps, fast_starts, linger = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
log = out / "metrics.jsonl"
lines = [json.dumps({"step": step, "train_loss": 2.0}) for step in range(1, num_steps + 1)]
lines += [json.dumps({"step": num_steps, "val_loss": 2.0})]
if "--resume" in sys.argv:
    del lines[: len(log.read_text().splitlines())]
else:
    with starts.open("a") as file:
        file.write(".")
    if len(starts.read_text()) <= fast_starts:
        log.write_text("".join(line + "\\n" for line in lines))
        time.sleep(linger)
        os._exit(0)
with log.open("a") as file:
    for line in lines:
        print(line, file=file, flush=True)
        time.sleep(0.1)
"""


def make_rehearsal(folder, fast_starts, linger):
    """Return the rehearsal of a run of the script."""
    (folder / "train.py").write_text(TRAINER)
    (folder / "runs").mkdir()
    decision = make_user_decision()
    template = (
        f"{shlex.quote(sys.executable)} train.py {{run_dir}} {{num_steps}} {fast_starts} {linger} "
        "{lr} {width} {seed}"  # Every command must name these.
    )
    command = dataclasses.replace(decision.own.command, template=template)
    own = dataclasses.replace(decision.own, command=command, resume="--resume")
    folders = UserRunFolders(run_dir=folder / "runs", code_dir=folder, corpus=None)
    return set_up_user_rehearsal(
        folder, dataclasses.replace(decision, own=own), folders, NUM_STEPS, folder / "runs"
    )


@pytest.mark.parametrize("linger", [0.0, 1.0], ids=["not disturbed", "disturbed too late"])
@pytest.mark.parametrize(
    ("fast_starts", "passes", "num_starts"),
    # A drill that killed the command starts it once more, for the undisturbed run.
    [(MAX_TRIES - 1, True, MAX_TRIES + 1), (MAX_TRIES + 1, False, MAX_TRIES)],
)
def test_drill_starts_again_if_the_last_step_was_logged_before_the_kill(
    tmp_path, fast_starts, passes, num_starts, linger
):
    observation = kill_command(make_rehearsal(tmp_path, fast_starts, linger))
    assert observation.passed == passes, observation.sentence
    assert len((tmp_path / "starts").read_text()) == num_starts
