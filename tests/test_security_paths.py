"""Tests that forerun writes only where it should, whatever names and links it is given.

No name of a run, source, shard or trainer leads out of its folder, and no link in a study's folder
makes forerun write elsewhere.
"""

import shutil

import pytest
from tiny_study import run_forerun, write_plan

from forerun._launcher.study.plan.file import PlanError, load_plan
from forerun._launcher.study.plan.plan import Plan
from forerun._launcher.study.stages.study_folder import LinksOutError, refuse_links_out
from forerun._proxies.core.checks import SpecError
from forerun._proxies.data.corpus import tokenize
from forerun._proxies.data.tokens import DataError, Shard, read_manifest
from forerun._sweeps.store.checkpoints import (
    drop_checkpoints,
    drop_stale_checkpoints,
    get_checkpoint_dir,
)
from forerun._sweeps.store.curves import get_curve_path

RUN_ID = "0123456789abcdef" * 4
"""A valid id of a run."""
BAD_NAMES = {
    "up": "../x",
    "absolute": "/etc/passwd",
    "up later": "a/../../b",
    "Windows": "..\\x",
    "zero byte": "a\0b",
    "two lines": "a\nb",
    "line's end": "a\n",
    "empty": "",
    "here": ".",
    "home": "~/x",
    "space": " ",
    "colon": "a:b",
}
"""Names that no run, source, shard or trainer may have, by what is wrong with them."""
LONG_NAME = "x" * 300
"""A name that is longer than a file system allows."""


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory):
    """The path of a plan with its corpus, which no test may change."""
    return write_plan(tmp_path_factory.mktemp("planned"))


@pytest.fixture
def outside(tmp_path):
    """A folder outside of the study with one file, which must not change."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "kept").write_text("kept")
    return folder


LINKS = {
    "folders": [
        "curves",
        "checkpoints",
        "external",
        "wandb",
        "frozen",
        f"checkpoints/{RUN_ID}",
        f"frozen/{RUN_ID}",
    ],
    "files": [
        "ledger.db",
        "plan.toml",
        "driver.lock",
        "live.json",
        "live.tmp",
        "report.html",
        "report.json",
        f"curves/{RUN_ID}.parquet",
        "wandb/index.json",
        "wandb/workspace.json",
    ],
}
"""Entries of a study's folder that the tests replace by links."""


@pytest.mark.parametrize("name", [*LINKS["folders"], *LINKS["files"]])
def test_link_out_of_a_study_is_refused_by_every_verb_that_writes(
    plan_path, tmp_path, outside, name
):
    study = tmp_path / "study"
    (study / name).parent.mkdir(parents=True)
    (study / name).symlink_to(outside if name in LINKS["folders"] else outside / "kept")
    for arguments in (
        ("sweep", plan_path, "--study", study),
        ("run", plan_path, "--study", study),
        ("report", study),
        ("dashboards", study),
        ("freeze", study),
    ):
        code, _, output = run_forerun(*arguments)
        is_link_named = code == 2 and f"{name} -> " in output
        # `freeze` may notice first that the study has no records.
        assert is_link_named or (arguments[0] == "freeze" and code in (2, 5)), output
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"kept": "kept"}
    assert sorted(
        path.relative_to(study).as_posix() for path in study.rglob("*") if path.is_symlink()
    ) == [name]


def test_links_within_a_study_and_to_its_folder_are_allowed(tmp_path):
    real, study = tmp_path / "scratch" / "real", tmp_path / "study"
    (real / "curves").mkdir(parents=True)
    (real / "latest").symlink_to("curves")
    (real / "curves" / "loop").symlink_to("loop")
    study.symlink_to(real)
    refuse_links_out(study)
    refuse_links_out(tmp_path / "absent")
    (real / "curves" / "away").symlink_to(tmp_path)
    with pytest.raises(LinksOutError, match="curves/away -> "):
        refuse_links_out(study)


def test_links_of_a_users_own_trainer_are_allowed(tmp_path):
    (tmp_path / "external" / RUN_ID).mkdir(parents=True)
    (tmp_path / "external" / RUN_ID / "data").symlink_to("/")
    refuse_links_out(tmp_path)


def test_checkpoints_are_not_removed_through_a_link(tmp_path, outside):
    (tmp_path / "study" / "checkpoints").mkdir(parents=True)
    (tmp_path / "study" / "checkpoints" / RUN_ID).symlink_to(outside)
    drop_checkpoints(tmp_path / "study", RUN_ID)
    drop_stale_checkpoints(tmp_path / "study", {RUN_ID})
    assert (outside / "kept").read_text() == "kept"


@pytest.mark.parametrize(
    "name",
    [*BAD_NAMES.values(), LONG_NAME, RUN_ID.upper(), RUN_ID[:-1], f"{RUN_ID}\n", f"../{RUN_ID}"],
    ids=repr,
)
def test_invalid_run_id_is_refused(tmp_path, name):
    for get_path in (get_curve_path, get_checkpoint_dir):
        with pytest.raises(ValueError, match="64 hex digits"):
            get_path(tmp_path, name)


@pytest.mark.parametrize("name", [*BAD_NAMES.values(), LONG_NAME], ids=repr)
def test_invalid_source_name_is_refused(tmp_path, name):
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text(f"some words {number}")
    with pytest.raises(DataError):
        tokenize({name: [tmp_path / "text"]}, tmp_path / "corpus")
    assert [path for path in tmp_path.rglob("*") if path.suffix == ".bin"] == []


@pytest.mark.parametrize(
    "name", [*BAD_NAMES.values(), "x.bin/../../y.bin", "/etc/x.bin", "a\n.bin"], ids=repr
)
def test_invalid_shard_name_is_refused(name):
    with pytest.raises(SpecError, match=r"\.bin"):
        Shard(file=name, num_tokens=1, max_id=1, sha256=RUN_ID)


@pytest.mark.parametrize("name", [*BAD_NAMES.values(), LONG_NAME], ids=repr)
def test_invalid_trainer_name_is_refused(tmp_path, name):
    (tmp_path / "launch.json").write_text("{}")
    code, _, output = run_forerun("export", tmp_path, "--to", name, "--out", tmp_path / "out")
    assert code == 2 and "must be one of" in output
    assert [path.name for path in tmp_path.iterdir()] == ["launch.json"]


def list_text_keys():
    """Return every key of a plan whose value is a free text."""
    return [
        f"{section}.{key}"
        for section, field in Plan.model_fields.items()
        for key, inner in field.annotation.model_fields.items()
        if inner.annotation is str
    ]


@pytest.mark.parametrize("key", list_text_keys())
def test_zero_byte_in_a_plan_is_refused(tmp_path, key):
    (tmp_path / "plan.toml").write_text("")
    with pytest.raises(PlanError, match=f"{key} holds a zero byte"):
        load_plan(tmp_path / "plan.toml", (f'{key}="a\\u0000b"',))


@pytest.mark.parametrize("key", ["data.path", "proxy.code_path"])
@pytest.mark.parametrize("value", [LONG_NAME, "../../../x", "/proc/self/mem", "a\\nb"])
def test_invalid_path_in_a_plan_is_a_named_error(plan_path, tmp_path, key, value):
    code, _, output = run_forerun(
        "validate", plan_path, "--set", f'{key}="{value}"', "--set", 'proxy.factory="mine:build"'
    )
    assert code == 2 and "bug" not in output, output


@pytest.mark.parametrize(
    "verb", ["status", "report", "freeze", "dashboards", "repair", "verify", "sweep", "fit"]
)
@pytest.mark.parametrize(
    "path", [LONG_NAME, "../absent", "/proc/self/mem", "a\nb", "/dev/null/x"], ids=repr
)
def test_invalid_study_or_file_is_a_named_error(verb, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, output = run_forerun(verb, path)
    assert code in (2, 5) and "bug" not in output and "Traceback" not in output, output
    assert not list(tmp_path.iterdir())


def test_manifest_with_files_elsewhere_is_refused(plan_path, tmp_path):
    shutil.copytree(plan_path.parent / "corpus", tmp_path / "corpus")
    manifest = tmp_path / "corpus" / "manifest.json"
    for name in ("../../etc/passwd", "/etc/passwd", f"{LONG_NAME}/x.bin"):
        text = manifest.read_text()
        file = next(part for part in text.split('"') if part.endswith(".bin"))
        manifest.write_text(text.replace(file, name))
        with pytest.raises(DataError, match=r"a \.bin file in the corpus folder"):
            read_manifest(tmp_path / "corpus")
        manifest.write_text(text)
