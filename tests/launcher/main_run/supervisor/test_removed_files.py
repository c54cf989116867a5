"""Tests of a launch whose run folder, metrics, checkpoints, or lock are removed while it trains.

A Python script takes the place of torchrun (fixture `launch_script`).
"""

import shutil
import threading
from pathlib import Path

import pytest
from waiting import wait_until

from forerun._launcher.main_run import event_log
from forerun._sweeps.store.errors import StudyHeld
from forerun._sweeps.store.lock import DriverLock

# On SIGTERM, this script saves and ends if files of its run folder were removed.
SAVES_IF_FOLDER_IS_GONE = """
def save_and_end(*_):
    if (run / "began-0").exists(): return
    for number in range(1, 6): step(number)
    save(5), end("interrupted", 130, 5)
signal.signal(signal.SIGTERM, save_and_end)
os.environ["LOCAL_RANK"] = "0"
step(1), save(1), (run / "at-it").touch()
time.sleep(30)
"""


# Replaces the metrics by their first lines, as a run that goes back does.
REWIND = """
def rewind(num_lines):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "new").write_text("".join(lines[:num_lines]))
    (run / "new").replace(run / "metrics.jsonl")
"""


def act_once_at_work(tmp_path, act):
    """Call `act` with the run's folder from another thread, once the script makes `at-it` there."""

    def wait_and_act():
        wait_until((tmp_path / "run" / "at-it").exists)
        act(tmp_path / "run")

    threading.Thread(target=wait_and_act).start()


def empty_folder(folder):
    """Empty a folder, as `rm -rf` does while another process writes into it."""
    for path in list(folder.iterdir()):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def move_aside(folder):
    """Give a folder another name."""
    folder.rename(folder.with_name("aside"))


@pytest.mark.parametrize("remove", [shutil.rmtree, empty_folder, move_aside])
def test_removed_run_folder_is_saved_again_and_reported(launch_script, tmp_path, remove):
    act_once_at_work(tmp_path, remove)
    outcome = launch_script(SAVES_IF_FOLDER_IS_GONE)
    assert (outcome.event, outcome.exit_code, outcome.num_restarts) == ("interrupted", 2, 0)
    assert "removed or emptied" in outcome.reason and "saved again at step 5" in outcome.reason
    (entry,) = event_log.read_events(tmp_path / "run")
    assert entry.kind == "ended" and "removed or emptied" in entry.text


@pytest.mark.parametrize(
    ("last_command", "event"), [("end()", "finished"), ("sys.exit(1)", "failed")]
)
def test_launch_without_its_run_folder_fails_and_is_not_restarted(
    launch_script, tmp_path, last_command, event
):
    text = (
        "import shutil\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nstep(1), "
        "shutil.rmtree(run)\n"
    )
    outcome = launch_script(f"{text}time.sleep(0.3), run.mkdir(exist_ok=True)\n{last_command}")
    assert (outcome.event, outcome.exit_code, outcome.num_restarts) == (event, 2, 0)
    assert "nothing could be saved" in outcome.reason


def cut_to_two_lines(path):
    """Remove all but the first two lines of a file."""
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))


def replace_file(path):
    """Replace a file of metrics by a new one that has step 3 only."""
    path.with_name("other").write_text('{"step": 3, "train_loss_nats": 2.5}\n')
    path.with_name("other").replace(path)


@pytest.mark.parametrize(
    ("remove", "lost"),
    [(Path.unlink, "steps 1 to 3"), (cut_to_two_lines, "step 3"), (replace_file, "steps 1 to 2")],
)
def test_lost_metrics_are_reported_and_fail_the_launch(
    launch_script, tmp_path, capsys, remove, lost
):
    act_once_at_work(tmp_path, lambda run: (remove(run / "metrics.jsonl"), (run / "done").touch()))
    text = "step(1), step(2), step(3), (run / 'at-it').touch(), wait_for(run / 'done')\n"
    outcome = launch_script(f"{text}step(4), time.sleep(0.5), end()")
    assert (outcome.event, outcome.exit_code) == ("finished", 2)
    assert f"lacks {lost};" in outcome.reason
    assert f"lacks {lost};" in capsys.readouterr().err, "the warning comes at once"
    again = launch_script("end()")
    assert (again.exit_code, again.reason) == (0, ""), "each loss is reported once"


def test_metrics_that_the_run_rewinds_are_not_lost(launch_script, tmp_path):
    text = f"{REWIND}step(1), step(2), save(2), step(3), step(4), time.sleep(0.3)\n"
    outcome = launch_script(f"{text}rewind(3), time.sleep(0.3), step(3), time.sleep(0.3), end()")
    assert (outcome.exit_code, outcome.reason) == (0, "")


@pytest.mark.parametrize(
    ("last_command", "expected_words"),
    [("step(4)", "no checkpoint is left"), ("save(9)", "of step 9")],
)
def test_removed_checkpoint_is_reported_and_fails_the_launch(
    launch_script, tmp_path, last_command, expected_words
):
    text = (
        "step(1), save(1), step(2), time.sleep(0.3), (run / 'checkpoints' / "
        "'step-00000001').rmdir()\n"
    )
    outcome = launch_script(
        f"{text}time.sleep(0.3), step(3), time.sleep(0.3), {last_command}, end()"
    )
    assert (outcome.event, outcome.exit_code) == ("finished", 2)
    assert "step-00000001 was removed" in outcome.reason and expected_words in outcome.reason


def test_older_kept_checkpoint_is_watched_too(launch_script, tmp_path):
    """The tiny run keeps two checkpoints. A checkpoint that the run removes itself is no loss.

    A checkpoint that was gone before is no loss either.
    """
    folder = "(run / 'checkpoints' / 'step-{:08d}').rmdir()"
    text = "step(1), save(1), step(2), save(2), step(3), time.sleep(0.3)\n"
    text += (
        f"(run / 'checkpoints' / 'step-00000004').mkdir(), {folder.format(1)}, "
        "time.sleep(0.3), step(4)\n"
    )
    text += (
        "time.sleep(0.3), (run / 'checkpoints' / 'step-00000004').rmdir(), save(4), step(5), "
        "time.sleep(0.3)\n"
    )
    outcome = launch_script(f"{text}end()")
    assert (outcome.exit_code, outcome.reason) == (0, "")
    text = f"{folder.format(2)}, time.sleep(0.3), step(13), time.sleep(0.3), end(number=13)"
    outcome = launch_script(text)
    assert (
        outcome.exit_code == 2
        and "step-00000002 was removed" in outcome.reason
        and "of step 4" in outcome.reason
    )
    assert launch_script("step(14), time.sleep(0.3), end(number=14)").exit_code == 0, (
        "each loss is reported once"
    )


def test_checkpoint_dropped_by_a_rollback_is_not_lost(launch_script, tmp_path):
    text = f"{REWIND}step(1), save(1), step(2), save(2), step(3), time.sleep(0.3)\n"
    text += "(run / 'checkpoints' / 'step-00000002').rmdir(), time.sleep(0.3), rewind(2)\n"
    outcome = launch_script(f"{text}step(2), time.sleep(0.3), end()")
    assert (outcome.exit_code, outcome.reason) == (0, "")


def test_removed_lock_is_taken_again(launch_script, tmp_path):
    text = "(run / 'driver.lock').unlink(), wait_for(run / 'driver.lock'), time.sleep(0.2)\n"
    text += "(run / 'at-it').touch(), time.sleep(0.5), end()"
    refused = []

    def take_lock(run):
        try:
            DriverLock(run)
        except StudyHeld as error:
            refused.append(error)

    act_once_at_work(tmp_path, take_lock)
    assert launch_script(text).exit_code == 0
    assert len(refused) == 1


def test_displaced_supervisor_stops_its_job(launch_script, tmp_path):
    locks = []
    act_once_at_work(
        tmp_path, lambda run: [(run / "driver.lock").unlink(), locks.append(DriverLock(run))]
    )
    with pytest.raises(StudyHeld):
        launch_script("(run / 'at-it').touch(), time.sleep(30)")
    locks[0].close()
