"""The folder and the token of a cluster of our own: private, gone at the end, and swept up after a
kill.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sweeps.ray.own import ClusterFolder, Environment, remove_abandoned


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def mode(path):
    return path.stat().st_mode & 0o777


def test_the_token_is_private_whatever_the_umask(base):
    before = os.umask(0)
    try:
        own = ClusterFolder()
    finally:
        os.umask(before)
    assert (mode(own.folder), mode(own.token)) == (0o700, 0o600)
    assert own.folder.parent == base
    assert len(own.token.read_text()) == 64
    other = ClusterFolder()
    assert other.token.read_text() != own.token.read_text()
    own.close()
    own.close()
    assert not own.folder.exists()
    assert other.token.exists(), "a folder in use is nobody else's to remove"
    other.close()
    assert list(base.iterdir()) == []


def test_a_killed_driver_leaves_nothing_for_long(base):
    script = (
        "import signal, os; from sweeps.ray.own import ClusterFolder\n"
        "ClusterFolder(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "TMPDIR": str(base)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = base.iterdir()
    (base / "forerun-notes").mkdir()
    (base / "forerun-notes" / "mine").touch()
    remove_abandoned(base)
    assert not left.exists()
    assert (base / "forerun-notes" / "mine").exists()


def test_what_ray_leaves_running_ends(base):
    """Also what was started below it, in a session of its own, or has no environment any more; and
    nothing else.
    """
    own = ClusterFolder()
    script = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"
    marked = subprocess.Popen(["sleep", "60"], env=own.marked(os.environ))
    subprocess.run([sys.executable, "-c", script], check=True, env=own.marked(os.environ))
    log = own.folder / "agent.log"
    with log.open("w") as file:  # Ray's agents write their titles over their environment
        writer = subprocess.Popen(["sleep", "60"], env={}, stdout=file)
    with log.open() as file:
        reader = subprocess.Popen(["sleep", "60"], env={}, stdin=file)
    other = subprocess.Popen(["sleep", "60"])
    own.close()
    assert (marked.wait(timeout=10), writer.wait(timeout=10)) == (-signal.SIGKILL, -signal.SIGKILL)
    assert (reader.poll(), other.poll()) == (None, None)
    for process in (reader, other):
        process.kill()
        process.wait(timeout=10)
    mark = f"FORERUN_RAY_FOLDER={own.folder}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            assert (
                mark not in (process / "environ").read_bytes()
                or "Z" in (process / "stat").read_text()
            )
        except OSError:
            continue


def test_a_token_that_is_a_link_is_not_followed(base):
    (base / "forerun-x").mkdir()
    (base / "forerun-x" / "token").symlink_to(base / "elsewhere")
    (base / "elsewhere").touch()
    remove_abandoned(base)
    assert (base / "forerun-x").exists()


def test_the_environment_is_put_back(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "theirs")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    before = dict(os.environ)
    own = Environment(Path("/a/token"))
    assert (os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN_PATH"]) == ("token", "/a/token")
    assert "RAY_AUTH_TOKEN" not in os.environ, "Ray would prefer it to ours"
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "1"
    own.close()
    assert dict(os.environ) == before
    theirs = Environment(None)
    assert (os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"]) == ("disabled", "theirs")
    theirs.close()
    assert dict(os.environ) == before
