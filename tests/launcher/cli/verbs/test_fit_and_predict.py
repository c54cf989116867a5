"""Tests of `forerun fit`, and of `predict` and `allocate` on its fits.

Users' scripts rely on the JSON keys, so these must stay. The tables hold the losses of planted
laws, whose exponents and optima the fits must recover. Other tests of `allocate` are in
`test_allocate_and_flops.py`.
"""

import math
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from summary_keys import FIT_KEYS
from tiny_study import run_forerun, run_json

from forerun._scaling_fits.forecast.conclusive import INCONCLUSIVE

FAST_FIT = ("--bootstrap", "50")
ALPHA, BETA = 0.34, 0.37
"""Exponents of parameters and tokens in the planted law."""


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Path of a table of runs that follow the planted law without noise."""
    path = tmp_path_factory.mktemp("table") / "runs.csv"
    rows = [f"{n},{d},{compute_loss(n, d)}" for n in (1e5, 2e5, 4e5, 8e5) for d in (1e6, 3e6, 9e6)]
    path.write_text("\n".join(["params,tokens,loss", *rows]) + "\n")
    return path


@pytest.fixture(scope="module")
def law_fit(table):
    """Path of the fit of `table`."""
    path = table.with_name("fit.json")
    code, _ = run_json("fit", table, *FAST_FIT, "--out", path)
    assert code == 0
    return path


def test_fit_does_not_overwrite_a_table(table, tmp_path):
    user_table = tmp_path / "table.csv"
    user_table.write_text("width,loss\n1,2\n")
    code, _, err = run_forerun("fit", table, *FAST_FIT, "--out", user_table)
    assert code == 2 and "is not a fit" in err and user_table.read_text() == "width,loss\n1,2\n"
    code, _, err = run_forerun("predict", user_table, "--params", "1e7", "--tokens", "1e8")
    assert code == 2 and "--out fit.json" in err and f"--out {user_table}" not in err


def test_fit_overwrites_an_empty_file_and_an_earlier_fit(table, tmp_path):
    out = tmp_path / "fit.json"
    out.touch()
    for _ in range(2):
        code, _, _ = run_forerun(
            "fit", table, "--form", "chinchilla", "--bootstrap", "0", "--out", out
        )
        assert code == 0


def test_fit_prints_its_keys_and_recovers_the_planted_exponent(table):
    code, body = run_json("fit", table, *FAST_FIT, "--form", "chinchilla")
    assert code == 0
    assert set(body) >= FIT_KEYS
    assert set(body["parameters"]) == {"E", "A", "B", "alpha", "beta"}
    assert set(body["exponents"]) == {"params_vs_flops", "tokens_vs_flops"}
    assert all(set(value) == {"value", "interval"} for value in body["exponents"].values())
    assert all(
        set(member) == {"form", "weight", "status", "parameters"} for member in body["members"]
    )
    assert (body["num_runs"], body["level"], body["status"]) == (12, 0.9, "converged")
    assert body["parameters"]["alpha"] == pytest.approx(ALPHA, rel=1e-3)


@pytest.mark.parametrize("depth", ["depth", "num_layers"])
def test_fit_recovers_the_planted_best_width_per_layer(tmp_path, depth):
    """The planted optimum is 20; an aspect is fitted only if every run has a width and a depth."""
    rows = []
    for width in (32, 48, 64, 96):
        for layers in (1, 2, 4):
            params = 12.0 * layers * width**2
            for number, tokens in enumerate((1e6, 3e6, 9e6)):
                noise = 0.0005 * (-1) ** (number + layers)
                log_excess = 0.01 * math.log2(width / layers / 20) ** 2 + noise
                loss = compute_loss(params, tokens) * math.exp(log_excess)
                rows.append(f"{params},{tokens},{loss},{width},{layers}")
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([f"params,tokens,loss,width,{depth}", *rows]) + "\n")
    code, body = run_json("fit", path, *FAST_FIT, "--form", "chinchilla")
    assert code == 0
    aspect = body["aspect"]
    assert aspect["determined"] and aspect["interval"][0] < 20 < aspect["interval"][1]
    assert {"width_per_layer", "share", "interval"} == set(aspect["costs"][0])
    assert (
        "the best width per layer is"
        in run_forerun("fit", path, *FAST_FIT, "--form", "chinchilla")[1]
    )
    path.write_text(path.read_text().replace(",96,4\n", ",96,\n", 1))  # a run without a depth
    assert "aspect" not in run_json("fit", path, *FAST_FIT, "--form", "chinchilla")[1]


def test_predict_prints_its_keys_and_the_planted_loss(law_fit):
    code, body = run_json("predict", law_fit, "--params", "1e6", "--tokens", "2e7")
    assert code == 0
    assert set(body) == {
        "params",
        "tokens",
        "flops",
        "loss",
        "interval",
        "level",
        "extrapolation",
        "warnings",
    }
    assert body["interval"][0] <= body["loss"] <= body["interval"][1]
    assert body["loss"] == pytest.approx(compute_loss(1e6, 2e7), rel=1e-2)
    largest_run_flops = 6 * 8e5 * 9e6
    assert body["flops"] == 6 * 1e6 * 2e7
    assert body["extrapolation"] == pytest.approx(body["flops"] / largest_run_flops)


def test_ladder_of_one_ratio_predicts_along_its_line_only(tmp_path):
    """Every run has 20 tokens per parameter, as in Cerebras-GPT (arXiv 2304.03208).

    The losses of its five smallest models predict the loss of its model of 12.9e9 parameters.
    """
    sizes, losses = (1.11e8, 2.56e8, 5.9e8, 1.316e9, 2.652e9), (2.608, 2.349, 2.181, 1.997, 1.834)
    path, out = tmp_path / "runs.csv", tmp_path / "fit.json"
    rows = [f"{n},{20 * n},{loss}" for n, loss in zip(sizes, losses, strict=True)]
    path.write_text("\n".join(["params,tokens,loss", *rows]) + "\n")
    code, text, _ = run_forerun("fit", path, "--out", out)
    assert code == 0
    assert "1 runs" not in text
    code, body = run_json("predict", out, "--params", "12.9e9", "--tokens", "258e9")
    assert code == 0
    assert body["interval"][0] < 1.572 < body["interval"][1]
    assert run_forerun("predict", out, "--params", "1e9", "--tokens", "1e12")[0] == 4
    assert run_forerun("allocate", out, "--flops", "1e21")[0] == 4


def test_implausible_forecast_or_allocation_cannot_tell(law_fit, tmp_path):
    assert run_forerun("predict", law_fit, "--params", "10", "--tokens", "10")[0] == 4

    # Tokens in thousands lead to an optimum below one token per parameter.
    path, out = tmp_path / "runs.csv", tmp_path / "swapped.json"
    rows = [
        f"{n},{d / 1000},{compute_loss(n, d)}"
        for n in (1e6, 2e6, 4e6, 8e6)
        for d in (1e7, 3e7, 9e7)
    ]
    path.write_text("\n".join(["params,tokens,loss", *rows]) + "\n")
    assert run_forerun("fit", path, "--out", out)[0] == 0
    code, body = run_json("allocate", out, "--flops", "1e13")
    assert code == 4
    assert body["tokens_per_param"] < 1


@pytest.mark.slow
@pytest.mark.parametrize(("num_sizes", "num_durations"), [(3, 3), (9, 5), (20, 12), (40, 25)])
def test_fits_and_forecasts_are_quick(tmp_path, num_sizes, num_durations):
    """A command may take 2 CPU-seconds to fit and 1 to predict, start of Python included."""
    path, out = tmp_path / "runs.csv", tmp_path / "fit.json"
    rows = [
        f"{1e5 * 1.1**i},{1e6 * 1.2**j},{compute_loss(1e5 * 1.1**i, 1e6 * 1.2**j)}"
        for i in range(num_sizes)
        for j in range(num_durations)
    ]
    path.write_text("\n".join(["params,tokens,loss", *rows]) + "\n")
    max_seconds_by_command = {
        ("fit", path, "--out", out): 2.0,
        ("predict", out, "--params", "1e7", "--tokens", "1e9"): 1.0,
        ("allocate", out, "--flops", "1e16"): 1.0,
    }
    for words, max_seconds in max_seconds_by_command.items():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "forerun", *map(str, words)], check=False, capture_output=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        # Less than 0.1 s would mean that the command did not run
        assert 0.1 < seconds <= max_seconds, words


def compute_loss(params, tokens):
    """Return the loss of the planted law in nats."""
    return 1.2 + 40 * params**-ALPHA + 60 * tokens**-BETA


def compute_best_params(flops):
    """Return the parameters N that minimize the planted law over N and D = flops / (6 N)."""
    factor = (ALPHA * 40 / (BETA * 60)) ** (1 / (ALPHA + BETA))
    return factor * (flops / 6) ** (BETA / (ALPHA + BETA))


@pytest.fixture(scope="module")
def isoflop_table(tmp_path_factory):
    """Path of a table with eleven runs around the optimum of each of five budgets."""
    path = tmp_path_factory.mktemp("isoflops") / "runs.csv"
    rows = ["params,tokens,loss"]
    for flops in (1e13, 3e13, 1e14, 3e14, 1e15):
        for offset in range(-5, 6):
            # Sizes are powers of 1.3, so that budgets share them as a user's models do
            params = 1.3 ** (round(math.log(compute_best_params(flops), 1.3)) + offset)
            tokens = flops / 6 / params
            rows.append(f"{params},{tokens},{compute_loss(params, tokens)}")
    path.write_text("\n".join(rows) + "\n")
    return path


def test_isoflop_fit_recovers_the_planted_optima(isoflop_table, tmp_path):
    code, body = run_json(
        "fit", isoflop_table, *FAST_FIT, "--form", "isoflop", "--out", tmp_path / "fit.json"
    )
    assert code == 0
    assert set(body) >= FIT_KEYS | {"budgets"}
    assert (body["form"], body["status"], body["num_runs"], body["members"]) == (
        "isoflop",
        "converged",
        55,
        [],
    )
    planted_exponent = BETA / (ALPHA + BETA)
    assert body["exponents"]["params_vs_flops"]["value"] == pytest.approx(
        planted_exponent, abs=0.02
    )
    for budget in body["budgets"]:
        assert budget["params"] == pytest.approx(compute_best_params(budget["flops"]), rel=0.05)
    code, body = run_json("predict", tmp_path / "fit.json", "--flops", "1e16")
    assert code == 0
    assert body["params_interval"][0] <= body["params"] <= body["params_interval"][1]
    assert body["params"] == pytest.approx(compute_best_params(1e16), rel=0.1)
    assert "best params" in run_forerun("fit", isoflop_table, *FAST_FIT, "--form", "isoflop")[1]


def test_isoflop_fit_of_two_budgets_cannot_tell(isoflop_table, tmp_path):
    two_budgets = tmp_path / "few.csv"
    num_lines = 1 + 2 * 11  # the names of the columns, and eleven runs for each budget
    two_budgets.write_text("\n".join(isoflop_table.read_text().splitlines()[:num_lines]))
    code, body = run_json(
        "fit", two_budgets, *FAST_FIT, "--form", "isoflop", "--out", tmp_path / "fit.json"
    )
    assert (code, body["status"], set(body["parameters"].values())) == (4, "unidentified", {None})
    assert any(
        "2 of 2 budgets with an optimum: there must be at least 3" in warning
        for warning in body["warnings"]
    )
    code, body = run_json("predict", tmp_path / "fit.json", "--flops", "1e16")
    assert (code, body["error"]) == (4, "CannotTellError")


@pytest.fixture(scope="module")
def rates_table(tmp_path_factory):
    """Path of a table whose best learning rate and batch size follow power laws in N and D."""
    path = tmp_path_factory.mktemp("rates") / "runs.csv"
    rows = ["params,tokens,learning_rate,batch_tokens,loss"]
    for params in (1e6, 4e6, 16e6):
        for tokens in (1e8, 4e8):
            best, batch = params**-0.5 * tokens**0.1, 4 * tokens**0.5
            for i in range(-3, 4):
                for j in range(-2, 3):
                    loss = 3 * (1 + 0.004 * (i + 0.3) ** 2 + 0.003 * j**2)
                    rows.append(f"{params},{tokens},{best * 2**i},{batch * 2**j},{loss}")
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.mark.parametrize(
    ("form", "exponents"), [("learning_rate", (-0.5, 0.1)), ("batch", (0.0, 0.5))]
)
def test_fit_recovers_planted_hyperparameter_laws(rates_table, tmp_path, form, exponents):
    code, body = run_json(
        "fit", rates_table, *FAST_FIT, "--form", form, "--out", tmp_path / "fit.json"
    )
    assert code == 0
    assert set(body) >= FIT_KEYS | {"cells", "design"}
    fitted_exponents = [body["parameters"][f"{name}_exponent"] for name in ("params", "tokens")]
    assert fitted_exponents == pytest.approx(exponents, abs=0.02)
    code, body = run_json("predict", tmp_path / "fit.json", "--params", "1e8", "--tokens", "1e10")
    assert code == 0
    assert body["interval"][0] <= body["value"] <= body["interval"][1]
    assert f"best {form}" in run_forerun("fit", rates_table, *FAST_FIT, "--form", form)[1]


def test_each_form_names_the_options_that_it_needs(isoflop_table, rates_table, law_fit, tmp_path):
    run_json(
        "fit", isoflop_table, *FAST_FIT, "--form", "isoflop", "--out", tmp_path / "isoflop.json"
    )
    run_json("fit", rates_table, *FAST_FIT, "--form", "batch", "--out", tmp_path / "batch.json")
    for path, options, message in (
        (
            tmp_path / "isoflop.json",
            ("--params", 1e6),
            "--flops is missing, --params does not apply",
        ),
        (
            tmp_path / "batch.json",
            ("--flops", 1e16),
            "--params is missing, --tokens is missing, --flops does not apply",
        ),
        (
            law_fit,
            ("--flops", 1e16),
            "--params is missing, --tokens is missing, --flops does not apply",
        ),
    ):
        code, body = run_json("predict", path, *options)
        assert code == 2
        assert message in body["message"]
    for path in (tmp_path / "isoflop.json", tmp_path / "batch.json"):
        code, body = run_json("allocate", path, "--flops", 1e16)
        assert code == 2
        assert "forerun predict" in body["message"]


def write_losses(path, law):
    """Write a table of twelve runs whose losses a function of parameters and tokens gives."""
    rows = [f"{n},{d},{law(n, d)!r}" for n in (3e6, 1e7, 3e7, 1e8) for d in (3e8, 1e9, 3e9)]
    path.write_text("\n".join(["params,tokens,loss", *rows]) + "\n")
    return path


def test_inconclusive_forecast_is_marked_before_its_number(tmp_path):
    """Exponents of 4 and 3.5 are degenerate, and so is every forecast of that law."""
    path = write_losses(
        tmp_path / "steep.csv", lambda n, d: 2 + 3 * (n / 3e6) ** -4 + 2 * (d / 3e8) ** -3.5
    )
    fit, options = tmp_path / "fit.json", ("--form", "chinchilla", "--bootstrap", "0")
    _, out, _ = run_forerun("fit", path, *options, "--out", fit)
    assert out.index(INCONCLUSIVE) < out.index("parameter ") and out.count(INCONCLUSIVE) == 1
    for words, number in (
        (("predict", fit, "--params", "1B", "--tokens", "20B"), "loss "),
        (("allocate", fit, "--flops", "1e19"), "budget: "),
    ):
        body = run_json(*words)[1]
        assert body["warnings"][0].startswith(f"{INCONCLUSIVE}: degenerate: ")
        out = run_forerun(*words)[1]
        assert out.index(INCONCLUSIVE) < out.index(number) and out.count(INCONCLUSIVE) == 1


def test_forecast_far_beyond_the_runs_is_inconclusive(tmp_path):
    fit = tmp_path / "fit.json"
    path = write_losses(tmp_path / "far.csv", lambda n, d: 1.7 + 480 * n**-0.35 + 2100 * d**-0.37)
    options = ("--form", "chinchilla", "--bootstrap", "5")
    assert run_forerun("fit", path, *options, "--out", fit)[0] == 0
    near_warnings, far_warnings = (
        run_json("predict", fit, "--params", n, "--tokens", "3B")[1]["warnings"]
        for n in ("200M", "70B")
    )
    assert not any(INCONCLUSIVE in warning for warning in near_warnings)
    assert INCONCLUSIVE in far_warnings[0]


def test_full_output_device_is_named(law_fit):
    disk_full = "standard output: No space left on device"
    for words, message in (
        (("flops", "--model", "gpt-2", "--json"), disk_full),
        (("allocate", law_fit, "--flops", "1e12"), disk_full),
        (("fit", "gone.csv"), "gone.csv cannot be read"),
    ):
        command = [sys.executable, "-m", "forerun", *map(str, words)]
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                command, stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
        assert (done.returncode, done.stderr.count("\n")) == (2, 1) and message in done.stderr


def test_table_without_noise_gets_no_absurd_warning(tmp_path):
    """The residuals are rounding errors, which must not serve as a unit of the forecast errors."""
    rows = [
        (n, d, 1.7 + 400 / n**0.34 + 410 / d**0.28)
        for n in (1e6, 1e7, 1e8)
        for d in (1e8, 1e9, 3e9)
    ]
    table = tmp_path / "exact.csv"
    table.write_text(
        "params,tokens,loss\n" + "".join(f"{n:g},{d:g},{loss!r}\n" for n, d, loss in rows)
    )
    code, body = run_json("fit", table, "--out", tmp_path / "fit.json")
    assert (code, body["status"]) == (0, "converged")
    assert not any("times beyond refits" in warning for warning in body["warnings"])
    _, forecast = run_json("predict", tmp_path / "fit.json", "--params", "2e8", "--tokens", "4e9")
    low, high = forecast["interval"]
    truth = 1.7 + 400 / 2e8**0.34 + 410 / 4e9**0.28  # the law of the table above
    assert low <= truth <= high and high - low < 0.05 * truth
