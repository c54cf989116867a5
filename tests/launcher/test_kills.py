"""Real kills of a real `forerun run` on real Ray: a named end in time, no process left, the same
frozen config.
"""

import os
import shutil
import signal
import subprocess

import pytest
from kill_case import RAY, Driver, frozen_digest, kill
from ray_cluster import RayCluster

HOW_IT_ENDS = {
    "worker": 0,
    "driver": -signal.SIGKILL,
    "raylet": 2,
    "gcs_server": 2,
    "SIGTERM": 130,
    "SIGINT": 130,
    "SIGINT twice": 130,
    "SIGSTOP": 75,
}

NUM_SLOTS = 4  # of each of two workers: the plan's default


@pytest.fixture(scope="module")
def whole(finished):
    """The digest that the uninterrupted study freezes."""
    copy = finished.parent / "frozen-copy"
    if not copy.exists():
        shutil.copytree(finished / "study", copy)
    return frozen_digest(copy)


def killed_and_finished(finished, whole, study, what, at_outcomes):
    row = kill(finished / "plan.toml", study, what, at_outcomes)
    assert row["exit_code"] == HOW_IT_ENDS[what], row["said"]
    assert row["notice_seconds"] < 40
    assert row["orphans_gone_seconds"] < 20
    assert row["num_repeated"] <= 2 * NUM_SLOTS, "at most what was in flight"
    assert frozen_digest(study) == whole
    return row


@pytest.mark.slow
def test_a_worker_is_killed(finished, whole, tmp_path):
    row = killed_and_finished(finished, whole, tmp_path / "study", "worker", 5)
    assert "worker lost" in row["said"]
    assert row["drivers"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("at_outcomes", [1, 30])
@pytest.mark.parametrize(
    "what", ["driver", "raylet", "gcs_server", "SIGTERM", "SIGINT", "SIGINT twice"]
)
def test_killed_resumed_and_frozen(finished, whole, tmp_path, what, at_outcomes):
    row = killed_and_finished(finished, whole, tmp_path / "study", what, at_outcomes)
    if what in ("raylet", "gcs_server"):
        assert "Ray is gone" in row["said"]
        assert "run the same command again to resume" in row["said"]
    if what in ("SIGTERM", "SIGINT"):
        assert "continues" in row["said"]


@pytest.mark.slow
def test_a_stopped_driver_comes_back_too_late(finished, whole, tmp_path):
    row = killed_and_finished(finished, whole, tmp_path / "study", "SIGSTOP", 10)
    assert row["stale_error"] == "StaleDriver"


@pytest.mark.slow
def test_a_cluster_dies_and_another_one_finishes(finished, whole, tmp_path):
    """As a job of Ray's is started: the address and the token in the environment, `auto` in the
    plan.
    """
    settings = ("--set", "cluster.backend=ray", "--set", "cluster.address=auto")
    study = tmp_path / "study"
    for dies in (True, False):
        cluster = RayCluster(2)
        environment = {**cluster.environment, "RAY_ADDRESS": cluster.address}
        driver = Driver(finished / "plan.toml", study, *settings, environment=environment)
        try:
            if dies:
                driver.wait_for(lambda driver=driver: driver.num_outcomes() >= 5)
                os.kill(cluster.pids("gcs_server")[0], signal.SIGKILL)
            code, _ = driver.end()
            assert code == (2 if dies else 0), driver.said()
            assert "2 workers on 1 node" in driver.said()
            assert ("Ray is gone" in driver.said()) == dies
        finally:
            driver.sweep_up()
            cluster.close()
    assert frozen_digest(study) == whole


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_while_ray_starts(finished, tmp_path, number):
    """Whatever part of it is up already; the same command goes on."""
    driver = Driver(finished / "plan.toml", tmp_path / "study", *RAY)
    try:
        driver.wait_for(lambda: driver.pids("gcs_server"))
        os.kill(driver.process.pid, number)
        code, body = driver.end(seconds=30)
        assert (code, body["exit_code"]) == (130, 130), driver.said()
        driver.gone_within(5)
        assert list(driver.temporary.glob("forerun-*")) == []
    finally:
        driver.sweep_up()


def test_the_count_of_orphans_sees_one_without_environment(finished, tmp_path):
    """As Ray's agents are: all that tells is what they write."""
    driver = Driver(finished / "plan.toml", tmp_path / "study", *RAY)
    driver.process.kill()
    with (driver.temporary / "agent.log").open("w") as log:
        planted = subprocess.Popen(["sleep", "60"], env={}, stdout=log)
    try:
        driver.process.wait(timeout=10)
        with pytest.raises(TimeoutError, match="sleep 60"):
            driver.gone_within(0.2)
    finally:
        driver.sweep_up()
    assert planted.wait(timeout=10) == -signal.SIGKILL
