"""What the terminal says of a study's transfer tests."""

import pytest
from example_report import finished_body
from odd_transfer import odd_body

from launcher.answers import texts
from launcher.answers.texts import transfer_text
from launcher.base import talk
from launcher.views import numbers


@pytest.fixture
def transfer():
    return finished_body()["transfer"]


def test_one_table_holds_every_test_and_all_axes(transfer):
    said = transfer_text(transfer)
    table = said.split("\n\n")[0].splitlines()
    assert [line.split("  ")[0] for line in table] == [
        "test", "learning rate over all axes", "learning rate over width", "learning rate over width, control",
        "learning rate over duration", "clip norm over width", "warmup fraction over width",
    ]  # fmt: skip
    verdict = transfer["tests"][1]["verdict"]
    drift, regret = verdict["drift_octaves_per_doubling"], verdict["regret_nats"]
    for part in ("holds", f"{drift['value']:+.2f} [{drift['interval'][0]:+.2f}", f"{regret['value']:.4f} [",
                 f"{verdict['transferred_value']:.4g}"):  # fmt: skip
        assert part in table[4]
    moved = transfer["tests"][0]["verdict"]["control"]["drift_octaves_per_doubling"]["value"]
    assert moved == pytest.approx(-1.0, abs=0.1)
    assert table[3].split("  ")[0] == "learning rate over width, control" and f"drifts  {moved:+.2f} [" in table[3]
    assert "to decide" not in said


def test_what_does_not_hold_says_why_and_what_would_decide_it():
    transfer = odd_body("undecided")["transfer"]
    said = transfer_text(transfer)
    part = next(part for part in said.split("\n\n") if part.startswith("learning rate over width: cannot tell"))
    for reason in transfer["tests"][0]["verdict"]["reasons"]:
        assert f"- {reason}" in part.splitlines()
    assert "- to decide: run width 128 at 2^-5, 2^-4 (3 seeds each): " in part
    assert "learning rate over all axes: cannot tell\n- " in said
    assert all(f"- {reason}" in said.splitlines() for reason in transfer["together"]["reasons"])


def test_shares_and_amounts_read_the_same_everywhere():
    """One screen had "0.856 of", "85.6 %" and "7.83%", and GPU-hours of 3.7e+02 [92, 4.8e+03]."""
    shares = {0.856: "85.6", 0.0783: "7.83", 0.0035: "0.35", 3.5e-5: "0.0035", 1.0: "100", 0.99996: "100"}
    for share, text in shares.items():
        assert talk.percent(share) == numbers.percent(share) == f"{text}\u00a0%"
    assert talk.of_main_run(0.856) == "85.6\u00a0% of the main run's FLOPs" == texts.share_text(0.856)
    assert talk.of_main_run(1.25) == "1.25 times the main run's FLOPs"
    assert [numbers.significant(value, 2) for value in (368.0, 92.1, 4812.0, 0.0, 2.3e-5, 1.23e9)] == [
        "370", "92", "4,800", "0", "2.3e-05", "1.2\u00a0B",
    ]  # fmt: skip
