"""Tests of the folder and token of the Ray cluster that forerun starts: they are private, and they
are removed at the end and after a kill.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from forerun._sweeps.ray.cluster_folder import ClusterFolder, RayEnvironment, remove_abandoned


@pytest.fixture
def temporary_folder(tmp_path, monkeypatch):
    """Make an empty folder the place of temporary files, and return it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def get_mode(path):
    return path.stat().st_mode & 0o777


def test_token_is_private_under_any_umask(temporary_folder):
    previous_umask = os.umask(0)
    try:
        cluster_folder = ClusterFolder()
    finally:
        os.umask(previous_umask)
    assert (get_mode(cluster_folder.folder), get_mode(cluster_folder.token)) == (0o700, 0o600)
    assert cluster_folder.folder.parent == temporary_folder
    assert len(cluster_folder.token.read_text()) == 64
    other_folder = ClusterFolder()
    assert other_folder.token.read_text() != cluster_folder.token.read_text()
    cluster_folder.close()
    cluster_folder.close()
    assert not cluster_folder.folder.exists()
    assert other_folder.token.exists(), "a folder in use must not be removed"
    other_folder.close()
    assert list(temporary_folder.iterdir()) == []


def test_folder_of_a_killed_driver_is_removed_by_the_next_one(temporary_folder):
    script = (
        "import signal, os; from forerun._sweeps.ray.cluster_folder import ClusterFolder\n"
        "ClusterFolder(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "TMPDIR": str(temporary_folder)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    (abandoned,) = temporary_folder.iterdir()
    (temporary_folder / "forerun-notes").mkdir()
    (temporary_folder / "forerun-notes" / "file").touch()
    remove_abandoned(temporary_folder)
    assert not abandoned.exists()
    assert (temporary_folder / "forerun-notes" / "file").exists()


def test_processes_that_ray_leaves_are_killed(temporary_folder):
    """The kill reaches processes in new sessions and processes without the mark in their
    environment, and no others.
    """
    cluster_folder = ClusterFolder()
    script = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"
    marked = subprocess.Popen(["sleep", "60"], env=cluster_folder.make_environment())
    subprocess.run(
        [sys.executable, "-c", script], check=True, env=cluster_folder.make_environment()
    )
    log = cluster_folder.folder / "agent.log"
    # Ray's agents overwrite their environment with their titles.
    with log.open("w") as file:
        writer = subprocess.Popen(["sleep", "60"], env={}, stdout=file)
    with log.open() as file:
        reader = subprocess.Popen(["sleep", "60"], env={}, stdin=file)
    unrelated = subprocess.Popen(["sleep", "60"])
    cluster_folder.close()
    assert (marked.wait(timeout=10), writer.wait(timeout=10)) == (-signal.SIGKILL, -signal.SIGKILL)
    assert (reader.poll(), unrelated.poll()) == (None, None)
    for process in (reader, unrelated):
        process.kill()
        process.wait(timeout=10)
    mark = f"FORERUN_RAY_FOLDER={cluster_folder.folder}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            assert (
                mark not in (process / "environ").read_bytes()
                or " Z " in (process / "stat").read_text()  # a zombie
            )
        except OSError:  # the process has ended, or is another user's
            continue


def test_token_that_is_a_link_is_not_followed(temporary_folder):
    (temporary_folder / "forerun-x").mkdir()
    (temporary_folder / "forerun-x" / "token").symlink_to(temporary_folder / "elsewhere")
    (temporary_folder / "elsewhere").touch()
    remove_abandoned(temporary_folder)
    assert (temporary_folder / "forerun-x").exists()


def test_environment_is_restored(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "user's token")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    environment_before = dict(os.environ)
    own_cluster = RayEnvironment(Path("/a/token"))
    assert (os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN_PATH"]) == ("token", "/a/token")
    assert "RAY_AUTH_TOKEN" not in os.environ, "Ray would prefer it to the file"
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "1"
    own_cluster.close()
    assert dict(os.environ) == environment_before
    users_cluster = RayEnvironment(None)
    assert (os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"]) == (
        "disabled",
        "user's token",
    )
    users_cluster.close()
    assert dict(os.environ) == environment_before
