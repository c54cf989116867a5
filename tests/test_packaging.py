"""What pip installs: the files of the wheel, what it asks for and from which version on, the papers
beside it;
slow: the whole chain from an environment that has nothing else.
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
import yaml
from packaging.requirements import Requirement
from tiny_study import PLAN, SENTENCE

from launcher.exporters.fidelity import MODULES

ROOT = Path(__file__).parents[1]
ROOMS = ("forerun", "proxies", "sweeps", "transfer", "scaling_fits", "launcher")
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())
BUILD = (
    "import sys; from setuptools import build_meta as b; out = sys.argv[1]; "
    "b.build_wheel(out); b.build_sdist(out)"
)
# as pip says it
NO_NETWORK = re.compile("connection broken|Max retries|timed out|IncompleteDownload|No space left")


def sources():
    """Every file of the rooms but what Python leaves there itself."""
    paths = (path for room in ROOMS for path in (ROOT / room).rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in paths if "__pycache__" not in path.parts}


def list_copied_files():
    """Return the files and folders that the Dockerfile copies into its image, from which it
    installs forerun.
    """
    copies = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.M)
    return {name for line in copies for name in line.split()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return a wheel and a source archive, built from the files that the Dockerfile copies and a
    planted test.
    """
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in list_copied_files():
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tree)
    (tree / "tests").mkdir()
    (tree / "tests" / "test_packaging.py").touch()
    subprocess.run(
        [sys.executable, "-c", BUILD, out], cwd=tree, check=True, capture_output=True, timeout=120
    )
    (wheel,), (archive,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, archive


def test_the_wheel_holds_the_rooms_and_nothing_else(built):
    """A package that pyproject.toml does not list, or a table that it does not name, is missing
    after `pip install`.
    """
    with zipfile.ZipFile(built[0]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == sources()


def test_the_source_archive_holds_what_a_build_needs_and_no_tests(built):
    with tarfile.open(built[1]) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    made = {name for name in names if name.startswith("forerun.egg-info/")} | {
        "PKG-INFO",
        "setup.cfg",
    }
    assert names - made == sources() | {"pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"}


def test_the_metadata_says_licence_python_front_page_and_command(built):
    with zipfile.ZipFile(built[0]) as wheel:
        (info,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
        said = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
        command = wheel.read(f"{info}/entry_points.txt").decode().split()
        licence = wheel.read(f"{info}/licenses/LICENSE").decode()
    assert command == ["[console_scripts]", "forerun", "=", "launcher.__main__:main"]
    assert said["License-Expression"] == "Apache-2.0" and "Apache License" in licence
    assert said["Requires-Python"] == ">=3.11"
    assert said["Description-Content-Type"] == "text/markdown"
    assert (
        said.get_payload(decode=True).decode().strip() == (ROOT / "README.md").read_text().strip()
    )


def pins(name):
    lines = [
        line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")
    ]
    return dict(line.split("==") for line in lines)


def test_the_oldest_versions_are_those_that_pyproject_promises():
    """Else `make test-min` would prove another promise."""
    asked = [Requirement(text) for text in DECLARED["project"]["dependencies"]]
    oldest = {}
    for one in asked:
        (bound,) = one.specifier
        assert bound.operator in (">=", "=="), one
        oldest[one.name] = bound.version
    pinned = pins("constraints-min.txt")
    assert pinned.keys() == oldest.keys()
    different = [
        name
        for name, version in pinned.items()
        if not Requirement(f"x=={version}").specifier.contains(oldest[name])
    ]
    assert different == []


def test_the_pinned_versions_are_allowed():
    extras = DECLARED["project"]["optional-dependencies"]
    asked = [Requirement(text) for text in [*DECLARED["project"]["dependencies"], *extras["dev"]]]
    pinned = {name.lower(): version for name, version in pins("constraints.txt").items()}
    assert [str(one) for one in asked if not one.specifier.contains(pinned[one.name.lower()])] == []


def test_the_citation_is_of_this_version_and_its_papers_are_in_the_source():
    said = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = DECLARED["project"]
    assert (said["cff-version"], said["type"]) == ("1.2.0", "software")
    assert (said["version"], said["license"]) == (project["version"], project["license"])
    assert said["message"] and said["title"] and said["authors"] == project["authors"]
    text = "".join(path.read_text() for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    for paper in said["references"]:
        assert paper["title"] and paper["authors"]
        assert f"arXiv {paper['url'].rpartition('/')[2]}" in text, paper["title"]


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md"])
def test_files_and_targets_that_a_page_names_are_there(page):
    text = (ROOT / page).read_text()
    paths = re.findall(r"`([\w.-]+(?:/[\w.-]+)*/?)`", text) + re.findall(r"\]\(([\w./-]+)\)", text)
    paths = [
        path for path in paths if "/" in path or path.endswith((".py", ".md", ".toml", ".txt"))
    ]
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists()] == []
    made = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = {target for line in made for target in line.split()}
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets


EVERYTHING_WRITTEN = """
import dataclasses, json, sys
from pathlib import Path
from types import SimpleNamespace
import launcher
from main_run import decision_of, spec_of
from launcher.exporters.fidelity import MODULES, exporter
from launcher.report.page import write_report
unpacked, out = map(Path, sys.argv[1:])
assert Path(launcher.__file__).is_relative_to(unpacked), launcher.__file__
manifest = SimpleNamespace(tokenizer="bytes", vocab_size=256, num_tokens=lambda split: 123_456)
plain = decision_of(spec_of("d" * 64), manifest)
decision = dataclasses.replace(plain, forward=dataclasses.replace(plain.forward, residual=0.5))
for trainer in MODULES.keys() - {"command"}:  # of a user's own trainer
    exporter(trainer).export(decision, out / trainer, exporter(trainer).VERSIONS[-1])
body = json.loads((out / "body.json").read_text())
write_report(out, body)
"""
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
        "by_status": {},
        "flops_causal": 0,
        "worker_seconds": 0,
        "share_of_target": 0.0,
    },
    "ledger_head": "e" * 64,
    "has_logbook": False,
}


def test_what_a_wheel_writes_is_all_in_the_wheel(built, tmp_path):
    """Templates are no modules: one that pyproject.toml does not name would be missing only after
    `pip install`.
    """
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(tmp_path / "unpacked")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "body.json").write_text(json.dumps(EMPTY_STUDY))
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(tmp_path / "unpacked"), str(ROOT / "tests" / "launcher")]
        ),
    }
    command = [sys.executable, "-c", EVERYTHING_WRITTEN, tmp_path / "unpacked", tmp_path / "out"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    written = {
        path.relative_to(tmp_path / "out").parts[0]
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert written == {*MODULES, "body.json", "report.html", "report.json"} - {"command"}
    carried = {path.name for path in (tmp_path / "out").glob("*/*.py")}
    templates = {path.name for path in (ROOT / "launcher" / "exporters" / "templates").iterdir()}
    renamed = {name for name in templates if name.startswith(("prove_", "train_", "rank_"))}
    assert carried == templates - renamed - {"__pycache__"} | {"prove.py", "train.py"}


def test_exported_programs_are_what_lint_and_types_check():
    """Each by the name under which its siblings import it."""
    templates = {path.stem for path in (ROOT / "launcher" / "exporters" / "templates").glob("*.py")}
    mypy, ruff = DECLARED["tool"]["mypy"], DECLARED["tool"]["ruff"]
    assert templates == {
        name for name in mypy["modules"] if name not in ("drawing", "recording", "site_hook")
    }
    assert "launcher/exporters/templates" in mypy["mypy_path"].split(":")
    assert not {"exclude", "extend-exclude"} & ruff.keys()
    assert not [
        folder for folder in ruff["lint"]["per-file-ignores"] if folder.startswith("launcher")
    ]
    loose = {key for one in mypy["overrides"] if templates & {*one["module"]} for key in one} - {
        "module"
    }
    assert loose == {"disallow_subclassing_any", "warn_return_any"}


@pytest.fixture(scope="module")
def empty(built, tmp_path_factory):
    """An environment with the wheel and what it asks for; nothing of this checkout can be imported
    from it.
    """
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
        built[0],
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode and NO_NETWORK.search(done.stderr):
        pytest.skip(f"pip reached no index: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.fixture
def forerun(empty, tmp_path):
    """The installed command in a folder that has nothing: the one object it prints, exit code 0
    taken for granted.
    """
    env = {"PATH": f"{empty / 'bin'}:{os.defpath}", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def run(*arguments, python=False):
        head = ["python", "-c"] if python else ["forerun"]
        command = [empty / "bin" / head[0], *head[1:], *arguments, *([] if python else ["--json"])]
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
        return json.loads(done.stdout)

    return run


WHOSE = """
import importlib, importlib.metadata, json, pathlib, sys
owners = importlib.metadata.packages_distributions()
paths = {room: pathlib.Path(importlib.import_module(room).__file__) for room in %r}
print(json.dumps({room: [owners[room], path.is_relative_to(sys.prefix)] for room, path in paths.items()}))
"""  # noqa: E501
"""Which distributions each room comes from, and whether from the environment's own folder."""


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_whole_chain_from_an_empty_environment(forerun, tmp_path):
    """Every verb that trains starts other processes: Ray's workers, torchrun's ranks, W&B's; each
    finds its modules.
    """
    assert forerun(WHOSE % (ROOMS,), python=True) == {room: [["forerun"], True] for room in ROOMS}
    rng, words = random.Random(0), SENTENCE.split()
    (tmp_path / "source").mkdir()
    for number in range(60):
        (tmp_path / "source" / f"{number}.txt").write_text(
            " ".join(rng.choice(words) for _ in range(250))
        )
    forerun("tokenize", "source", "--out", "corpus", "--validation-fraction", "0.3")
    forerun("init", "--data", "corpus", "--out", "new.toml")
    assert forerun("validate", "new.toml")["valid"]
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
    assert forerun("flops", *shape, "--tokens", "1e6")["params"] > 0
    (tmp_path / "plan.toml").write_text(PLAN)
    body = forerun(
        "run", "plan.toml", "--set", "cluster.backend=ray", "--set", "cluster.num_workers=1"
    )
    assert len(forerun("status", "study")["gates"]) == len(body["gates"]) > 3
    assert forerun("fit", "study", "--form", "chinchilla", "--bootstrap", "0")["num_runs"] == 9
    closed = [
        part
        for gate in body["gates"]
        if gate["outcome"] != "passed"
        for part in ("--accept", gate["name"])
    ]
    digest = forerun("freeze", "study", *closed, "--reason", "a toy")["digest"]
    frozen = f"study/frozen/{digest}"
    forerun("export", frozen, "--to", "torchtitan")
    forerun("launch", frozen, "--steps", "2")
    assert forerun("verify", frozen)["digest"] == digest
    forerun("dashboards", "study")
    assert [*(tmp_path / "study").rglob("*.wandb")]
    assert "<svg" in (tmp_path / "study" / "report.html").read_text()
