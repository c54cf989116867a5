"""What doctor says of facts: every check shown a sound machine, and each fault that it is to catch."""

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from launcher.doctor import versions
from launcher.doctor.devices import DeviceFacts, Smi, judge_driver, judge_torch_devices, judge_torchvision
from launcher.doctor.findings import Finding, body_of, fail, line_of, ok, warn, worst
from launcher.doctor.folders import FolderFacts, TemporaryFacts, judge_folder, judge_temporary
from launcher.doctor.imports import Imported
from launcher.doctor.machine import MachineFacts, judge_machine
from launcher.doctor.names import HOME, ROOMS, NameFacts, judge_names
from launcher.doctor.network import NetworkFacts, judge_network
from launcher.doctor.planned import PlanFacts, judge_plan
from launcher.doctor.versions import Library, judge_library, judge_python
from sweeps.ray import own as ray_own
from sweeps.ray import start as ray_start

ROOT = Path(__file__).parents[2]
GB = 10**9
NAMES = NameFacts(found={room: str(HOME / room) for room in ROOMS}, beside=(), has_wandb_sweeps=False, changed=())
MACHINE = MachineFacts(
    num_cores=4, num_machine_cores=4, memory_bytes=16 * GB, memory_limit_bytes=0, shm_bytes=2**30, num_files=65536,
    num_numa_nodes=1, threads={}, compiler="/usr/bin/g++", slurm={}, has_sbatch=False,
)  # fmt: skip
FOLDER = FolderFacts(path="study", filesystem="ext4", free_bytes=50 * GB, total_bytes=100 * GB, free_inodes=10**6)
TEMPORARY = TemporaryFacts(
    base="/tmp", ray_base="/tmp/ray", problem="", free_bytes=50 * GB, total_bytes=100 * GB, noexec=False
)
NETWORK = NetworkFacts(
    loopback_problem="", localhost=("127.0.0.1",), proxies=(), no_proxy="", ray_address=False, has_key=False,
    key_problem="", wandb_mode="", netrc="",
)  # fmt: skip
H100 = "NVIDIA H100 80GB HBM3, 81559, 570.86.15"
NODE = DeviceFacts(
    num_nodes=2, smi=Smi(found=True, gpus=(H100, H100)), visible=None, torch_version="2.13.0", cuda_built="13.0",
    hip_built="", devices=("", ""), warned=(),
)  # fmt: skip
CPU = DeviceFacts(
    num_nodes=0, smi=Smi(found=False), visible=None, torch_version="2.13.0+cpu", cuda_built="", hip_built="",
    devices=(), warned=(),
)  # fmt: skip
LIBRARY = Library(name="torch", version="2.13.0+cpu", wanted=((">=", "2.13"),), imported=Imported(seconds=1.0))
PLAN = PlanFacts(
    path="plan.toml", problems=(), corpus="corpus", worker_cpus=1.0, disk_bytes=1e6, free_bytes=GB, num_cores=4
)


def of(facts, **changes):
    return dataclasses.replace(facts, **changes)


def machine(facts):
    return {each.name: each for each in judge_machine(facts)}


def network(facts):
    return {each.name: each for each in judge_network(facts)}


SOUND = [
    judge_python((3, 11, 7), "linux"),
    judge_names(NAMES),
    *judge_machine(MACHINE),
    *judge_folder(FOLDER),
    *judge_temporary(TEMPORARY),
    *judge_network(NETWORK),
    *(judge(facts) for judge in (judge_driver, judge_torch_devices) for facts in (NODE, CPU)),
    judge_torchvision("", None),
    judge_library(LIBRARY),
    *judge_plan(PLAN),
]


@pytest.mark.parametrize("finding", SOUND, ids=lambda finding: finding.name)
def test_a_sound_machine_is_told_so(finding):
    assert (finding.state, finding.mend) == ("ok", "")


def only(findings):
    """The one that is not ok."""
    (bad,) = [each for each in findings if each.state != "ok"]
    return bad


def named(**found):
    return judge_names(of(NAMES, found=NAMES.found | found))


SITE = "/venv/lib/site-packages/sweeps"
FAULTS = {
    "old python": (judge_python((3, 10, 12), "linux"), "fail", "3.11 or newer"),
    "new python": (judge_python((3, 14, 0), "linux"), "warn", "newer than any tested"),
    "mac": (judge_python((3, 12, 0), "darwin"), "warn", "only Linux is tested"),
    "windows": (judge_python((3, 12, 0), "win32"), "fail", "locks and signals"),
    "hidden": (named(sweeps=SITE), "fail", f"`import sweeps` takes {SITE}"),
    "gone": (named(transfer=""), "fail", "`import transfer` takes nothing"),
    "wandb's": (judge_names(of(NAMES, has_wandb_sweeps=True)), "fail", "wandb[sweeps]"),
    "overwritten": (judge_names(of(NAMES, changed=("sweeps/__init__.py", "x"))), "fail", "2 files of ours are not as"),
    "beside": (judge_names(of(NAMES, beside=("launcher.py",))), "fail", "launcher.py would hide ours"),
    "one core": (machine(of(MACHINE, num_cores=1))["cores"], "warn", "1 of the machine's 4"),
    "no memory": (machine(of(MACHINE, memory_bytes=GB))["memory"], "fail", "1.0 GB free"),
    "little memory": (machine(of(MACHINE, memory_bytes=2 * GB))["memory"], "warn", "4 workers take 2.8 GB"),
    "memory unknown": (machine(of(MACHINE, memory_bytes=0))["memory"], "warn", "not known"),
    "docker's shm": (machine(of(MACHINE, shm_bytes=64 * 2**20))["/dev/shm"], "warn", "64 MiB free"),
    "few files": (machine(of(MACHINE, num_files=63))["open files"], "fail", "Ray does not start"),
    "some files": (machine(of(MACHINE, num_files=4095))["open files"], "warn", "4,095 at most"),
    "many threads": (machine(of(MACHINE, threads={"OMP_NUM_THREADS": "5"}))["threads"], "warn", "of 4 cores"),
    "odd threads": (machine(of(MACHINE, threads={"OMP_NUM_THREADS": "all"}))["threads"], "warn", "'all' is no number"),
    "no compiler": (machine(of(MACHINE, compiler=""))["C++ compiler"], "warn", "nothing compiles"),
    "login node": (machine(of(MACHINE, has_sbatch=True))["SLURM"], "warn", "login node"),
    "read only": (only(judge_folder(of(FOLDER, problem="/data: Read-only file system"))), "fail", "Read-only file"),
    "full": (only(judge_folder(of(FOLDER, free_bytes=10**7))), "fail", "0.0 GB free"),
    "nearly full": (only(judge_folder(of(FOLDER, free_bytes=GB))), "warn", "1.0 GB free"),
    "no inodes": (only(judge_folder(of(FOLDER, free_inodes=0))), "fail", "no file more"),
    "no locks": (only(judge_folder(of(FOLDER, locks="flock: free"))), "fail", "flock: free: two drivers"),
    "nfs": (only(judge_folder(of(FOLDER, filesystem="nfs4"))), "warn", "on nfs4"),
    "memory's disk": (only(judge_folder(of(FOLDER, filesystem="tmpfs"))), "warn", "gone when the machine restarts"),
    "slow disk": (only(judge_folder(of(FOLDER, fsync_seconds=0.9))), "warn", "fsync takes 900 ms"),
    "no fsync": (only(judge_folder(of(FOLDER, fsync_problem="Invalid argument"))), "fail", "could be lost"),
    "server's clock": (only(judge_folder(of(FOLDER, skew_seconds=-7.0))), "warn", "-7 s off"),
    "tmp shut": (only(judge_temporary(of(TEMPORARY, problem="/tmp: No space"))), "fail", "nothing can be written"),
    "tmp full": (only(judge_temporary(of(TEMPORARY, free_bytes=4 * GB))), "warn", "more than 95% full"),
    "tmp noexec": (only(judge_temporary(of(TEMPORARY, noexec=True))), "warn", "noexec"),
    "no loopback": (network(of(NETWORK, loopback_problem="refused"))["ports"], "fail", "refused"),
    "localhost": (network(of(NETWORK, localhost=("10.0.0.1",)))["ports"], "warn", "`localhost` is 10.0.0.1"),
    "ray elsewhere": (network(of(NETWORK, ray_address=True))["ports"], "warn", "RAY_ADDRESS"),
    "proxy": (network(of(NETWORK, proxies=("http_proxy",)))["proxies"], "warn", "http_proxy would catch"),
    "half a proxy": (
        network(of(NETWORK, proxies=("http_proxy",), no_proxy="localhost,.x"))["proxies"], "warn", "would catch",
    ),
    "torn key": (network(of(NETWORK, key_problem="is set, and empty"))["W&B"], "warn", "is set, and empty"),
    "open netrc": (network(of(NETWORK, netrc="~/.netrc can be read by others"))["W&B"], "warn", "read by others"),
    "mismatch": (
        judge_driver(of(NODE, smi=Smi(found=True, problem="Driver/library version mismatch"))), "fail", "mismatch",
    ),
    "hanging gpu": (judge_driver(of(NODE, smi=Smi(found=True, problem="no answer in 20 s"))), "fail", "no answer"),
    "no smi": (judge_driver(of(NODE, smi=Smi(found=False))), "warn", "/dev has 2 GPUs, and there is no nvidia-smi"),
    "cpu torch": (judge_torch_devices(of(NODE, cuda_built="", devices=())), "warn", "2 GPUs stay idle"),
    "old driver": (
        judge_torch_devices(of(NODE, devices=(), warned=("driver on your system is too old",))), "fail", "too old",
    ),
    "hidden gpus": (judge_torch_devices(of(NODE, devices=(), visible="")), "warn", "hides 2 GPUs"),
    "sick gpu": (
        judge_torch_devices(of(NODE, devices=("", "no kernel image"))), "fail", "GPU 1: no kernel image",
    ),
    "rocm": (judge_torch_devices(of(NODE, hip_built="6.4")), "warn", "ROCm 6.4"),
    "no torch": (judge_torch_devices(of(CPU, problem="it is not installed")), "fail", "it is not installed"),
    "torchvision": (
        judge_torchvision("0.20.0", Imported(seconds=1.0, problem="operator torchvision::nms does not exist")),
        "warn", "does not fit this torch",
    ),
    "missing": (judge_library(of(LIBRARY, version="")), "fail", "not installed"),
    "too old": (judge_library(of(LIBRARY, version="2.12.1")), "fail", ">=2.13 is wanted"),
    "a patch too old": (judge_library(of(LIBRARY, wanted=((">=", "2.13.1"),))), "fail", ">=2.13.1 is wanted"),
    "another": (judge_library(of(LIBRARY, name="mup", version="1.1.0", wanted=(("==", "1.0.0"),))), "fail", "==1.0.0"),
    "too new": (judge_library(of(LIBRARY, version="3.0.0", wanted=(("<", "3"),))), "fail", "<3 is wanted"),
    "untested": (judge_library(of(LIBRARY, version="2.14.0.dev20261101")), "warn", "newer than any tested"),
    "broken": (
        judge_library(of(LIBRARY, imported=Imported(seconds=1.0, problem="SIGSEGV"))), "fail", "cannot be imported",
    ),
    "slow": (judge_library(of(LIBRARY, imported=Imported(seconds=42.0))), "warn", "takes 42 s to import"),
    "bad plan": (only(judge_plan(of(PLAN, problems=("a", "b")))), "fail", "2 problems, a for one"),
    "no corpus": (only(judge_plan(of(PLAN, corpus_problem="no manifest"))), "fail", "no manifest"),
    "no gpus": (only(judge_plan(of(PLAN, worker_gpus=1.0, num_gpus=1, num_ranks=2))), "fail", "want 2 GPUs, torch can"),
    "no cores": (only(judge_plan(of(PLAN, num_workers=5))), "fail", "want 5 cores, 4 are here"),
    "idle gpus": (only(judge_plan(of(PLAN, num_gpus=8))), "warn", "8 GPUs are here, and no worker takes one"),
    "no head": (only(judge_plan(of(PLAN, address="h:6379", head_answers=False))), "fail", "takes no connection"),
    "no room": (only(judge_plan(of(PLAN, disk_bytes=2e9))), "fail", "at most 2,000.0 MB"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_and_what_mends_it_said(fault):
    finding, state, said = FAULTS[fault]
    assert (finding.state, said in finding.said, bool(finding.mend)) == (state, True, True), finding


FINE = [
    network(of(NETWORK, proxies=("http_proxy",), no_proxy="localhost, 127.0.0.1"))["proxies"],
    network(of(NETWORK, proxies=("http_proxy",), no_proxy="*"))["proxies"],
    network(of(NETWORK, has_key=True, wandb_mode="online"))["W&B"],
    machine(of(MACHINE, threads={"OMP_NUM_THREADS": "4,2"}))["threads"],
    machine(of(MACHINE, num_files=-1))["open files"],
    machine(of(MACHINE, shm_bytes=-1))["/dev/shm"],
    machine(of(MACHINE, slurm={"SLURM_JOB_ID": "7"}, has_sbatch=True))["SLURM"],
    judge_torch_devices(of(NODE, devices=("",))),
    judge_torch_devices(of(NODE, smi=Smi(found=False), devices=())),
    judge_torchvision("0.28.0", Imported(seconds=1.0)),
    judge_library(of(LIBRARY, version="2.13.1")),
    *judge_plan(of(PLAN, address="auto", worker_gpus=64.0)),
    *judge_plan(of(PLAN, corpus="")),
    *judge_folder(of(FOLDER, free_inodes=-1, ignores_case=True)),
]


@pytest.mark.parametrize("finding", FINE, ids=lambda finding: finding.name)
def test_what_looks_odd_and_is_fine(finding):
    assert finding.state == "ok", finding


def test_a_long_temporary_folder_counts_where_ray_would_take_it():
    """Beyond 24 characters our own folder goes to Ray's default: that is as long as TMPDIR, or RAY_TMPDIR is short."""
    long = "/scratch/users/somebody/with/a/long/name"
    finding = only(judge_temporary(of(TEMPORARY, base=long, ray_base=f"{long}/ray")))
    assert (finding.state, "paths of 108 bytes, 107 is the most" in finding.said) == ("fail", True), finding
    assert judge_temporary(of(TEMPORARY, base=long, ray_base=f"{long[:-1]}/ray"))[0].state == "ok"
    assert judge_temporary(of(TEMPORARY, base=long, ray_base="/tmp/ray"))[0].state == "ok"


def test_numbers_said_here_are_those_of_the_rooms():
    from launcher.doctor import folders
    from launcher.doctor import machine as this

    assert this.OBJECT_STORE_BYTES == ray_start.OBJECT_STORE_BYTES
    assert folders.OWN_BASE_CHARS == ray_own._MAX_BASE_CHARS
    assert len(ray_own._PREFIX) == len("forerun-")


def test_the_versions_that_are_tested_are_those_that_are_pinned():
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [re.match(r"[\w.-]+", line).group() for line in project["dependencies"]]
    assert {name: pinned[name] for name in wanted} == versions.TESTED
    assert project["requires-python"] == f">={'.'.join(map(str, versions.OLDEST_PYTHON))}"
    for library in versions.look_at_libraries({}):
        assert judge_library(library).state != "fail", "the tests run with what is asked for"


def test_findings_are_counted_and_the_worst_decides():
    found = [ok("a", "b"), warn("c", "d", "e"), ok("f", "g")]
    assert (worst(found), worst([*found, fail("h", "i", "j")]), worst([])) == ("warn", "fail", "ok")
    body = body_of(found)
    assert (body["outcome"], body["num_ok"], body["num_warn"], body["num_fail"]) == ("warn", 2, 1, 0)
    assert body["findings"][1] == {"name": "c", "state": "warn", "said": "d", "mend": "e"}
    assert line_of(found[1]) == "warn  c: d\n      mend: e"


@pytest.mark.parametrize(("state", "mend"), [("ok", "x"), ("warn", ""), ("fail", "")])
def test_what_is_not_ok_has_a_mend_and_what_is_has_none(state, mend):
    with pytest.raises(ValueError, match="mend"):
        Finding(name="a", state=state, said="b", mend=mend)
