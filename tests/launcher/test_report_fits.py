"""The report's sections on the ladder say what the body says: laws and rates checked."""

import pytest
from example_report import finished_body
from test_report import part_of, text_of


@pytest.fixture
def body():
    return finished_body()


def ladder(body):
    """Its sections as a reader reads them."""
    return text_of(part_of("ladder", body))


def test_the_law_has_a_row_with_what_it_says_of_the_main_run(body):
    told = ladder(body).split("The law")[1].split("Back-test")[0]
    (member,) = body["fit"]["members"]
    assert f"{member['form']}: " in told
    assert f"{member['params_vs_flops']:.2f} {member['tokens_vs_flops']:.2f}" in told
    assert f"{member['loss_at_choice_nats']:.3f}" in told


def test_every_back_test_is_told_with_its_distance(body):
    told = ladder(body).split("Back-test")[1]
    for backtest in body["fit"]["backtests"]:
        assert f"were predicted from {backtest['num_fitted']} smaller ones" in told
        assert f"{backtest['num_covered']} inside its interval" in told


def test_checked_rungs_show_rates_losses_and_verdict(body):
    told = ladder(body).split("Were the rungs' learning rates right?")[1]
    assert told.strip().startswith("cannot tell 1 of 2 checked rungs is tuned")
    for check in body["ladder"]["checks"]:
        for one in check["offsets"]:
            assert f"{one['learning_rate']:.4g} {one['loss_nats']:.3f}" in told
    assert told.count("would settle it") == 1, (
        "what the untold one needs; the tuned one needs nothing"
    )
    body["ladder"]["tuned"]["reason"] = "; ".join(
        check["words"] for check in body["ladder"]["checks"]
    )
    assert ladder(body).count("would settle it") == 2, "said by the gate, and not again"
