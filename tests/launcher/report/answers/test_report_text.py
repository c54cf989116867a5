"""Tests of the terminal's text about transfer tests: the table, the reasons, and the next runs."""

import pytest
from example_report import make_finished_body
from tiny_study import run_forerun
from unusual_transfer import make_unusual_body

from forerun._launcher.report.answers.report_text import format_transfer_tests
from forerun._launcher.report.views.transfer_findings import Transfer


@pytest.fixture
def transfer():
    """Section `transfer` of a finished study's report, as JSON."""
    return make_finished_body()["transfer"]


def test_table_has_a_row_for_each_test_and_for_all_axes(transfer):
    text = format_transfer_tests(Transfer.model_validate(transfer))
    table = text.split("\n\n")[0].splitlines()
    assert [line.split("  ")[0] for line in table] == [
        "test",
        "learning rate over all axes",
        "learning rate over width",
        "learning rate over width, control",
        "learning rate over duration",
        "clip norm over width",
        "warmup fraction over width",
    ]
    # The second test is the learning rate over duration, in the fifth line of the table.
    verdict = transfer["tests"][1]["verdict"]
    drift, regret = verdict["drift_octaves_per_doubling"], verdict["regret_nats"]
    for cell in (
        "holds",
        f"{drift['value']:+.2f} [{drift['interval'][0]:+.2f}",
        f"{regret['value']:.4f} [",
        f"{verdict['transferred_value']:.4g}",
    ):
        assert cell in table[4]
    drift = transfer["tests"][0]["verdict"]["control"]["drift_octaves_per_doubling"]["value"]
    assert drift == pytest.approx(-1.0, abs=0.1)
    assert f"drifts  {drift:+.2f} [" in table[3]
    assert "to decide" not in text


def test_undecided_test_says_why_and_what_would_decide_it():
    transfer = make_unusual_body("undecided")["transfer"]
    text = format_transfer_tests(Transfer.model_validate(transfer))
    heading = "learning rate over width: cannot tell"
    (section,) = [part for part in text.split("\n\n") if part.startswith(heading)]
    for reason in transfer["tests"][0]["verdict"]["reasons"]:
        assert f"- {reason}" in section.splitlines()
    assert "- to decide: run width 128 at 2^-5, 2^-4 (3 seeds each): " in section
    assert "learning rate over all axes: cannot tell\n- " in text
    for reason in transfer["together"]["reasons"]:
        assert f"- {reason}" in text.splitlines()


@pytest.mark.parametrize(
    ("first_log2", "is_between_runs"),
    [(-9.5, True), (-9.0, False)],
    ids=["between two runs", "at a run"],
)
def test_fitted_minimum_below_every_run_is_explained(tmp_path, first_log2, is_between_runs):
    """The planted optimum is at 2^-7; the nearest runs may be half an octave away from it."""
    rows = ["width,lr,loss"]
    for width, min_loss in ((32, 3.0), (64, 2.9), (128, 2.8)):
        for octave in range(6):
            log2 = first_log2 + octave
            rows.append(f"{width},{2.0**log2},{min_loss + 0.3 * abs(log2 + 7) ** 1.5}")
    (tmp_path / "runs.csv").write_text("\n".join(rows))
    _, out, _ = run_forerun("transfer", "--runs", tmp_path / "runs.csv")
    head, row = (out.splitlines()[number].split("  ") for number in (1, 2))
    assert {"fitted (nats)", "lowest run"} <= {cell.strip() for cell in head}
    lowest_nats = 3.0 + 0.3 * 0.5**1.5 if is_between_runs else 3.0
    assert f"{lowest_nats:.3f}" in [cell.strip() for cell in row]
    assert ("between the values that were run" in out) == is_between_runs
