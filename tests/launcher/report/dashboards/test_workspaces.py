"""Tests of the W&B workspace of a study: its panels name logged values, and it is saved once."""

import dataclasses
import json
import shutil

import pytest
from example_report import make_finished_body
from wandb_case import Server

from forerun._launcher.report.dashboards import wandb_writer
from forerun._launcher.report.dashboards.run_record import RunRecord, build_study_record
from forerun._launcher.report.dashboards.runs import list_proxy_runs
from forerun._launcher.report.dashboards.wandb_writer import WandbTarget, write_workspace
from forerun._launcher.report.views.report_model import to_report

DIGEST, SECOND_DIGEST = "d" * 64, "e" * 64
"""Digests of the configs of two main runs."""
MAIN_RUN_METRICS = {
    "main_run/train_loss_nats",
    "expected_loss_nats",
    "expected_low_nats",
    "expected_high_nats",
    "main_run/validation_loss_nats",
    "main_run/grad_norm",
    "tokens_per_second",
    "mfu",
}
"""Metrics that only a main run logs, not a proxy run."""


@pytest.fixture(scope="module")
def runs():
    """Records of a study and of one main run."""
    main_run = RunRecord(run_id="m", name="run", config={"digest": DIGEST}, group="main run")
    return [build_study_record(to_report(make_finished_body())), main_run]


@pytest.fixture(scope="module")
def workspace(runs, tmp_path_factory):
    """Study folder, and the (path, URL) of its workspace."""
    study = tmp_path_factory.mktemp("workspace")
    return study, write_workspace(study, runs, WandbTarget())


@pytest.fixture(scope="module")
def spec(workspace):
    """Spec of the workspace: its sections, panels, and run sets."""
    _, (path, _) = workspace
    return json.loads(path.read_text())["spec"]


def get_panels(spec):
    """Return the panels by the name of their section."""
    return {
        section["name"]: section["panels"]
        for section in spec["section"]["panelBankConfig"]["sections"]
    }


def add_main_run(runs):
    """Return the runs and another main run."""
    return [*runs, dataclasses.replace(runs[1], config={"digest": SECOND_DIGEST})]


def test_workspace_is_saved_with_the_study_and_built_once(workspace, runs, tmp_path, monkeypatch):
    study, saved = workspace
    assert saved == (study / "wandb" / "workspace.json", None)
    copied_study = shutil.copytree(study, tmp_path / "study")
    path = copied_study / "wandb" / "workspace.json"
    content = path.read_bytes()
    orders = []

    def record_order(order, *, online):
        orders.append(order)
        return {"spec": {}, "url": None}

    monkeypatch.setattr(wandb_writer, "ask_wandb", record_order)
    assert write_workspace(copied_study, runs, WandbTarget()) == (path, None)
    assert path.read_bytes() == content and orders == []

    # Another main run changes the workspace, so it is built again.
    assert write_workspace(copied_study, add_main_run(runs), WandbTarget()) == (path, None)
    (order,) = orders
    assert order["workspace"]["digests"] == [DIGEST, SECOND_DIGEST]


def find_names(value):
    """Return every `config:` and `summary:` name in nested lists and dictionaries."""
    if isinstance(value, str):
        return {value} if value.startswith(("config:", "summary:")) else set()
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return set()
    return set().union(*map(find_names, value))


def test_panels_name_only_logged_settings_and_outcomes(spec, study, ledger):
    records = list_proxy_runs(study, ledger)
    logged = {
        "config": set(records[0].config),
        "summary": set().union(*(record.summary for record in records)),
    }
    names = find_names(get_panels(spec)) | find_names(spec["section"]["runSets"])
    assert len(names) > 6
    for name in names:
        kind, key = name.split(":", 1)
        assert key.removesuffix(".value") in logged[kind], name


def test_main_run_panels_name_only_metrics_of_the_main_run(spec):
    """A metric that proxy runs have too would draw a line for each of them."""
    main_run_panels = get_panels(spec)["Main run"]
    metrics = [panel["config"].get("metrics", []) for panel in main_run_panels]
    assert set().union(*metrics) <= MAIN_RUN_METRICS
    assert "expected_low_nats" in metrics[0]
    assert main_run_panels[0]["config"]["xAxis"] == "step"


def test_workspace_shows_the_runs_of_the_study(spec, runs):
    (run_set,) = spec["section"]["runSets"]
    filters = json.dumps(run_set["filters"])
    assert json.dumps(runs[0].run_id) in filters and json.dumps(DIGEST) in filters


def test_missing_workspace_library_gives_no_workspace(tmp_path, monkeypatch, runs):
    (tmp_path / "wandb_workspaces").mkdir()
    text = "raise ModuleNotFoundError('No module named wandb_workspaces', name='wandb_workspaces')"
    (tmp_path / "wandb_workspaces" / "__init__.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert write_workspace(tmp_path / "study", runs, WandbTarget()) == (None, None)


def test_online_workspace_is_saved_again_only_for_more_runs(tmp_path, runs, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with Server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        saved = write_workspace(tmp_path / "study", runs, WandbTarget(), online=True)
        assert write_workspace(tmp_path / "study", runs, WandbTarget(), online=True) == saved
        path, _ = write_workspace(
            tmp_path / "study", add_main_run(runs), WandbTarget(), online=True
        )
    first, second = server.views
    assert first["entityName"] == "me" and first["projectName"] == "forerun"
    assert json.loads(second["spec"]) == json.loads(path.read_text())["spec"]
    assert saved[1].startswith(server.url) and "/me/forerun?nw=" in saved[1]
