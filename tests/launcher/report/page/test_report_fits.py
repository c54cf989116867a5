"""Tests of the report's section on the ladder: the law, the back-tests, and the checked rates."""

import pytest
from example_report import make_finished_body
from report_page import extract_text, render_section


@pytest.fixture
def body():
    return make_finished_body()


def render_ladder(body):
    """Return the text of the section on the ladder."""
    return extract_text(render_section("ladder", body))


def test_law_has_a_row_with_its_exponents_and_forecast(body):
    section = render_ladder(body).split("The law")[1].split("Back-test")[0]
    (member,) = body["fit"]["members"]
    assert f"{member['form']}: " in section
    assert f"{member['params_vs_flops']:.2f} {member['tokens_vs_flops']:.2f}" in section
    assert f"{member['loss_at_choice_nats']:.3f}" in section


def test_every_back_test_has_its_numbers(body):
    section = render_ladder(body).split("Back-test")[1]
    for backtest in body["fit"]["backtests"]:
        assert f"were predicted from {backtest['num_fitted']} smaller ones" in section
        assert f"{backtest['num_covered']} inside its interval" in section


def test_checked_rungs_show_rates_losses_and_verdict(body):
    section = render_ladder(body).split("Were the rungs' learning rates right?")[1]
    assert section.strip().startswith("cannot tell 1 of 2 checked rungs is tuned")
    for check in body["ladder"]["checks"]:
        for offset in check["offsets"]:
            assert f"{offset['learning_rate']:.4g} {offset['loss_nats']:.3f}" in section
    assert section.count("would settle it") == 1, "only the undecided rung needs more runs"

    # If the gate's reason has the advice, the rungs do not repeat it.
    advice = [check["words"] for check in body["ladder"]["checks"]]
    body["ladder"]["tuned"]["reason"] = "; ".join(advice)
    assert render_ladder(body).count("would settle it") == 2
