"""Tests of `forerun run` on Ray when its processes are killed.

The run must end in time with its exit code, leave no process behind, and a resumed run must freeze
the same config as an uninterrupted one.
"""

import os
import shutil
import signal
import subprocess

import pytest
from kill_case import RAY, Driver, freeze_accepting_gates, kill
from ray_cluster import RayCluster

EXIT_CODES = {
    "worker": 0,
    "driver": -signal.SIGKILL,
    "raylet": 2,
    "gcs_server": 2,
    "SIGTERM": 130,
    "SIGINT": 130,
    "SIGINT twice": 130,
    "SIGSTOP": 75,
}
"""Exit code of the driver, by the process that is killed or the signal that the driver gets."""

NUM_SLOTS = 4
"""Runs that a worker trains at a time: the plan's default, for each of the two workers."""


@pytest.fixture(scope="module")
def expected_digest(finished_study_dir):
    """Digest of the config that the uninterrupted study freezes."""
    copy = finished_study_dir.parent / "frozen-copy"
    if not copy.exists():
        shutil.copytree(finished_study_dir / "study", copy)
    return freeze_accepting_gates(copy)


def kill_and_finish(finished_study_dir, expected_digest, study, target, at_outcomes):
    """Kill a target, resume the study, check its end, and return the record of the kill.

    Args:
        finished_study_dir: Folder with the plan.
        expected_digest: Digest of the config that the study must freeze.
        study: Folder of the study.
        target: Process to kill or signal to send, a key of `EXIT_CODES`.
        at_outcomes: Number of outcomes in the ledger at which the target is killed.
    """
    row = kill(finished_study_dir / "plan.toml", study, target, at_outcomes)
    assert row["exit_code"] == EXIT_CODES[target], row["said"]
    assert row["notice_seconds"] < 40
    assert row["orphans_gone_seconds"] < 20
    assert row["num_repeated"] <= 2 * NUM_SLOTS, "only runs in flight are repeated"
    assert freeze_accepting_gates(study) == expected_digest
    return row


@pytest.mark.slow
def test_killed_worker_is_replaced(finished_study_dir, expected_digest, tmp_path):
    row = kill_and_finish(finished_study_dir, expected_digest, tmp_path / "study", "worker", 5)
    assert "worker lost" in row["said"]
    assert row["drivers"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("at_outcomes", [1, 30])
@pytest.mark.parametrize(
    "target", ["driver", "raylet", "gcs_server", "SIGTERM", "SIGINT", "SIGINT twice"]
)
def test_killed_study_resumes_and_freezes_the_same_config(
    finished_study_dir, expected_digest, tmp_path, target, at_outcomes
):
    row = kill_and_finish(
        finished_study_dir, expected_digest, tmp_path / "study", target, at_outcomes
    )
    if target in ("raylet", "gcs_server"):
        assert "Ray is gone" in row["said"]
        assert "run the same command again to resume" in row["said"]
    if target in ("SIGTERM", "SIGINT"):
        assert "continues" in row["said"]


@pytest.mark.slow
def test_stopped_driver_that_continues_finds_itself_replaced(
    finished_study_dir, expected_digest, tmp_path
):
    row = kill_and_finish(finished_study_dir, expected_digest, tmp_path / "study", "SIGSTOP", 10)
    assert row["stale_error"] == "StaleDriver"


@pytest.mark.slow
def test_another_cluster_finishes_after_the_first_dies(
    finished_study_dir, expected_digest, tmp_path
):
    """Start the driver as a Ray job: address and token in the environment, `auto` in the plan."""
    settings = ("--set", "cluster.backend=ray", "--set", "cluster.address=auto")
    study = tmp_path / "study"
    for first_cluster_dies in (True, False):
        cluster = RayCluster(2)
        environment = {**cluster.environment, "RAY_ADDRESS": cluster.address}
        driver = Driver(finished_study_dir / "plan.toml", study, *settings, environment=environment)
        try:
            if first_cluster_dies:
                driver.wait_for(lambda driver=driver: driver.count_outcomes() >= 5)
                os.kill(cluster.list_pids("gcs_server")[0], signal.SIGKILL)
            code, _ = driver.wait_for_end()
            assert code == (2 if first_cluster_dies else 0), driver.read_stderr()
            assert "2 workers on 1 node" in driver.read_stderr()
            assert ("Ray is gone" in driver.read_stderr()) == first_cluster_dies
        finally:
            driver.sweep_up()
            cluster.close()
    assert freeze_accepting_gates(study) == expected_digest


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signal_while_ray_starts_ends_every_process(finished_study_dir, tmp_path, number):
    driver = Driver(finished_study_dir / "plan.toml", tmp_path / "study", *RAY)
    try:
        driver.wait_for(lambda: driver.list_pids("gcs_server"))
        os.kill(driver.process.pid, number)
        code, body = driver.wait_for_end(seconds=30)
        assert (code, body["exit_code"]) == (130, 130), driver.read_stderr()
        driver.wait_until_gone(5)
        assert list(driver.temporary.glob("forerun-*")) == []
    finally:
        driver.sweep_up()


def test_orphan_without_the_environment_is_found_by_its_log(finished_study_dir, tmp_path):
    """Ray's agents do not inherit the environment; only their log files show whose they are."""
    driver = Driver(finished_study_dir / "plan.toml", tmp_path / "study", *RAY)
    driver.process.kill()
    with (driver.temporary / "agent.log").open("w") as log:
        planted = subprocess.Popen(["sleep", "60"], env={}, stdout=log)
    try:
        driver.process.wait(timeout=10)
        with pytest.raises(TimeoutError, match="sleep 60"):
            driver.wait_until_gone(0.2)
    finally:
        driver.sweep_up()
    assert planted.wait(timeout=10) == -signal.SIGKILL
