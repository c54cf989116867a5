"""A Ray cluster that exists without us: started by `ray start`, some nodes on this machine, ended
by its own pids.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
START = ["start", "--block", "--object-store-memory=80000000", "--disable-usage-stats"]


def processes(folder):
    """Pid -> command line of every live process that names `folder` in it."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
            except OSError:
                continue
            if str(folder) in line:
                found[int(entry.name)] = line
    return found


def below(pid):
    """Pids of all live descendants of a process."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if stat[0] != "Z":
                parents[int(entry.name)] = int(stat[1])
    found, todo = [], [pid]
    while todo:
        here = todo.pop()
        children = [child for child, parent in parents.items() if parent == here]
        found += children
        todo += children
    return found


def await_true(what, seconds):
    """Poll until `what()` is true; seconds waited. Raises TimeoutError."""
    began = time.monotonic()
    while not what():
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"not true within {seconds} s")
        time.sleep(0.05)
    return time.monotonic() - began


class RayCluster:
    """Token-guarded; `environment` lets a process in."""

    def __init__(self, *node_cpus, fake_gpus=0):
        """A head, and further nodes with so many GPUs that are not there."""
        self.folder = Path(tempfile.mkdtemp(prefix="rc-", dir="/tmp"))
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        }
        self.nodes = []
        self._start(
            "--head",
            "--port=0",
            "--include-dashboard=false",
            f"--temp-dir={self.folder}",
            cpus=node_cpus[0],
        )
        current = self.folder / "ray_current_cluster"
        await_true(current.exists, 60)
        self.address = current.read_text()
        for cpus in node_cpus[1:]:
            self._start(f"--address={self.address}", f"--num-gpus={fake_gpus}", cpus=cpus)
        await_true(lambda: self._num_alive() == len(node_cpus), 60)

    def _start(self, *arguments, cpus):
        # Ray looks for its token in the home folder too: nobody's real one is touched.
        env = {**os.environ, **self.environment, "HOME": str(self.folder)}
        command = [*RAY, *START, f"--num-cpus={cpus}", *arguments]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.nodes.append(subprocess.Popen(command, env=env, start_new_session=True, **quiet))

    def _num_alive(self):
        """As the head sees it, asked by a process of its own: this one's Ray remembers tokens."""
        script = (
            "from ray._raylet import GcsClient; n = "
            f"GcsClient(address={self.address!r}).get_all_node_info(timeout=9)"
        )
        script += "; print(sum(node.state == 0 for node in n.values()))"
        environment = {**os.environ, **self.environment}
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return int(done.stdout)

    def pids(self, part):
        """Pids of the raylets or of the head's server."""
        return [
            pid for pid, line in processes(self.folder).items() if line.split(" ")[0].endswith(part)
        ]

    def close(self):
        for node in reversed(self.nodes):
            pids = [node.pid, *below(node.pid)]
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            node.wait(timeout=20)
        for pid in processes(self.folder):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)
