"""Fixtures of the launcher's tests: corpora, process groups, and parts of the finished study.

A fixture that takes long is made once for all tests. The command line is imported only where a
fixture uses it, because tests marked `gpu` run on machines without pydantic.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import study_fixtures
import torch.distributed as dist
from main_run import write_corpus
from study_fixtures import make_folder_once

from forerun._proxies.data.tokens import read_manifest
from forerun._sweeps.store.ledger import Ledger

cached_results = study_fixtures.cached_results
finished_study_dir = study_fixtures.finished_study_dir
frozen_study = study_fixtures.frozen_study


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of the test module with the tiny study's corpus, for its plans and studies."""
    import tiny_study

    path = tmp_path_factory.mktemp("module")
    tiny_study.write_corpus(path)
    return path


@pytest.fixture(scope="module")
def one_rank():
    """A process group of this process alone, in which a rank of the trainer can run."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def two_rank_runs(corpus, tmp_path_factory):
    """Folder with the outputs of `rank_runs`, which torchrun starts on two ranks."""
    support = Path(__file__).parents[1] / "support" / "launcher"
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]

    def make(out):
        process = subprocess.run(
            [*torchrun, support / "rank_runs.py", corpus, out],
            timeout=240,
            check=False,
            capture_output=True,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": f"{support}:{support.parents[1]}",
            },
        )
        assert process.returncode == 0, process.stderr

    return make_folder_once(tmp_path_factory, "ranks", make)


@pytest.fixture
def study_copy(finished_study_dir, tmp_path):
    """A copy of the finished study that a test may change; its plan names the shared corpus."""
    shutil.copytree(finished_study_dir / "study", tmp_path / "study")
    return tmp_path / "study"


@pytest.fixture(scope="module")
def study(finished_study_dir):
    """The finished study, read from its folder."""
    from forerun._launcher.study.stages.study_folder import read_recorded_study

    return read_recorded_study(finished_study_dir / "study")


@pytest.fixture(scope="module")
def ledger(finished_study_dir):
    """The ledger of the finished study, which records its runs and decisions."""
    return Ledger.read(finished_study_dir / "study")


@pytest.fixture(scope="module")
def findings(study, ledger):
    """The results of all stages of the finished study."""
    from forerun._launcher.study.stages.study_findings import gather_findings

    return gather_findings(study, ledger)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Folder with a tokenized corpus of generated sentences."""
    return make_folder_once(tmp_path_factory, "made_up", write_corpus) / "tokens"


@pytest.fixture(scope="session")
def manifest(corpus):
    """The manifest of the corpus: its data id, its tokenizer, and its shards."""
    return read_manifest(corpus)
