"""Tests that no socket of forerun's own Ray cluster answers a client without the token."""

import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import grpc
from sweep_fakes import FakeHostFactory

from forerun._sweeps.ray.cluster_folder import find_processes
from forerun._sweeps.ray.pool import RayPool

# Methods of every service that Ray's processes offer: the head, the node, its objects, a worker
METHODS = (
    "NodeInfoGcsService/GetAllNodeInfo",
    "InternalKVGcsService/InternalKVKeys",
    "NodeManagerService/GetNodeStats",
    "NodeManagerService/RequestWorkerLease",
    "ObjectManagerService/Pull",
    "CoreWorkerService/PushTask",
)


def list_listening_sockets(pids):
    """Return (process name, address, port) of every TCP socket on which these processes listen."""
    inodes = {}
    for pid in pids:
        try:
            for handle in Path(f"/proc/{pid}/fd").iterdir():
                if match := re.fullmatch(r"socket:\[(\d+)\]", str(handle.readlink())):
                    inodes[match[1]] = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            continue
    sockets = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            parts = line.split()
            # The connection's state (0A: it listens) and the socket's inode
            if parts[3] == "0A" and parts[9] in inodes:
                address, port = parts[1].split(":")
                sockets.add((inodes[parts[9]], address, int(port, 16)))
    return sorted(sockets)


def ask_grpc(port):
    """Return the status that a client without a token gets, by method."""
    statuses = {}
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for method in METHODS:
            try:
                channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=5)
                statuses[method] = "OK"
            except grpc.RpcError as error:
                statuses[method] = error.code().name
    return statuses


def get_http_status(host, port):
    try:
        return urllib.request.urlopen(f"http://{host}:{port}/", timeout=5).status
    except urllib.error.HTTPError as error:
        return error.code
    except urllib.error.URLError as error:
        # The socket is closed: a worker has ended meanwhile.
        if isinstance(error.reason, ConnectionRefusedError):
            return None
        raise


def test_every_socket_requires_the_token(tmp_path, monkeypatch):
    # The user's own Ray needs no token.
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    # Other tests of this process may listen too.
    sockets_before = list_listening_sockets([os.getpid()])
    pool = RayPool(1, FakeHostFactory(str(tmp_path / "diary")))
    try:
        token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        assert (token.stat().st_mode & 0o777, token.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        sockets = sorted(
            set(list_listening_sockets([os.getpid(), *find_processes(pool._cluster_folder.folder)]))
            - set(sockets_before)
        )
        names = {name for name, _, _ in sockets}
        assert {"gcs_server", "raylet"} <= names
        assert len(sockets) >= 6, "head, node, its objects, its agent, this driver, a worker"
        assert not [name for name in names if "dashboard" in name]
        head = pool._connection.gcs_address
        host = head.rpartition(":")[0]
        for name, address, port in sockets:
            statuses = ask_grpc(port)
            assert "OK" not in statuses.values(), (name, port, statuses)
            if "UNAUTHENTICATED" not in statuses.values():
                assert get_http_status(host, port) in (401, None), (name, address, port, statuses)
        client_outputs = [
            run_client(head, token_variables)
            for token_variables in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64})
        ]
        assert [output.splitlines()[-1] for output in client_outputs] == ["AuthenticationError"] * 2
        secret = token.read_text()
        files_with_token = [
            path
            for path in token.parent.rglob("*")
            if path.is_file() and secret in path.read_text("latin-1")
        ]
        assert files_with_token == [token], "the token must be in no other file"
    finally:
        pool.close()
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
    assert not token.parent.exists()


def run_client(head, token_variables):
    """Run a real Ray client in a new process, with no token or a wrong one; return what it
    prints.
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
    environment = {**inherited, "HOME": "/nowhere", **token_variables}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout
