"""GPUs: what the machine has, what the driver says of them, and what torch was built for."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from launcher.doctor.findings import Finding, fail, ok, warn
from launcher.doctor.imports import Imported
from launcher.doctor.versions import TESTED

SMI_SECONDS = 20.0
_QUERY = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
_INDEX = "https://download.pytorch.org/whl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Smi:
    """What nvidia-smi answers."""

    found: bool
    gpus: tuple[str, ...] = ()
    """Of each the name, its memory in MiB and the driver's version."""
    problem: str = ""
    """What it said instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """GPUs from three sides; they may disagree."""

    num_nodes: int
    """`/dev/nvidia0` and so on: what this machine, or container, was given."""
    smi: Smi
    visible: str | None
    """CUDA_VISIBLE_DEVICES; None: not set."""
    torch_version: str
    cuda_built: str
    """The CUDA that torch was built for; empty: none."""
    hip_built: str
    devices: tuple[str, ...]
    """Of each GPU that torch sees, what is wrong with it; empty: it adds."""
    warned: tuple[str, ...]
    """What torch had to say about the driver."""
    problem: str = ""
    """Why torch could not be asked."""


def look_at_devices(torch: Imported, cuda: Imported, torch_version: str, dev: Path = Path("/dev")) -> DeviceFacts:
    """The facts; `torch`, `cuda`: of `imports.try_imports`."""
    devices, warned = cuda.facts.get("devices"), cuda.facts.get("warned")
    return DeviceFacts(
        num_nodes=len(list(dev.glob("nvidia[0-9]*"))),
        smi=ask_smi(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        torch_version=torch_version,
        cuda_built=str(torch.facts.get("cuda", "")),
        hip_built=str(torch.facts.get("hip", "")),
        devices=tuple(map(str, devices)) if isinstance(devices, list) else (),
        warned=tuple(map(str, warned)) if isinstance(warned, list) else (),
        problem=torch.problem or cuda.problem,
    )


def ask_smi(seconds: float = SMI_SECONDS) -> Smi:
    """nvidia-smi's list; it hangs where a GPU does."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Smi(found=False)
    try:
        done = subprocess.run([program, *_QUERY], capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return Smi(found=True, problem=f"no answer in {seconds:g} s")
    except OSError as error:
        return Smi(found=True, problem=str(error.strerror))
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
        return Smi(found=True, problem=said[0][:300])
    return Smi(found=True, gpus=tuple(line.strip() for line in done.stdout.splitlines() if line.strip()))


def judge_driver(facts: DeviceFacts) -> Finding:
    """The machine's GPUs and their driver, whatever torch is."""
    name, smi = "driver", facts.smi
    if smi.problem:
        mend = "restart the machine: the driver was updated under a running kernel module"
        if "mismatch" not in smi.problem.lower():
            mend = "sudo dmesg | grep -i -E 'nvrm|xid' says why; often a restart mends it, or a new driver"
        return fail(name, f"nvidia-smi: {smi.problem}", mend)
    if smi.gpus:
        return ok(name, f"{len(smi.gpus)} GPUs: {_counted(smi.gpus)}")
    if facts.num_nodes:
        why = "nvidia-smi finds none" if smi.found else "there is no nvidia-smi"
        mend = "docker run --gpus all with NVIDIA's container toolkit; outside a container, install the driver"
        return warn(name, f"/dev has {facts.num_nodes} GPUs, and {why}", mend)
    return ok(name, "no GPU here: proxies and the demo run on the CPU")


def judge_torch_devices(facts: DeviceFacts) -> Finding:
    """Whether torch can use what is there."""
    name, gpus = "torch and GPUs", facts.smi.gpus
    if facts.problem:
        return fail(name, f"torch could not be asked: {facts.problem}", "mend the line of torch first")
    if facts.hip_built:
        mend = "forerun demo, and compare its numbers with the README's"
        return warn(name, f"torch is built for ROCm {facts.hip_built}, which nobody has tried here", mend)
    if broken := [f"GPU {index}: {said}" for index, said in enumerate(facts.devices) if said]:
        return fail(name, "; ".join(broken), "export CUDA_VISIBLE_DEVICES=<the others>, and see `nvidia-smi -q`")
    if not facts.cuda_built:
        if not gpus:
            return ok(name, f"torch {facts.torch_version or 'of this machine'} without CUDA, and no GPU")
        said = f"torch {facts.torch_version} is built without CUDA: {len(gpus)} GPUs stay idle"
        return warn(name, said, f"pip install --force-reinstall torch=={TESTED['torch']}")
    if facts.devices:
        seen = f"torch, built for CUDA {facts.cuda_built}, adds on {len(facts.devices)} GPUs"
        hidden = len(gpus) - len(facts.devices)
        return ok(name, f"{seen}; {hidden} are hidden from it" if hidden > 0 else seen)
    if gpus and facts.visible in ("", "-1"):
        said = f"CUDA_VISIBLE_DEVICES = {facts.visible!r} hides {len(gpus)} GPUs"
        return warn(name, said, "unset CUDA_VISIBLE_DEVICES")
    if gpus:
        why = facts.warned[0] if facts.warned else f"torch is built for CUDA {facts.cuda_built}"
        mend = f"nvidia-smi shows the newest CUDA of the driver: update it, or pip install torch from {_INDEX}/"
        return fail(name, f"torch sees none of {len(gpus)} GPUs: {why.splitlines()[0][:300]}", mend)
    return ok(name, f"torch built for CUDA {facts.cuda_built}, and no GPU")


def judge_torchvision(version: str, tried: Imported | None) -> Finding:
    """Whether it fits: mup brings it along and never imports it; transformers does, where it is there."""
    name = "torchvision"
    if not version:
        return ok(name, "not installed, and not needed")
    if tried is not None and tried.problem:
        said = f"{version} does not fit this torch ({tried.problem}): unused here, but transformers imports it"
        return warn(name, said, "pip uninstall -y torchvision")
    return ok(name, f"{version}, unused")


def _counted(gpus: tuple[str, ...]) -> str:
    kinds: dict[str, int] = {}
    for line in gpus:
        name, memory, driver = ([part.strip() for part in line.split(",")] + ["", "", ""])[:3]
        kind = f"{name}, {memory} MiB, driver {driver}"
        kinds[kind] = kinds.get(kind, 0) + 1
    return "; ".join(f"{count} x {kind}" for kind, count in kinds.items())
