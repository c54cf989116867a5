"""Tables of optima, as papers publish them: planted laws are found again, and what was assumed is said."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from launcher.cli.cli import cli
from scaling_fits.compute.frontier import fit_optima, is_of_optima, read_optima
from scaling_fits.compute.optima import OptimaError, predict_at
from scaling_fits.fit_file import from_file, to_file

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "porian_refinedweb" / "published_fits.csv"
FLOPS = np.geomspace(1e18, 1e22, 9)
PARAMS = 0.1 * FLOPS**0.5
TOKENS = FLOPS / (6 * PARAMS)
LOSS = 1.8 + 900 * FLOPS**-0.16
COLUMNS = {"flops": FLOPS, "loss": LOSS, "params": PARAMS, "tokens": TOKENS}


def write(folder, *names, noise=0.0, rows=slice(None)):
    rng = np.random.default_rng(0)
    columns = [COLUMNS[name][rows] * np.exp(rng.normal(0, noise, len(FLOPS[rows]))) if name == "loss" else
               COLUMNS[name][rows] for name in names]  # fmt: skip
    lines = [",".join(names), *(",".join(repr(float(x)) for x in row) for row in zip(*columns, strict=True))]
    (folder / "optima.csv").write_text("\n".join(lines) + "\n")
    return folder / "optima.csv"


def answer(*arguments):
    got = CliRunner().invoke(cli, [*map(str, arguments), "--json"])
    assert isinstance(got.exception, SystemExit | None), got.exception
    return got.exit_code, json.loads(got.stdout)


@pytest.mark.parametrize("sizes", [("params", "tokens"), ("params",), ("tokens",), ()])
def test_planted_laws_are_found_again(tmp_path, sizes):
    path = write(tmp_path, "flops", "loss", *sizes, noise=0.001)
    optima = () if len(sizes) < 2 else ("--optima",)
    assert is_of_optima(path) == (not optima)
    code, body = answer("fit", path, "--form", "frontier", *optima, "--bootstrap", "50", "--out", tmp_path / "fit.json")
    assert (code, body["status"], body["rows"], body["num_runs"]) == (0, "converged", "optima", 9)
    said = body["warnings"][0]
    assert said.startswith("every row is taken for the best of its budget")
    assert all(("no column" in said and repr(name) in said) == (name not in sizes) for name in ("params", "tokens"))
    assert body["parameters"]["E"] == pytest.approx(1.8, abs=0.15)
    assert body["parameters"]["params_exponent"] == (pytest.approx(0.5, abs=1e-6) if sizes else None)
    code, at = answer("predict", tmp_path / "fit.json", "--flops", "1e23")
    assert code == 0
    truth = 1.8 + 900 * 1e23**-0.16
    assert at["interval"][0] < truth < at["interval"][1] and at["loss"] == pytest.approx(truth, rel=0.02)
    assert (at["params"], at["tokens"]) == (
        (pytest.approx(0.1 * 1e23**0.5), pytest.approx(1e23**0.5 / 0.6)) if sizes else (None, None)
    )  # fmt: skip


def test_a_table_of_runs_stays_one_unless_told(tmp_path):
    path = write(tmp_path, "flops", "loss", "params", "tokens")
    code, body = answer("fit", path, "--form", "frontier", "--bootstrap", "0")
    assert (code, body["rows"], body["status"]) == (4, "runs", "unidentified")
    assert "9 runs, form frontier" in CliRunner().invoke(cli, ["fit", str(path), "--form", "frontier"]).stdout
    for line in (("--optima",), ("--optima", "--form", "isoflop")):
        assert CliRunner().invoke(cli, ["fit", str(path), *line]).exit_code == 2


def test_a_budget_has_one_optimum_and_a_law_three(tmp_path):
    lines = write(tmp_path, "flops", "loss").read_text().splitlines()
    (tmp_path / "twice.csv").write_text("\n".join([*lines, lines[3]]) + "\n")
    with pytest.raises(OptimaError, match=r"rows 4 and 11 are both of budget 1e\+19"):
        read_optima(tmp_path / "twice.csv")
    found = fit_optima(read_optima(write(tmp_path, "flops", "loss", rows=slice(2))), bootstrap=0)
    assert found.status == "unidentified" and "2 optima: at least 3" in found.warnings[-1]


def test_a_fit_without_sizes_lies_in_a_file_and_comes_back(tmp_path):
    found = fit_optima(read_optima(write(tmp_path, "flops", "loss")), bootstrap=20)
    again = from_file(json.loads(json.dumps(to_file(found))))
    assert predict_at(again, 1e23) == predict_at(found, 1e23) and again.rows == "optima"


def test_published_optima_give_their_published_exponent(tmp_path):
    if not SHARED.is_file():
        pytest.skip(f"no public data at {SHARED}")
    with SHARED.open(encoding="utf-8-sig", newline="") as file:
        records = [row for row in csv.DictReader(file) if row["kind"] in ("optimum", "fit_basic")]
    keys = ("dataset", "hparams", "warmup", "decay", "param_count", "val")
    groups = {}
    for row in records:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    compared = 0
    for rows in groups.values():
        optima = [row for row in rows if row["kind"] == "optimum" and row["n"] and row["loss"]]
        published = [float(row["n_exponent"]) for row in rows if row["n_exponent"]]
        if len(optima) < 4 or not published:
            continue
        (tmp_path / "published.csv").write_text("flops,loss,params\n" + "".join(
            f"{row['flops']},{row['loss']},{row['n']}\n" for row in optima))  # fmt: skip
        found = fit_optima(read_optima(tmp_path / "published.csv"), bootstrap=0)
        assert found.params_law.exponents[0] == pytest.approx(published[0], abs=0.05)
        compared += 1
    assert compared
