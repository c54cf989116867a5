"""No name leads out of the folder it is a name in, and no link in a study's folder has other files
written to.
"""

import shutil

import pytest
from tiny_study import forerun, write_plan

from launcher.plan.file import PlanError, load_plan
from launcher.plan.plan import Plan
from launcher.study.study_folder import LinksOutError, refuse_links_out
from proxies.core.checks import SpecError
from proxies.data.corpus import tokenize
from proxies.data.tokens import DataError, Shard, read_manifest
from sweeps.store.checkpoints import checkpoint_dir, drop_checkpoints, drop_stale_checkpoints
from sweeps.store.curves import curve_path

ID = "0123456789abcdef" * 4
BAD = {
    "up": "../x",
    "absolute": "/etc/passwd",
    "up later": "a/../../b",
    "of Windows": "..\\x",
    "zero byte": "a\0b",
    "two lines": "a\nb",
    "line's end": "a\n",
    "empty": "",
    "here": ".",
    "home": "~/x",
    "space": " ",
    "colon": "a:b",
}
LONG = "x" * 300


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A plan and its corpus; nobody writes here."""
    return write_plan(tmp_path_factory.mktemp("planned"))


@pytest.fixture
def outside(tmp_path):
    """What must not change: a folder with a file, and a file."""
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
        f"checkpoints/{ID}",
        f"frozen/{ID}",
    ],
    "files": [
        "ledger.db",
        "plan.toml",
        "driver.lock",
        "live.json",
        "live.tmp",
        "report.html",
        "report.json",
        f"curves/{ID}.parquet",
        "wandb/index.json",
        "wandb/workspace.json",
    ],
}


@pytest.mark.parametrize("name", [*LINKS["folders"], *LINKS["files"]])
def test_a_link_that_leads_out_of_a_study_is_refused_by_whatever_writes(
    planned, tmp_path, outside, name
):
    study = tmp_path / "study"
    (study / name).parent.mkdir(parents=True)
    (study / name).symlink_to(outside if name in LINKS["folders"] else outside / "kept")
    for arguments in (
        ("sweep", planned, "--study", study),
        ("run", planned, "--study", study),
        ("report", study),
        ("dashboards", study),
        ("freeze", study),
    ):
        code, _, said = forerun(*arguments)
        assert (code == 2 and f"{name} -> " in said) or (
            arguments[0] == "freeze" and code in (2, 5)
        ), said
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"kept": "kept"}
    assert sorted(
        path.relative_to(study).as_posix() for path in study.rglob("*") if path.is_symlink()
    ) == [name]


def test_links_within_a_study_and_of_its_whole_folder_are_fine(tmp_path):
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


def test_what_a_users_own_trainer_links_to_is_its_business(tmp_path):
    (tmp_path / "external" / ID).mkdir(parents=True)
    (tmp_path / "external" / ID / "data").symlink_to("/")
    refuse_links_out(tmp_path)


def test_states_are_never_removed_through_a_link(tmp_path, outside):
    (tmp_path / "study" / "checkpoints").mkdir(parents=True)
    (tmp_path / "study" / "checkpoints" / ID).symlink_to(outside)
    drop_checkpoints(tmp_path / "study", ID)
    drop_stale_checkpoints(tmp_path / "study", {ID})
    assert (outside / "kept").read_text() == "kept"


@pytest.mark.parametrize(
    "name", [*BAD.values(), LONG, ID.upper(), ID[:-1], f"{ID}\n", f"../{ID}"], ids=repr
)
def test_no_other_name_is_a_runs(tmp_path, name):
    for path_of in (curve_path, checkpoint_dir):
        with pytest.raises(ValueError, match="64 hex digits"):
            path_of(tmp_path, name)


@pytest.mark.parametrize("name", [*BAD.values(), LONG], ids=repr)
def test_no_other_name_is_a_sources(tmp_path, name):
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text(f"some words {number}")
    with pytest.raises(DataError):
        tokenize({name: [tmp_path / "text"]}, tmp_path / "corpus")
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent.name != "text"]
    assert [path for path in left if path.suffix == ".bin"] == []


@pytest.mark.parametrize(
    "name", [*BAD.values(), "x.bin/../../y.bin", "/etc/x.bin", "a\n.bin"], ids=repr
)
def test_no_other_name_is_a_shards(name):
    with pytest.raises(SpecError, match=r"\.bin"):
        Shard(file=name, num_tokens=1, max_id=1, sha256=ID)


@pytest.mark.parametrize("name", [*BAD.values(), LONG], ids=repr)
def test_no_other_name_is_a_trainers(tmp_path, name):
    (tmp_path / "launch.json").write_text("{}")
    code, _, said = forerun("export", tmp_path, "--to", name, "--out", tmp_path / "out")
    assert code == 2 and "must be one of" in said
    assert [path.name for path in tmp_path.iterdir()] == ["launch.json"]


def texts_of_a_plan():
    """Every key of a plan that takes any text."""
    return [
        f"{section}.{key}"
        for section, field in Plan.model_fields.items()
        for key, inner in field.annotation.model_fields.items()
        if inner.annotation is str
    ]


@pytest.mark.parametrize("key", texts_of_a_plan())
def test_no_text_of_a_plan_holds_a_zero_byte(tmp_path, key):
    (tmp_path / "plan.toml").write_text("")
    with pytest.raises(PlanError, match=f"{key} holds a zero byte"):
        load_plan(tmp_path / "plan.toml", (f'{key}="a\\u0000b"',))


@pytest.mark.parametrize("key", ["data.path", "proxy.code_path"])
@pytest.mark.parametrize("value", [LONG, "../../../x", "/proc/self/mem", "a\\nb"])
def test_a_path_of_a_plan_that_is_none_ends_in_words(planned, tmp_path, key, value):
    code, _, said = forerun(
        "validate", planned, "--set", f'{key}="{value}"', "--set", 'proxy.factory="mine:build"'
    )
    assert code == 2 and "bug" not in said, said


@pytest.mark.parametrize(
    "verb", ["status", "report", "freeze", "dashboards", "repair", "verify", "sweep", "fit"]
)
@pytest.mark.parametrize(
    "path", [LONG, "../absent", "/proc/self/mem", "a\nb", "/dev/null/x"], ids=repr
)
def test_a_study_or_a_file_that_is_none_ends_in_words(verb, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, said = forerun(verb, path)
    assert code in (2, 5) and "bug" not in said and "Traceback" not in said, said
    assert not list(tmp_path.iterdir())


def test_a_manifest_may_not_name_files_elsewhere(planned, tmp_path):
    shutil.copytree(planned.parent / "corpus", tmp_path / "corpus")
    manifest = tmp_path / "corpus" / "manifest.json"
    for name in ("../../etc/passwd", "/etc/passwd", f"{LONG}/x.bin"):
        text = manifest.read_text()
        file = next(part for part in text.split('"') if part.endswith(".bin"))
        manifest.write_text(text.replace(file, name))
        with pytest.raises(DataError, match=r"a \.bin file in the corpus folder"):
            read_manifest(tmp_path / "corpus")
        manifest.write_text(text)
