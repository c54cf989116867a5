"""Tests of the texts for people: the first line is the answer, and `--full` adds the details."""

import copy
import re
from dataclasses import replace

import pytest
from example_report import make_finished_body
from tiny_study import run_forerun, run_json, set_gates

from forerun._launcher.report.answers.estimate_text import format_hours
from forerun._launcher.report.answers.outcome import (
    format_gates,
    format_next_decision,
    format_outcome,
    format_study,
)
from forerun._launcher.report.views.report_model import to_report
from forerun._launcher.study.stages.gates import Gate
from forerun._launcher.study.stages.next_runs import NextRuns

MORE_SEEDS = NextRuns(
    gates=("transfer", "ladder_tuned"),
    sets=("transfer.num_seeds=6",),
    num_runs=24,
    flops=1e12,
    seconds=240.0,
    usd=None,
    times_spent=1.9,
)
SPEND_BUDGET = replace(MORE_SEEDS, gates=("transfer",), sets=(), usd=3.5)
CLOSED_GATES = [
    {"name": name, "outcome": "cannot_tell", "reason": f"why {name}"}
    for name in ("transfer", "ladder_tuned")
]


@pytest.fixture
def body():
    """JSON of a finished study's report."""
    body = make_finished_body()
    body["choice"]["shape"] = body["decision"]["shape"]
    return body


def test_study_says_first_whether_to_launch(body, tmp_path):
    assert format_outcome(to_report(body), None).startswith("ready to launch: learning rate ")
    body["gates"] = [gate for gate in body["gates"] if gate["name"] != "transfer"] + CLOSED_GATES
    before = copy.deepcopy(body)
    lines = format_study(to_report(body), MORE_SEEDS, tmp_path).splitlines()
    assert lines[0].startswith("cannot tell")
    assert lines[1].startswith("to decide: forerun run ")
    assert len(lines) <= 38, "two more lines of `run` fit on a screen of 40 lines"
    assert body == before
    # The first gate is `coordinates`.
    body["gates"][0]["outcome"] = "failed"
    assert format_outcome(to_report(body), None).startswith("do not launch: gate coordinates ")
    body |= {"choice": None, "gates": []}
    outcome = format_outcome(to_report(body), None)
    assert re.match(r"not decided yet: .*transfer \d+ of \d+", outcome)


def test_learning_rate_is_written_the_same_everywhere(body, tmp_path):
    """The verdict has the rate before rounding, and the row of values has the frozen rate.

    The text has the rate three times: in the outcome, the verdict, and the table of values.
    """
    rate = next(
        row for row in body["transfer"]["values"] if row["hyperparameter"] == "learning_rate"
    )
    rate["target_value"] = 0.01148
    body["transfer"]["together"]["transferred_value"] = 0.0114747
    text = format_study(to_report(body), None, tmp_path)
    assert text.count("0.01148") == 3 and "0.01147" not in text


def test_gates_that_need_the_same_runs_share_one_line(body):
    body["gates"] = CLOSED_GATES
    (line,) = format_gates(to_report(body), MORE_SEEDS)
    assert "transfer" in line and "ladder_tuned" in line and "why" not in line

    # Without runs that decide both gates, each line has its gate's reason.
    lines = format_gates(to_report(body), None)
    assert len(lines) == 2 and "why transfer" in lines[0]
    body["accepted"] = {"transfer": "we know"}
    lines = format_gates(to_report(body), replace(MORE_SEEDS, gates=("ladder_tuned",)))
    assert sum("we know" in line for line in lines) == 1


def test_next_decision_is_one_command_with_time_and_price(tmp_path):
    line = format_next_decision(MORE_SEEDS, tmp_path)
    assert line.count("\n") == 0 and "--fork" in line and "--set transfer.num_seeds=6" in line
    assert "+24 runs" in line and "4 min" in line and "USD" not in line
    assert "times what the study has spent" not in line
    line = format_next_decision(replace(MORE_SEEDS, times_spent=4.7), tmp_path)
    assert "4.7 times what the study has spent" in line
    line = format_next_decision(SPEND_BUDGET, tmp_path)
    assert " --spend " in line and "USD 3.5" in line
    assert format_next_decision(None, tmp_path) == ""


def test_command_that_leaves_a_gate_undecided_names_the_gates_it_decides(tmp_path):
    closed = [Gate(name=name, outcome="cannot_tell", reason="") for name in MORE_SEEDS.gates]
    assert format_next_decision(MORE_SEEDS, tmp_path, closed).startswith("to decide: ")
    fit = Gate(name="fit", outcome="cannot_tell", reason="")
    line = format_next_decision(MORE_SEEDS, tmp_path, [*closed, fit])
    assert line.startswith(f"to decide {' and '.join(MORE_SEEDS.gates)} alone: forerun run ")


def test_estimate_for_a_laptop_is_short_and_names_no_gpu(finished_study_dir):
    code, text, _ = run_forerun("estimate", finished_study_dir / "plan.toml")
    assert code == 0 and text.startswith("about ") and len(text.splitlines()) <= 20
    assert "H100" not in text and "USD" not in text
    assert text.startswith(
        format_hours(run_json("estimate", finished_study_dir / "plan.toml")[1]["wall_hours"])
    )
    assert "H100" in run_forerun("estimate", finished_study_dir / "plan.toml", "--gpu", "H100")[1]
    full = run_forerun("estimate", finished_study_dir / "plan.toml", "--full")[1]
    assert full.splitlines()[0] == text.splitlines()[0] and "memory of a rank" in full
    result = run_json("estimate", finished_study_dir / "plan.toml")
    assert result == run_json("estimate", finished_study_dir / "plan.toml", "--full"), (
        "--json has everything"
    )


def test_status_and_freeze_begin_with_the_outcome_of_the_study(study_copy, monkeypatch):
    text = run_forerun("status", study_copy)[1]
    assert text.startswith(("ready to launch", "cannot tell", "do not launch", "not decided yet"))
    assert len(run_forerun("status", study_copy, "--full")[1]) > len(text)
    set_gates(monkeypatch)
    _, out, err = run_forerun("freeze", study_copy)
    assert "not frozen: gates " in (out + err) and "--accept transfer" in (out + err)


def test_verbs_of_a_frozen_config_begin_with_the_outcome(frozen_study, tmp_path):
    (frozen,) = (frozen_study / "frozen").iterdir()
    _, out, _ = run_forerun("verify", frozen)
    assert re.match(r"all \d+ checks hold", out) and "ok  " not in out
    assert "ok  digest " in run_forerun("verify", frozen, "--full")[1]
    _, out, _ = run_forerun("export", frozen, "--to", "native", "--out", tmp_path / "native")
    assert len(out.splitlines()) == 3 and "fields exact" in out.splitlines()[0]
    _, out, _ = run_forerun("explain", frozen)
    fields = run_forerun("explain", frozen, "--full")[1].splitlines()
    assert out.startswith("learning rate ") and len(out.splitlines()) <= 30 < len(fields)
