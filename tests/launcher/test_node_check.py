"""What a node is asked, each answer once wrong; and that the question travels as it is."""

import dataclasses
import re
import shutil

import pytest

from launcher.study import pools
from launcher.study.pools import node_check, source_sha256, versions
from launcher.study.study_folder import recorded_study


@pytest.fixture
def asked(finished, copied):
    """The question of a study of one's own, its corpus too."""
    folder = copied.parent / "corpus"
    shutil.copytree(finished / "corpus", folder)
    study = dataclasses.replace(recorded_study(copied), study_dir=copied, corpus=folder)
    return node_check(study)


def test_here_all_is_well(asked):
    assert asked() == []
    assert asked.versions == versions()
    assert set(asked.versions) == {"python", "torch", "numpy", "ray"}
    assert asked.code_dir == "", "the plan names nobody's code"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"versions": {"torch": "1.0"}}, "torch .* there, 1.0 here"),
        ({"source_sha256": "0" * 64}, "another version of forerun is there"),
        ({"study_dir": "/nowhere/study"}, "the study folder /nowhere/study is not there"),
        ({"manifest_sha256": "0" * 64}, "another corpus is there"),
        ({"corpus": ""}, ""),
    ],
)
def test_what_is_otherwise_there(asked, changes, said):
    problems = dataclasses.replace(asked, **changes)()
    assert [re.match(said, problem) is not None for problem in problems] == [True] * bool(said)


def test_our_code_is_named_by_its_content(tmp_path, monkeypatch):
    before = source_sha256()
    for room in ("proxies", "sweeps", "launcher"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(pools, "__file__", str(tmp_path / "launcher" / "study" / "pools.py"))
    first = source_sha256()
    assert first != before
    (tmp_path / "sweeps" / "a.py").write_text("x = 2\n")
    assert source_sha256() != first
