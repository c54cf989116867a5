"""What the terminal says of a study's transfer tests."""

import pytest
from example_report import finished_body
from odd_transfer import odd_body
from tiny_study import forerun

from launcher.answers.texts import transfer_text


@pytest.fixture
def transfer():
    return finished_body()["transfer"]


def test_one_table_holds_every_test_and_all_axes(transfer):
    said = transfer_text(transfer)
    table = said.split("\n\n")[0].splitlines()
    assert [line.split("  ")[0] for line in table] == [
        "test",
        "learning rate over all axes",
        "learning rate over width",
        "learning rate over width, control",
        "learning rate over duration",
        "clip norm over width",
        "warmup fraction over width",
    ]
    verdict = transfer["tests"][1]["verdict"]
    drift, regret = verdict["drift_octaves_per_doubling"], verdict["regret_nats"]
    for part in (
        "holds",
        f"{drift['value']:+.2f} [{drift['interval'][0]:+.2f}",
        f"{regret['value']:.4f} [",
        f"{verdict['transferred_value']:.4g}",
    ):
        assert part in table[4]
    moved = transfer["tests"][0]["verdict"]["control"]["drift_octaves_per_doubling"]["value"]
    assert moved == pytest.approx(-1.0, abs=0.1)
    assert (
        table[3].split("  ")[0] == "learning rate over width, control"
        and f"drifts  {moved:+.2f} [" in table[3]
    )
    assert "to decide" not in said


def test_what_does_not_hold_says_why_and_what_would_decide_it():
    transfer = odd_body("undecided")["transfer"]
    said = transfer_text(transfer)
    part = next(
        part
        for part in said.split("\n\n")
        if part.startswith("learning rate over width: cannot tell")
    )
    for reason in transfer["tests"][0]["verdict"]["reasons"]:
        assert f"- {reason}" in part.splitlines()
    assert "- to decide: run width 128 at 2^-5, 2^-4 (3 seeds each): " in part
    assert "learning rate over all axes: cannot tell\n- " in said
    assert all(f"- {reason}" in said.splitlines() for reason in transfer["together"]["reasons"])


@pytest.mark.parametrize(
    ("first", "said"), [(-9.5, True), (-9.0, False)], ids=["between two runs", "at a run"]
)
def test_a_fitted_minimum_below_every_run_says_why(tmp_path, first, said):
    """The table showed 3.831 beside a lowest run of 3.876, without a word."""
    rows = ["width,lr,loss"]
    for width, depth in ((32, 3.0), (64, 2.9), (128, 2.8)):
        rows += [
            f"{width},{2.0 ** (first + at)},{depth + 0.3 * abs(first + at + 7) ** 1.5}"
            for at in range(6)
        ]
    (tmp_path / "runs.csv").write_text("\n".join(rows))
    _, out, _ = forerun("transfer", "--runs", tmp_path / "runs.csv")
    head, row = (out.splitlines()[at].split("  ") for at in (1, 2))
    assert {"fitted (nats)", "lowest run"} <= {cell.strip() for cell in head}
    lowest = 3.0 if not said else 3.0 + 0.3 * 0.5**1.5
    assert f"{lowest:.3f}" in [cell.strip() for cell in row]
    assert ("between the values that were run" in out) == said
