"""Tests of the modules that commands load: no heavy library without need, and no foreign namesake.

Loading a heavy library may take a second, and a user waits for it at every command. A namesake is a
user's module or another library's package with the name of one of our packages.
"""

import json
import os
import subprocess
import sys

import pytest
from source_rules import CORE
from source_tree import API, PACKAGES, ROOT, SourceTree, get_package

HEAVY_LIBRARIES = ("torch", "ray", "optuna", "wandb", "mup", "matplotlib", "scipy")


@pytest.fixture(scope="module")
def source_tree():
    """The packages of this repository."""
    return SourceTree(ROOT)


def list_loaded_libraries(code, *arguments):
    """Run code in a new interpreter and return its exit code and the heavy libraries it loaded.

    The exit code is the text "None" if the code does not exit.
    """
    script = f"""
import sys
code = None
try:
    {code}
except SystemExit as stop:
    code = stop.code
loaded = {{name.split('.')[0] for name in sys.modules}} & set({HEAVY_LIBRARIES!r})
print('loaded', code, *sorted(loaded), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True
    )
    return done.stderr.splitlines()[-1].split()[1:]


RUN_COMMAND_LINE = "from forerun._launcher.cli.cli import main; main(sys.argv[1:])"


@pytest.mark.parametrize(
    "module",
    [
        "study.workers.host",
        "study.stages.stages",
        "main_run.watch.follower",
        "report.views.study_status",
    ],
)
def test_drivers_and_watch_do_not_import_torch(module):
    assert "torch" not in list_loaded_libraries(f"import forerun._launcher.{module}")


def test_help_and_validate_import_no_heavy_library(tmp_path):
    (tmp_path / "plan.toml").write_text("")
    (tmp_path / "corpus").mkdir()
    manifest = {
        "schema_version": 3,
        "tokenizer": "bytes",
        "vocab_size": 256,
        "dtype": "uint16",
        "end_id": 0,
        "sources": [
            {"name": "text", "weight": 1.0, "num_documents": 2, "train": [], "validation": []}
        ],
        "not_read": [],
    }
    (tmp_path / "corpus" / "manifest.json").write_text(json.dumps(manifest))
    assert list_loaded_libraries(RUN_COMMAND_LINE, "--help") == ["0"]
    assert list_loaded_libraries(RUN_COMMAND_LINE, "validate", str(tmp_path / "plan.toml")) == ["0"]
    assert list_loaded_libraries(RUN_COMMAND_LINE, "flops", "--help") == ["0"]
    shape = "layers=2,width=64,heads=4,ffn=128,vocab=256,seq_len=16"
    options = ("--parametrization", "mup", "--shape", shape, "--base", "width=32")
    assert list_loaded_libraries(RUN_COMMAND_LINE, "explain", *options) == ["0"]
    assert list_loaded_libraries("import torch.version") == ["None", "torch"], (
        "a loaded library is found"
    )


def test_core_imports_no_heavy_library_and_statistics_only_scipy(source_tree):
    assert list_loaded_libraries(
        f"import {', '.join(f'forerun._{name}' for name in sorted(CORE))}"
    ) == ["None"]
    modules = [
        name for name in source_tree.trees if get_package(name) in ("transfer", "scaling_fits")
    ]
    code = f"import {', '.join(f'forerun._{name}' for name in modules)}"
    assert set(list_loaded_libraries(code)) <= {"None", "scipy"}


def test_help_takes_less_than_three_tenths_of_a_second():
    """Processor time is measured, because other work on the machine slows the clock."""
    cpu_seconds = []
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-m", "forerun", "--help"], stdout=subprocess.DEVNULL, cwd=ROOT
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        cpu_seconds.append(usage.ru_utime + usage.ru_stime)
    assert min(cpu_seconds) < 0.3


def test_no_other_distribution_has_our_import_name(tmp_path):
    """A fresh process, because benchmarks that tests import add this checkout to `sys.path`."""
    script = f"import importlib.metadata as m; print(*m.packages_distributions()[{API!r}])"
    command = [sys.executable, "-c", script]
    assert subprocess.check_output(command, cwd=tmp_path, text=True).split() == ["forerun"]


def test_user_modules_do_not_shadow_our_packages(tmp_path):
    """A user may have a file `transfer.py` next to a notebook, and W&B has a package `sweeps`."""
    for package in PACKAGES:
        if package != API:
            (tmp_path / f"{package}.py").write_text("raise ImportError('the wrong module')\n")
    # `forerun._transfer` must be imported for its path. The last line prints the API's names, which
    # must be functions and not the user's modules.
    script = (
        "import forerun._transfer, pkgutil, importlib\n"
        "for module in pkgutil.walk_packages(forerun._transfer.__path__, 'forerun._transfer.'):\n"
        "    importlib.import_module(module.name)\n"
        "import forerun._launcher.cli.cli\n"
        "print(type(forerun.transfer).__name__, type(forerun.fit).__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.split(), done.stderr) == (["function", "function"], "")
