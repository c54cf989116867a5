"""The watchdog, by a clock of its own: what counts as moving, and how long silence may last."""

from launcher.base import metrics
from launcher.base.watchdog import STEP_FACTOR, Limits, Watchdog


def step(run_dir, number, seconds=0.5):
    metrics.append(
        run_dir,
        {"step": number, "train_loss_nats": 2.5, "tokens": 100 * number, "seconds": seconds},
    )


def hung(watchdog, now):
    return bool(watchdog.look(now))


def test_before_the_first_step_there_is_more_time(tmp_path):
    watchdog = Watchdog(tmp_path, Limits(floor_seconds=10, start_seconds=100), now=0)
    assert not hung(watchdog, 100)
    assert "before its first step" in watchdog.look(101)


def test_after_a_step_the_floor_counts_from_the_last_one(tmp_path):
    watchdog = Watchdog(tmp_path, Limits(floor_seconds=10, start_seconds=100), now=0)
    watchdog.look(1)
    for number in range(1, 4):
        step(tmp_path, number)
        assert not hung(watchdog, 9.0 * number)
    assert not hung(watchdog, 37)
    assert watchdog.look(38) == "no line of metrics for 11 s after step 3; the limit is 10 s"


def test_slow_steps_lengthen_the_limit(tmp_path):
    watchdog = Watchdog(tmp_path, Limits(floor_seconds=10), now=0)
    watchdog.look(0)
    for number, seconds in enumerate((30.0, 500.0, 30.0), start=1):
        step(tmp_path, number, seconds)
        watchdog.look(1)
    assert not hung(watchdog, 1 + STEP_FACTOR * 30) and hung(watchdog, 2 + STEP_FACTOR * 30)


def test_what_earlier_attempts_left_is_no_step_of_this_one(tmp_path):
    for number in range(1, 8):
        step(tmp_path, number)
    watchdog = Watchdog(tmp_path, Limits(floor_seconds=10, start_seconds=100), now=0)
    watchdog.look(1)
    assert watchdog.pace.step is None
    metrics.rewind(tmp_path, 4)
    watchdog.look(2)
    assert watchdog.pace.step == 4
    assert not hung(watchdog, 100), "a rewind is no step: the ranks may compile now"
    step(tmp_path, 5)
    watchdog.look(101)
    assert watchdog.pace.step == 5 and hung(watchdog, 112)


def part_of(run_dir):
    folder = run_dir / "checkpoints" / "step-00000004.part"
    folder.mkdir(parents=True)
    return folder / "__0_0.distcp"


def test_a_save_that_is_written_is_no_hang_however_long_it_takes(tmp_path):
    watchdog = Watchdog(tmp_path, Limits(floor_seconds=16), now=0)
    metrics.append(tmp_path, {"event": "started", "step": 0})
    watchdog.look(0)
    step(tmp_path, 1)
    watchdog.look(1)
    file = part_of(tmp_path)
    for second in range(2, 102):
        file.write_bytes(b"x" * (second // 10))
        assert not hung(watchdog, second)
    assert not hung(watchdog, 116)
    said = watchdog.look(119)
    assert said.startswith("no line of metrics, nor any change of the save"), "it stands still"
    assert said.endswith(" after step 1; the limit is 16 s")


def test_what_an_earlier_attempt_left_of_a_save_is_no_sign_of_life(tmp_path):
    part_of(tmp_path).write_bytes(b"x")
    watchdog = Watchdog(tmp_path, Limits(floor_seconds=16, start_seconds=16), now=0)
    assert not hung(watchdog, 16) and hung(watchdog, 17)


def test_a_disk_that_stutters_is_silence_and_no_error(tmp_path, monkeypatch):
    watchdog = Watchdog(tmp_path, Limits(floor_seconds=10, start_seconds=10), now=0)

    def stale(self):
        raise OSError(116, "Stale file handle", "metrics.jsonl")

    with monkeypatch.context() as patched:
        patched.setattr("launcher.base.metrics.Following.read", stale)
        assert not hung(watchdog, 9) and hung(watchdog, 11)
    step(tmp_path, 1)
    assert not hung(watchdog, 12)
