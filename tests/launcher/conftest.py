"""One finished tiny study and one corpus for every test of this room that only reads them.

The command is imported by the fixtures that use it: tests marked `gpu` run where pydantic is not
installed.
"""

import dataclasses
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from main_run import write_corpus

from proxies.data.tokens import read_manifest
from scaling_fits.forecast import uncertainty
from scaling_fits.laws import law
from sweeps.store.ledger import Ledger


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of the module's own that holds the tiny study's corpus; its plans and studies go
    beside that.
    """
    import tiny_study

    made = tmp_path_factory.mktemp("module")
    tiny_study.write_corpus(made)
    return made


@pytest.fixture(scope="module")
def one_rank():
    """A process group of this process alone, so that a rank's whole life runs here."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def nothing_is_fitted_twice():
    """Some hundred tests of this room fit the same few ladders; a fit is a function of its table,
    so it is kept.

    A module's, as a folder without `__init__.py` is no package: the patches would outlive this
    room.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((uncertainty, "fit_runs"), (law, "fit_law")):
            patch.setattr(module, name, kept(getattr(module, name)))
        yield


@pytest.fixture
def fitted_anew():
    """For tests of two fits being one: what was fitted so far is forgotten, and by a call what was
    since.
    """
    MEMORY.clear()
    return MEMORY.clear


MEMORY = {}


def kept(fitting):
    """The function, with a memory."""

    def remembering(*args, **given):
        key = repr([fitting.__name__, *given, *map(said, (*args, *given.values()))])
        if key not in MEMORY:
            MEMORY[key] = fitting(*args, **given)
        return MEMORY[key]

    return remembering


def said(part):
    """All that a table, a fit or an option holds, as text."""
    if isinstance(part, np.ndarray):
        return hashlib.sha256(part.tobytes()).hexdigest(), part.shape
    if dataclasses.is_dataclass(part):
        return [said(getattr(part, field.name)) for field in dataclasses.fields(part)]
    if isinstance(part, Mapping):
        return [(name, said(value)) for name, value in part.items()]
    return [said(each) for each in part] if isinstance(part, tuple | list) else part


def made_once(tmp_path_factory, name, make):
    """A folder that the first of pytest-xdist's processes to want it makes for all; nobody writes
    into it.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (whole := folder.with_suffix(".whole")).exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            whole.touch()
    return folder


@pytest.fixture(scope="session")
def two_ranks(corpus, tmp_path_factory):
    """The folder that the runs of `rank_runs` left."""
    here = Path(__file__).parent
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]

    def make(out):
        done = subprocess.run(
            [*torchrun, here / "rank_runs.py", corpus, out],
            timeout=240,
            check=False,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{here}:{here.parents[1]}"},
        )
        assert done.returncode == 0, done.stderr

    return made_once(tmp_path_factory, "ranks", make)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Folder of `plan.toml`, `corpus/` and the finished `study/`."""

    from tiny_study import ask, write_plan

    def make(folder):
        code, answer = ask("run", write_plan(folder), "--study", folder / "study")
        assert code == 0, answer

    return made_once(tmp_path_factory, "finished", make)


@pytest.fixture(scope="session")
def frozen_once(finished, tmp_path_factory):
    """A copy of the finished study, frozen: one gate failed, one cannot tell, both accepted. Nobody
    writes into it.
    """
    from tiny_study import ask, set_gates

    def make(folder):
        shutil.copytree(finished / "study", folder / "study")
        with pytest.MonkeyPatch.context() as patch:
            set_gates(patch)
            accept = ("--accept", "coordinates", "--accept", "transfer", "--reason", "planted")
            code, answer = ask("freeze", folder / "study", *accept)
        assert code == 0, answer

    return made_once(tmp_path_factory, "frozen_once", make) / "study"


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished study, to be written into; its plan names the shared corpus."""
    shutil.copytree(finished / "study", tmp_path / "study")
    return tmp_path / "study"


@pytest.fixture(scope="module")
def study(finished):
    from launcher.study.study_folder import recorded_study

    return recorded_study(finished / "study")


@pytest.fixture(scope="module")
def ledger(finished):
    return Ledger.read(finished / "study")


@pytest.fixture(scope="module")
def found(study, ledger):
    from launcher.study.evidence import gather

    return gather(study, ledger)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """The tokens of made-up sentences."""
    return made_once(tmp_path_factory, "made_up", write_corpus) / "tokens"


@pytest.fixture(scope="session")
def manifest(corpus):
    return read_manifest(corpus)
