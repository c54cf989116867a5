"""Tests of `forerun explain plan`, which explains the keys of a plan."""

import json

from tiny_study import run_forerun

from forerun._launcher.study.plan.writing import SHOWN_KEYS


def test_explain_plan_names_every_key_once():
    code, out, _ = run_forerun("explain", "plan", "--json")
    keys = [entry["key"] for entry in json.loads(out)["keys"]]
    assert code == 0 and len(keys) == len(set(keys)) and set(keys) >= SHOWN_KEYS
    (entry,) = json.loads(run_forerun("explain", "plan", "num_trials", "--json")[1])["keys"]
    assert (entry["key"], entry["default"]) == ("search.num_trials", "24")
    seeds = json.loads(run_forerun("explain", "plan", "seed", "--json")[1])["keys"]
    assert [entry["key"] for entry in seeds] == ["search.seed", "ladder.seed", "launch.seed"]
    code, _, err = run_forerun("explain", "plan", "num_trails")
    assert (code, "search.num_trials" in err) == (2, True)


def test_explain_plan_shows_the_studys_value(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = run_forerun("explain", "learning_rate")
    assert (code, "forerun explain plan learning_rate" in err) == (2, True)
    (tmp_path / "study").mkdir(exist_ok=True)
    (tmp_path / "study" / "plan.toml").write_text("[search]\nnum_trials = 17\n")
    (entry,) = json.loads(run_forerun("explain", "plan", "num_trials", "--json")[1])["keys"]
    assert (entry["study_value"], entry["default"]) == ("17", "24")
    assert run_forerun("explain", "plan", "num_trials")[1].startswith("search.num_trials = 17 ")
    (tmp_path / "study" / "plan.toml").write_text("[search\n")
    assert run_forerun("explain", "plan", "num_trials")[0] == 0, "a broken plan does not prevent it"
