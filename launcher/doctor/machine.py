"""Cores, memory, GPUs, and what Ray and W&B need of a machine. No secret's value is kept."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.doctor.findings import Finding, fail, ok, warn
from launcher.doctor.libraries import TESTED, Imported

RAY_BYTES = 800 * 10**6
"""What Ray's own processes take."""
WORKER_BYTES = 500 * 10**6
"""A worker with torch imported (220 MB) and a small bank; measured at tens of MB to 2.4 GB with the bank."""
LEAST_MEMORY_BYTES = 1500 * 10**6
OBJECT_STORE_BYTES = 80 * 2**20
"""Of a cluster of our own (`sweeps.ray.start`); where /dev/shm has less, Ray puts it on the disk."""
FEW_FILES, ENOUGH_FILES = 64, 4096
"""Ray and two workers start with 64 and not with 40 (measured, ray 2.60.0); Ray itself warns below 4,096. It raises the
soft limit to the hard one."""
SMI_SECONDS = 20.0
LOOPBACK_SECONDS = 5.0
_QUERY = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
_KEY_CHARS = 40
_GB = 1e9


def check_machine() -> list[Finding]:
    """Every line of this process's machine but its GPUs."""
    num = num_cores()
    free, limit = memory_bytes()
    return [
        judge_cores(num, os.cpu_count() or 1),
        judge_memory(free, limit, num),
        judge_shm(shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None),
        judge_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        judge_loopback(loopback_problem()),
        judge_wandb(os.environ),
    ]


def num_cores() -> int:
    """With the container's quota, if `sweeps` is ours; `doctor` is asked just where it may not be."""
    try:
        from sweeps.run.cores import num_cores
    except ImportError:
        return os.cpu_count() or 1
    return num_cores()


def judge_cores(num: int, num_machine: int) -> Finding:
    """As many as workers may keep busy."""
    said = f"{num}" if num == num_machine else f"{num} of {num_machine}, by affinity or the container's quota"
    if num < 2:
        return warn("cores", f"{said}: one worker and its driver share it", "docker run --cpus 2, or a larger machine")
    return ok("cores", said)


def memory_bytes(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> tuple[int, int]:
    """Free memory, 0 where nobody says; and the container's limit (control groups v2), 0 where there is none."""
    free, limits = 0, []
    with contextlib.suppress(OSError):
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
        free = int(found[1]) * 1024 if found else 0
    with contextlib.suppress(OSError):
        inner = cgroups / own.read_text().strip().rpartition(":")[2].lstrip("/")
        for group in (inner, *inner.parents):
            with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                limit, used = (int((group / f"memory.{what}").read_text()) for what in ("max", "current"))
                limits.append((max(0, limit - used), limit))
    left, limit = min(limits, default=(free, 0))
    return min(free, left), limit


def judge_memory(free: int, limit: int, cores: int) -> Finding:
    """For Ray and a worker a core."""
    mend = "--set cluster.num_workers=1, or a machine (docker run --memory 8g) with more"
    if not free:
        return warn("memory", "not known here", "look yourself: Ray takes 0.8 GB, a worker 0.5 GB and its bank")
    said = f"{free / _GB:.1f} GB free" + (f", in a container of {limit / _GB:.1f} GB" if limit else "")
    if free < LEAST_MEMORY_BYTES:
        return fail("memory", f"{said}: Ray and one worker take 1.5 GB", mend)
    need = RAY_BYTES + cores * WORKER_BYTES
    if free < need:
        return warn("memory", f"{said}: Ray and {cores} workers take {need / _GB:.1f} GB and their banks", mend)
    return ok("memory", said)


def judge_shm(free: int | None) -> Finding:
    """Ray's object store lies there, and what NCCL and data loaders share."""
    if free is None:
        return ok("/dev/shm", "none on this system; Ray uses its temporary folder")
    said = f"{free / 2**20:,.0f} MiB free"
    if free < OBJECT_STORE_BYTES:
        said += ": Ray's object store (80 MiB) goes to the disk, and NCCL may not start"
        return warn("/dev/shm", said, "docker run --shm-size=1g")
    return ok("/dev/shm", said)


def judge_files(most: int) -> Finding:
    """Ray's processes hold a connection for each other; `most`: the hard limit, -1 if there is none."""
    mend = "ulimit -Hn 65536 as root, or docker run --ulimit nofile=65536; under SLURM: the site's"
    if 0 <= most < FEW_FILES:
        return fail("open files", f"{most:,} at most: Ray does not start", mend)
    if 0 <= most < ENOUGH_FILES:
        return warn("open files", f"{most:,} at most: Ray asks for {ENOUGH_FILES:,}", mend)
    return ok("open files", "no limit" if most < 0 else f"{most:,} at most")


def loopback_problem() -> str:
    """Send a byte to ourselves; what is wrong, in words."""
    try:
        with contextlib.ExitStack() as opened:
            server = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
            server.settimeout(LOOPBACK_SECONDS)
            client = opened.enter_context(socket.create_connection(server.getsockname(), LOOPBACK_SECONDS))
            taken = opened.enter_context(server.accept()[0])
            taken.settimeout(LOOPBACK_SECONDS)
            client.sendall(b"?")
            return "" if taken.recv(1) == b"?" else "a byte sent did not arrive"
    except OSError as error:
        return error.strerror or str(error)


def judge_loopback(problem: str) -> Finding:
    """Ray's parts and the ranks of a run meet there."""
    if problem:
        mend = "sudo ip link set lo up; in a container, allow connections to 127.0.0.1"
        return fail("ports", f"127.0.0.1: {problem}: neither Ray nor torchrun can start", mend)
    return ok("ports", "127.0.0.1 takes connections at free ports")


def judge_wandb(environment: Mapping[str, str]) -> Finding:
    """A key is needed for `--online` and `--sync` alone; its value is not kept."""
    key = environment.get("WANDB_API_KEY")
    if key is None:
        return ok("W&B", "no WANDB_API_KEY: dashboards stay offline, or use the login of `wandb login`")
    if key != key.strip() or not key.isprintable() or len(key) < _KEY_CHARS:
        said = f"WANDB_API_KEY has {len(key.strip())} characters, or spaces around them: W&B's keys have 40 and more"
        return warn("W&B", said, "wandb login --relogin, and unset WANDB_API_KEY")
    return ok("W&B", "a key is set; nothing is sent without --online or --sync")


def ask_smi(seconds: float = SMI_SECONDS) -> tuple[list[str], str]:
    """nvidia-smi's list of GPUs, and what is wrong with it; it hangs where a GPU does."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], ""
    try:
        done = subprocess.run([program, *_QUERY], capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return [], f"no answer in {seconds:g} s"
    except OSError as error:
        return [], str(error.strerror)
    if done.returncode != 0:
        return [], ((done.stdout + done.stderr).strip().splitlines() or [f"exit code {done.returncode}"])[0][:300]
    return [line.strip() for line in done.stdout.splitlines() if line.strip()], ""


def judge_driver(gpus: Sequence[str], problem: str) -> Finding:
    """The machine's GPUs and their driver, whatever torch is; `gpus`: name, memory and driver of each."""
    if problem:
        mend = "sudo dmesg | grep -i -E 'nvrm|xid' says why; often a restart mends it, or a new driver"
        return fail("driver", f"nvidia-smi: {problem}", mend)
    if not gpus:
        return ok("driver", "no GPU here: proxies and the demo run on the CPU")
    kinds = "; ".join(f"{list(gpus).count(kind)} x {kind}" for kind in dict.fromkeys(gpus))
    return ok("driver", f"{len(gpus)} GPUs: {kinds}")


def judge_torch(version: str, torch: Imported, gpus: Sequence[str], hidden: bool) -> Finding:
    """Whether torch can use what is there; `hidden`: CUDA_VISIBLE_DEVICES is set."""
    name, cuda, devices, warned = "torch and GPUs", torch.facts.get("cuda"), usable(torch), torch.facts.get("warned")
    if torch.problem:
        return fail(name, f"torch could not be asked: {torch.problem}", "mend the line of torch first")
    if broken := [f"GPU {index}: {said}" for index, said in enumerate(devices) if said]:
        return fail(name, "; ".join(broken), "export CUDA_VISIBLE_DEVICES=<the others>, and see `nvidia-smi -q`")
    if devices:
        return ok(name, f"torch, built for CUDA {cuda}, adds on {len(devices)} of {max(len(gpus), len(devices))} GPUs")
    if not gpus:
        return ok(name, f"torch {version}, and no GPU")
    if not cuda:
        said = f"torch {version} is built without CUDA: {len(gpus)} GPUs stay idle"
        return warn(name, said, f"pip install --force-reinstall torch=={TESTED['torch']}")
    if hidden:
        return warn(name, f"CUDA_VISIBLE_DEVICES hides {len(gpus)} GPUs", "unset CUDA_VISIBLE_DEVICES")
    why = str(warned[0]) if isinstance(warned, list) and warned else f"torch is built for CUDA {cuda}"
    mend = "nvidia-smi shows the newest CUDA of the driver: update it, or install a torch built for that CUDA"
    return fail(name, f"torch sees none of {len(gpus)} GPUs: {why.splitlines()[0][:300]}", mend)


def usable(torch: Imported) -> list[str]:
    """Of each GPU that torch sees, what is wrong with it; empty: it adds."""
    devices = torch.facts.get("devices")
    return [str(said) for said in devices] if isinstance(devices, list) else []
