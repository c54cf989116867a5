"""Tests of the Python interface: importing it is cheap, and functions answer as the commands do."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from tiny_study import run_json

import forerun

ROOT = Path(__file__).parents[2]
LIST_LOADED = """
import sys
names = set(sys.modules)
import forerun
dir(forerun)
print(*(set(sys.modules) - names))
"""
"""Program that prints the modules that `import forerun` loads."""


def compute_law_loss(params, tokens):
    """Return the loss of the planted law in nats."""
    return 1.7 + 400 * params**-0.34 + 410 * tokens**-0.28


def make_law_runs():
    """Return runs whose losses follow the planted law with noise of 0.1 %."""
    rng = np.random.default_rng(0)
    sizes = [
        (n, n * tokens_per_param) for n in (1e6, 3e6, 1e7, 3e7) for tokens_per_param in (5, 20, 80)
    ]
    loss = [compute_law_loss(n, d) * float(np.exp(rng.normal(0, 0.001))) for n, d in sizes]
    return pd.DataFrame(
        {"params": [n for n, _ in sizes], "tokens": [d for _, d in sizes], "loss": loss}
    )


def make_basin_runs():
    """Return runs at three widths, each with the optimal learning rate 2^-8, and a diverged run."""
    rng = np.random.default_rng(0)
    rows = [
        (width, 2.0**log2, 3 - width / 1024 + 0.02 * (log2 + 8) ** 2 + rng.normal(0, 1e-4), seed)
        for width in (64, 128, 256)
        for log2 in range(-11, -4)
        for seed in (0, 1)
    ]
    rows.append((64, 1.0, float("nan"), 0))
    return pd.DataFrame(rows, columns=["width", "lr", "loss", "seed"])


def test_import_loads_only_the_standard_library():
    done = subprocess.run(
        [sys.executable, "-c", LIST_LOADED], capture_output=True, text=True, check=True, cwd=ROOT
    )
    modules = done.stdout.split()
    assert [name for name in modules if name.split(".")[0] not in sys.stdlib_module_names] == [
        "forerun"
    ]


def test_every_public_name_exists_and_is_documented():
    assert set(forerun.__all__) <= set(dir(forerun))
    for name in forerun.__all__:
        assert getattr(forerun, name).__doc__, name
    with pytest.raises(AttributeError):
        forerun.no_such_name  # noqa: B018
    from forerun._launcher.report.figures import plots

    assert forerun.plots is plots


def test_functions_answer_as_the_commands_for_every_kind_of_table(tmp_path):
    frame = make_law_runs()
    options = ("--bootstrap", "20")
    frame.to_csv(tmp_path / "runs.csv", index=False)
    tables = (
        frame,
        pa.Table.from_pandas(frame),
        frame.to_dict("list"),
        {name: frame[name] for name in frame},
        frame.to_dict("records"),
        tmp_path / "runs.csv",
        str(tmp_path / "runs.csv"),
    )
    _, printed = run_json("fit", tmp_path / "runs.csv", *options, "--out", tmp_path / "fit.json")
    fits = [forerun.fit(table, bootstrap=20) for table in tables]
    for fit in fits:
        assert json.loads(json.dumps(fit.body)) == printed
    fit = fits[0]
    assert fit.status == printed["status"]
    assert fit.parameters == printed["parameters"]
    assert "runs" in repr(fit)
    fit.write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "fit.json").read_bytes()

    # Forecasts and allocations are the same from the fit and from its file.
    _, printed = run_json("predict", tmp_path / "fit.json", "--params", "1e8", "--tokens", "2e9")
    for source in (fit, tmp_path / "again.json"):
        predicted = forerun.predict(source, params=1e8, tokens=2e9)
        assert (predicted.loss_nats, list(predicted.interval)) == (
            printed["loss"],
            printed["interval"],
        )
    _, printed = run_json("allocate", tmp_path / "fit.json", "--usd", "20", "--gpu", "H100")
    for source in (fit, tmp_path / "again.json"):
        best = forerun.allocate(source, usd=20, gpu="H100")
        assert best.body == printed
        assert (best.params, best.loss_nats) == (printed["params"], printed["loss"])


def test_transfer_answers_as_the_command(tmp_path):
    frame = make_basin_runs()
    frame.to_parquet(tmp_path / "runs.parquet")
    frame.to_csv(tmp_path / "runs.csv", index=False, na_rep="NaN")
    _, printed = run_json("transfer", "--runs", tmp_path / "runs.csv", "--target-width", "512")
    for table in (frame, tmp_path / "runs.csv", frame.to_dict("records")):
        verdict = forerun.transfer(table, target_width=512)
        assert json.loads(json.dumps(verdict.body)) == printed
    low, high = verdict.interval
    assert verdict.outcome == printed["outcome"] == "holds" and low <= verdict.regret_nats <= high
    assert verdict.transferred_value == pytest.approx(2**-8, rel=0.1)


@pytest.mark.parametrize(
    ("call", "phrase"),
    [
        (lambda fit: forerun.fit(make_law_runs().rename(columns={"loss": "nats"})), "loss"),
        (lambda fit: forerun.fit({"params": [1.0], "tokens": [], "loss": [1.0]}), "length"),
        (lambda fit: forerun.fit(3), "int"),
        (lambda fit: forerun.fit("no_such.csv"), "no_such.csv"),
        (lambda fit: forerun.fit(make_law_runs().assign(loss=["a", *[3.0] * 11])), "row 0"),
        (lambda fit: forerun.fit(make_law_runs(), form="cubic", bootstrap=0), "cubic"),
        (lambda fit: forerun.predict(fit, params=1e8), "tokens"),
        (forerun.allocate, "flops"),
        (lambda fit: forerun.allocate(fit, usd=5), "gpu"),
        (lambda fit: forerun.allocate(fit, flops=1e40), "1.00e+40"),
        (
            lambda fit: forerun.transfer(make_basin_runs(), target_width=512, target_size=512),
            "target_width",
        ),
        (lambda fit: forerun.transfer(make_basin_runs().drop(columns="lr")), "hyperparameter"),
        (lambda fit: forerun.load("no_such_study"), "no_such_study"),
        (lambda fit: forerun.explain("no_such_config"), "no_such_config"),
    ],
)
def test_input_that_the_commands_refuse_raises_value_error(call, phrase, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape(phrase)):
        call(forerun.fit(make_law_runs(), bootstrap=0))


def test_isoflop_fit_predicts_from_flops_alone():
    sizes = [
        (n, budget / (6 * n))
        for budget in (1e16, 1e17, 1e18)
        for n in np.geomspace(0.2, 5, 7) * budget**0.5 / 8
    ]
    loss = [compute_law_loss(n, d) for n, d in sizes]
    fit = forerun.fit(
        [{"params": n, "tokens": d, "loss": y} for (n, d), y in zip(sizes, loss, strict=True)],
        form="isoflop",
        bootstrap=0,
    )
    predicted = forerun.predict(fit, flops=1e19)
    assert predicted.body["params"] > 0 and not hasattr(predicted, "loss_nats")
    with pytest.raises(ValueError, match="isoflop"):
        forerun.predict(fit, params=1e8, tokens=1e9)
    with pytest.raises(ValueError, match="predict"):
        forerun.allocate(fit, flops=1e19)


def test_load_and_explain_answer_as_the_commands(frozen_study, monkeypatch):
    monkeypatch.chdir(frozen_study.parent)
    (config,) = (frozen_study / "frozen").iterdir()
    trials = forerun.load().trials()
    assert len(trials) and trials["loss_nats"].notna().any()
    _, printed = run_json("explain", config, "learning_rate")
    for name in (None, "latest", config.name[:8], config / "launch.json"):
        explanation = forerun.explain(name, "learning_rate")
        assert explanation.body == printed
        assert any("learning_rate" in field for field in explanation.values)


def test_documented_snippets_run(frozen_study, tmp_path, monkeypatch, capsys):
    shutil.copytree(frozen_study, tmp_path / "study")
    make_law_runs().to_csv(tmp_path / "runs.csv", index=False)
    make_basin_runs().to_csv(tmp_path / "sweep.csv", index=False, na_rep="NaN")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "python.md").read_text()
    exec("\n".join(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)), {})
    assert "holds" in capsys.readouterr().out
    assert forerun.predict("fit.json", params=1e8, tokens=2e9).interval


def test_predict_takes_arrays_of_any_kind():
    fit = forerun.fit(make_law_runs(), bootstrap=20)
    forecasts = [forerun.predict(fit, params=n, tokens=2e9) for n in (1e8, 2e8)]
    for sizes in (
        [1e8, 2e8],
        np.array([1e8, 2e8]),
        pd.Series([10**8, 2 * 10**8]),
        (np.float32(1e8), np.int64(2e8)),
    ):
        batch = forerun.predict(fit, params=sizes, tokens=2e9)
        losses = [forecast.loss_nats for forecast in forecasts]
        assert batch.loss_nats.tolist() == pytest.approx(losses)
        assert len(batch) == 2 and batch[1].interval == pytest.approx(forecasts[1].interval)
        assert batch.interval.shape == (2, 2)
    forecast = forerun.predict(fit, params=np.float64(1e8), tokens=np.int64(2e9))
    assert forecast.loss_nats == forecasts[0].loss_nats


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        ({"params": [1e8]}, "tokens is missing"),
        ({"params": [1e8, 2e8], "tokens": [1e9]}, "different lengths"),
        ({"params": [[1e8]], "tokens": 1e9}, "params[0]"),
        ({"params": 1e8, "tokens": True}, "tokens = True"),
        ({"params": "1e8", "tokens": 1e9}, "params = '1e8'"),
    ],
)
def test_errors_name_arguments_instead_of_options(arguments, phrase):
    fit = forerun.fit(make_law_runs(), bootstrap=0)
    with pytest.raises(ValueError, match=re.escape(phrase)) as caught:
        forerun.predict(fit, **arguments)
    assert "--" not in str(caught.value)


def test_errors_of_tables_and_budgets_name_arguments():
    fit = forerun.fit(make_law_runs(), bootstrap=0)
    calls = [
        lambda: forerun.allocate(fit),
        lambda: forerun.allocate(fit, flops=[1e19, 1e20]),
        lambda: forerun.allocate(fit, flops=1e30),
        lambda: forerun.allocate(fit, usd=5),
        lambda: forerun.fit({"size": [1], "tokens": [1], "loss": [2]}),
        lambda: forerun.fit(make_law_runs(), compute_from="budget"),
        lambda: forerun.transfer({"width": [1, 2], "lr": [1, 2]}),
    ]
    for call in calls:
        with pytest.raises(ValueError) as caught:
            call()
        assert "--" not in str(caught.value)
        assert not any("--" in problem for problem in getattr(caught.value, "problems", ()))


def test_columns_may_be_renamed():
    renamed = make_law_runs().rename(columns={"params": "size", "loss": "bpb"})
    fit = forerun.fit(renamed, bootstrap=0, columns={"params": "size", "loss": "bpb"})
    assert fit.parameters == forerun.fit(make_law_runs(), bootstrap=0).parameters
    assert (
        forerun.transfer(
            make_basin_runs().rename(columns={"lr": "eta"}), columns={"lr": "eta"}
        ).outcome
        == "holds"
    )
