"""The verbs on tables of runs and on shapes. Their keys are a contract."""

import math
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_study import ask, forerun

from scaling_fits.forecast.conclusive import INCONCLUSIVE

FIT = ("--bootstrap", "50")
CONTRACT = {
    "form",
    "status",
    "parameters",
    "members",
    "intervals",
    "level",
    "exponents",
    "num_runs",
    "dropped",
    "backtest",
    "warnings",
}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "runs.csv"
    rows = [f"{n},{d},{loss_of(n, d)}" for n in (1e5, 2e5, 4e5, 8e5) for d in (1e6, 3e6, 9e6)]
    path.write_text("\n".join(["params,tokens,loss", *rows]) + "\n")
    return path


@pytest.fixture(scope="module")
def fitted(table):
    path = table.with_name("fit.json")
    code, _ = ask("fit", table, *FIT, "--out", path)
    assert code == 0
    return path


def test_no_command_and_no_advice_writes_a_fit_over_a_table(table, fitted, tmp_path):
    other = tmp_path / "other.csv"
    other.write_text("width,loss\n1,2\n")
    code, _, err = forerun("fit", table, *FIT, "--out", other)
    assert code == 2 and "is not a fit" in err and other.read_text() == "width,loss\n1,2\n"
    code, _, err = forerun("predict", other, "--params", "1e7", "--tokens", "1e8")
    assert code == 2 and "--out fit.json" in err and f"--out {other}" not in err
    (tmp_path / "empty.json").touch()
    for out in (fitted, tmp_path / "empty.json"):
        assert (
            forerun("fit", table, "--form", "chinchilla", "--bootstrap", "0", "--out", out)[0] == 0
        )
    forerun("fit", table, *FIT, "--out", fitted)


def test_the_keys_of_fit(table):
    code, body = ask("fit", table, *FIT, "--form", "chinchilla")
    assert code == 0
    assert set(body) >= CONTRACT
    assert set(body["parameters"]) == {"E", "A", "B", "alpha", "beta"}
    assert set(body["exponents"]) == {"params_vs_flops", "tokens_vs_flops"}
    assert all(set(value) == {"value", "interval"} for value in body["exponents"].values())
    assert all(
        set(member) == {"form", "weight", "status", "parameters"} for member in body["members"]
    )
    assert (body["num_runs"], body["level"], body["status"]) == (12, 0.9, "converged")
    assert body["parameters"]["alpha"] == pytest.approx(0.34, rel=1e-3)


@pytest.mark.parametrize("depth", ["depth", "num_layers"])
def test_a_table_with_widths_and_depths_is_fitted_by_shape_too(tmp_path, depth):
    """A planted optimum of 20 widths a layer; without a column for every run nothing is said."""
    rows = []
    for width in (32, 48, 64, 96):
        for layers in (1, 2, 4):
            params = 12.0 * layers * width**2
            for number, tokens in enumerate((1e6, 3e6, 9e6)):
                added = 0.01 * math.log2(width / layers / 20) ** 2 + 0.0005 * (-1) ** (
                    number + layers
                )
                rows.append(
                    f"{params},{tokens},{loss_of(params, tokens) * math.exp(added)},{width},{layers}"  # noqa: E501
                )
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([f"params,tokens,loss,width,{depth}", *rows]) + "\n")
    code, body = ask("fit", path, *FIT, "--form", "chinchilla")
    assert code == 0
    aspect = body["aspect"]
    assert aspect["determined"] and aspect["interval"][0] < 20 < aspect["interval"][1]
    assert {"width_per_layer", "share", "interval"} == set(aspect["costs"][0])
    assert "the best width per layer is" in forerun("fit", path, *FIT, "--form", "chinchilla")[1]
    path.write_text(path.read_text().replace(",96,4\n", ",96,\n", 1))
    assert "aspect" not in ask("fit", path, *FIT, "--form", "chinchilla")[1]


def test_the_keys_of_predict(fitted):
    code, body = ask("predict", fitted, "--params", "1e6", "--tokens", "2e7")
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
    assert body["loss"] == pytest.approx(loss_of(1e6, 2e7), rel=1e-2)
    assert (body["flops"], body["extrapolation"]) == (
        1.2e14,
        pytest.approx(1.2e14 / (6 * 8e5 * 9e6)),
    )


def test_a_ladder_of_one_ratio_is_fitted_and_asked_along_its_line(tmp_path):
    sizes, losses = (1.11e8, 2.56e8, 5.9e8, 1.316e9, 2.652e9), (2.608, 2.349, 2.181, 1.997, 1.834)
    path, out = tmp_path / "runs.csv", tmp_path / "fit.json"
    rows = [f"{n},{20 * n},{loss}" for n, loss in zip(sizes, losses, strict=True)]
    path.write_text("\n".join(["params,tokens,loss", *rows]) + "\n")
    code, text, _ = forerun("fit", path, "--out", out)
    assert code == 0
    assert "1 runs" not in text
    code, body = ask("predict", out, "--params", "12.9e9", "--tokens", "258e9")
    assert code == 0
    assert body["interval"][0] < 1.572 < body["interval"][1]
    assert forerun("predict", out, "--params", "1e9", "--tokens", "1e12")[0] == 4
    assert forerun("allocate", out, "--flops", "1e21")[0] == 4


def test_a_question_without_a_sensible_answer_ends_with_cannot_tell(fitted, tmp_path):
    assert forerun("predict", fitted, "--params", "10", "--tokens", "10")[0] == 4
    path, out = tmp_path / "runs.csv", tmp_path / "swapped.json"
    rows = [
        f"{n},{d / 1000},{loss_of(n, d)}" for n in (1e6, 2e6, 4e6, 8e6) for d in (1e7, 3e7, 9e7)
    ]
    path.write_text("\n".join(["params,tokens,loss", *rows]) + "\n")
    assert forerun("fit", path, "--out", out)[0] == 0
    code, body = ask("allocate", out, "--flops", "1e13")
    assert code == 4
    assert body["tokens_per_param"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("num_runs", [9, 45, 240, 1000])
def test_fits_and_forecasts_are_quick(tmp_path, num_runs):
    """CPU-seconds of each command, start-up included: at most 2 to fit and 1 to ask."""
    sizes, lengths = {9: (3, 3), 45: (9, 5), 240: (20, 12), 1000: (40, 25)}[num_runs]
    path, out = tmp_path / "runs.csv", tmp_path / "fit.json"
    rows = [
        f"{1e5 * 1.1**i},{1e6 * 1.2**j},{loss_of(1e5 * 1.1**i, 1e6 * 1.2**j)}"
        for i in range(sizes)
        for j in range(lengths)
    ]
    path.write_text("\n".join(["params,tokens,loss", *rows]) + "\n")
    asked = {
        ("fit", path, "--out", out): 2.0,
        ("predict", out, "--params", "1e7", "--tokens", "1e9"): 1.0,
        ("allocate", out, "--flops", "1e16"): 1.0,
    }
    for words, most_seconds in asked.items():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "launcher", *map(str, words)], check=False, capture_output=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert 0.1 < seconds <= most_seconds, words


def loss_of(params, tokens):
    return 1.2 + 40 * params**-0.34 + 60 * tokens**-0.37


def best_of(flops):
    return (0.34 * 40 / (0.37 * 60)) ** (1 / 0.71) * (flops / 6) ** (0.37 / 0.71)


@pytest.fixture(scope="module")
def valleys_table(tmp_path_factory):
    path = tmp_path_factory.mktemp("valleys") / "runs.csv"
    rows = ["params,tokens,loss"]
    for flops in (1e13, 3e13, 1e14, 3e14, 1e15):
        for step in range(-5, 6):
            params = 1.3 ** (round(math.log(best_of(flops), 1.3)) + step)
            rows.append(f"{params},{flops / 6 / params},{loss_of(params, flops / 6 / params)}")
    path.write_text("\n".join(rows) + "\n")
    return path


def test_optima_against_compute(valleys_table, tmp_path):
    code, body = ask(
        "fit", valleys_table, *FIT, "--form", "isoflop", "--out", tmp_path / "fit.json"
    )
    assert code == 0
    assert set(body) >= CONTRACT | {"budgets"}
    assert (body["form"], body["status"], body["num_runs"], body["members"]) == (
        "isoflop",
        "converged",
        55,
        [],
    )
    assert body["exponents"]["params_vs_flops"]["value"] == pytest.approx(0.37 / 0.71, abs=0.02)
    assert all(
        at["params"] == pytest.approx(best_of(at["flops"]), rel=0.05) for at in body["budgets"]
    )
    code, body = ask("predict", tmp_path / "fit.json", "--flops", "1e16")
    assert code == 0
    assert body["params_interval"][0] <= body["params"] <= body["params_interval"][1]
    assert body["params"] == pytest.approx(best_of(1e16), rel=0.1)
    assert "best params" in forerun("fit", valleys_table, *FIT, "--form", "isoflop")[1]


def test_too_few_budgets_say_what_to_run(valleys_table, tmp_path):
    few = tmp_path / "few.csv"
    few.write_text("\n".join(valleys_table.read_text().splitlines()[:23]))
    code, body = ask("fit", few, *FIT, "--form", "isoflop", "--out", tmp_path / "fit.json")
    assert (code, body["status"], set(body["parameters"].values())) == (4, "unidentified", {None})
    assert any(
        "2 of 2 budgets with an optimum: there must be at least 3" in warning
        for warning in body["warnings"]
    )
    code, body = ask("predict", tmp_path / "fit.json", "--flops", "1e16")
    assert (code, body["error"]) == (4, "CannotTellError")


@pytest.fixture(scope="module")
def rates_table(tmp_path_factory):
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
def test_hyperparameter_laws(rates_table, tmp_path, form, exponents):
    code, body = ask("fit", rates_table, *FIT, "--form", form, "--out", tmp_path / "fit.json")
    assert code == 0
    assert set(body) >= CONTRACT | {"cells", "design"}
    assert [
        body["parameters"][f"{name}_exponent"] for name in ("params", "tokens")
    ] == pytest.approx(exponents, abs=0.02)
    code, body = ask("predict", tmp_path / "fit.json", "--params", "1e8", "--tokens", "1e10")
    assert code == 0
    assert body["interval"][0] <= body["value"] <= body["interval"][1]
    assert f"best {form}" in forerun("fit", rates_table, *FIT, "--form", form)[1]


def test_each_kind_of_fit_is_asked_in_its_own_way(valleys_table, rates_table, fitted, tmp_path):
    ask("fit", valleys_table, *FIT, "--form", "isoflop", "--out", tmp_path / "isoflop.json")
    ask("fit", rates_table, *FIT, "--form", "batch", "--out", tmp_path / "batch.json")
    for path, options, said in (
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
            fitted,
            ("--flops", 1e16),
            "--params is missing, --tokens is missing, --flops does not apply",
        ),
    ):
        code, body = ask("predict", path, *options)
        assert code == 2
        assert said in body["message"]
    for path in (tmp_path / "isoflop.json", tmp_path / "batch.json"):
        code, body = ask("allocate", path, "--flops", 1e16)
        assert code == 2
        assert "forerun predict" in body["message"]


def write_losses(path, loss):
    rows = [f"{n},{d},{loss(n, d)!r}" for n in (3e6, 1e7, 3e7, 1e8) for d in (3e8, 1e9, 3e9)]
    path.write_text("\n".join(["params,tokens,loss", *rows]) + "\n")
    return path


def test_an_inconclusive_forecast_is_said_to_be_so_before_its_number(tmp_path):
    path = write_losses(
        tmp_path / "steep.csv", lambda n, d: 2 + 3 * (n / 3e6) ** -4 + 2 * (d / 3e8) ** -3.5
    )
    fit, options = tmp_path / "fit.json", ("--form", "chinchilla", "--bootstrap", "0")
    _, out, _ = forerun("fit", path, *options, "--out", fit)
    assert out.index(INCONCLUSIVE) < out.index("parameter ") and out.count(INCONCLUSIVE) == 1
    for line, number in (
        (("predict", fit, "--params", "1B", "--tokens", "20B"), "loss "),
        (("allocate", fit, "--flops", "1e19"), "budget: "),
    ):
        body = ask(*line)[1]
        assert body["warnings"][0].startswith(f"{INCONCLUSIVE}: degenerate: ")
        out = forerun(*line)[1]
        assert out.index(INCONCLUSIVE) < out.index(number) and out.count(INCONCLUSIVE) == 1
    far = write_losses(tmp_path / "far.csv", lambda n, d: 1.7 + 480 * n**-0.35 + 2100 * d**-0.37)
    assert forerun("fit", far, *options[:2], "--bootstrap", "5", "--out", fit)[0] == 0
    near, beyond = (
        ask("predict", fit, "--params", n, "--tokens", "3B")[1]["warnings"] for n in ("200M", "70B")
    )
    assert not [said for said in near if INCONCLUSIVE in said] and INCONCLUSIVE in beyond[0]


def piped(*arguments, **streams):
    command = [sys.executable, "-m", "launcher", *map(str, arguments)]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, **streams)


def test_an_output_that_takes_no_more_is_named(fitted):
    for line in (
        ("flops", "--model", "gpt-2", "--json"),
        ("allocate", fitted, "--flops", "1e12"),
        ("fit", "gone.csv"),
    ):
        with Path("/dev/full").open("w") as full:
            done = piped(*line, stdout=full)
        wanted = (
            "gone.csv cannot be read"
            if "gone.csv" in line
            else "standard output: No space left on device"
        )
        assert (done.returncode, done.stderr.count("\n")) == (2, 1) and wanted in done.stderr


def test_a_table_without_noise_says_nothing_absurd(tmp_path):
    """Its residuals are rounding errors: nothing is to be measured by them."""
    rows = [
        (n, d, 1.7 + 400 / n**0.34 + 410 / d**0.28)
        for n in (1e6, 1e7, 1e8)
        for d in (1e8, 1e9, 3e9)
    ]
    table = tmp_path / "exact.csv"
    table.write_text(
        "params,tokens,loss\n" + "".join(f"{n:g},{d:g},{loss!r}\n" for n, d, loss in rows)
    )
    code, body = ask("fit", table, "--out", tmp_path / "fit.json")
    assert (code, body["status"]) == (0, "converged")
    assert not any("times beyond refits" in warning for warning in body["warnings"])
    _, near = ask("predict", tmp_path / "fit.json", "--params", "2e8", "--tokens", "4e9")
    low, high = near["interval"]
    truth = 1.7 + 400 / 2e8**0.34 + 410 / 4e9**0.28
    assert low <= truth <= high and high - low < 0.05 * truth
