"""Tests of the check that a study's driver makes on every node of a cluster: a difference between
the node and the driver's machine is reported.
"""

import dataclasses
import re
import shutil

import pytest

from forerun._launcher.study.stages.study_folder import read_recorded_study
from forerun._launcher.study.stages.worker_pools import (
    build_node_check,
    find_versions,
)
from forerun._proxies.core import canon


@pytest.fixture
def node_check(finished_study_dir, study_copy):
    """The check of a study that has its own corpus."""
    folder = study_copy.parent / "corpus"
    shutil.copytree(finished_study_dir / "corpus", folder)
    study = dataclasses.replace(
        read_recorded_study(study_copy), study_dir=study_copy, corpus=folder
    )
    return build_node_check(study)


def test_same_machine_has_no_problem(node_check):
    assert node_check() == []
    assert node_check.versions == find_versions()
    assert set(node_check.versions) == {"python", "torch", "numpy", "ray"}
    assert node_check.code_dir == "", "the plan names no user code"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"versions": {"torch": "1.0"}}, "torch .* there, 1.0 here"),
        ({"source_sha256": "0" * 64}, "another version of forerun is there"),
        ({"study_dir": "/nowhere/study"}, "the study folder /nowhere/study is not there"),
        ({"manifest_sha256": "0" * 64}, "another corpus is there"),
        ({"corpus": ""}, ""),
    ],
)
def test_difference_on_a_node_is_reported(node_check, changes, expected):
    problems = dataclasses.replace(node_check, **changes)()
    assert len(problems) == (1 if expected else 0)
    assert all(re.match(expected, problem) for problem in problems)


def test_hash_of_the_sources_depends_on_their_content(tmp_path, monkeypatch):
    before = canon.hash_sources()
    for package in ("_proxies", "_sweeps", "_launcher"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        (tmp_path / package / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(canon, "PACKAGE_DIR", tmp_path)
    first = canon.hash_sources()
    assert first != before
    (tmp_path / "_sweeps" / "a.py").write_text("x = 2\n")
    assert canon.hash_sources() != first
