"""Tests of `report.views.transfer`, the texts about one transfer test.

The tests cover the short notation of sizes, the sentences on runs that would decide an undecided
test, and the selection of the runs that a figure draws.
"""

import pytest
from example_report import make_finished_body
from unusual_transfer import make_unusual_body

from forerun._launcher.report.views.transfer import (
    describe_deciding_runs,
    format_short_size,
    format_test,
)
from forerun._launcher.report.views.transfer_findings import TransferTest, Verdict


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (96, "96"),
        (9999, "9999"),
        (10_000, "10k"),
        (204_800, "205k"),
        (51_200, "51.2k"),
        (999_499, "999k"),
        (999_500, "1M"),
        (13_500_416, "13.5M"),
        (1_000_000_000, "1B"),
        (15 * 10**12, "15T"),
    ],
)
def test_size_from_10000_on_has_at_most_three_digits_and_a_suffix(size, text):
    assert format_short_size(size) == text


def test_deciding_runs_of_one_size_share_a_sentence():
    verdict = make_unusual_body("undecided")["transfer"]["tests"][0]["verdict"]
    sentences = describe_deciding_runs(Verdict.model_validate(verdict))
    assert len(sentences) < len(verdict["what_to_run"])
    phrase = "width 32 at 2^-7, 2^-6, 2^-5, 2^-4, 2^-3 (5 seeds each)"
    assert any(phrase in sentence for sentence in sentences)
    # Each run has one learning rate, written as a power of two before the first parenthesis.
    num_rates = sum(sentence.split(" (")[0].count("2^") for sentence in sentences)
    assert num_rates == len(verdict["what_to_run"]), "each run is in a sentence"


def test_deciding_runs_of_beta2_are_given_by_value():
    """The search varies log2(1 - beta2): -2 stands for beta2 = 0.75, and -3 for 0.875."""
    verdict = make_unusual_body("six sizes")["transfer"]["tests"][2]["verdict"]
    assert verdict["hyperparameter"] == "beta2"
    run = {
        "axis": "width",
        "hyperparameter": "beta2",
        "size": 64,
        "num_seeds": 1,
        "reason": "to see",
    }
    verdict["what_to_run"] = [run | {"log2_value": log2} for log2 in (-2.0, -3.0)]
    verdict = Verdict.model_validate(verdict)
    assert format_test(verdict) == "beta2 over width"
    assert describe_deciding_runs(verdict) == [
        "run width 64 at beta2 0.875, 0.75 (1 seed each): to see"
    ]


def test_failed_runs_are_left_out_and_diverged_runs_are_kept():
    """`select_runs("sp")` returns the control: the runs in the standard parametrization."""
    body = make_finished_body()["transfer"]["tests"][0]
    num_runs = len(body["runs"])
    body["runs"][0] |= {"loss_nats": None, "status": "failed"}
    test = TransferTest.model_validate(body)
    assert len(test.select_runs()) == num_runs - 1
    control_runs = test.select_runs("sp")
    assert {run.arm for run in control_runs} == {"sp"}
    assert any(run.status == "diverged" for run in control_runs)
