"""Tests of `forerun allocate` and `forerun flops --model`: keys, numbers, and warnings."""

import math

import numpy as np
import pytest
from summary_keys import ALLOCATION_KEYS
from tiny_study import run_json


@pytest.fixture(scope="module")
def fit(tmp_path_factory):
    """Path of a fit of runs that follow a Chinchilla law with 0.3 % noise."""
    folder = tmp_path_factory.mktemp("allocate")
    rng = np.random.default_rng(0)
    rows = [
        f"{n},{d},{(1.7 + 480 * n**-0.35 + 2100 * d**-0.37) * math.exp(rng.normal(0, 0.003))}"
        for n in (3e6, 1e7, 3e7, 1e8)
        for d in (3e8, 1e9, 3e9)
    ]
    (folder / "runs.csv").write_text("\n".join(["params,tokens,loss", *rows]) + "\n")
    path = folder / "fit.json"
    code, _ = run_json(
        "fit", folder / "runs.csv", "--bootstrap", "40", "--form", "chinchilla", "--out", path
    )
    assert code == 0
    return path


def test_allocation_has_its_keys_and_spends_the_budget(fit):
    code, body = run_json("allocate", fit, "--flops", "1e20", "--batch-tokens", "1048576")
    assert code == 0 and set(body) >= ALLOCATION_KEYS
    assert (
        6 * body["params"] * body["tokens"] == pytest.approx(body["flops"]) == pytest.approx(1e20)
    )
    assert (body["batch_tokens"], body["num_steps"]) == (1048576, round(body["tokens"] / 1048576))
    # The flat range has the sizes whose loss is hardly above that of the best size.
    assert body["flat_range"]["params"][0] < body["params"] < body["flat_range"]["params"][1]
    assert body["flat_range"]["tokens"][0] < body["tokens"] < body["flat_range"]["tokens"][1]
    body = run_json("allocate", fit, "--flops", "1e20")[1]
    assert body["batch_tokens"] is None and body["batch_tokens_from"].startswith("null")


@pytest.mark.parametrize("flops", [1e19, 1e20, 1e21, 1e22])
def test_allocate_is_as_conclusive_as_predict(fit, flops):
    code, body = run_json("allocate", fit, "--flops", flops)
    predict_code, forecast = run_json(
        "predict", fit, "--params", body["params"], "--tokens", body["tokens"]
    )
    assert code == predict_code == (0 if flops <= 1e20 else 4)
    assert any("inconclusive" in warning for warning in body["warnings"]) == (code == 4)
    assert forecast["loss"] == pytest.approx(body["loss"])


def test_optimum_below_one_token_a_parameter_gets_a_warning(tmp_path):
    """Losses along one schedule, passed as separate runs, give such a law."""
    rng = np.random.default_rng(0)
    rows = [
        f"{n},{d},{(1.5 + 60 * n**-0.2 + 2e6 * d**-0.75) * math.exp(rng.normal(0, 0.002))}"
        for n in (5e7, 1e8, 2e8, 4e8)
        for d in (7e7, 3e8, 1e9, 3e9)
    ]
    (tmp_path / "runs.csv").write_text("\n".join(["params,tokens,loss", *rows]) + "\n")
    options = ("--bootstrap", "0", "--form", "chinchilla", "--out", tmp_path / "fit.json")
    run_json("fit", tmp_path / "runs.csv", *options)
    body = run_json("allocate", tmp_path / "fit.json", "--flops", "1e23", "--beyond")[1]
    assert body["tokens_per_param"] < 1
    assert any("tokens per parameter" in warning for warning in body["warnings"])


def test_runs_of_one_size_give_no_allocation(fit):
    one_size = fit.with_name("one.csv")
    one_size.write_text(
        "params,tokens,loss\n" + "".join(f"1e6,{d},{3 + 1 / d}\n" for d in range(1, 4))
    )
    assert run_json("fit", one_size, "--bootstrap", "0", "--out", fit.with_name("one.json"))[0] == 4
    options = ("--flops", "1e20", "--inference-tokens", "1e9", "--shape")
    code, body = run_json("allocate", fit.with_name("one.json"), *options)
    assert code == 4 and "3 different pairs" in body["message"]


def test_budget_may_be_hours_dollars_or_a_deadline(fit):
    hours = run_json("allocate", fit, "--gpu-hours", "1000", "--gpu", "h100", "--mfu", "0.4")[1]
    assert hours["flops"] == pytest.approx(1000 * 3600 * 989e12 * 0.4)
    assert hours["budget"]["gpu"]["mfu"]["source"] == "given"
    money = run_json(
        "allocate", fit, "--usd", "2000", "--price-usd", "2", "--gpu", "H100", "--mfu", "0.4"
    )[1]
    assert money["flops"] == pytest.approx(hours["flops"])
    gpu = run_json("allocate", fit, "--usd", "2000", "--gpu", "H100")[1]["budget"]["gpu"]
    low, high = gpu["mfu"]["interval"]
    assert 0.1 < low < gpu["mfu"]["value"] < high < 0.8
    assert "published" in gpu["mfu"]["source"]
    assert "default" in gpu["price_usd"]["source"]
    machine = ("--gpus", "8", "--gpu", "A100", "--mfu", ".5")
    deadline = run_json("allocate", fit, "--flops", "1e24", "--deadline-days", "1", *machine)[1]
    assert deadline["budget"]["binds"] == "deadline"
    assert deadline["flops"] == pytest.approx(8 * 86400 * 312e12 * 0.5)


def test_inference_and_repeated_data_change_the_allocation(fit):
    plain = run_json("allocate", fit, "--flops", "1e21")[1]
    served = run_json("allocate", fit, "--flops", "1e21", "--inference-tokens", "1e11")[1]
    assert served["params"] < plain["params"]
    assert served["tokens_per_param"] > plain["tokens_per_param"]
    assert served["training_flops"] + 2 * served["params"] * 1e11 == pytest.approx(1e21)
    limited = run_json("allocate", fit, "--flops", "1e21", "--unique-tokens", "3e9")[1]
    assert limited["data_limit"]["epochs"] == pytest.approx(limited["tokens"] / 3e9)
    assert limited["loss"] > plain["loss"]
    assert any("beyond 4" in warning for warning in limited["warnings"])


def test_shape_is_divisible_and_its_cost_exact(fit):
    options = ("--shape", "--tp", "4", "--vocab", "50257", "--seq-len", "2048")
    code, body = run_json("allocate", fit, "--flops", "1e20", *options)
    assert code == 0
    shape, exact = body["shape"], body["shape_exact"]
    assert shape["vocab_size"] == 50_688 and shape["seq_len"] == 2048
    assert shape["num_heads"] % 4 == shape["num_kv_heads"] % 4 == shape["ffn_width"] % 512 == 0
    # `flops` counts the same parameters and FLOPs for that shape.
    sizes = {
        "layers": "num_layers",
        "width": "width",
        "heads": "num_heads",
        "kv-heads": "num_kv_heads",
        "ffn": "ffn_width",
        "vocab": "vocab_size",
        "seq-len": "seq_len",
    }
    shape_options = []
    for option, name in sizes.items():
        shape_options += [f"--{option}", shape[name]]
    counted = run_json("flops", *shape_options)[1]
    assert (exact["params"], exact["flops_per_token"]) == (
        counted["params"],
        counted["flops_per_token"],
    )
    assert exact["tokens"] == pytest.approx(1e20 / exact["flops_per_token"])
    assert exact["flops_over_six_nd"] == pytest.approx(
        counted["flops_per_token"] / (6 * counted["params"])
    )
    assert exact["within_flat_range"]
    assert exact["interval"][0] < exact["loss"] < exact["interval"][1]
    assert body["shape_assumed"]


def test_context_that_exhausts_the_budget_gets_a_warning(fit):
    options = ("--inference-tokens", "1e9", "--shape", "--seq-len", "100000")
    body = run_json("allocate", fit, "--flops", "1e17", *options)[1]
    assert body["shape_exact"]["tokens"] is None
    assert any("shorter context" in warning for warning in body["warnings"])


@pytest.mark.parametrize("bad", ["1e-300", "nan"])
def test_all_absurd_numbers_are_refused_at_once(fit, bad):
    options = ("flops", "deadline-days", "mfu", "price-usd", "unique-tokens")
    words = ["--gpu", "H100", "--gpus", "0", "--shape", "--tp", "-3"]
    for option in options:
        words += [f"--{option}", bad]
    code, body = run_json("allocate", fit, *words)
    assert code == 2 and body["error"] == "OptionProblems"
    assert len(body["problems"]) >= len(options) + 2
    for option in ("gpu-hours", "usd"):
        assert run_json("allocate", fit, f"--{option}", bad, "--gpu", "H100")[0] == 2, option


def test_budget_far_beyond_the_runs_needs_the_option_beyond(fit):
    largest = 6 * 1e8 * 3e9
    code, body = run_json("allocate", fit, "--flops", 0.99e4 * largest)
    assert code == 4 and body["params"] > 0, "an inconclusive answer"
    code, body = run_json("allocate", fit, "--flops", 1.01e4 * largest)
    assert (code, body["error"]) == (4, "CannotTellError")
    assert (
        "10,100 times the largest fitted run's (1.80e+18)" in body["message"]
        and "--beyond" in body["message"]
    )
    code, body = run_json("allocate", fit, "--flops", 1.01e4 * largest, "--beyond")
    assert code == 4 and body["params"] > 0
    assert run_json("allocate", fit, "--usd", "1B", "--gpu", "H100")[0] == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--flops", "1e20", "--usd", "5"), "flops and usd: "),
        (("--usd", "5"), "--gpu is missing"),
        (("--usd", "5", "--gpu", "B200"), "--price-usd is missing"),
        (("--flops", "1e20", "--mfu", "0.4"), "--mfu needs --gpu"),
        (("--flops", "1e20", "--tp", "4"), "--tp: only with --shape"),
        (("--flops", "1e20", "--deadline-days", "4", "--gpu", "H100"), "num_gpus"),
        (
            (
                "--flops",
                "1e20",
                "--inference-tokens",
                "1e9",
                "--deadline-days",
                "4",
                "--gpus",
                "8",
                "--gpu",
                "H100",
            ),
            "training alone",
        ),
        (("--flops", "1e20", "--inference-tokens", "1e30"), "both must be from 1"),
        (("--flops", "1e10", "--shape"), "the smallest shape"),
        (("--flops", "1e16", "--batch-tokens", "1000000000000"), "must be at most"),
    ],
)
def test_missing_or_clashing_options_are_refused(fit, options, message):
    code, body = run_json("allocate", fit, *options)
    assert code == 2 and message in body["message"]


def test_flops_of_published_models():
    code, body = run_json("flops", "--model", "GPT-3 175B")
    assert (code, body["model"]) == (0, "gpt-3-175b")
    assert (
        body["six_nd"]
        == pytest.approx(3.14e23, rel=2e-3)
        == pytest.approx(body["flops_published"], rel=2e-3)
    )
    assert (
        run_json("flops", "--model", "llama-3-8b", "--convention", "full")[1]["flops_per_token"]
        == 57_912_852_480
    )
    body = run_json("flops", "--model", "llama-3-8b", "--seq-len", "2048", "--tokens", "1e12")[1]
    assert body["tokens"] == 1e12 and body["flops_per_token"] < 51e9
