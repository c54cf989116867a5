"""What doctor says of facts: every check shown a sound machine, and each fault that it is to
catch.
"""

from pathlib import Path

import pytest

from launcher.doctor import libraries, machine
from launcher.doctor.findings import HOME, PACKAGES, judge_names
from launcher.doctor.folders import judge_room
from launcher.doctor.libraries import LibraryCheck, judge_library, judge_python
from launcher.doctor.machine import (
    judge_driver,
    judge_loopback,
    judge_shm,
    judge_torch,
    judge_wandb,
)
from sweeps.ray import start as ray_start

GB = 10**9
NAMES = {name: str(HOME / name) for name in PACKAGES}
H100 = "NVIDIA H100 80GB HBM3, 81559 MiB, 570.86.15"
CPU, CUDA = (
    {"cuda": "", "devices": [], "warned": []},
    {"cuda": "13.0", "devices": ["", ""], "warned": []},
)
KEY = "0123456789" * 4


def torch(gpus=(H100, H100), hidden=False, problem="", **facts):
    return judge_torch(
        "2.13.0", LibraryCheck(problem=problem, facts={**CUDA, **facts}), gpus, hidden
    )


def library(version="2.13.0+cpu", needs=((">=", "2.13"),), name="torch", problem=""):
    return judge_library(name, version, needs, LibraryCheck(problem=problem))


SOUND = [
    judge_python((3, 11, 7), "linux"),
    judge_names(NAMES, False),
    judge_shm(2**30),
    judge_loopback(""),
    judge_wandb({}),
    judge_wandb({"WANDB_API_KEY": KEY}),
    judge_room(Path("s"), 50 * GB, "ext4"),
    judge_driver([], ""),
    judge_driver([H100, H100], ""),
    torch(),
    torch((), **CPU),
    torch((), devices=[]),
    torch(devices=[""]),
    library(),
    library("2.13.1"),
]
SITE = "/venv/lib/site-packages/sweeps"
FAULTS = {
    "old python": (judge_python((3, 10, 12), "linux"), "fail", "3.11 or newer"),
    "mac": (judge_python((3, 12, 0), "darwin"), "warn", "only Linux is tested"),
    "hidden": (
        judge_names(NAMES | {"sweeps": SITE}, False),
        "fail",
        f"`import sweeps` finds {SITE}",
    ),
    "wandb's": (judge_names(NAMES, True), "fail", "wandb[sweeps]"),
    "docker's shm": (judge_shm(64 * 2**20), "warn", "64 MiB free"),
    "full": (judge_room(Path("s"), 10**7, "ext4"), "fail", "10 MB free"),
    "nearly full": (judge_room(Path("s"), GB, "ext4"), "warn", "1 GB free"),
    "nfs": (judge_room(Path("s"), 50 * GB, "nfs4"), "warn", "on nfs4"),
    "no loopback": (judge_loopback("refused"), "fail", "refused"),
    "empty key": (judge_wandb({"WANDB_API_KEY": ""}), "warn", "has 0 characters"),
    "key with a line end": (judge_wandb({"WANDB_API_KEY": f"{KEY}\n"}), "warn", "spaces around"),
    "mismatch": (judge_driver([], "Driver/library version mismatch"), "fail", "mismatch"),
    "cpu torch": (torch(**CPU), "warn", "cannot use 2 GPUs"),
    "old driver": (
        torch(devices=[], warned=["driver on your system is too old"]),
        "fail",
        "too old",
    ),
    "hidden gpus": (torch(hidden=True, devices=[]), "warn", "hides 2 GPUs"),
    "sick gpu": (torch(devices=["", "no kernel image"]), "fail", "GPU 1: no kernel image"),
    "no torch": (torch((), problem="it is not installed"), "fail", "it is not installed"),
    "missing": (library(""), "fail", "not installed"),
    "too old": (library("2.12.1"), "fail", ">=2.13"),
    "another": (library("1.1.0", (("==", "1.0.0"),), "mup"), "fail", "==1.0.0"),
    "too new": (library("3.0.0", (("<", "3"),)), "fail", "<3"),
    "broken": (library(problem="SIGSEGV"), "fail", "cannot be imported"),
}


def test_a_sound_machine_is_told_so():
    assert [finding for finding in SOUND if (finding.state, finding.mend) != ("ok", "")] == []
    assert not [finding for finding in SOUND if KEY[:12] in finding.said]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_and_what_mends_it_said(fault):
    finding, state, said = FAULTS[fault]
    assert (finding.state, said in finding.said, bool(finding.mend)) == (state, True, True), finding
    assert KEY[:12] not in finding.said + finding.mend


def test_numbers_said_here_are_those_of_ray_as_we_start_it():
    assert machine.OBJECT_STORE_BYTES == ray_start.OBJECT_STORE_BYTES


def test_the_tests_run_with_what_is_asked_for():
    needs = libraries.needed()
    assert {"torch", "ray", "optuna", "wandb", "mup"} < set(needs)
    for name, limits in needs.items():
        assert judge_library(name, libraries.version_of(name), limits, LibraryCheck()).state == "ok"
