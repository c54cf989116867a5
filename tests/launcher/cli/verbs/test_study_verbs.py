"""Tests of the verbs that write a plan, run the stages of a study, and report on them.

The stages of a finished study run nothing and answer from its records. Users' scripts rely on the
JSON keys that the verbs print, so these must stay.
"""

import json

from tiny_study import run_forerun, run_json

from forerun._launcher.study.plan.file import load_plan


def test_report_writes_what_status_prints(study_copy):
    (study_copy / "report.json").unlink()
    assert run_forerun("report", study_copy)[0] == 0
    body = run_json("status", study_copy)[1]
    assert body.pop("now")["num_runs"]["finished"] > 0
    assert json.loads((study_copy / "report.json").read_text()) == body


def test_stages_of_a_finished_study_answer_from_its_records(finished_study_dir, study_copy):
    plan, study = finished_study_dir / "plan.toml", ("--study", study_copy)
    code, body = run_json("check", plan, *study)
    assert code == {"passed": 0, "failed": 3, "cannot_tell": 4}[body["outcome"]]
    assert set(body) == {"coordinates", "outcome", "reason"}
    assert set(run_json("sweep", plan, *study)[1]) == {
        "trials",
        "best",
        "best_trial",
        "sampler",
        "ranges",
        "can_be_off",
        "growth",
        "open_edges",
        "stopped",
        "replicates",
        "pruner",
        "replays",
        "ties",
    }
    code, body = run_json("transfer", plan, *study)
    assert code == {"holds": 0, "drifts": 3, "cannot_tell": 4}[body["outcome"]]
    code, body = run_json("ladder", plan, *study)
    assert (code, set(body)) == (0, {"ladder", "fit"})


def test_init_writes_a_valid_plan_and_overwrites_none(tmp_path, finished_study_dir):
    plan = tmp_path / "new" / "plan.toml"
    code, body = run_json(
        "init", "--data", finished_study_dir / "corpus", "--budget-flops", "1.5e13", "--out", plan
    )
    assert (code, body["plan"], body["schema"]) == (
        0,
        str(plan),
        str(plan.with_name("plan.schema.json")),
    )
    code, body = run_json("validate", plan)
    assert (code, body["valid"], body["plan"]["target"]["budget_flops"]) == (0, True, 1.5e13)
    assert json.loads(plan.with_name("plan.schema.json").read_text())["type"] == "object"
    content = plan.read_bytes()
    proxy = load_plan(plan).proxy
    assert (proxy.num_slots, proxy.compiled, proxy.matmul_precision) == ("auto", "auto", "highest")
    assert run_json("init", "--out", plan)[0] == 2
    assert plan.read_bytes() == content


def test_init_refuses_bad_values_and_writes_good_ones(tmp_path):
    bad = tmp_path / "bad.toml"
    assert run_json("init", "--budget-flops", "nan", "--out", bad)[0] == 2
    assert run_json("init", "--set", "proxy.num_slot=4", "--out", bad)[0] == 2
    assert not bad.exists()
    pinned = tmp_path / "pinned.toml"
    changes = ("--set", "proxy.num_slots=4", "--set", "search.max_extensions=0")
    assert run_json("init", *changes, "--out", pinned)[0] == 0
    loaded = load_plan(pinned)
    assert (loaded.proxy.num_slots, loaded.proxy.compiled) == (4, "auto")
    assert loaded.search.max_extensions == 0


def test_quick_plan_shows_the_keys_that_people_change(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run_forerun("init", "--quick", "--json")
    assert (code, json.loads(out)["preset"]) == (0, "demo")
    lines = [
        line
        for line in (tmp_path / "plan.toml").read_text().splitlines()
        if " = " in line and line[0] != "#"
    ]
    assert len(lines) <= 50 and any(line.startswith("learning_rate") for line in lines)


def test_brief_status_refuses_the_option_full(study_copy):
    code, body = run_json("status", study_copy, "--brief", "--full")
    assert (code, body["message"]) == (2, "--full: only without --brief and --follow")


def test_slurm_job_refuses_options_that_it_does_not_pass_on(tmp_path):
    job = tmp_path / "job.sh"
    code, body = run_json("run", tmp_path / "plan.toml", "--sbatch", job, "--verbose")
    assert (code, body["message"]) == (2, "--verbose and --full: only without --sbatch")
    assert not job.exists()
