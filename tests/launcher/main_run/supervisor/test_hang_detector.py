"""Tests of the hang detector with a fake clock.

New steps in the metrics and a growing checkpoint are progress of a run. A run without progress is
hung after a limit. Before the first step of an attempt, the limit is `start_seconds`. Later it is
`floor_seconds`, or `STEP_FACTOR` median steps if those take longer.
"""

from forerun._launcher.main_run import metrics_file
from forerun._launcher.main_run.supervisor.hang_detector import (
    STEP_FACTOR,
    HangDetector,
    SilenceLimits,
)


def log_step(run_dir, number, seconds=0.5):
    """Append a line of metrics for a step that took `seconds`."""
    metrics_file.append_line(
        run_dir,
        {"step": number, "train_loss_nats": 2.5, "tokens": 100 * number, "seconds": seconds},
    )


def is_hung(detector, now):
    """Let the detector look at the run at time `now`; return whether it reports a hang."""
    return bool(detector.check(now))


def test_first_step_has_a_longer_limit(tmp_path):
    detector = HangDetector(tmp_path, SilenceLimits(floor_seconds=10, start_seconds=100), now=0)
    assert not is_hung(detector, 100)
    assert "before its first step" in detector.check(101)


def test_floor_counts_from_the_last_step(tmp_path):
    detector = HangDetector(tmp_path, SilenceLimits(floor_seconds=10, start_seconds=100), now=0)
    detector.check(1)
    for number in range(1, 4):
        log_step(tmp_path, number)
        assert not is_hung(detector, 9.0 * number)
    # The detector saw step 3 at 27 s.
    assert not is_hung(detector, 37)
    assert detector.check(38) == "no line of metrics for 11 s after step 3; the limit is 10 s"


def test_slow_steps_lengthen_the_limit(tmp_path):
    detector = HangDetector(tmp_path, SilenceLimits(floor_seconds=10), now=0)
    detector.check(0)
    for number, seconds in enumerate((30.0, 500.0, 30.0), start=1):
        log_step(tmp_path, number, seconds)
        detector.check(1)
    # The median step takes 30 s, and the last one was seen at 1 s.
    assert not is_hung(detector, 1 + STEP_FACTOR * 30)
    assert is_hung(detector, 2 + STEP_FACTOR * 30)


def test_steps_of_earlier_attempts_are_no_progress(tmp_path):
    for number in range(1, 8):
        log_step(tmp_path, number)
    detector = HangDetector(tmp_path, SilenceLimits(floor_seconds=10, start_seconds=100), now=0)
    detector.check(1)
    assert detector.pace.step is None
    metrics_file.rewind_metrics(tmp_path, 4)
    detector.check(2)
    assert detector.pace.step == 4
    assert not is_hung(detector, 100), "the ranks may be compiling after the rewind"
    log_step(tmp_path, 5)
    detector.check(101)
    assert detector.pace.step == 5 and is_hung(detector, 112)


def make_partial_checkpoint(run_dir):
    """Make the folder of an unfinished save; return the path of a file in it."""
    folder = run_dir / "checkpoints" / "step-00000004.part"
    folder.mkdir(parents=True)
    return folder / "__0_0.distcp"


def test_growing_save_is_no_hang_however_long_it_takes(tmp_path):
    detector = HangDetector(tmp_path, SilenceLimits(floor_seconds=16), now=0)
    metrics_file.append_line(tmp_path, {"event": "started", "step": 0})
    detector.check(0)
    log_step(tmp_path, 1)
    detector.check(1)
    file = make_partial_checkpoint(tmp_path)
    # The file grows every 10 s, and for the last time at 100 s.
    for second in range(2, 102):
        file.write_bytes(b"x" * (second // 10))
        assert not is_hung(detector, second)
    assert not is_hung(detector, 116)
    message = detector.check(119)
    assert message.startswith("no line of metrics, nor any change of the save")
    assert message.endswith(" after step 1; the limit is 16 s")


def test_unfinished_save_of_an_earlier_attempt_is_no_progress(tmp_path):
    make_partial_checkpoint(tmp_path).write_bytes(b"x")
    detector = HangDetector(tmp_path, SilenceLimits(floor_seconds=16, start_seconds=16), now=0)
    assert not is_hung(detector, 16) and is_hung(detector, 17)


def test_read_error_counts_as_silence(tmp_path, monkeypatch):
    detector = HangDetector(tmp_path, SilenceLimits(floor_seconds=10, start_seconds=10), now=0)

    def raise_stale_handle(self):
        raise OSError(116, "Stale file handle", "metrics.jsonl")

    with monkeypatch.context() as patched:
        patched.setattr(
            "forerun._launcher.main_run.metrics_file.MetricsFollower.read", raise_stale_handle
        )
        assert not is_hung(detector, 9) and is_hung(detector, 11)
    log_step(tmp_path, 1)
    assert not is_hung(detector, 12)
