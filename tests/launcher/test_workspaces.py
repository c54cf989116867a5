"""A study's workspace: every axis it names is logged, it is kept and saved once, and can be done
without.
"""

import dataclasses
import json

import pytest
from example_report import finished_body
from wandb_case import Server

from launcher.dashboards import wandb_writer
from launcher.dashboards.records import RunRecord, study_record
from launcher.dashboards.runs import proxy_runs
from launcher.dashboards.wandb_writer import WandbTarget, keep_workspace

DIGEST = "d" * 64
MAIN_RUN = {
    "main_run/train_loss_nats",
    "expected_loss_nats",
    "expected_low_nats",
    "expected_high_nats",
    "main_run/validation_loss_nats",
    "main_run/grad_norm",
    "tokens_per_second",
    "mfu",
}


@pytest.fixture(scope="module")
def runs():
    main = RunRecord(run_id="m", name="run", config={"digest": DIGEST}, group="main run")
    return [study_record(finished_body()), main]


@pytest.fixture(scope="module")
def kept(runs, tmp_path_factory):
    study = tmp_path_factory.mktemp("kept")
    return study, keep_workspace(study, runs, WandbTarget())


@pytest.fixture(scope="module")
def spec(kept):
    return json.loads(kept[1][0].read_text())["spec"]


def panels(spec):
    return {
        section["name"]: section["panels"]
        for section in spec["section"]["panelBankConfig"]["sections"]
    }


def with_more(runs):
    return [*runs, dataclasses.replace(runs[1], config={"digest": "e" * 64})]


def test_it_is_kept_with_the_study_and_not_built_twice(kept, runs, monkeypatch):
    study, first = kept
    path = study / "wandb" / "workspace.json"
    assert first == (path, None)
    content = path.read_bytes()
    monkeypatch.setattr(wandb_writer, "ask", None)
    assert keep_workspace(study, runs, WandbTarget()) == first and path.read_bytes() == content
    with pytest.raises(TypeError):  # built anew when the study has more to show
        keep_workspace(study, with_more(runs), WandbTarget())


def named(value):
    """Every `config:` and `summary:` name in a panel."""
    if isinstance(value, dict):
        return {name for part in value.values() for name in named(part)}
    if isinstance(value, list):
        return {name for part in value for name in named(part)}
    return (
        {value} if isinstance(value, str) and value.startswith(("config:", "summary:")) else set()
    )


def test_every_setting_and_outcome_it_names_is_logged(spec, study, ledger):
    records = proxy_runs(study, ledger)
    config, summary = (
        records[0].config.keys(),
        set().union(*(record.summary.keys() for record in records)),
    )
    names = named(panels(spec)) | named(spec["section"]["runSets"])
    assert len(names) > 6
    for name in names:
        kind, key = name.split(":", 1)
        assert key.removesuffix(".value") in (config if kind == "config" else summary), name


def test_the_main_runs_panels_name_what_its_run_alone_has(spec):
    """What proxies have too would draw a line for each of them."""
    metrics = [panel["config"].get("metrics", []) for panel in panels(spec)["Main run"]]
    assert {name for some in metrics for name in some} <= MAIN_RUN
    assert (
        "expected_low_nats" in metrics[0]
        and panels(spec)["Main run"][0]["config"]["xAxis"] == "step"
    )


def test_its_runs_are_the_studys(spec, runs):
    (shown,) = spec["section"]["runSets"]
    assert (
        json.dumps(runs[0].run_id) in (said := json.dumps(shown["filters"]))
        and json.dumps(DIGEST) in said
    )


def test_without_the_library_it_is_told_and_all_else_goes_on(tmp_path, monkeypatch, runs):
    (tmp_path / "wandb_workspaces").mkdir()
    text = "raise ModuleNotFoundError('No module named wandb_workspaces', name='wandb_workspaces')"
    (tmp_path / "wandb_workspaces" / "__init__.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert keep_workspace(tmp_path / "study", runs, WandbTarget()) == (None, None)


def test_online_it_is_saved_once_and_anew_when_there_is_more(tmp_path, runs, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with Server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        saved = keep_workspace(tmp_path / "study", runs, WandbTarget(), online=True)
        assert keep_workspace(tmp_path / "study", runs, WandbTarget(), online=True) == saved
        again = keep_workspace(tmp_path / "study", with_more(runs), WandbTarget(), online=True)
    first, second = server.views
    assert first["entityName"] == "me" and first["projectName"] == "forerun"
    assert json.loads(second["spec"]) == json.loads(again[0].read_text())["spec"]
    assert saved[1].startswith(server.url) and "/me/forerun?nw=" in saved[1]
