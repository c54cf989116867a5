"""The verbs on tables of runs and on shapes. Their keys are a contract."""

import pytest
from tiny_study import ask, forerun

FIT = ("--bootstrap", "50")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "runs.csv"
    rows = [
        f"{n},{d},{1.2 + 40 * n**-0.34 + 60 * d**-0.37}" for n in (1e5, 2e5, 4e5, 8e5) for d in (1e6, 3e6, 9e6)
    ]  # fmt: skip
    path.write_text("\n".join(["params,tokens,loss", *rows]) + "\n")
    return path


@pytest.fixture(scope="module")
def fitted(table):
    path = table.with_name("fit.json")
    code, _ = ask("fit", table, *FIT, "--out", path)
    assert code == 0
    return path


def valleys(drift):
    """A table of runs of three widths, whose optimum moves so many octaves per doubling."""
    rows = ["width,lr,loss,seed"]
    for number, width in enumerate((32, 64, 128)):
        for octave in range(-10, -1):
            for seed in range(3):
                loss = 3 - 0.1 * number + 0.06 * (octave + 6 - drift * number) ** 2 + 0.001 * ((7 * seed + octave) % 3)
                rows.append(f"{width},{2.0**octave},{loss},{seed}")
    return "\n".join(rows) + "\n"


@pytest.mark.parametrize(("drift", "outcome", "code"), [(0.0, "holds", 0), (-1.0, "drifts", 3)])
def test_a_table_is_judged(tmp_path, drift, outcome, code):
    (tmp_path / "runs.csv").write_text(valleys(drift))
    got, body = ask("transfer", "--runs", tmp_path / "runs.csv")
    assert (got, body["outcome"]) == (code, outcome)
    assert body["drift_octaves_per_doubling"]["value"] == pytest.approx(drift, abs=0.05)
    assert f"verdict: {outcome}" in forerun("transfer", "--runs", tmp_path / "runs.csv")[1]


def test_a_table_that_cannot_tell_says_what_to_run(tmp_path):
    few = [line for line in valleys(0.0).splitlines() if not line.startswith("128")][:30]
    (tmp_path / "runs.csv").write_text("\n".join(few) + "\n")
    code, body = ask("transfer", "--runs", tmp_path / "runs.csv")
    assert (code, body["outcome"]) == (4, "cannot_tell")
    assert body["reasons"]


def test_the_keys_of_fit(table):
    code, body = ask("fit", table, *FIT, "--form", "chinchilla")
    assert code == 0
    assert set(body) >= {
        "form", "status", "parameters", "members", "intervals", "level", "exponents", "num_runs", "dropped",
        "backtest", "warnings",
    }  # fmt: skip
    assert set(body["parameters"]) == {"E", "A", "B", "alpha", "beta"}
    assert set(body["exponents"]) == {"params_vs_flops", "tokens_vs_flops"}
    assert all(set(value) == {"value", "interval"} for value in body["exponents"].values())
    assert all(set(member) == {"form", "weight", "status", "parameters"} for member in body["members"])
    assert (body["num_runs"], body["level"], body["status"]) == (12, 0.9, "converged")
    assert body["parameters"]["alpha"] == pytest.approx(0.34, rel=1e-3)


def test_no_bootstrap_no_intervals(table):
    _, body = ask("fit", table, "--bootstrap", "0", "--form", "chinchilla")
    assert set(body["intervals"].values()) == {None}


def test_the_keys_of_predict_and_allocate(fitted):
    code, body = ask("predict", fitted, "--params", "1e6", "--tokens", "2e7")
    assert code == 0
    assert set(body) == {"params", "tokens", "flops", "loss", "interval", "level", "extrapolation"}
    assert body["interval"][0] <= body["loss"] <= body["interval"][1]
    assert body["loss"] == pytest.approx(1.2 + 40 * 1e6**-0.34 + 60 * 2e7**-0.37, rel=1e-2)
    assert (body["flops"], body["extrapolation"]) == (1.2e14, pytest.approx(1.2e14 / (6 * 8e5 * 9e6)))
    code, body = ask("allocate", fitted, "--flops", "1e14")
    assert code == 0
    assert set(body) >= {
        "flops", "params", "tokens", "tokens_per_param", "batch_tokens", "loss", "interval", "params_interval",
        "tokens_interval", "flat_range", "warnings",
    }  # fmt: skip
    assert 6 * body["params"] * body["tokens"] == pytest.approx(1e14)
    low, high = body["flat_range"]["params"]
    assert low <= body["params"] <= high


def test_a_study_is_a_table_too(finished):
    code, body = ask("fit", finished / "study", "--bootstrap", "0", "--form", "chinchilla")
    assert (code, body["num_runs"]) == (0, 9)


def test_the_keys_of_flops():
    sizes = {"layers": 2, "width": 64, "heads": 4, "ffn": 128, "vocab": 256, "seq-len": 64, "tokens": 1000}
    code, body = ask("flops", *(part for name, size in sizes.items() for part in (f"--{name}", size)))
    assert code == 0
    assert set(body) == {
        "params", "params_non_embedding", "params_active", "flops_per_token", "flops_total", "six_nd", "convention",
    }  # fmt: skip
    blocks = 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
    assert body["params"] == body["params_active"] == blocks + 2 * 256 * 64
    assert body["six_nd"] == 6 * body["params"] * 1000
    assert body["flops_total"] == body["flops_per_token"] * 1000
    assert body["convention"] == "causal"


def test_flops_of_every_family():
    sizes = {"layers": 12, "width": 768, "heads": 12, "ffn": 3072, "vocab": 50_257, "seq-len": 1024}
    gpt2 = ["flops", *(part for name, size in sizes.items() for part in (f"--{name}", size)), "--tied"]
    gpt2 += ["--family", "gpt2"]
    code, body = ask(*gpt2)
    assert (code, body["params"]) == (0, 124_439_808)
    normed = ask(*gpt2, "--qk-norm")[1]
    assert normed["params"] == body["params"] + 12 * 2 * 64
    assert normed["flops_per_token"] == body["flops_per_token"]
    assert ask(*gpt2[:-1], "llama")[1]["params"] == ask(*gpt2[:-2])[1]["params"] != body["params"]
    code, *said = forerun(*gpt2[:-1], "bert")
    assert code == 2 and "llama" in "".join(said)
