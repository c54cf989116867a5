"""Tests of the checks of `forerun doctor`.

Each check judges the facts of a sound machine, and the facts of machines with one planted fault.
The installed libraries, too, must meet forerun's requirements.
"""

from pathlib import Path

import pytest

from forerun._launcher.cli.doctor import libraries, machine
from forerun._launcher.cli.doctor.folders import judge_room
from forerun._launcher.cli.doctor.libraries import LibraryCheck, judge_library, judge_python
from forerun._launcher.cli.doctor.machine import (
    judge_driver,
    judge_loopback,
    judge_shm,
    judge_torch,
    judge_wandb,
)
from forerun._sweeps.ray import cluster_start as ray_start

GIGABYTE = 10**9
H100 = "NVIDIA H100 80GB HBM3, 81559 MiB, 570.86.15"
CPU_FACTS = {"cuda": "", "devices": [], "warned": []}
CUDA_FACTS = {"cuda": "13.0", "devices": ["", ""], "warned": []}
WANDB_KEY = "0123456789" * 4


def check_torch(gpus=(H100, H100), hidden=False, problem="", **facts):
    """Judge a torch with these facts on a machine with these GPUs."""
    return judge_torch(
        "2.13.0", LibraryCheck(problem=problem, facts={**CUDA_FACTS, **facts}), gpus, hidden
    )


def check_library(version="2.13.0+cpu", needs=((">=", "2.13"),), name="torch", problem=""):
    """Judge an installed version of a library by its requirements."""
    return judge_library(name, version, needs, LibraryCheck(problem=problem))


FINDINGS_OF_SOUND_MACHINES = [
    judge_python((3, 11, 7), "linux"),
    judge_shm(2**30),
    judge_loopback(""),
    judge_wandb({}),
    judge_wandb({"WANDB_API_KEY": WANDB_KEY}),
    judge_room(Path("s"), 50 * GIGABYTE, "ext4"),
    judge_driver([], ""),
    judge_driver([H100, H100], ""),
    check_torch(),
    check_torch((), **CPU_FACTS),
    check_torch((), devices=[]),
    check_torch(devices=[""]),
    check_library(),
    check_library("2.13.1"),
]
FAULTS = {
    "old python": (judge_python((3, 10, 12), "linux"), "fail", "3.11 or newer"),
    "mac": (judge_python((3, 12, 0), "darwin"), "warn", "only Linux is tested"),
    "docker's shm": (judge_shm(64 * 2**20), "warn", "64 MiB free"),
    "full": (judge_room(Path("s"), 10**7, "ext4"), "fail", "10 MB free"),
    "nearly full": (judge_room(Path("s"), GIGABYTE, "ext4"), "warn", "1 GB free"),
    "nfs": (judge_room(Path("s"), 50 * GIGABYTE, "nfs4"), "warn", "on nfs4"),
    "no loopback": (judge_loopback("refused"), "fail", "refused"),
    "empty key": (judge_wandb({"WANDB_API_KEY": ""}), "warn", "has 0 characters"),
    "key with a line end": (
        judge_wandb({"WANDB_API_KEY": f"{WANDB_KEY}\n"}),
        "warn",
        "spaces around",
    ),
    "mismatch": (judge_driver([], "Driver/library version mismatch"), "fail", "mismatch"),
    "cpu torch": (check_torch(**CPU_FACTS), "warn", "cannot use 2 GPUs"),
    "old driver": (
        check_torch(devices=[], warned=["driver on your system is too old"]),
        "fail",
        "too old",
    ),
    "hidden gpus": (check_torch(hidden=True, devices=[]), "warn", "hides 2 GPUs"),
    "sick gpu": (check_torch(devices=["", "no kernel image"]), "fail", "GPU 1: no kernel image"),
    "no torch": (check_torch((), problem="it is not installed"), "fail", "it is not installed"),
    "missing": (check_library(""), "fail", "not installed"),
    "too old": (check_library("2.12.1"), "fail", ">=2.13"),
    "another": (check_library("1.1.0", (("==", "1.0.0"),), "mup"), "fail", "==1.0.0"),
    "too new": (check_library("3.0.0", (("<", "3"),)), "fail", "<3"),
    "broken": (check_library(problem="SIGSEGV"), "fail", "cannot be imported"),
}
"""Finding, expected state, and a part of its message, by the planted fault."""


def test_sound_machine_passes_every_check():
    for finding in FINDINGS_OF_SOUND_MACHINES:
        assert (finding.state, finding.fix) == ("ok", ""), finding
    assert not any(WANDB_KEY[:12] in finding.fact for finding in FINDINGS_OF_SOUND_MACHINES)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found_with_its_remedy(fault):
    finding, state, message = FAULTS[fault]
    assert finding.state == state and message in finding.fact and finding.fix, finding
    assert WANDB_KEY[:12] not in finding.fact + finding.fix


def test_object_store_size_is_the_one_that_ray_is_started_with():
    assert machine.OBJECT_STORE_BYTES == ray_start.OBJECT_STORE_BYTES


def test_installed_libraries_meet_the_requirements():
    needs = libraries.read_requirements()
    assert {"torch", "ray", "optuna", "wandb", "mup"} < set(needs)
    for name, limits in needs.items():
        version = libraries.find_version(name)
        assert judge_library(name, version, limits, LibraryCheck()).state == "ok"
