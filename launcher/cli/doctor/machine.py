"""Checks of the GPUs, and of what Ray and W&B need of a machine. No value of a secret is kept."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from forerun._launcher.cli.doctor.findings import DoctorFinding, fail, ok, warn
from forerun._launcher.cli.doctor.libraries import MAX_PROBLEM_CHARS, LibraryCheck
from forerun._proxies.core.notation import format_counted

OBJECT_STORE_BYTES = 80 * 2**20
"""Bytes of the object store of a cluster that forerun starts, as in
`forerun._sweeps.ray.cluster_start`. If /dev/shm has less, Ray puts the store on disk.
"""
SMI_SECONDS = 20.0
"""Maximum seconds that `nvidia-smi` may take."""
LOOPBACK_SECONDS = 5.0
"""Maximum seconds for one byte over the loopback interface."""
_QUERY = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
_MIN_KEY_CHARS = 40
"""Minimum number of characters of a W&B API key."""


def check_machine() -> list[DoctorFinding]:
    """Check shared memory, the loopback interface, and the W&B login."""
    has_shm = Path("/dev/shm").is_dir()  # not on macOS
    return [
        *([judge_shm(shutil.disk_usage("/dev/shm").free)] if has_shm else []),
        judge_loopback(test_loopback()),
        judge_wandb(os.environ),
    ]


def judge_shm(free: int) -> DoctorFinding:
    """Judge the free bytes of /dev/shm, which holds Ray's object store and the shared memory of
    NCCL and data loaders.
    """
    fact = f"{free / 2**20:,.0f} MiB free"
    if free < OBJECT_STORE_BYTES:
        fact += (
            f": Ray's object store ({OBJECT_STORE_BYTES / 2**20:.0f} MiB) goes to the disk, and "
            "NCCL may not start"
        )
        return warn("/dev/shm", fact, "docker run --shm-size=1g")
    return ok("/dev/shm", fact)


def test_loopback() -> str:
    """Send a byte to this machine itself; return the problem in words, empty if it arrived."""
    try:
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            server.settimeout(LOOPBACK_SECONDS)
            client = stack.enter_context(
                socket.create_connection(server.getsockname(), LOOPBACK_SECONDS)
            )
            connection = stack.enter_context(server.accept()[0])
            connection.settimeout(LOOPBACK_SECONDS)
            client.sendall(b"?")
            return "" if connection.recv(1) == b"?" else "a test byte did not arrive"
    except OSError as error:
        return error.strerror or str(error)


def judge_loopback(problem: str) -> DoctorFinding:
    """Judge the loopback interface, through which the parts of Ray and the ranks of a run
    connect.
    """
    if problem:
        fix = "sudo ip link set lo up; in a container, allow connections to 127.0.0.1"
        return fail("ports", f"127.0.0.1: {problem}: neither Ray nor torchrun can start", fix)
    return ok("ports", "127.0.0.1 takes connections at free ports")


def judge_wandb(environment: Mapping[str, str]) -> DoctorFinding:
    """Judge the W&B login. Only `--online` needs a key; its value is not kept."""
    key = environment.get("WANDB_API_KEY")
    if key is None:
        return ok(
            "W&B", "no WANDB_API_KEY: dashboards stay offline, or use the login of `wandb login`"
        )
    if key != key.strip() or not key.isprintable() or len(key) < _MIN_KEY_CHARS:
        length = format_counted(len(key.strip()), "character")
        fact = (
            f"WANDB_API_KEY has {length}, or spaces around them: W&B's keys have at least "
            f"{_MIN_KEY_CHARS}"
        )
        return warn("W&B", fact, "wandb login --relogin, and unset WANDB_API_KEY")
    return ok("W&B", "a key is set; nothing is sent without --online")


def run_nvidia_smi(seconds: float = SMI_SECONDS) -> tuple[list[str], str]:
    """Return the GPUs that nvidia-smi lists, and its problem in words; empty if there is none. A
    GPU that hangs makes nvidia-smi hang too, so its time is limited.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], ""
    try:
        process = subprocess.run(
            [program, *_QUERY], capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return [], f"no answer in {seconds:g} s"
    except OSError as error:
        return [], str(error.strerror)
    if process.returncode != 0:
        lines = (process.stdout + process.stderr).strip().splitlines()
        return [], lines[0][:MAX_PROBLEM_CHARS] if lines else f"exit code {process.returncode}"
    return [line.strip() for line in process.stdout.splitlines() if line.strip()], ""


def judge_driver(gpus: Sequence[str], problem: str) -> DoctorFinding:
    """Judge the machine's GPUs and their driver, independent of torch.

    Args:
        gpus: Name, memory, and driver of each GPU.
        problem: Problem of nvidia-smi; empty if there is none.
    """
    if problem:
        fix = (
            "sudo dmesg | grep -i -E 'nvrm|xid' shows why; a restart or a new driver often fixes it"
        )
        return fail("driver", f"nvidia-smi: {problem}", fix)
    if not gpus:
        return ok("driver", "no GPU here: proxies and the demo run on the CPU")
    kinds = "; ".join(f"{list(gpus).count(kind)} x {kind}" for kind in dict.fromkeys(gpus))
    return ok("driver", f"{format_counted(len(gpus), 'GPU')}: {kinds}")


def judge_torch(
    version: str, torch: LibraryCheck, gpus: Sequence[str], is_hidden: bool
) -> DoctorFinding:
    """Judge whether torch can use the GPUs of this machine.

    Args:
        version: Version of torch.
        torch: Result of importing it.
        gpus: Name, memory, and driver of each GPU.
        is_hidden: Whether CUDA_VISIBLE_DEVICES is set.
    """
    name = "torch and GPUs"
    if torch.problem:
        fact = f"torch could not be tested: {torch.problem}"
        return fail(name, fact, "fix the line of torch first")
    cuda, devices, warned = (torch.facts[key] for key in ("cuda", "devices", "warned"))
    if broken := [f"GPU {index}: {problem}" for index, problem in enumerate(devices) if problem]:
        fix = "export CUDA_VISIBLE_DEVICES=<the others>, and see `nvidia-smi -q`"
        return fail(name, "; ".join(broken), fix)
    num_gpus = format_counted(max(len(gpus), len(devices)), "GPU")
    if devices:
        fact = f"torch, built for CUDA {cuda}, computes on {len(devices)} of {num_gpus}"
        return ok(name, fact)
    if not gpus:
        return ok(name, f"torch {version}, and no GPU")
    if not cuda:
        fact = f"torch {version} is built without CUDA: it cannot use {num_gpus}"
        return warn(name, fact, "pip install --force-reinstall torch")
    if is_hidden:
        return warn(name, f"CUDA_VISIBLE_DEVICES hides {num_gpus}", "unset CUDA_VISIBLE_DEVICES")
    reason = warned[0] if warned else f"torch is built for CUDA {cuda}"
    fix = (
        "nvidia-smi shows the newest CUDA of the driver: update it, or install a torch built for "
        "that CUDA"
    )
    fact = f"torch sees none of {num_gpus}: {reason.splitlines()[0][:MAX_PROBLEM_CHARS]}"
    return fail(name, fact, fix)
