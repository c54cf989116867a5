"""Verbs that read a table: tables that people post are read, or refused with advice."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_study import ask

CASES = Path(__file__).parents[3] / "shared" / "cases"
WIDTHS, OCTAVES = (256, 512, 1024), range(-9, -4)


def _isoflops(path, *, flops_column="budget", factor=2.5):
    """Write isoFLOP runs with N* = 40 C^0.4, whose tokens are C / (6 N) times a power of N, so that 6ND is not C."""
    lines = [f"{flops_column},params_total,tokens,loss"]
    for budget in (1e18, 3e18, 1e19, 3e19):
        best = 40 * budget**0.4
        for step in range(-3, 4):
            n = best * 1.5**step
            tokens = factor * (n / best) ** 0.3 * budget / (6 * n)
            lines.append(
                f"{budget},{n:.0f},{tokens:.0f},{2.0 + 0.02 * math.log(n / best) ** 2 - 0.01 * math.log(budget)}"
            )
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("name", ["budget", "flops_budget"])
def test_a_budget_is_the_flops_of_its_runs(tmp_path, name):
    path, fit = _isoflops(tmp_path / "runs.csv", flops_column=name), tmp_path / "fit.json"
    code, body = ask("fit", path, "--form", "isoflop", "--bootstrap", "0", "--out", fit)
    assert (code, body["flops_from"]) == (0, "budget")
    assert [budget["flops"] for budget in body["budgets"]] == pytest.approx([1e18, 3e18, 1e19, 3e19])
    note = next(warning for warning in body["warnings"] if "6 * N * D is" in warning)
    assert "1.7 to 3.6 times" in note and not any("add a column" in warning for warning in body["warnings"])
    assert ask("predict", fit, "--flops", "1e19")[1]["params"] == pytest.approx(40 * 1e19**0.4, rel=0.02)
    body = ask("fit", path, "--form", "isoflop", "--bootstrap", "0", "--compute-from", "6nd")[1]
    assert body["flops_from"] == "6ND" and body["budgets"][0]["flops"] > 2e18
    assert ask("fit", path, "--form", "isoflop", "--compute-from", "flops")[0] == 2
    assert ask("fit", path, "--compute-from", "budget")[0] == 2


def test_a_budget_that_is_a_label_is_not_taken_for_flops(tmp_path):
    path = _isoflops(tmp_path / "runs.csv", factor=1.0)
    path.write_text(re.sub(r"(?m)^[13]\.?0?e\+?1[89],", lambda m: f"{float(m[0][:-1]) / 1e18:g},", path.read_text()))
    body = ask("fit", path, "--form", "isoflop", "--bootstrap", "0")[1]
    assert body["flops_from"] == "6ND" and any("too far to be FLOPs" in warning for warning in body["warnings"])


@pytest.mark.skipif(not CASES.is_dir(), reason="no cases beside the checkout")
def test_the_posted_isoflop_table(tmp_path):
    table, fit = CASES / "20" / "renamed2.csv", tmp_path / "fit.json"
    options = ("--form", "isoflop", "--params-column", "params_total")
    body = ask("fit", table, *options, "--out", fit)[1]
    assert any("2.1 to 2.8 times column 'budget'" in warning for warning in body["warnings"])
    assert ask("predict", fit, "--flops", "1e19")[1]["params"] == pytest.approx(5.26e8, rel=0.005)
    assert ask("fit", CASES / "20" / "results.csv", "--form", "isoflop", "--column", "loss=val_bpb")[0] == 0
    posted = ask("fit", CASES / "24" / "runs.csv", "--form", "isoflop", "--column", "loss=cd_val_loss")[1]
    assert any("'parameter_count', not 'params_planned'" in warning for warning in posted["warnings"])


def _ladder(path, head="params,tokens,loss"):
    rng = np.random.default_rng(0)
    rows = [
        f"{n},{d},{(1.7 + 480 * n**-0.35 + 2100 * d**-0.37) * math.exp(rng.normal(0, 0.002))}"
        for n in (3e6, 1e7, 3e7, 1e8)
        for d in (3e8, 1e9, 3e9)
    ]
    path.write_text("\n".join([head, *rows]) + "\n")
    return path


def test_a_column_may_be_named_and_a_missing_one_lists_the_names(tmp_path):
    aliases = ask("fit", _ladder(tmp_path / "a.csv", "num_params,num_tokens,val_loss"), "--bootstrap", "0")[1]
    named = _ladder(tmp_path / "b.csv", "size,toks,bpb")
    code, body = ask("fit", named, "--bootstrap", "0")
    assert code == 2 and "num_params" in body["message"] and "--column params=NAME" in body["message"]
    columns = ("--column", "params=size", "--column", "tokens=toks", "--column", "loss=bpb")
    assert ask("fit", named, "--bootstrap", "0", *columns)[1]["parameters"] == aliases["parameters"]
    for wrong in ("loss", "loss=none", "bogus=size"):
        assert ask("fit", named, *columns[:4], "--column", wrong)[0] == 2


def test_json_has_every_bad_cell_and_text_three(tmp_path):
    path = _ladder(tmp_path / "runs.csv")
    path.write_text(path.read_text() + "x,1e7,3\n" * 9)
    code, body = ask("fit", path)
    assert (code, len(body["problems"])) == (2, 9)
    assert body["message"].count("column 'params'") == 3 and "9 bad cells" in body["message"]


def test_a_table_with_too_many_runs_is_refused_with_the_limit(tmp_path, monkeypatch):
    from launcher.answers import law_fits

    monkeypatch.setattr(law_fits, "MAX_RUNS", 11)
    code, body = ask("fit", _ladder(tmp_path / "runs.csv"), "--bootstrap", "0")
    assert code == 2 and "12 runs" in body["message"] and "at most 11" in body["message"]


def _sweep(head, rows):
    return "\n".join([head, *rows]) + "\n"


def _losses():
    rng = np.random.default_rng(1)
    for width in WIDTHS:
        for octave in OCTAVES:
            for seed in (0, 1):
                yield width, 2.0**octave, seed, 3.5 - width / 2048 + 0.03 * (octave + 7) ** 2 + rng.normal(0, 0.002)


@pytest.mark.parametrize(
    ("head", "row"),
    [
        ("config/lr,config/width,config/seed,loss", "{lr},{width},{seed},{loss}"),
        ("number,value,params_lr,params_n_embd,params_seed,state", "0,{loss},{lr},{width},{seed},COMPLETE"),
        ("State,optimizer.lr,model.n_embd,seed,val/loss", "finished,{lr},{width},{seed},{loss}"),
    ],
)
def test_exports_of_sweeps_are_judged(tmp_path, head, row):
    rows = [row.format(width=width, lr=lr, seed=seed, loss=loss) for width, lr, seed, loss in _losses()]
    (tmp_path / "sweep.csv").write_text(_sweep(head, rows))
    code, body = ask("transfer", "--runs", tmp_path / "sweep.csv")
    assert (code, body["outcome"], body["dropped"]) == (0, "holds", [])
    assert [round(optimum["log2_value"], 1) for optimum in body["optima"]] == [-7.0, -7.0, -7.0]


def test_runs_that_did_not_finish_are_dropped_and_never_diverged(tmp_path):
    rows = [f"finished,{lr},{width},{seed},{loss}" for width, lr, seed, loss in _losses()]
    rows[4:4] = ["crashed,0.0078125,256,5,", "running,0.0078125,512,5,2.9", "failed,0.0078125,256,6,NaN"]
    (tmp_path / "sweep.csv").write_text(_sweep("State,lr,width,seed,val_loss", rows))
    code, body = ask("transfer", "--runs", tmp_path / "sweep.csv")
    assert (code, body["outcome"]) == (0, "holds")
    assert [row["row"] for row in body["dropped"]] == [6, 7, 8]
    assert sum(optimum["num_diverged"] for optimum in body["optima"]) == 0


def test_published_optima_of_any_hyperparameter_are_judged(tmp_path):
    (tmp_path / "optima.csv").write_text("width,wd_optimum\n128,0.1\n256,0.1\n512,0.1\n1024,0.1\n2048,0.1\n")
    body = ask("transfer", "--runs", tmp_path / "optima.csv")[1]
    assert body["hyperparameter"] == "weight_decay" and body["outcome"] in ("holds", "cannot_tell")
    (tmp_path / "optima.csv").write_text("params,batch_size_optimum\n1e6,32K\n2e6,64K\n4e6,128K\n8e6,256K\n")
    body = ask("transfer", "--runs", tmp_path / "optima.csv")[1]
    assert (body["hyperparameter"], body["axis"], body["outcome"]) == ("batch_size", "params", "drifts")
    assert body["drift_octaves_per_doubling"]["value"] == pytest.approx(1)
    both = "width,lr_optimum,wd_optimum\n" + "".join(f"{2**k},{2.0**-k},0.1\n" for k in range(7, 12))
    (tmp_path / "optima.csv").write_text(both)
    assert ask("transfer", "--runs", tmp_path / "optima.csv")[1]["outcome"] == "drifts"
    body = ask("transfer", "--runs", tmp_path / "optima.csv", "--hyperparameter", "weight_decay")[1]
    assert body["drift_octaves_per_doubling"]["value"] == pytest.approx(0, abs=1e-9)


def test_too_many_learning_rates_are_refused_with_the_limit(tmp_path, monkeypatch):
    from transfer.tables import table

    monkeypatch.setattr(table, "MAX_VALUES", 4)
    rows = [f"{lr},{width},{seed},{loss}" for width, lr, seed, loss in _losses()]
    (tmp_path / "sweep.csv").write_text(_sweep("lr,width,seed,loss", rows))
    code, body = ask("transfer", "--runs", tmp_path / "sweep.csv")
    assert code == 2 and len(body["problems"]) == 3 and "at most 4" in body["message"]


def test_a_table_from_standard_input(tmp_path):
    text = _ladder(tmp_path / "runs.csv").read_text()
    done = subprocess.run(
        [sys.executable, "-m", "forerun", "fit", "-", "--bootstrap", "0", "--json"],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_runs"] == 12


@pytest.mark.parametrize("verb", ["fit", "predict", "allocate", "transfer"])
def test_a_pipe_with_a_name_is_refused_and_never_waited_for(tmp_path, verb):
    os.mkfifo(tmp_path / "in.csv")
    options = {
        "fit": (tmp_path / "in.csv",),
        "predict": (tmp_path / "in.csv", "--params", "1e9", "--tokens", "1e10"),
        "allocate": (tmp_path / "in.csv", "--flops", "1e20"),
        "transfer": ("--runs", tmp_path / "in.csv"),
    }[verb]
    code, body = ask(verb, *options)
    assert code == 2 and "it is a pipe" in body["message"]
