"""Tests of the verbs that read a table of runs, on tables in the forms in which people have them.

A table must be read with the right meaning of its columns, or be refused with a reason.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_study import run_json

CASES = Path(__file__).parents[5] / "shared" / "cases"
"""Folder of published tables by number, next to the checkout. Without it, their test is skipped."""
WIDTHS, OCTAVES = (256, 512, 1024), range(-9, -4)


def write_isoflops(path, *, flops_column="budget", factor=2.5):
    """Write isoFLOP runs: seven sizes N for each FLOP budget C.

    The best size is 40 C^0.4. The tokens D are C / (6N) times `factor` and times a power of N, so
    6ND differs from the budget.
    """
    lines = [f"{flops_column},params_total,tokens,loss"]
    for budget in (1e18, 3e18, 1e19, 3e19):
        best = 40 * budget**0.4
        for offset in range(-3, 4):
            n = best * 1.5**offset
            tokens = factor * (n / best) ** 0.3 * budget / (6 * n)
            loss = 2.0 + 0.02 * math.log(n / best) ** 2 - 0.01 * math.log(budget)
            lines.append(f"{budget},{n:.0f},{tokens:.0f},{loss}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("name", ["budget", "flops_budget"])
def test_budget_column_gives_the_flops_of_its_runs(tmp_path, name):
    path, fit = write_isoflops(tmp_path / "runs.csv", flops_column=name), tmp_path / "fit.json"
    code, body = run_json("fit", path, "--form", "isoflop", "--bootstrap", "0", "--out", fit)
    assert (code, body["flops_from"]) == (0, "budget")
    assert [budget["flops"] for budget in body["budgets"]] == pytest.approx(
        [1e18, 3e18, 1e19, 3e19]
    )
    (warning,) = [warning for warning in body["warnings"] if "6 * N * D is" in warning]
    # The factor is 2.5 (n / best)^0.3, and n / best is from 1.5^-3 to 1.5^3.
    assert "1.7 to 3.6 times" in warning
    assert not any("add a column" in warning for warning in body["warnings"])
    forecast = run_json("predict", fit, "--flops", "1e19")[1]
    assert forecast["params"] == pytest.approx(40 * 1e19**0.4, rel=0.02)

    # The user may ask for 6ND instead, but for no column that is absent or does not apply.
    body = run_json("fit", path, "--form", "isoflop", "--bootstrap", "0", "--compute-from", "6nd")[
        1
    ]
    assert body["flops_from"] == "6ND" and body["budgets"][0]["flops"] > 2e18
    assert run_json("fit", path, "--form", "isoflop", "--compute-from", "flops")[0] == 2
    assert run_json("fit", path, "--compute-from", "budget")[0] == 2


def test_budget_column_with_labels_is_not_taken_for_flops(tmp_path):
    path = write_isoflops(tmp_path / "runs.csv", factor=1.0)
    head, *rows = path.read_text().splitlines()
    labelled = []
    for row in rows:
        budget, _, cells = row.partition(",")
        labelled.append(f"{float(budget) / 1e18:g},{cells}")
    path.write_text("\n".join([head, *labelled]) + "\n")
    body = run_json("fit", path, "--form", "isoflop", "--bootstrap", "0")[1]
    assert body["flops_from"] == "6ND"
    assert any("too far to be FLOPs" in warning for warning in body["warnings"])


@pytest.mark.skipif(not CASES.is_dir(), reason="the published cases are not in the checkout")
def test_published_isoflop_tables_are_fitted(tmp_path):
    table, fit = CASES / "20" / "renamed2.csv", tmp_path / "fit.json"
    options = ("--form", "isoflop", "--params-column", "params_total")
    body = run_json("fit", table, *options, "--out", fit)[1]
    assert any("2.1 to 2.8 times column 'budget'" in warning for warning in body["warnings"])
    assert run_json("predict", fit, "--flops", "1e19")[1]["params"] == pytest.approx(
        5.26e8, rel=0.005
    )
    table = CASES / "20" / "results.csv"
    assert run_json("fit", table, "--form", "isoflop", "--column", "loss=val_bpb")[0] == 0
    table = CASES / "24" / "runs.csv"
    warnings = run_json("fit", table, "--form", "isoflop", "--column", "loss=cd_val_loss")[1][
        "warnings"
    ]
    assert any("'parameter_count', not 'params_planned'" in warning for warning in warnings)


def write_ladder(path, head="params,tokens,loss"):
    """Write twelve runs that follow a Chinchilla law with 0.2 % noise, under these columns."""
    rng = np.random.default_rng(0)
    rows = [
        f"{n},{d},{(1.7 + 480 * n**-0.35 + 2100 * d**-0.37) * math.exp(rng.normal(0, 0.002))}"
        for n in (3e6, 1e7, 3e7, 1e8)
        for d in (3e8, 1e9, 3e9)
    ]
    path.write_text("\n".join([head, *rows]) + "\n")
    return path


def test_column_may_be_named_and_a_missing_one_lists_the_aliases(tmp_path):
    with_aliases = write_ladder(tmp_path / "a.csv", "num_params,num_tokens,val_loss")
    parameters = run_json("fit", with_aliases, "--bootstrap", "0")[1]["parameters"]
    unnamed = write_ladder(tmp_path / "b.csv", "size,toks,bpb")
    code, body = run_json("fit", unnamed, "--bootstrap", "0")
    assert code == 2
    assert "num_params" in body["message"] and "--column params=NAME" in body["message"]
    columns = ("--column", "params=size", "--column", "tokens=toks", "--column", "loss=bpb")
    assert run_json("fit", unnamed, "--bootstrap", "0", *columns)[1]["parameters"] == parameters
    for wrong in ("loss", "loss=none", "bogus=size"):
        assert run_json("fit", unnamed, *columns[:4], "--column", wrong)[0] == 2


def test_json_lists_every_bad_cell_and_the_message_three(tmp_path):
    path = write_ladder(tmp_path / "runs.csv")
    path.write_text(path.read_text() + "x,1e7,3\n" * 9)
    code, body = run_json("fit", path)
    assert (code, len(body["problems"])) == (2, 9)
    assert body["message"].count("column 'params'") == 3 and "9 bad cells" in body["message"]


def test_table_with_too_many_runs_is_refused_with_the_limit(tmp_path, monkeypatch):
    from forerun._launcher.report.answers import law_fits

    monkeypatch.setattr(law_fits, "MAX_RUNS", 11)
    code, body = run_json("fit", write_ladder(tmp_path / "runs.csv"), "--bootstrap", "0")
    assert code == 2 and "12 runs" in body["message"] and "at most 11" in body["message"]


def format_table(head, rows):
    """Return the rows as CSV text."""
    return "\n".join([head, *rows]) + "\n"


def generate_sweep():
    """Yield width, rate, seed, and loss of runs whose best rate is 2^-7 at every width."""
    rng = np.random.default_rng(1)
    for width in WIDTHS:
        for octave in OCTAVES:
            for seed in (0, 1):
                noise = rng.normal(0, 0.002)
                loss = 3.5 - width / 2048 + 0.03 * (octave + 7) ** 2 + noise
                yield width, 2.0**octave, seed, loss


@pytest.mark.parametrize(
    ("head", "row"),
    [
        ("config/lr,config/width,config/seed,loss", "{lr},{width},{seed},{loss}"),
        (
            "number,value,params_lr,params_n_embd,params_seed,state",
            "0,{loss},{lr},{width},{seed},COMPLETE",
        ),
        ("State,optimizer.lr,model.n_embd,seed,val/loss", "finished,{lr},{width},{seed},{loss}"),
    ],
)
def test_sweep_exports_of_other_tools_are_judged(tmp_path, head, row):
    rows = [
        row.format(width=width, lr=lr, seed=seed, loss=loss)
        for width, lr, seed, loss in generate_sweep()
    ]
    (tmp_path / "sweep.csv").write_text(format_table(head, rows))
    code, body = run_json("transfer", "--runs", tmp_path / "sweep.csv")
    assert (code, body["outcome"], body["dropped"]) == (0, "holds", [])
    assert [round(optimum["log2_value"], 1) for optimum in body["optima"]] == [-7.0, -7.0, -7.0]


def test_unfinished_runs_are_dropped_and_not_counted_as_diverged(tmp_path):
    rows = [f"finished,{lr},{width},{seed},{loss}" for width, lr, seed, loss in generate_sweep()]
    # These are rows 6 to 8 of the file, whose first row is the head.
    rows[4:4] = [
        "crashed,0.0078125,256,5,",
        "running,0.0078125,512,5,2.9",
        "failed,0.0078125,256,6,NaN",
    ]
    (tmp_path / "sweep.csv").write_text(format_table("State,lr,width,seed,val_loss", rows))
    code, body = run_json("transfer", "--runs", tmp_path / "sweep.csv")
    assert (code, body["outcome"]) == (0, "holds")
    assert [row["row"] for row in body["dropped"]] == [6, 7, 8]
    assert sum(optimum["num_diverged"] for optimum in body["optima"]) == 0


def test_tables_of_optima_of_any_hyperparameter_are_judged(tmp_path):
    (tmp_path / "optima.csv").write_text(
        "width,wd_optimum\n128,0.1\n256,0.1\n512,0.1\n1024,0.1\n2048,0.1\n"
    )
    body = run_json("transfer", "--runs", tmp_path / "optima.csv")[1]
    assert body["hyperparameter"] == "weight_decay" and body["outcome"] in ("holds", "cannot_tell")
    (tmp_path / "optima.csv").write_text(
        "params,batch_size_optimum\n1e6,32K\n2e6,64K\n4e6,128K\n8e6,256K\n"
    )
    body = run_json("transfer", "--runs", tmp_path / "optima.csv")[1]
    assert (body["hyperparameter"], body["axis"]) == ("batch_size", "params")
    assert body["outcome"] == "drifts"
    assert body["drift_octaves_per_doubling"]["value"] == pytest.approx(1)

    # In a table of two hyperparameters, the user can choose one.
    rows = [f"{2**k},{2.0**-k},0.1\n" for k in range(7, 12)]
    (tmp_path / "optima.csv").write_text("width,lr_optimum,wd_optimum\n" + "".join(rows))
    assert run_json("transfer", "--runs", tmp_path / "optima.csv")[1]["outcome"] == "drifts"
    body = run_json(
        "transfer", "--runs", tmp_path / "optima.csv", "--hyperparameter", "weight_decay"
    )[1]
    assert body["drift_octaves_per_doubling"]["value"] == pytest.approx(0, abs=1e-9)


def test_too_many_learning_rates_are_refused_with_the_limit(tmp_path, monkeypatch):
    from forerun._transfer.tables import table

    monkeypatch.setattr(table, "MAX_VALUES", 4)
    rows = [f"{lr},{width},{seed},{loss}" for width, lr, seed, loss in generate_sweep()]
    (tmp_path / "sweep.csv").write_text(format_table("lr,width,seed,loss", rows))
    code, body = run_json("transfer", "--runs", tmp_path / "sweep.csv")
    assert code == 2 and len(body["problems"]) == 3 and "at most 4" in body["message"]


def test_table_is_read_from_standard_input(tmp_path):
    text = write_ladder(tmp_path / "runs.csv").read_text()
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
def test_named_pipe_is_refused_without_blocking(tmp_path, verb):
    os.mkfifo(tmp_path / "in.csv")
    options = {
        "fit": (tmp_path / "in.csv",),
        "predict": (tmp_path / "in.csv", "--params", "1e9", "--tokens", "1e10"),
        "allocate": (tmp_path / "in.csv", "--flops", "1e20"),
        "transfer": ("--runs", tmp_path / "in.csv"),
    }[verb]
    code, body = run_json(verb, *options)
    assert code == 2 and "it is a pipe" in body["message"]
