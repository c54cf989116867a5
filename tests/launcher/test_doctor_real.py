"""Doctor's facts on real faults: packages that hide ours, crash or hang."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.doctor import (
    findings,
    folders,
    machine,
)
from launcher.doctor.libraries import try_imports

TORCH = """
class version:
    cuda = "13.0"
class cuda:
    is_available = staticmethod(lambda: False)
"""
SMI = "#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559 MiB, 570.86.15'\n"


def package(folder, name, text=""):
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(text)


def program(folder, name, text):
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)


def run(arguments, here, **environment):
    """`python -m launcher` in a folder of its own, the editable install's way: what is on the path
    comes first.
    """
    given = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, "-m", "launcher", *arguments],
        capture_output=True,
        text=True,
        cwd=here,
        env=given,
        check=False,
        timeout=120,
    )
    assert "Traceback" not in done.stderr
    # a planted library prints at its import
    return done.returncode, json.loads(done.stdout[done.stdout.index("{") :])


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A folder with a `sweeps` that is not ours, a Ray that cannot be imported, a W&B that ends the
    interpreter.
    """
    folder = tmp_path_factory.mktemp("broken")
    package(folder, "sweeps", "from sweeps.config import SweepConfig\n")
    package(folder, "torch", TORCH)
    (folder / "ray.py").write_text("raise ImportError('libray.so: undefined symbol')")
    (folder / "wandb.py").write_text("import os; os.abort()")
    for name in (
        "mup",
        "infshape",
        "optuna",
        "scipy",
        "pyarrow",
        "matplotlib",
        "pydantic",
        "safetensors",
        "tokenizers",
    ):
        (folder / f"{name}.py").write_text("print('hello from an import')")
    program(folder, "nvidia-smi", SMI)
    return folder


def test_a_broken_environment_gets_its_whole_report(broken, tmp_path):
    path = f"{broken}:{os.environ['PATH']}"
    code, body = run(
        ["doctor", "--json"],
        tmp_path,
        PYTHONPATH=f"{broken}:{findings.HOME}",
        PATH=path,
        WANDB_API_KEY="f" * 40,
    )
    found = {each["name"]: each for each in body["findings"]}
    assert (code, body["outcome"], body["num_fail"]) == (2, "fail", 4)
    assert f"`import sweeps` finds {broken / 'sweeps'}" in found["names"]["said"]
    assert "ImportError: libray.so: undefined symbol" in found["ray"]["said"]
    assert "it ends the interpreter (SIGABRT)" in found["wandb"]["said"]
    assert found["ray"]["mend"] == "pip install 'ray>=2.52' --force-reinstall"
    assert (found["optuna"]["state"], found["numpy"]["state"]) == ("ok", "ok"), (
        "what comes after a crash is tried too"
    )
    assert "torch sees none of 1 GPU" in found["torch and GPUs"]["said"]
    assert "1 x NVIDIA H100 80GB HBM3, 81559 MiB, 570.86.15" in found["driver"]["said"]
    assert {"/dev/shm", "study folder", "ports", "W&B"} < set(found)
    assert "f" * 40 not in json.dumps(body)


def test_another_verb_says_who_hides_ours(broken, tmp_path):
    code, body = run(
        ["status", "nowhere", "--json"], tmp_path, PYTHONPATH=f"{broken}:{findings.HOME}"
    )
    assert (code, body["error"]) == (2, "NamesError")
    assert f"`import sweeps` finds {broken / 'sweeps'}: run `forerun doctor`" in body["message"]


def test_a_package_named_proxies_that_hides_ours_is_named(tmp_path):
    (tmp_path / "proxies.py").write_text("")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{findings.HOME}"}
    command = [sys.executable, "-m", "launcher", "status"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, str(tmp_path / "proxies.py") in done.stderr) == (2, True)
    assert "Traceback" not in done.stderr


def test_what_crashes_hangs_or_exits_is_named_and_the_rest_goes_on(tmp_path, monkeypatch):
    texts = {
        "hangs": "import time; time.sleep(60)",
        "fine": "print('noise', flush=True)",
        "dies": "import os; os._exit(7)",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    found = try_imports(list(texts), limit_seconds=5.0)
    assert {name: each.problem for name, each in found.items()} == {
        "hangs": "no answer in 5 s",
        "fine": "",
        "dies": "exit code 7",
    }


def test_gpus_are_asked_to_add(tmp_path, monkeypatch):
    sick = TORCH.replace("False", "True") + (
        "    device_count = staticmethod(lambda: 2)\n"
        "def ones(n, device):\n"
        "    if device == 'cuda:1':\n        raise RuntimeError('uncorrectable ECC error')\n"
        "    class Two:\n        sum = lambda self: self\n        item = lambda self: 2.0\n    "
        "return Two()\n"
    )
    package(tmp_path, "torch", sick)
    monkeypatch.syspath_prepend(tmp_path)
    facts = try_imports(["torch"])["torch"].facts
    assert (facts["cuda"], facts["devices"]) == (
        "13.0",
        ["", "RuntimeError: uncorrectable ECC error"],
    )


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("#!/bin/sh\nexec sleep 30\n", "no answer in 0.5 s"),
        (
            (
                "#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'; "
                "exit "
                "18\n"
            ),
            "version mismatch",
        ),
    ],
)
def test_nvidia_smi_is_believed_and_not_waited_for(tmp_path, monkeypatch, script, problem):
    program(tmp_path, "nvidia-smi", script)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    gpus, said = machine.ask_smi(seconds=0.5 if "sleep" in script else 20)
    assert problem in said and gpus == []


def test_the_innermost_mount_names_the_filesystem(tmp_path):
    mounts = tmp_path / "mountinfo"
    lines = [
        ("/", "ext4"),
        (tmp_path, "nfs4"),
        (f"{tmp_path}/a\\040b", "tmpfs"),
        (f"{tmp_path}x", "xfs"),
    ]
    mounts.write_text(
        "".join(f"1 2 0:3 / {point} rw shared:1 - {kind} source rw\n" for point, kind in lines)
    )
    (tmp_path / "a b").mkdir()
    kinds = [
        folders.filesystem_of(path, mounts) for path in (tmp_path, tmp_path / "a b", Path("/usr"))
    ]
    assert kinds == ["nfs4", "tmpfs", "ext4"]
    assert folders.filesystem_of(tmp_path, tmp_path / "none") == ""


@pytest.mark.slow
def test_here_where_the_tests_run_nothing_fails(tmp_path):
    """With the real torch, Ray and wandb imported: some 6 s of a core."""
    code, body = run(["doctor", "--json"], tmp_path, PYTHONPATH=str(findings.HOME))
    found = {each["name"]: each for each in body["findings"]}
    assert (code, [each for each in body["findings"] if each["state"] == "fail"]) == (0, [])
    assert {"torch", "ray", "mup", "wandb", "torch and GPUs"} < set(found)
    assert list(tmp_path.iterdir()) == []
