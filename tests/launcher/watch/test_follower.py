"""A run looked at again and again: what is new is told once, what stands stays, what comes back is
told again.
"""

import pytest
from planted_watch import NUM_STEPS, decision, expected
from watched_case import header, reader

from launcher.base import chronicle, metrics
from launcher.watch.follower import Follower
from proxies.core import canon

DECISION = decision()


def follower(folder):
    readings = reader(folder, NUM_STEPS, digest=DECISION.digest)
    return Follower(DECISION, readings, frozen=folder / "launch.json", run_dir=folder)


def write(folder, *spiked, last=400, first=1):
    for step in range(first, last + 1):
        loss = float(expected(step)) + 0.003 * (step % 7) + 3.0 * (step in spiked)
        metrics.append(folder, {"step": step, "train_loss_nats": loss})


@pytest.fixture
def run(tmp_path):
    metrics.append(
        tmp_path, canon.decode(metrics.Header, canon.to_json(header(digest=DECISION.digest)))
    )
    return tmp_path


def recorded(folder):
    return [
        (entry.data["name"], entry.step)
        for entry in chronicle.entries(folder)
        if entry.kind == "alert"
    ]


def spikes_told(following):
    return [
        said for said in following.look(last=False).news if said.startswith("ALARM spike_lasts")
    ]


def test_an_alert_is_news_once_and_again_when_it_has_been_away(run):
    write(run, last=300)
    following = follower(run)
    assert following.look(last=False).news == ()
    write(run, *range(301, 321), first=301, last=320)
    (told,) = spikes_told(following)
    assert told.startswith("ALARM spike_lasts, from step 301: ")
    assert following.look(last=False).news == ()
    write(run, first=321, last=420)
    assert spikes_told(following) == [], "it is over"
    write(run, *range(421, 441), first=421, last=440)
    assert len(spikes_told(following)) == 1
    twice = [("spike_lasts", 301), ("spike_lasts", 421)]
    assert [entry for entry in recorded(run) if entry[0] == "spike_lasts"] == twice
    follower(run).look(last=False)
    assert [entry for entry in recorded(run) if entry[0] == "spike_lasts"] == twice, "whoever looks"
