"""Tests of `forerun doctor` on a machine whose libraries, GPUs, or driver are broken.

Fake libraries and a fake `nvidia-smi` have the faults. The last test runs on the real machine.
"""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from forerun._launcher.cli.doctor import machine
from forerun._launcher.cli.doctor.libraries import try_imports
from forerun._proxies.core.canon import IMPORT_DIR

FAKE_TORCH = """
gpu_errors = {gpu_errors!r}

class version:
    cuda = "13.0"

class cuda:
    is_available = staticmethod(lambda: len(gpu_errors) > 0)
    device_count = staticmethod(lambda: len(gpu_errors))

class TwoOnes:
    sum = lambda self: self
    item = lambda self: 2.0

def ones(n, device):
    if error := gpu_errors[int(device.removeprefix("cuda:"))]:
        raise RuntimeError(error)
    return TwoOnes()
"""
"""A torch that sees one GPU for each of `gpu_errors`; an empty error is a GPU that computes."""
NOISY_LIBRARIES = (
    "mup",
    "infshape",
    "optuna",
    "scipy",
    "pyarrow",
    "matplotlib",
    "pydantic",
    "safetensors",
    "tokenizers",
)
"""Libraries that print a line when they are imported, which must not spoil the report."""


def write_torch(folder, gpu_errors):
    """Write a fake torch with these errors of GPUs."""
    (folder / "torch.py").write_text(FAKE_TORCH.format(gpu_errors=gpu_errors))


def write_nvidia_smi(folder, text):
    """Write a shell script as a fake nvidia-smi."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def run_forerun(arguments, folder, **environment):
    """Run `python -m forerun` in a folder and return its exit code and JSON.

    PYTHONPATH must name the folder of forerun, and may name folders of fake libraries before it.
    """
    done = subprocess.run(
        [sys.executable, "-m", "forerun", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **environment},
        check=False,
        timeout=120,
    )
    assert "Traceback" not in done.stderr
    # The fake libraries print when they are imported, before the JSON.
    return done.returncode, json.loads(done.stdout[done.stdout.index("{") :])


@pytest.fixture(scope="module")
def broken_libraries(tmp_path_factory):
    """A folder of fake libraries, and a fake `nvidia-smi` that reports one GPU.

    torch sees no GPU, Ray cannot be imported, and wandb aborts the interpreter.
    """
    folder = tmp_path_factory.mktemp("broken")
    write_torch(folder, gpu_errors=[])
    (folder / "ray.py").write_text("raise ImportError('libray.so: undefined symbol')")
    (folder / "wandb.py").write_text("import os; os.abort()")
    for name in NOISY_LIBRARIES:
        (folder / f"{name}.py").write_text("print('hello from an import')")
    write_nvidia_smi(folder, "echo 'NVIDIA H100 80GB HBM3, 81559 MiB, 570.86.15'")
    return folder


def test_doctor_reports_every_library_of_a_broken_environment(broken_libraries, tmp_path):
    code, body = run_forerun(
        ["doctor", "--json"],
        tmp_path,
        PYTHONPATH=f"{broken_libraries}:{IMPORT_DIR}",
        PATH=f"{broken_libraries}:{os.environ['PATH']}",
        WANDB_API_KEY="f" * 40,
    )
    findings = {finding["name"]: finding for finding in body["findings"]}
    failures = {name for name, finding in findings.items() if finding["state"] == "fail"}
    assert failures == {"ray", "wandb", "torch and GPUs"}
    assert (code, body["outcome"], body["num_fail"]) == (2, "fail", len(failures))
    assert "ImportError: libray.so: undefined symbol" in findings["ray"]["said"]
    assert "it ends the interpreter (SIGABRT)" in findings["wandb"]["said"]
    (ray,) = [
        requirement
        for requirement in map(Requirement, importlib.metadata.requires("forerun"))
        if requirement.name == "ray"
    ]
    assert findings["ray"]["mend"] == f"pip install '{ray}' --force-reinstall"
    assert (findings["optuna"]["state"], findings["numpy"]["state"]) == ("ok", "ok"), (
        "libraries after the crash are still tried"
    )
    assert "torch sees none of 1 GPU" in findings["torch and GPUs"]["said"]
    assert "1 x NVIDIA H100 80GB HBM3, 81559 MiB, 570.86.15" in findings["driver"]["said"]
    assert {"/dev/shm", "study folder", "ports", "W&B"} < set(findings)
    assert "f" * 40 not in json.dumps(body)


def test_try_imports_names_crashes_and_hangs_and_continues(tmp_path, monkeypatch):
    sources = {
        "hangs": "import time; time.sleep(60)",
        "fine": "print('noise', flush=True)",
        "dies": "import os; os._exit(7)",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    checks = try_imports(list(sources), limit_seconds=5.0)
    assert {name: check.problem for name, check in checks.items()} == {
        "hangs": "no answer in 5 s",
        "fine": "",
        "dies": "exit code 7",
    }


def test_each_gpu_is_probed_with_a_small_sum(tmp_path, monkeypatch):
    write_torch(tmp_path, gpu_errors=["", "uncorrectable ECC error"])
    monkeypatch.syspath_prepend(tmp_path)
    facts = try_imports(["torch"])["torch"].facts
    assert (facts["cuda"], facts["devices"]) == (
        "13.0",
        ["", "RuntimeError: uncorrectable ECC error"],
    )


@pytest.mark.parametrize(
    ("script", "limit_seconds", "problem"),
    [
        ("exec sleep 30", 0.5, "no answer in 0.5 s"),
        # A long limit, because a busy machine may start the program slowly
        (
            "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
            20,
            "version mismatch",
        ),
    ],
    ids=["hangs", "fails"],
)
def test_nvidia_smi_errors_and_timeouts_are_reported(
    tmp_path, monkeypatch, script, limit_seconds, problem
):
    write_nvidia_smi(tmp_path, script)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    gpus, message = machine.run_nvidia_smi(seconds=limit_seconds)
    assert problem in message and gpus == []


@pytest.mark.slow
def test_doctor_finds_no_failure_on_this_machine(tmp_path):
    """Import the real torch, Ray, and wandb, which takes about 6 s of one core."""
    code, body = run_forerun(["doctor", "--json"], tmp_path, PYTHONPATH=str(IMPORT_DIR))
    failures = [finding for finding in body["findings"] if finding["state"] == "fail"]
    assert (code, failures) == (0, [])
    names = {finding["name"] for finding in body["findings"]}
    assert {"torch", "ray", "mup", "wandb", "torch and GPUs"} < names
    assert list(tmp_path.iterdir()) == []
