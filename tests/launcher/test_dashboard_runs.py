"""A study's runs as they are told: every outcome once, numbers from ledger and curve alone, nothing
made up.
"""

import json
import math
from types import SimpleNamespace

import pytest
from main_run import tiny_decision, write_attested
from tiny_study import replay

from launcher.base import metrics
from launcher.dashboards.main_run import band_at
from launcher.dashboards.records import flat, study_id
from launcher.dashboards.runs import main_runs, proxy_runs
from launcher.frozen.launch_file import attest
from proxies.core import canon
from sweeps.store.curves import load_curve


@pytest.fixture(scope="module")
def runs(study, ledger):
    return proxy_runs(study, ledger)


# Proxies


def test_every_outcome_is_one_run_with_its_settings(runs, study, ledger):
    results = ledger.results()
    assert len(runs) == len({one.run_id for one in runs}) == len(results) > 50
    specs = {run.spec.id: run.spec for run in ledger.runs()}
    assert sum(result.status == "diverged" for result in results.values()) < len(results) / 10
    for one in runs:
        config, summary = one.config, one.summary
        spec, result = specs[config["run_id"]], results[config["run_id"]]
        assert (config["width"], config["learning_rate"]) == (
            spec.shape.width,
            spec.hparams.learning_rate,
        )
        assert config["arm"] == spec.parametrization.name and config["study"] == study_id(
            study.question
        )
        diverged = result.status == "diverged"
        assert summary.get("validation_loss_nats") == result.loss_nats
        assert diverged or summary["objective_nats"] == result.loss_nats
        assert (summary["status"], summary["diverged"], summary["flops"]) == (
            "diverged" if diverged else "finished",
            diverged,
            result.flops,
        )
        assert canon.canonical([config, summary])  # finite, plain


def test_runs_are_grouped_by_the_stage_that_asked_first(runs, study, ledger):
    groups = {}
    for one in runs:
        folder, _, stage = one.group.rpartition(" ")
        assert folder == study.study_dir.resolve().name, "studies of one project are apart"
        assert f" lr {one.config['learning_rate']:.4g} " in one.name
        groups.setdefault((stage, one.job_type), []).append(one)
    assert set(groups) >= {
        ("search", "trial"),
        ("transfer", "valley"),
        ("transfer", "control"),
        ("ladder", "rung"),
    }
    assert len(groups["search", "trial"]) == 4
    assert {one.config["arm"] for one in groups["transfer", "control"]} == {"sp"}
    assert "other" not in {group for group, _ in groups}


def test_rows_are_the_curve_and_the_end_has_the_validation_loss(runs, study, ledger):
    for one in runs[:3]:
        result, rows = ledger.results()[one.config["run_id"]], list(one.rows())
        curve = load_curve(study.study_dir, result)
        assert tuple(row["train_loss_nats"] for row in rows) == curve.train_loss_nats
        assert tuple(row["grad_norm"] for row in rows) == curve.grad_norm
        assert [row["tokens"] for row in rows] == [64 * step for step in curve.steps]
        assert [row.get("validation_loss_nats") for row in rows] == [None] * (len(rows) - 1) + [
            result.loss_nats
        ]


ENDS = {"diverged": "the loss left the range", "failed": "out of memory"}


def test_runs_that_did_not_finish_say_so(tmp_path, finished, runs):
    """One diverged, one failed; the rest of the study is as it was."""
    ended = dict(zip((runs[0].config["run_id"], runs[1].config["run_id"]), ENDS, strict=True))

    def edit(record):
        if record.key not in ended or record.kind != "result":
            return record.body
        status = ended[record.key]
        body = json.loads(json.dumps(record.body))
        body["result"] |= {"status": status, "loss_nats": None, "reason": ENDS[status]}
        return body

    found = proxy_runs(*replay(finished / "study", tmp_path / "study", lambda record: True, edit))
    lost = {one.summary["status"]: one for one in found if one.config["run_id"] in ended}
    diverged, failed = (lost[status].summary for status in ENDS)
    assert diverged["diverged"] is True and diverged["objective_nats"] == pytest.approx(
        math.log(256) + 1
    )
    assert failed["diverged"] is False and "objective_nats" not in failed
    assert all("validation_loss_nats" not in one.summary for one in lost.values())
    assert all("validation_loss_nats" not in row for one in lost.values() for row in one.rows())
    assert "out of memory" not in json.dumps([one.body for one in found])


# Main runs


GATES = [
    {"name": "transfer", "outcome": "failed", "reason": "it drifts"},
    {"name": "fit", "outcome": "cannot_tell", "reason": "two rungs"},
]
ACCEPTED = {"transfer": "Mallory said so", "fit": "a toy"}


def write_main_run(study_dir, corpus, losses):
    decision = tiny_decision(corpus)
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
        metrics.append(run_dir, line)
    return decision, run_dir


def test_a_main_run_has_its_layers_and_its_band(tmp_path, corpus):
    losses = [3.0 + 0.01 * (step % 3) for step in range(80)]
    decision, run_dir = write_main_run(tmp_path, corpus, losses)
    metrics.write_ending(
        run_dir,
        metrics.AttemptEnd(event="finished", exit_code=0, step=80, validation_loss_nats=3.01),
    )
    (one,) = main_runs(SimpleNamespace(study_dir=tmp_path, question={"a": 1}))
    rows = [row for row in one.rows() if "train_loss_nats" in row]
    assert [row["train_loss_nats"] for row in rows] == losses
    assert [row["main_run/train_loss_nats"] for row in rows] == losses
    assert (rows[0]["layers/layers.0/update_ratio"], rows[0]["mfu"], rows[0]["take"]) == (
        1e-3,
        0.4,
        1,
    )
    assert one.run_id == decision.digest[:16] and one.config["digest"] == decision.digest
    ending = {"ended": "finished", "num_steps_done": 80, "validation_loss_nats": 3.01}
    assert one.summary == ending | {"accepted_failures": ["transfer"]}
    assert one.name == f"run {decision.digest[:8]}, accepted failure: transfer"
    assert "Mallory" not in json.dumps(one.body), "what a person wrote stays here"
    metrics.append(run_dir, {"step": 81, "train_loss_nats": 3.0})
    assert (
        main_runs(SimpleNamespace(study_dir=tmp_path, question={"a": 1}))[0].content != one.content
    )


def test_the_band_is_straight_over_the_logarithm_of_the_step():
    points = [(10, 4.0, 3.5, 4.5), (40, 3.0, 2.0, 3.2)]
    curve = [SimpleNamespace(step=s, loss_nats=m, low_nats=a, high_nats=b) for s, m, a, b in points]
    assert band_at(curve, 20) == {
        "expected_loss_nats": 3.5,
        "expected_low_nats": 2.75,
        "expected_high_nats": pytest.approx(3.85),
    }
    assert (
        band_at(curve, 10)["expected_loss_nats"] == 4.0
        and band_at(curve, 40)["expected_high_nats"] == 3.2
    )
    assert band_at(curve, 9) == band_at(curve, 41) == band_at([], 5) == {}


# The study's own run


def test_every_leaf_has_a_flat_name_and_an_estimate_its_own():
    estimate = {"value": 0.5, "interval": [0.25, 0.75]}
    told = {
        "a": estimate,
        "b": {"value": 1, "interval": None},
        "c": [{"d": True}, None],
        "e": ["x", "y"],
        "f": [],
    }
    assert flat(told) == {
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
