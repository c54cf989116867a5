"""Tests of the follower, which looks at a run's log again and again.

It must report an alert once, and again only if the alert returns after it was over.
"""

import pytest
from planted_watch import NUM_STEPS, compute_expected_losses, make_watched_decision
from watched_case import make_header, make_reader

from forerun._launcher.main_run import event_log, metrics_file
from forerun._launcher.main_run.watch.follower import Follower
from forerun._proxies.core import canon

DECISION = make_watched_decision()


def make_follower(folder):
    """Return a follower of the log in a run's folder."""
    reader = make_reader(folder, NUM_STEPS, digest=DECISION.digest)
    return Follower(DECISION, reader, frozen=folder / "launch.json", run_dir=folder)


def write_steps(folder, *spike_steps, last=400, first=1):
    """Append steps `first` to `last` to the log, with losses 3 nats higher at `spike_steps`."""
    for step in range(first, last + 1):
        loss = (
            float(compute_expected_losses(step)) + 0.003 * (step % 7) + 3.0 * (step in spike_steps)
        )
        metrics_file.append_line(folder, {"step": step, "train_loss_nats": loss})


@pytest.fixture
def run(tmp_path):
    """The folder of a run whose log has a header and no step yet."""
    metrics_file.append_line(
        tmp_path,
        canon.decode(metrics_file.AttemptStart, canon.to_json(make_header(digest=DECISION.digest))),
    )
    return tmp_path


def list_recorded_alerts(folder):
    """Return name and step of every alert in the event log."""
    return [
        (entry.data["name"], entry.step)
        for entry in event_log.read_events(folder)
        if entry.kind == "alert"
    ]


def look_for_spikes(follower):
    """Look once; return the new alerts about a lasting spike."""
    news = follower.look(last=False).news
    return [line for line in news if line.startswith("ALARM spike_lasts")]


def test_alert_is_news_once_and_again_after_it_was_over(run):
    write_steps(run, last=300)
    follower = make_follower(run)
    assert follower.look(last=False).news == ()
    # A first spike
    write_steps(run, *range(301, 321), first=301, last=320)
    (line,) = look_for_spikes(follower)
    assert line.startswith("ALARM spike_lasts, from step 301: ")
    assert follower.look(last=False).news == ()
    # The spike ends, and another one begins.
    write_steps(run, first=321, last=420)
    assert look_for_spikes(follower) == []
    write_steps(run, *range(421, 441), first=421, last=440)
    assert len(look_for_spikes(follower)) == 1
    # Each spike is recorded once, also when another follower looks.
    expected_alerts = [("spike_lasts", 301), ("spike_lasts", 421)]
    alerts = [alert for alert in list_recorded_alerts(run) if alert[0] == "spike_lasts"]
    assert alerts == expected_alerts
    make_follower(run).look(last=False)
    alerts = [alert for alert in list_recorded_alerts(run) if alert[0] == "spike_lasts"]
    assert alerts == expected_alerts
