"""A study's workspace: every axis it names is logged, it is kept and saved once, and can be done without."""

import json

import pytest
from example_report import finished_body
from wandb_case import Server

from launcher.dashboards import workspace as dashboard_workspace
from launcher.dashboards.dashboards import Place
from launcher.dashboards.record import record_of
from launcher.dashboards.runs import proxy_runs
from launcher.dashboards.workspace import Kept, described, keep_workspace

DIGEST = "d" * 64
MAIN_RUN = {
    "main_run/train_loss_nats", "expected_loss_nats", "expected_low_nats", "expected_high_nats",
    "main_run/validation_loss_nats", "main_run/grad_norm", "num_loss_spikes", "tokens_per_second", "mfu",
}  # fmt: skip


@pytest.fixture(scope="module")
def told():
    body = finished_body()
    return described(body, record_of(body, "<html></html>"), [DIGEST])


@pytest.fixture(scope="module")
def kept(told, tmp_path_factory):
    study = tmp_path_factory.mktemp("kept")
    return study, keep_workspace(study, told, Place())


@pytest.fixture(scope="module")
def spec(kept):
    return json.loads(kept[1].path.read_text())["spec"]


def panels(spec):
    return {
        section["name"]: section["panels"] for section in spec["section"]["panelBankConfig"]["sections"]
    }  # fmt: skip


def test_it_is_kept_with_the_study_and_not_built_twice(kept, told, monkeypatch):
    study, first = kept
    assert first == Kept(path=study / "wandb" / "workspace.json")
    content = first.path.read_bytes()
    monkeypatch.setattr(dashboard_workspace, "ask", None)
    assert keep_workspace(study, told, Place()) == first and first.path.read_bytes() == content
    with pytest.raises(TypeError):  # built anew when the study has more to show
        keep_workspace(study, {**told, "pictures": ["more"]}, Place())


def test_its_sections_show_what_a_study_is_about(spec):
    found = {name: [panel["viewType"] for panel in some] for name, some in panels(spec).items()}
    assert list(found) == ["Transfer", "Search", "Scaling", "Main run", "Verdicts, fits, frozen config"]
    assert "Vega2" in found["Transfer"] and "Scatter Plot" in found["Transfer"]
    assert found["Search"][0] == "Parallel Coordinates Plot" and found["Search"][-1] == "Run History Line Plot"
    assert found["Scaling"] == ["Vega2", "Scatter Plot"]
    assert found["Main run"][0] == "Run History Line Plot"


def test_mup_stands_beside_sp(spec):
    titles = [panel["config"]["stringSettings"]["title"] for panel in panels(spec)["Transfer"]
              if panel["viewType"] == "Vega2"]  # fmt: skip
    assert {"valley learning rate over width mup", "valley learning rate over width sp"} <= set(titles)
    assert "drift learning rate over width" in titles


def test_every_axis_of_a_chart_is_a_column_of_its_table(spec, told):
    seen = 0
    for some in panels(spec).values():
        for panel in some:
            if panel["viewType"] != "Vega2":
                continue
            (query,) = panel["config"]["userQuery"]["queryFields"]
            (table,) = (field["args"][0]["value"] for field in query["fields"] if field["name"] == "summaryTable")
            axes = panel["config"]["fieldSettings"]
            assert [axes["x"], axes["y"], axes["stroke"]] == told["tables"][table.removeprefix("tables/")]
            seen += 1
    assert seen >= 5


def named(value):
    """Every `config:` and `summary:` name in a panel."""
    if isinstance(value, dict):
        return {name for part in value.values() for name in named(part)}
    if isinstance(value, list):
        return {name for part in value for name in named(part)}
    return {value} if isinstance(value, str) and value.startswith(("config:", "summary:")) else set()


def test_every_setting_and_outcome_it_names_is_logged(spec, study, ledger):
    records = [one.record for one in proxy_runs(study, ledger)]
    config, summary = records[0].config.keys(), set().union(*(record.summary.keys() for record in records))
    names = named(panels(spec)) | named(spec["section"]["runSets"])
    assert len(names) > 6
    for name in names:
        kind, key = name.split(":", 1)
        assert key.removesuffix(".value") in (config if kind == "config" else summary), name


def test_the_main_runs_panels_name_what_its_run_alone_has(spec):
    """What proxies have too would draw a line for each of them."""
    metrics = [panel["config"].get("metrics", []) for panel in panels(spec)["Main run"]]
    assert {name for some in metrics for name in some} <= MAIN_RUN
    assert "expected_low_nats" in metrics[0] and panels(spec)["Main run"][0]["config"]["xAxis"] == "step"


def test_its_runs_are_the_studys(spec, told):
    (runs,) = spec["section"]["runSets"]
    assert json.dumps(told["study"]) in (said := json.dumps(runs["filters"])) and json.dumps(DIGEST) in said


def test_without_the_library_it_is_told_and_all_else_goes_on(tmp_path, monkeypatch, told):
    (tmp_path / "wandb_workspaces").mkdir()
    text = "raise ModuleNotFoundError('No module named wandb_workspaces', name='wandb_workspaces')"
    (tmp_path / "wandb_workspaces" / "__init__.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert keep_workspace(tmp_path / "study", told, Place()) == Kept(path=None)
    assert "pip install 'forerun[workspaces]'" in dashboard_workspace.ABSENT


def test_online_it_is_saved_once_and_then_again_in_its_place(tmp_path, told, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with Server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        saved = keep_workspace(tmp_path / "study", told, Place(), online=True)
        again = keep_workspace(tmp_path / "study", {**told, "pictures": []}, Place(), online=True)
    first, second = server.views
    assert first["entityName"] == "me" and first["projectName"] == "forerun" and first.get("id") is None
    assert (second["id"], second["name"]) == ("view1", first["name"])
    assert json.loads(second["spec"]) == json.loads(again.path.read_text())["spec"]
    assert saved.url.startswith(server.url) and "/me/forerun?nw=" in saved.url
