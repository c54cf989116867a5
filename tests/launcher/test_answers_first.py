"""The first line of what people read is the answer; `--full` has the rest, `--json` all of it as before."""

import copy
import re

import pytest
from example_report import finished_body
from tiny_study import ask, forerun, set_gates

from launcher.answers.main_run_estimate import time_text
from launcher.answers.outcome import closing_text, decide_line, gate_lines, outcome_line
from launcher.study.gates import Gate

SEEDS = {"gates": ["transfer", "ladder_tuned"], "sets": ["transfer.num_seeds=6"], "num_runs": 24, "flops": 1e12,
         "seconds": 240.0, "usd": None, "times_spent": 1.9}  # fmt: skip
SPEND = SEEDS | {"gates": ["transfer"], "sets": [], "usd": 3.5}
CLOSED = [{"name": name, "outcome": "cannot_tell", "reason": f"why {name}"} for name in ("transfer", "ladder_tuned")]


@pytest.fixture
def body():
    found = finished_body()
    found["choice"]["shape"] = found["decision"]["shape"]
    return found


def test_a_study_says_first_whether_to_launch(body, tmp_path):
    assert outcome_line(body, None).startswith("ready to launch: learning rate ")
    body["gates"] = [gate for gate in body["gates"] if gate["name"] != "transfer"] + CLOSED
    before = copy.deepcopy(body)
    text = closing_text(body, SEEDS, tmp_path)
    assert text.splitlines()[0].startswith("cannot tell") and text.splitlines()[1].startswith("to decide: forerun run ")
    assert len(text.splitlines()) <= 38  # `run` adds the report and the next command
    assert body == before
    body["gates"][0]["outcome"] = "failed"
    assert outcome_line(body, None).startswith("do not launch: gate coordinates ")
    body |= {"choice": None, "gates": []}
    assert re.match(r"not decided yet: .*transfer \d+ of \d+", outcome_line(body, None))


def test_gates_that_lack_the_same_runs_are_one_line(body):
    body["gates"] = CLOSED
    (line,) = gate_lines(body, SEEDS)
    assert "transfer" in line and "ladder_tuned" in line and "why" not in line
    assert len(gate_lines(body, None)) == 2, "without runs that decide both, each has its own reason"
    assert "why transfer" in gate_lines(body, None)[0]
    body["accepted"] = {"transfer": "we know"}
    assert sum("we know" in line for line in gate_lines(body, SEEDS | {"gates": ["ladder_tuned"]})) == 1


def test_what_would_decide_is_one_command_with_its_time_and_price(tmp_path):
    line = decide_line(SEEDS, tmp_path)
    assert line.count("\n") == 0 and "--fork" in line and "--set transfer.num_seeds=6" in line
    assert "+24 runs" in line and "4 min" in line and "USD" not in line
    assert "times what the study has spent" not in line
    assert "4.7 times what the study has spent" in decide_line(SEEDS | {"times_spent": 4.7}, tmp_path)
    assert " --spend " in decide_line(SPEND, tmp_path) and "USD 3.5" in decide_line(SPEND, tmp_path)
    assert decide_line(None, tmp_path) == ""


def test_a_command_that_leaves_a_gate_undecided_names_what_it_decides(tmp_path):
    closed = [Gate(name=name, outcome="cannot_tell", reason="") for name in SEEDS["gates"]]
    assert decide_line(SEEDS, tmp_path, closed).startswith("to decide: ")
    line = decide_line(SEEDS, tmp_path, [*closed, {"name": "fit", "outcome": "cannot_tell"}])
    assert line.startswith(f"to decide {' and '.join(SEEDS['gates'])} alone: forerun run ")


def test_an_estimate_for_a_laptop_is_short_and_names_no_gpu(finished):
    code, text, _ = forerun("estimate", finished / "plan.toml")
    assert code == 0 and text.startswith("about ") and len(text.splitlines()) <= 20
    assert "H100" not in text and "USD" not in text
    assert text.startswith(time_text(ask("estimate", finished / "plan.toml")[1]["wall_hours"]))
    assert "H100" in forerun("estimate", finished / "plan.toml", "--gpu", "H100")[1]
    full = forerun("estimate", finished / "plan.toml", "--full")[1]
    assert full.splitlines()[0] == text.splitlines()[0] and "memory of a rank" in full
    assert ask("estimate", finished / "plan.toml") == ask("estimate", finished / "plan.toml", "--full")


def test_status_and_freeze_say_first_what_came_of_the_study(copied, monkeypatch):
    first = forerun("status", copied)[1].splitlines()[0]
    assert first.startswith(("ready to launch", "cannot tell", "do not launch", "not decided yet"))
    assert len(forerun("status", copied, "--full")[1]) > len(forerun("status", copied)[1])
    set_gates(monkeypatch)
    _, out, err = forerun("freeze", copied)
    assert "not frozen: gates " in (out + err) and "--accept transfer" in (out + err)


def test_a_frozen_config_is_answered_for_in_a_line(frozen_once, tmp_path):
    (frozen,) = (frozen_once / "frozen").iterdir()
    _, out, _ = forerun("verify", frozen)
    assert re.match(r"all \d+ checks hold", out) and "ok  " not in out
    assert "ok  digest " in forerun("verify", frozen, "--full")[1]
    _, out, _ = forerun("export", frozen, "--to", "native", "--out", tmp_path / "native")
    assert len(out.splitlines()) == 3 and "fields exact" in out.splitlines()[0]
    _, out, _ = forerun("explain", frozen)
    fields = forerun("explain", frozen, "--full")[1].splitlines()
    assert out.startswith("learning rate ") and len(out.splitlines()) <= 30 < len(fields)
