"""A Ray cluster of several nodes on this machine, started by `ray start` and stopped by its process
ids.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from waiting import wait_until

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
START = ["start", "--block", "--object-store-memory=80000000", "--disable-usage-stats"]


def list_processes(folder):
    """Return {pid: command line} of every live process that names `folder` in its command line."""
    lines_by_pid = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                line = words.decode(errors="replace")
            except OSError:
                continue
            if str(folder) in line:
                lines_by_pid[int(entry.name)] = line
    return lines_by_pid


def list_descendants(pid):
    """Return the pids of all live descendants of a process."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if stat[0] != "Z":
                parents[int(entry.name)] = int(stat[1])
    descendants, ancestors = [], [pid]
    while ancestors:
        ancestor = ancestors.pop()
        children = [child for child, parent in parents.items() if parent == ancestor]
        descendants += children
        ancestors += children
    return descendants


class RayCluster:
    """A cluster whose clients need a token; `environment` has the variables with the token."""

    def __init__(self, *node_cpus, fake_gpus=0):
        """Start a head and more nodes.

        Args:
            node_cpus: number of CPUs of each node, the head first.
            fake_gpus: number of GPUs that each node except the head claims to have.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="rc-", dir="/tmp"))
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        }
        self.nodes = []
        try:
            self._start_nodes(node_cpus, fake_gpus)
        except BaseException:
            self.close()
            raise

    def _start_nodes(self, node_cpus, fake_gpus):
        """Start the nodes as `__init__` describes, and wait until all are alive."""
        self._start(
            "--head",
            "--port=0",
            "--include-dashboard=false",
            f"--temp-dir={self.folder}",
            cpus=node_cpus[0],
        )
        current = self.folder / "ray_current_cluster"
        wait_until(current.exists, 60)
        self.address = current.read_text()
        for cpus in node_cpus[1:]:
            self._start(f"--address={self.address}", f"--num-gpus={fake_gpus}", cpus=cpus)
        wait_until(lambda: self._count_live_nodes() == len(node_cpus), 60)

    def _start(self, *arguments, cpus):
        """Start a node by `ray start` with these arguments."""
        # Ray looks for its token in the home folder too, so the user's own folder must not be used.
        env = {**os.environ, **self.environment, "HOME": str(self.folder)}
        command = [*RAY, *START, f"--num-cpus={cpus}", *arguments]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.nodes.append(subprocess.Popen(command, env=env, start_new_session=True, **quiet))

    def _count_live_nodes(self):
        """Count the live nodes as the head sees them.

        A new process asks, because Ray keeps tokens in the memory of this one.
        """
        script = (
            "from ray._raylet import GcsClient\n"
            f"nodes = GcsClient(address={self.address!r}).get_all_node_info(timeout=9)\n"
            "print(sum(node.state == 0 for node in nodes.values()))  # 0: alive"
        )
        environment = {**os.environ, **self.environment}
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return int(done.stdout)

    def list_pids(self, program):
        """Return the pids of the cluster's processes whose program's path ends so: `raylet/raylet`
        for the nodes, `gcs_server` for the head's server.
        """
        return [
            pid
            for pid, line in list_processes(self.folder).items()
            if line.split(" ")[0].endswith(program)
        ]

    def close(self):
        """Kill all processes of the cluster, and remove its folder."""
        for node in reversed(self.nodes):
            for pid in [node.pid, *list_descendants(node.pid)]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            node.wait(timeout=20)
        for pid in list_processes(self.folder):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)
