"""Names, sizes and what is wanted, as people read them."""

import pytest
from example_report import finished_body
from odd_transfer import odd_body

from launcher.views.transfer import name_of, runs_of, short_size, wanted


@pytest.mark.parametrize(
    ("size", "said"),
    [(96, "96"), (9999, "9999"), (10_000, "10k"), (204_800, "205k"), (51_200, "51.2k"), (999_499, "999k"),
     (999_500, "1M"), (13_500_416, "13.5M"), (1_000_000_000, "1B"), (15 * 10**12, "15T")],
)  # fmt: skip
def test_sizes_have_three_digits_and_a_suffix(size, said):
    assert short_size(size) == said


def test_what_is_wanted_at_one_size_stands_together():
    test = odd_body("undecided")["transfer"]["tests"][0]
    said = wanted(test["verdict"])
    assert len(said) < len(test["verdict"]["what_to_run"])
    assert any("width 32 at 2^-7, 2^-6, 2^-5, 2^-4, 2^-3 (5 seeds each)" in sentence for sentence in said)
    asked = sum(sentence.split(" (")[0].count("2^") for sentence in said)
    assert asked == len(test["verdict"]["what_to_run"]), "none is lost"
    beta = odd_body("six sizes")["transfer"]["tests"][2]["verdict"]
    asked = {"axis": "width", "hyperparameter": "beta2", "size": 64, "num_seeds": 1, "reason": "to see"}
    beta["what_to_run"] = [asked | {"log2_value": log2} for log2 in (-2.0, -3.0)]
    assert name_of(beta) == "beta2 over width"
    assert wanted(beta) == ["run width 64 at beta2 0.875, 0.75 (1 seed each): to see"]


def test_failed_runs_say_nothing_and_diverged_ones_do():
    test = finished_body()["transfer"]["tests"][0]
    everything = len(test["runs"])
    test["runs"][0] |= {"loss_nats": None, "status": "failed"}
    assert len(runs_of(test)) == everything - 1
    assert {run["arm"] for run in runs_of(test, "sp")} == {"sp"}
    assert any(run["status"] == "diverged" for run in runs_of(test, "sp"))
