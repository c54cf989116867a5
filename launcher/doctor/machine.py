"""Cores, memory, shared memory, open files, threads, a compiler, a scheduler."""

from __future__ import annotations

import os
import re
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

from launcher.doctor.findings import Finding, fail, ok, warn

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
_GB = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineFacts:
    """What a process may take here."""

    num_cores: int
    """With affinity and the container's quota."""
    num_machine_cores: int
    memory_bytes: int
    """Free now, within the container's limit; 0: not known."""
    memory_limit_bytes: int
    """The container's; 0: none."""
    shm_bytes: int
    """Free in /dev/shm; -1: there is none."""
    num_files: int
    """Hard limit of open files; -1: none."""
    num_numa_nodes: int
    threads: dict[str, str]
    """OMP_NUM_THREADS and its kind, as far as they are set."""
    compiler: str
    """Of C++; empty: none."""
    slurm: dict[str, str]
    """SLURM's variables of this job; empty outside."""
    has_sbatch: bool


_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_SLURM = ("SLURM_JOB_ID", "SLURM_CPUS_ON_NODE", "SLURM_JOB_NUM_NODES", "SLURM_GPUS_ON_NODE", "SLURM_JOB_PARTITION")


def look_at_machine() -> MachineFacts:
    """The facts of this process's machine."""
    limit, used = _container_memory()
    free = _available_bytes()
    return MachineFacts(
        num_cores=_num_cores(),
        num_machine_cores=os.cpu_count() or 1,
        memory_bytes=min(free, max(0, limit - used)) if limit else free,
        memory_limit_bytes=limit,
        shm_bytes=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else -1,
        num_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        num_numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        threads={name: os.environ[name] for name in _THREADS if name in os.environ},
        compiler=next(filter(None, map(shutil.which, (os.environ.get("CXX") or "g++", "g++", "clang++"))), ""),
        slurm={name: os.environ[name] for name in _SLURM if name in os.environ},
        has_sbatch=shutil.which("sbatch") is not None,
    )


def judge_machine(facts: MachineFacts) -> list[Finding]:
    """Every line of the machine."""
    checks = (judge_cores, judge_memory, judge_shm, judge_files, judge_threads, judge_compiler, judge_slurm)
    return [check(facts) for check in checks]


def judge_cores(facts: MachineFacts) -> Finding:
    """As many as workers may keep busy."""
    said = f"{facts.num_cores}"
    if facts.num_cores < facts.num_machine_cores:
        said += f" of the machine's {facts.num_machine_cores}, by affinity or the container's quota"
    if facts.num_numa_nodes > 1:
        said += f", {facts.num_numa_nodes} NUMA nodes (a worker has one thread, which stays on one)"
    if facts.num_cores < 2:
        return warn("cores", f"{said}: one worker and its driver share it", "docker run --cpus 2, or a larger machine")
    return ok("cores", said)


def judge_memory(facts: MachineFacts) -> Finding:
    """For Ray and a worker a core."""
    name, mend = "memory", "--set cluster.num_workers=1, or a machine (docker run --memory 8g) with more"
    if not facts.memory_bytes:
        return warn(name, "not known here", "look yourself: Ray takes 0.8 GB, a worker 0.5 GB and its bank")
    said = f"{facts.memory_bytes / _GB:.1f} GB free"
    said += f", in a container of {facts.memory_limit_bytes / _GB:.1f} GB" if facts.memory_limit_bytes else ""
    if facts.memory_bytes < LEAST_MEMORY_BYTES:
        return fail(name, f"{said}: Ray and one worker take 1.5 GB", mend)
    need = RAY_BYTES + facts.num_cores * WORKER_BYTES
    if facts.memory_bytes < need:
        return warn(name, f"{said}: Ray and {facts.num_cores} workers take {need / _GB:.1f} GB and their banks", mend)
    return ok(name, said)


def judge_shm(facts: MachineFacts) -> Finding:
    """Ray's object store lies there, and what NCCL and data loaders share."""
    name, mend = "/dev/shm", "docker run --shm-size=1g"
    if facts.shm_bytes < 0:
        return ok(name, "none on this system; Ray uses its temporary folder")
    said = f"{facts.shm_bytes / 2**20:,.0f} MiB free"
    if facts.shm_bytes < OBJECT_STORE_BYTES:
        return warn(name, f"{said}: Ray's object store (80 MiB) goes to the disk, and NCCL may not start", mend)
    return ok(name, said)


def judge_files(facts: MachineFacts) -> Finding:
    """Ray's processes hold a connection for each other."""
    name, mend = "open files", "ulimit -Hn 65536 as root, or docker run --ulimit nofile=65536; under SLURM: the site's"
    said = "no limit" if facts.num_files < 0 else f"{facts.num_files:,} at most"
    if 0 <= facts.num_files < FEW_FILES:
        return fail(name, f"{said}: Ray does not start", mend)
    if 0 <= facts.num_files < ENOUGH_FILES:
        return warn(name, f"{said}: Ray wants {ENOUGH_FILES:,}", mend)
    return ok(name, said)


def judge_threads(facts: MachineFacts) -> Finding:
    """Workers have one each whatever is set; the main run and `backend = "inline"` obey."""
    name, told = "threads", ", ".join(f"{key}={value}" for key, value in facts.threads.items())
    for key, value in facts.threads.items():
        if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", value.strip()):
            return warn(name, f"{key}={value!r} is no number of threads", f"unset {key}")
        if int(value.split(",")[0]) > facts.num_cores:
            said = f"{key}={value}, of {facts.num_cores} cores: threads would wait for each other"
            return warn(name, said, f"export {key}={facts.num_cores}")
    return ok(name, told or "as the libraries choose; a worker has one")


def judge_compiler(facts: MachineFacts) -> Finding:
    """torch.compile builds what it makes for a CPU."""
    if facts.compiler:
        return ok("C++ compiler", facts.compiler)
    said = 'none: nothing compiles on the CPU, and "auto" leaves compiled proxies away'
    return warn("C++ compiler", said, "sudo apt install g++, or module load gcc")


def judge_slurm(facts: MachineFacts) -> Finding:
    """A login node is no place for a study."""
    name = "SLURM"
    if facts.slurm:
        told = ", ".join(f"{key.removeprefix('SLURM_').lower()} {value}" for key, value in facts.slurm.items())
        return ok(name, f"in a job: {told}")
    if facts.has_sbatch:
        mend = "forerun run PLAN --sbatch job.sh && sbatch job.sh"
        return warn(name, "this is no job: on a login node studies disturb, and are ended", mend)
    return ok(name, "none here")


def _num_cores() -> int:
    """With the container's quota, if `sweeps` is ours; `doctor` is asked just where it may not be."""
    try:
        from sweeps.run.cores import num_cores
    except ImportError:
        return os.cpu_count() or 1
    return num_cores()


def _available_bytes() -> int:
    """The kernel's own estimate; 0 where it gives none."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def _container_memory(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> tuple[int, int]:
    """The tightest limit of this process's control groups (v1, v2) in bytes, and what is used of it; 0, 0: none."""
    limits = []
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return 0, 0
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")) if controllers else (
            cgroups, ("memory.max", "memory.current"))  # fmt: skip
        inner = root / path.lstrip("/")
        for group in (inner, *inner.parents):
            if group.is_relative_to(root):
                try:
                    limits.append((int((group / names[0]).read_text()), int((group / names[1]).read_text())))
                except (OSError, ValueError):  # "max" is no limit
                    continue
    real = [each for each in limits if each[0] < 2**60]  # v1 writes 2^63 for none
    return min(real, key=lambda each: each[0] - each[1], default=(0, 0))
