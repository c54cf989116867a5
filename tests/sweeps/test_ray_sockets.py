"""What Ray of our own listens on, every socket of it, and that nobody without the token gets an
answer there.
"""

import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import grpc
from sweep_fakes import FakeHostFactory

from sweeps.ray.own import processes
from sweeps.ray.pool import RayPool

METHODS = (
    "NodeInfoGcsService/GetAllNodeInfo",
    "InternalKVGcsService/InternalKVKeys",
    "NodeManagerService/GetNodeStats",
    "NodeManagerService/RequestWorkerLease",
    "ObjectManagerService/Pull",
    "CoreWorkerService/PushTask",
)


def listening(pids):
    """(pid's name, address, port) of every TCP socket on which one of the processes listens."""
    inodes = {}
    for pid in pids:
        try:
            for handle in Path(f"/proc/{pid}/fd").iterdir():
                if found := re.fullmatch(r"socket:\[(\d+)\]", str(handle.readlink())):
                    inodes[found[1]] = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            continue
    sockets = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == "0A" and parts[9] in inodes:
                address, port = parts[1].split(":")
                sockets.add((inodes[parts[9]], address, int(port, 16)))
    return sorted(sockets)


def grpc_answers(port):
    """Method -> what a client without a token is told."""
    said = {}
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for method in METHODS:
            try:
                channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=5)
                said[method] = "OK"
            except grpc.RpcError as error:
                said[method] = error.code().name
    return said


def http_status(host, port):
    try:
        return urllib.request.urlopen(f"http://{host}:{port}/", timeout=5).status
    except urllib.error.HTTPError as error:
        return error.code
    except urllib.error.URLError as error:
        # it listens no more: a worker has ended meanwhile
        if isinstance(error.reason, ConnectionRefusedError):
            return None
        raise


def test_every_socket_wants_the_token(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # whatever the user's own Ray does
    before = listening([os.getpid()])  # of other tests in this process
    pool = RayPool(1, FakeHostFactory(str(tmp_path / "diary")))
    try:
        token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        assert (token.stat().st_mode & 0o777, token.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        sockets = sorted(set(listening([os.getpid(), *processes(pool._own.folder)])) - set(before))
        names = {name for name, _, _ in sockets}
        assert {"gcs_server", "raylet"} <= names
        assert len(sockets) >= 6, "head, node, its objects, its agent, this driver, a worker"
        assert not [name for name in names if "dashboard" in name]
        head = pool._connection.gcs_address
        host = head.rpartition(":")[0]
        for name, address, port in sockets:
            said = grpc_answers(port)
            assert "OK" not in said.values(), (name, port, said)
            if "UNAUTHENTICATED" not in said.values():
                assert http_status(host, port) in (401, None), (name, address, port, said)
        clients = [
            client(head, extra)
            for extra in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64})
        ]
        assert [told.splitlines()[-1] for told in clients] == ["AuthenticationError"] * 2
        secret = token.read_text()
        printed = [
            path
            for path in token.parent.rglob("*")
            if path.is_file() and secret in path.read_text("latin-1")
        ]
        assert printed == [token], "the token is in its own file alone"
    finally:
        pool.close()
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
    assert not token.parent.exists()


def client(head, extra):
    """A real Ray client in a process of its own, with no token or a wrong one: the error it ends
    with.
    """
    script = f"""
import sys
from ray._raylet import GcsClient
try:
    print(GcsClient(address={head!r}).get_all_node_info(timeout=5))
except Exception as error:
    print(type(error).__name__)
"""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")
    }
    environment = {**inherited, "HOME": "/nowhere", **extra}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout
