"""What a run's chronicle says of the time between its launches."""

import datetime

import pytest
from planted_watch import BEGAN

from launcher.base import chronicle
from launcher.watch.follower import figure_lines
from launcher.watch.liveness import UNKNOWN, liveness_of
from proxies.core import canon

DIGEST = "a" * 64
BEGUN = BEGAN.timestamp()
FIGURES = {
    "train_loss_nats": None, "final_nats": 2.0, "final_interval_nats": (1.9, 2.1), "foretold_nats": 2.0,
    "foretold_interval_nats": (1.9, 2.1), "level": 0.95, "tokens_per_second": None, "mfu": None, "goodput": None,
    "projection": None,
}  # fmt: skip


def said_by(folder, *events, digest=DIGEST):
    """What a chronicle says of events, at so many seconds after the run began."""
    moments = [(kind, (BEGAN + datetime.timedelta(seconds=after)).isoformat()) for kind, after in events]
    entries = [chronicle.Entry(at=at, kind=kind, text=kind, digest=digest) for kind, at in moments]
    lines = [canon.canonical(entry) for entry in entries]
    (folder / chronicle.CHRONICLE_FILE).write_text("\n".join(lines) + "\n")
    return liveness_of(folder, DIGEST)


def test_a_run_lies_still_from_the_end_of_a_launch_to_the_next(tmp_path):
    found = said_by(tmp_path, ("launched", 0), ("restarted", 40), ("ended", 60), ("launched", 100), ("ended", 150))
    assert found.pauses == ((BEGUN + 60, BEGUN + 100),) and found.num_launches == 2
    assert [found.paused_seconds(BEGUN, BEGUN + at) for at in (50, 60, 70, 100, 900)] == [0, 0, 10, 40, 40]
    assert [found.paused_seconds(BEGUN + at, BEGUN + 900) for at in (70, 100, 200)] == [30, 0, 0], "not begun yet"
    assert found.ended == "ended"


def test_a_supervisor_that_was_killed_says_no_end_and_its_gap_is_lost_time(tmp_path):
    found = said_by(tmp_path, ("launched", 0), ("launched", 100), ("ended", 160), ("note", 170), ("launched", 200))
    assert found.pauses == ((BEGUN + 160, BEGUN + 200),) and found.num_launches == 3


def test_another_run_says_nothing_of_this_one(tmp_path):
    assert said_by(tmp_path, ("launched", 0), ("ended", 60), ("launched", 100), digest="b" * 64) == UNKNOWN


@pytest.mark.parametrize(
    ("launches", "attempts", "said"),
    [
        (None, None, None),
        (None, 2, "1 restart"),
        (1, 1, "0 restarts"),
        (2, 2, "launched 2 times, 0 restarts"),
        (2, 4, "launched 2 times, 2 restarts"),
        (3, 2, "launched 3 times, 0 restarts"),
    ],
)
def test_who_continues_a_run_restarts_nothing(launches, attempts, said):
    lines = figure_lines({**FIGURES, "num_launches": launches, "num_attempts": attempts})
    assert lines[1:] == ([said] if said else [])
