"""Tests of the checks of `forerun doctor`.

Each check judges facts of a sound machine, and facts with one planted fault. The libraries that are
installed here must meet forerun's requirements.
"""

from pathlib import Path

import pytest

from forerun._launcher.cli.doctor import folders, libraries, machine
from forerun._launcher.cli.doctor.folders import judge_room
from forerun._launcher.cli.doctor.libraries import LibraryCheck, judge_library, judge_python
from forerun._launcher.cli.doctor.machine import (
    judge_driver,
    judge_loopback,
    judge_shm,
    judge_torch,
    judge_wandb,
)
from forerun._sweeps.ray import cluster_start

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
    "Python is too old": (judge_python((3, 10, 12), "linux"), "fail", "3.11 or newer"),
    "the system is macOS": (judge_python((3, 12, 0), "darwin"), "warn", "only Linux is tested"),
    "/dev/shm has Docker's default size": (judge_shm(64 * 2**20), "warn", "64 MiB free"),
    "the disk is full": (judge_room(Path("s"), 10**7, "ext4"), "fail", "10 MB free"),
    "the disk is nearly full": (judge_room(Path("s"), GIGABYTE, "ext4"), "warn", "1 GB free"),
    "the study folder is on NFS": (judge_room(Path("s"), 50 * GIGABYTE, "nfs4"), "warn", "on nfs4"),
    "the loopback interface refuses": (judge_loopback("refused"), "fail", "refused"),
    "the W&B key is empty": (judge_wandb({"WANDB_API_KEY": ""}), "warn", "has 0 characters"),
    "the W&B key ends with a line break": (
        judge_wandb({"WANDB_API_KEY": f"{WANDB_KEY}\n"}),
        "warn",
        "spaces around",
    ),
    "driver and nvidia-smi do not match": (
        judge_driver([], "Driver/library version mismatch"),
        "fail",
        "mismatch",
    ),
    "torch is built without CUDA": (check_torch(**CPU_FACTS), "warn", "cannot use 2 GPUs"),
    "the driver is too old for torch": (
        check_torch(devices=[], warned=["driver on your system is too old"]),
        "fail",
        "too old",
    ),
    "the GPUs are hidden": (check_torch(hidden=True, devices=[]), "warn", "hides 2 GPUs"),
    "a GPU fails to compute": (
        check_torch(devices=["", "no kernel image"]),
        "fail",
        "GPU 1: no kernel image",
    ),
    "torch is missing": (
        check_torch((), problem="it is not installed"),
        "fail",
        "it is not installed",
    ),
    "a library is missing": (check_library(""), "fail", "not installed"),
    "a library is too old": (check_library("2.12.1"), "fail", ">=2.13"),
    "a library is not the pinned version": (
        check_library("1.1.0", (("==", "1.0.0"),), "mup"),
        "fail",
        "==1.0.0",
    ),
    "a library is too new": (check_library("3.0.0", (("<", "3"),)), "fail", "<3"),
    "a library cannot be imported": (
        check_library(problem="SIGSEGV"),
        "fail",
        "cannot be imported",
    ),
}
"""Finding, expected state, and a part of its message, by the planted fault."""


def test_sound_machine_passes_every_check():
    for finding in FINDINGS_OF_SOUND_MACHINES:
        assert (finding.state, finding.fix) == ("ok", ""), finding
        assert WANDB_KEY[:12] not in finding.fact


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found_with_its_remedy(fault):
    finding, state, message = FAULTS[fault]
    assert finding.state == state and message in finding.fact and finding.fix, finding
    assert WANDB_KEY[:12] not in finding.fact + finding.fix


def test_object_store_size_is_the_one_that_ray_is_started_with():
    assert machine.OBJECT_STORE_BYTES == cluster_start.OBJECT_STORE_BYTES


def test_installed_libraries_meet_the_requirements():
    needs = libraries.read_requirements()
    assert {"torch", "ray", "optuna", "wandb", "mup"} < set(needs)
    for name, limits in needs.items():
        version = libraries.find_version(name)
        assert judge_library(name, version, limits, LibraryCheck()).state == "ok"


def test_the_innermost_mount_names_the_filesystem(tmp_path):
    """The kernel's file of mounts writes a space in a path as \\040."""
    mounts_file = tmp_path / "mountinfo"
    kinds_by_mount_point = {
        "/": "ext4",
        f"{tmp_path}": "nfs4",
        f"{tmp_path}/a\\040b": "tmpfs",
        f"{tmp_path}x": "xfs",
    }
    mounts_file.write_text(
        "".join(
            f"1 2 0:3 / {mount_point} rw shared:1 - {kind} source rw\n"
            for mount_point, kind in kinds_by_mount_point.items()
        )
    )
    (tmp_path / "a b").mkdir()
    kinds = [
        folders.find_filesystem(path, mounts_file)
        for path in (tmp_path, tmp_path / "a b", Path("/usr"))
    ]
    assert kinds == ["nfs4", "tmpfs", "ext4"]
    assert folders.find_filesystem(tmp_path, tmp_path / "none") == ""
