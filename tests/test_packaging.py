"""Tests of what pip installs: the files of the wheel, and its requirements and their versions.

A slow test runs the whole chain of commands in an environment that has nothing else.
"""

import email
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tiny_study import PLAN, SENTENCE

from forerun._launcher.main_run.exporters.registry import EXPORTER_MODULES

ROOT = Path(__file__).parents[1]
LINKS = {path.name for path in (ROOT / "forerun").iterdir() if path.is_symlink()}
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())
BUILD = (
    "import sys; from setuptools import build_meta as b; out = sys.argv[1]; "
    "b.build_wheel(out); b.build_sdist(out)"
)
CANNOT_INSTALL = re.compile(
    "connection broken|Max retries|timed out|IncompleteDownload|No space left"
)
"""Messages of pip when this machine cannot install packages."""


def list_package_files():
    """Return every file of the import package, including those behind its links."""
    folders = [ROOT / "forerun", *(ROOT / "forerun" / name for name in LINKS)]
    paths = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in paths if "__pycache__" not in path.parts}


def list_copied_files():
    """Return the files and folders from which the Dockerfile installs forerun."""
    copies = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.M)
    return {name for line in copies for name in line.split()}


@pytest.fixture(scope="module")
def built_archives(tmp_path_factory):
    """A wheel and a source archive, built from the files that the Dockerfile copies.

    One test file is added, which the archives must not contain.
    """
    tree = tmp_path_factory.mktemp("tree")
    out = tmp_path_factory.mktemp("dist")
    for name in list_copied_files():
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name,
                tree / name,
                symlinks=True,
                ignore=shutil.ignore_patterns("__pycache__"),
            )
        else:
            shutil.copy(ROOT / name, tree)
    (tree / "tests").mkdir()
    (tree / "tests" / "test_packaging.py").touch()
    subprocess.run(
        [sys.executable, "-c", BUILD, out], cwd=tree, check=True, capture_output=True, timeout=120
    )
    (wheel,), (archive,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, archive


def test_wheel_holds_exactly_the_import_package(built_archives):
    """A package or table that pyproject.toml does not list is missing after `pip install`."""
    with zipfile.ZipFile(built_archives[0]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == list_package_files()


def test_source_archive_holds_what_a_build_needs_and_no_tests(built_archives):
    with tarfile.open(built_archives[1]) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    generated = {name for name in names if name.startswith("forerun.egg-info/")} | {
        "PKG-INFO",
        "setup.cfg",
    }
    assert names - generated == list_package_files() | {
        "pyproject.toml",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
    }


def test_metadata_names_license_python_readme_and_command(built_archives):
    with zipfile.ZipFile(built_archives[0]) as wheel:
        (info,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
        metadata = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
        command = wheel.read(f"{info}/entry_points.txt").decode().split()
        license_text = wheel.read(f"{info}/licenses/LICENSE").decode()
    assert command == ["[console_scripts]", "forerun", "=", "forerun.__main__:main"]
    assert metadata["License-Expression"] == "Apache-2.0" and "Apache License" in license_text
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert (
        metadata.get_payload(decode=True).decode().strip()
        == (ROOT / "README.md").read_text().strip()
    )


def read_pins(name):
    """Return the pinned version of each package in a file of constraints."""
    lines = [
        line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")
    ]
    return dict(line.split("==") for line in lines)


def test_minimum_constraints_match_pyproject():
    """`make test-min` must test the oldest versions that pyproject.toml allows."""
    requirements = [Requirement(text) for text in DECLARED["project"]["dependencies"]]
    oldest = {}
    for requirement in requirements:
        (bound,) = requirement.specifier
        assert bound.operator in (">=", "=="), requirement
        oldest[requirement.name] = bound.version
    pinned = read_pins("constraints-min.txt")
    assert pinned.keys() == oldest.keys()
    different = [
        name
        for name, version in pinned.items()
        if not Requirement(f"x=={version}").specifier.contains(oldest[name])
    ]
    assert different == []


def test_pinned_versions_are_allowed():
    extras = DECLARED["project"]["optional-dependencies"]
    requirements = [
        Requirement(text) for text in [*DECLARED["project"]["dependencies"], *extras["dev"]]
    ]
    pinned = {name.lower(): version for name, version in read_pins("constraints.txt").items()}
    assert [
        str(requirement)
        for requirement in requirements
        if not requirement.specifier.contains(pinned[requirement.name.lower()])
    ] == []


WRITE_ALL_SCRIPT = """
import dataclasses, json, sys
from pathlib import Path
from types import SimpleNamespace
import forerun
from main_run import make_decision, make_spec
from forerun._launcher.main_run.exporters.registry import EXPORTER_MODULES, load_exporter
from forerun._launcher.report.page.page import write_report
from forerun._launcher.report.views.report_model import to_report
unpacked, out = map(Path, sys.argv[1:])
assert Path(forerun.__file__).is_relative_to(unpacked), forerun.__file__
manifest = SimpleNamespace(tokenizer="bytes", vocab_size=256, count_tokens=lambda split: 123_456)
plain = make_decision(make_spec("d" * 64), manifest)
decision = dataclasses.replace(plain, forward=dataclasses.replace(plain.forward, residual=0.5))
for trainer in EXPORTER_MODULES.keys() - {"command"}:  # it writes no file from a template
    load_exporter(trainer).export(decision, out / trainer, load_exporter(trainer).VERSIONS[-1])
body = json.loads((out / "body.json").read_text())
write_report(out, to_report(body))
"""
"""Write everything that forerun makes from templates: all exports and a report."""
EMPTY_STUDY = {
    "schema_version": 1,
    "question": {
        "data_id": "d" * 64,
        "proxy": {
            "parametrization": "mup",
            "num_steps": 200,
            "base_width": 32,
            "batch_tokens": 1024,
        },
        "search": {"num_trials": 12, "seed": 3},
        "transfer": {"widths": [32, 64], "level": 0.9},
    },
    "corpus": {
        "data_id": "d" * 64,
        "tokenizer": "bytes",
        "vocab_size": 256,
        "num_documents": 3,
        "num_train_tokens": 9,
        "num_validation_tokens": 9,
    },
    "progress": {"search": [0, 12]},
    "calibration": [],
    "coordinates": {},
    "wider": None,
    "gates": [],
    "accepted": {},
    **dict.fromkeys(
        (
            "search",
            "transfer",
            "ladder",
            "fit",
            "frontier",
            "choice",
            "decision",
            "digest",
            "own_run",
            "main_run",
        )
    ),
    "spend": {
        "num_runs": 0,
        "num_imported": 0,
        "by_status": {},
        "flops_causal": 0,
        "worker_seconds": 0,
        "share_of_target": 0.0,
    },
    "ledger_head": "e" * 64,
    "has_logbook": False,
}
"""The JSON of a study that has not begun. `to_report` validates it, and refuses a missing key."""


def test_wheel_has_all_templates_that_it_writes(built_archives, tmp_path):
    """Templates are data files, which `pip install` leaves out unless pyproject.toml names them."""
    with zipfile.ZipFile(built_archives[0]) as wheel:
        wheel.extractall(tmp_path / "unpacked")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "body.json").write_text(json.dumps(EMPTY_STUDY))
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(tmp_path / "unpacked"), str(ROOT / "tests" / "support" / "launcher")]
        ),
    }
    command = [sys.executable, "-c", WRITE_ALL_SCRIPT, tmp_path / "unpacked", tmp_path / "out"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    written = {
        path.relative_to(tmp_path / "out").parts[0]
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert written == {*EXPORTER_MODULES, "body.json", "report.html", "report.json"} - {"command"}
    exported = {path.name for path in (tmp_path / "out").glob("*/*.py")}
    templates = {
        path.name for path in (ROOT / "launcher" / "main_run" / "exporters" / "templates").iterdir()
    }
    # An export has one of these programs, without the name of the trainer.
    renamed = {name for name in templates if name.startswith(("prove_", "train_"))}
    assert exported == templates - renamed - {"__pycache__"} | {"prove.py", "train.py"}


def test_exported_programs_are_linted_and_type_checked():
    """mypy knows each program by the file name under which the other programs import it."""
    templates = {
        path.stem
        for path in (ROOT / "launcher" / "main_run" / "exporters" / "templates").glob("*.py")
    }
    mypy, ruff = DECLARED["tool"]["mypy"], DECLARED["tool"]["ruff"]
    assert templates == {
        name for name in mypy["modules"] if name not in ("readme_picture", "recording", "site_hook")
    }
    assert "launcher/main_run/exporters/templates" in mypy["mypy_path"].split(":")
    assert not {"exclude", "extend-exclude"} & ruff.keys()
    assert not [
        folder for folder in ruff["lint"]["per-file-ignores"] if folder.startswith("launcher")
    ]
    relaxed_rules = {
        key
        for override in mypy["overrides"]
        if templates & {*override["module"]}
        for key in override
    } - {"module"}
    assert relaxed_rules == {"disallow_subclassing_any", "warn_return_any"}


@pytest.fixture(scope="module")
def empty_environment(built_archives, tmp_path_factory):
    """A virtual environment with the wheel and its requirements, and nothing of this checkout."""
    folder = tmp_path_factory.mktemp("empty") / "venv"
    venv.create(folder, with_pip=True)
    command = [
        folder / "bin" / "python",
        "-m",
        "pip",
        "install",
        "-q",
        "-c",
        ROOT / "constraints.txt",
        built_archives[0],
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode and CANNOT_INSTALL.search(done.stderr):
        pytest.skip(f"pip cannot install here: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.fixture
def run_forerun(empty_environment, tmp_path):
    """A function that runs the installed command in an empty folder; it returns the printed JSON.

    With `python=True`, it runs a Python script in that environment instead.
    """
    env = {
        "PATH": f"{empty_environment / 'bin'}:{os.defpath}",
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }

    def run(*arguments, python=False):
        head = ["python", "-c"] if python else ["forerun"]
        command = [
            empty_environment / "bin" / head[0],
            *head[1:],
            *arguments,
            *([] if python else ["--json"]),
        ]
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
        return json.loads(done.stdout)

    return run


LIST_OWNERS_SCRIPT = """
import importlib, importlib.metadata, json, pathlib, sys
owners = importlib.metadata.packages_distributions()
paths = {name: pathlib.Path(importlib.import_module(name).__file__) for name in %r}
print(json.dumps({name: [owners[name], path.is_relative_to(sys.prefix)] for name, path in paths.items()}))
"""  # noqa: E501
"""Print the distributions of each package, and whether it is in the environment's own folder."""


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_whole_chain_runs_in_an_empty_environment(run_forerun, tmp_path):
    """Commands start other processes, which must find their modules.

    These are Ray's workers, torchrun's ranks, and W&B's process.
    """
    assert run_forerun(LIST_OWNERS_SCRIPT % (("forerun",),), python=True) == {
        "forerun": [["forerun"], True]
    }
    rng, words = random.Random(0), SENTENCE.split()
    (tmp_path / "source").mkdir()
    for number in range(60):
        (tmp_path / "source" / f"{number}.txt").write_text(
            " ".join(rng.choice(words) for _ in range(250))
        )
    run_forerun("tokenize", "source", "--out", "corpus", "--validation-fraction", "0.3")
    run_forerun("init", "--data", "corpus", "--out", "new.toml")
    assert run_forerun("validate", "new.toml")["valid"]
    shape = [
        "--layers",
        "2",
        "--width",
        "64",
        "--heads",
        "4",
        "--ffn",
        "128",
        "--vocab",
        "256",
        "--seq-len",
        "64",
    ]
    assert run_forerun("flops", *shape, "--tokens", "1e6")["params"] > 0
    (tmp_path / "plan.toml").write_text(PLAN)
    body = run_forerun(
        "run", "plan.toml", "--set", "cluster.backend=ray", "--set", "cluster.num_workers=1"
    )
    assert len(run_forerun("status", "study")["gates"]) == len(body["gates"]) > 3
    assert run_forerun("fit", "study", "--form", "chinchilla", "--bootstrap", "0")["num_runs"] == 9
    accept_options = [
        part
        for gate in body["gates"]
        if gate["outcome"] != "passed"
        for part in ("--accept", gate["name"])
    ]
    digest = run_forerun("freeze", "study", *accept_options, "--reason", "a toy")["digest"]
    frozen = f"study/frozen/{digest}"
    run_forerun("export", frozen, "--to", "torchtitan")
    run_forerun("launch", frozen, "--steps", "2")
    assert run_forerun("verify", frozen)["digest"] == digest
    run_forerun("dashboards", "study")
    assert [*(tmp_path / "study").rglob("*.wandb")]
    assert "<svg" in (tmp_path / "study" / "report.html").read_text()
