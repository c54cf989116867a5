"""Tests of the records of a study's runs for dashboards: proxies, main runs, and the study itself.

Each outcome of the ledger is one record. The values of the record come from the ledger and the loss
curve.
"""

import json
import math
from types import SimpleNamespace

import pytest
from main_run import make_tiny_decision, write_attested
from tiny_study import copy_records

from forerun._launcher.main_run import metrics_file
from forerun._launcher.main_run.frozen.launch_file import attest
from forerun._launcher.report.dashboards.main_run import interpolate_band
from forerun._launcher.report.dashboards.run_record import compute_study_id, flatten_json
from forerun._launcher.report.dashboards.runs import list_main_runs, list_proxy_runs
from forerun._proxies.core import canon
from forerun._sweeps.store.curves import load_curve


@pytest.fixture(scope="module")
def runs(study, ledger):
    """Records of the proxy runs of a finished study."""
    return list_proxy_runs(study, ledger)


# ---- Proxy runs ----


def test_every_outcome_is_one_run_with_its_settings(runs, study, ledger):
    results = ledger.get_results()
    assert len(runs) == len({run.run_id for run in runs}) == len(results) > 50
    specs = {run.spec.id: run.spec for run in ledger.read_runs()}
    assert sum(result.status == "diverged" for result in results.values()) < len(results) / 10
    for run in runs:
        config, summary = run.config, run.summary
        spec, result = specs[config["run_id"]], results[config["run_id"]]
        assert config["width"] == spec.shape.width
        assert config["learning_rate"] == spec.hparams.learning_rate
        assert config["arm"] == spec.parametrization.name
        assert config["study"] == compute_study_id(study.question)
        diverged = result.status == "diverged"
        assert summary.get("validation_loss_nats") == result.loss_nats
        assert diverged or summary["objective_nats"] == result.loss_nats
        assert summary["status"] == ("diverged" if diverged else "finished")
        assert (summary["diverged"], summary["flops"]) == (diverged, result.flops)
        assert canon.to_canonical_json([config, summary]), "values are finite JSON"


def test_runs_are_grouped_by_the_first_stage_that_needs_them(runs, study, ledger):
    groups = {}
    for run in runs:
        folder, _, stage = run.group.rpartition(" ")
        assert folder == study.study_dir.resolve().name, "a group belongs to one study"
        assert f" lr {run.config['learning_rate']:.4g} " in run.name
        groups.setdefault((stage, run.job_type), []).append(run)
    assert set(groups) >= {
        ("search", "trial"),
        ("transfer", "valley"),  # an older name of a loss basin
        ("transfer", "control"),
        ("ladder", "rung"),
    }
    assert len(groups["search", "trial"]) == 4
    assert {run.config["arm"] for run in groups["transfer", "control"]} == {"sp"}
    assert "other" not in {stage for stage, _ in groups}


def test_rows_are_the_curve_and_the_last_has_the_validation_loss(runs, study, ledger):
    for run in runs[:3]:
        result, rows = ledger.get_results()[run.config["run_id"]], list(run.rows())
        curve = load_curve(study.study_dir, result)
        assert tuple(row["train_loss_nats"] for row in rows) == curve.train_loss_nats
        assert tuple(row["grad_norm"] for row in rows) == curve.grad_norm
        assert [row["tokens"] for row in rows] == [64 * step for step in curve.steps]
        validation_losses = [row.get("validation_loss_nats") for row in rows]
        assert validation_losses == [None] * (len(rows) - 1) + [result.loss_nats]


REASONS = {"diverged": "the loss left the range", "failed": "out of memory"}
"""Planted reasons by status."""


def test_diverged_and_failed_runs_have_no_validation_loss(tmp_path, finished_study_dir, runs):
    """Change two results of the study: the first run diverges, the second fails."""
    statuses = {runs[0].config["run_id"]: "diverged", runs[1].config["run_id"]: "failed"}

    def edit(record):
        if record.key not in statuses or record.kind != "result":
            return record.body
        status = statuses[record.key]
        body = json.loads(json.dumps(record.body))
        body["result"] |= {"status": status, "loss_nats": None, "reason": REASONS[status]}
        return body

    study, ledger = copy_records(
        finished_study_dir / "study", tmp_path / "study", lambda record: True, edit
    )
    records = list_proxy_runs(study, ledger)
    diverged, failed = (
        next(record for record in records if record.config["run_id"] == run_id)
        for run_id in statuses
    )
    assert diverged.summary["diverged"] is True
    # The search counts a diverged run as 1 nat above a uniform guess over the vocabulary.
    penalty_nats = math.log(256) + 1
    assert diverged.summary["objective_nats"] == pytest.approx(penalty_nats)
    assert failed.summary["diverged"] is False and "objective_nats" not in failed.summary
    for record in (diverged, failed):
        assert "validation_loss_nats" not in record.summary
        assert all("validation_loss_nats" not in row for row in record.rows())
    bodies = json.dumps([record.body for record in records])
    assert "out of memory" not in bodies, "a reason is free text"


# ---- Main runs ----


GATES = [
    {"name": "transfer", "outcome": "failed", "reason": "it drifts"},
    {"name": "fit", "outcome": "cannot_tell", "reason": "two rungs"},
]
ACCEPTED = {"transfer": "Mallory said so", "fit": "a toy"}


def write_main_run(study_dir, corpus, losses):
    """Write a frozen config with accepted gates and the metrics of its main run; return both."""
    decision = make_tiny_decision(corpus)
    run_dir = write_attested(study_dir / "frozen", decision).parent / "run"
    attest(run_dir.parent, "evidence", decision.digest, {"gates": GATES, "accepted": ACCEPTED})
    run_dir.mkdir()
    for step, loss in enumerate(losses, 1):
        layers = {"layers.0": {"weight_rms": 0.02, "update_ratio": 1e-3}}
        line = {
            "step": step,
            "train_loss_nats": loss,
            "tokens_per_second": 9.0,
            "mfu": 0.4,
            "layers": layers,
        }
        metrics_file.append_line(run_dir, line)
    return decision, run_dir


def test_main_run_record_has_layers_and_outcome_but_no_free_text(tmp_path, corpus):
    losses = [3.0 + 0.01 * (step % 3) for step in range(80)]
    decision, run_dir = write_main_run(tmp_path, corpus, losses)
    metrics_file.write_ending(
        run_dir,
        metrics_file.AttemptEnd(event="finished", exit_code=0, step=80, validation_loss_nats=3.01),
    )
    study = SimpleNamespace(study_dir=tmp_path, question={"a": 1})
    (record,) = list_main_runs(study)
    rows = [row for row in record.rows() if "train_loss_nats" in row]
    assert [row["train_loss_nats"] for row in rows] == losses
    assert [row["main_run/train_loss_nats"] for row in rows] == losses
    assert rows[0]["layers/layers.0/update_ratio"] == 1e-3
    assert (rows[0]["mfu"], rows[0]["take"]) == (0.4, 1)
    assert record.run_id == decision.digest[:16] and record.config["digest"] == decision.digest
    ending = {"ended": "finished", "num_steps_done": 80, "validation_loss_nats": 3.01}
    assert record.summary == ending | {"accepted_failures": ["transfer"]}
    assert record.name == f"run {decision.digest[:8]}, accepted failure: transfer"
    assert "Mallory" not in json.dumps(record.body), "the reason of an acceptance is not logged"

    # A further step changes the content.
    metrics_file.append_line(run_dir, {"step": 81, "train_loss_nats": 3.0})
    (longer_record,) = list_main_runs(study)
    assert longer_record.content != record.content


def test_band_is_interpolated_over_the_logarithm_of_the_step():
    points = [(10, 4.0, 3.5, 4.5), (40, 3.0, 2.0, 3.2)]
    curve = [
        SimpleNamespace(step=step, loss_nats=loss, low_nats=low, high_nats=high)
        for step, loss, low, high in points
    ]
    assert interpolate_band(curve, 20) == {
        "expected_loss_nats": 3.5,
        "expected_low_nats": 2.75,
        "expected_high_nats": pytest.approx(3.85),
    }
    assert interpolate_band(curve, 10)["expected_loss_nats"] == 4.0
    assert interpolate_band(curve, 40)["expected_high_nats"] == 3.2
    assert interpolate_band(curve, 9) == interpolate_band(curve, 41) == {}
    assert interpolate_band([], 5) == {}


# ---- The run of the study itself ----


def test_json_is_flattened_and_estimates_get_low_and_high():
    estimate = {"value": 0.5, "interval": [0.25, 0.75]}
    nested = {
        "a": estimate,
        "b": {"value": 1, "interval": None},
        "c": [{"d": True}, None],
        "e": ["x", "y"],
        "f": [],
    }
    assert flatten_json(nested) == {
        "a": 0.5,
        "a/low": 0.25,
        "a/high": 0.75,
        "b": 1,
        "b/low": None,
        "b/high": None,
        "c/0/d": True,
        "c/1": None,
        "e": "x, y",
    }
