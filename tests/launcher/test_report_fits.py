"""The report's sections on the ladder say what the body says: laws, what they hang on, rates checked, next runs."""

import html

import pytest
from example_report import finished_body
from test_report import HOSTILE, text_of, unknown_numbers

from launcher.report.decision import decision
from launcher.report.fits import NUM_INFLUENTIAL, next_runs, scaling
from launcher.views.transfer import short_size


@pytest.fixture
def body():
    return finished_body()


def shown(source):
    return " ".join(text_of(source).split())


def test_every_law_has_a_row_with_what_it_says_of_the_main_run(body):
    told = shown(scaling(body)).split("The laws")[1].split("What the fit misses")[0]
    for member in body["fit"]["members"]:
        assert f"{member['form']}: " in told
        assert f"{100 * member['weight']:.0f} % {member['status']}" in told
        assert f"{member['params_vs_flops']:.2f} {member['tokens_vs_flops']:.2f}" in told
        assert f"{member['loss_at_choice_nats']:.3f}" in told
    assert "All rungs count alike" in told
    body["fit"]["weighting"] = "near_frontier"
    assert "the nearer its loss is to the best for its compute" in shown(scaling(body))


def test_one_law_is_said_to_be_one(body):
    body["fit"]["members"] = body["fit"]["members"][:1]
    source = shown(scaling(body))
    assert "One law, as the plan asks" in source
    assert "Each law's own frontier" not in source


def test_the_rungs_that_the_choice_hangs_on_are_named_first(body):
    rows = body["fit"]["influence"]["rows"]
    told = shown(scaling(body)).split("What the choice hangs on")[1].split("Were the rungs")[0]
    assert told.count("tokens") == NUM_INFLUENTIAL
    first = body["ladder"]["rungs"][rows[0]["rung"]]
    assert f" width {first['width']}, {short_size(first['tokens'])} tokens" in told
    body["fit"]["influence"]["warnings"] = []
    assert "hangs on no single rung" in shown(scaling(body))
    body["fit"]["influence"]["warnings"] = ["the choice hangs on run 3"]
    assert "hangs on no single rung" not in shown(scaling(body))
    assert "Single rungs: the choice hangs on run 3." in shown(decision(body))


def test_a_rung_that_is_needed_determines_the_choice_and_a_wild_one_has_whole_percents(body):
    rows = body["fit"]["influence"]["rows"]
    rows[0] |= {"params_shift": None, "loss_shift": None, "share_of_arm": None}
    rows[1] |= {"params_shift": 1234.5}
    told = shown(scaling(body)).split("What the choice hangs on")[1]
    assert "tokens not determined not determined –" in told
    assert "+123450 %" in told


def test_the_laws_disagreement_is_among_what_is_not_known(body):
    losses = [member["loss_at_choice_nats"] for member in body["fit"]["members"]]
    assert f"The 3 laws that count say {min(losses):.3f} to {max(losses):.3f} nats" in shown(decision(body))
    body["fit"]["members"][1]["weight"] = body["fit"]["members"][2]["weight"] = 0.0
    assert "laws that count" not in shown(decision(body))


def test_outliers_are_named_under_the_residuals(body):
    for row in body["fit"]["influence"]["rows"]:
        row["outlier"] = False
    assert "no rung is an outlier" in shown(scaling(body))
    body["fit"]["influence"]["rows"][4] |= {"outlier": True, "rung": 15}
    told = shown(scaling(body))
    assert "takes a rung of its weight: width 96, 819k tokens." in told
    assert "no rung is an outlier" not in told


def test_checked_rungs_show_rates_losses_and_verdict(body):
    told = shown(scaling(body)).split("Were the rungs' learning rates right?")[1]
    assert told.startswith(" cannot tell 1 of 2 checked rungs is tuned")
    for check in body["ladder"]["checks"]:
        assert f"width {check['width']}, {check['num_steps']} steps -1 0 +1" in told
        assert " ".join(f"{one['loss_nats']:.4f}" for one in check["offsets"]) in told
    assert told.count("would settle it") == 1, "what the untold one needs; the tuned one needs nothing"
    body["ladder"]["tuned"]["reason"] = "; ".join(check["words"] for check in body["ladder"]["checks"])
    assert shown(scaling(body)).count("would settle it") == 2, "said by the gate, and not again"
    shift = body["ladder"]["sensitivity"]["shift_nats"]
    assert f"would move by {shift['value']:+.4f} nats [{shift['interval'][0]:+.4f}" in told
    assert "better neighbours" in told
    body["ladder"]["sensitivity"]["with_better_neighbours_nats"] = None
    assert "better neighbours" not in shown(scaling(body))


def test_a_check_that_lost_a_run_shows_dashes(body):
    check = body["ladder"]["checks"][0]
    check["offsets"][2]["loss_nats"] = None
    check |= {"excess_nats": {"value": None, "interval": None}, "optimum_octaves": {"value": None, "interval": None},
              "outcome": "mis_tuned"}  # fmt: skip
    source = scaling(body)
    assert '<span class="chip bad">mis tuned</span>' in source
    assert "None" not in source and "– no interval" in shown(source)


@pytest.mark.parametrize("tuned", [None, {"outcome": "cannot_tell", "reason": "no rung was checked"}])
def test_a_ladder_without_checks_says_so(body, tuned):
    body["ladder"] |= {"checks": [], "sensitivity": None, "tuned": tuned}
    told = shown(scaling(body)).split("learning rates right?")[1]
    assert ("no rung was checked" if tuned else "No rung was run at other rates") in told


def test_next_runs_say_cost_and_gain(body):
    run = body["next_runs"]["runs"][0]
    body["next_runs"]["runs"] = [run]
    told = shown(next_runs(body))
    assert f"narrows the interval by {run['width']} " in told
    assert f"{100 * run['interval_shrink']:.0f} %" in told
    assert "A rung to add" in told
    body["next_runs"]["runs"] *= 2
    assert "Rungs, in this order, to add" in shown(next_runs(body)) and "together" in shown(next_runs(body))
    body["next_runs"] |= {"runs": [], "interval_shrink": None, "note": "too dear"}
    assert "No run to add is worth its compute: too dear." in shown(next_runs(body))
    body["next_runs"] = None
    assert next_runs(body) == ""


def test_before_its_runs_have_ended_the_section_says_how_to_run_them(body):
    body |= {"ladder": None, "fit": None}
    body["progress"]["ladder"] = [3, 15]
    assert "3 of 15 runs are done. forerun ladder PLAN" in shown(scaling(body))


def test_words_are_escaped_and_numbers_are_the_bodys(body):
    body["fit"]["influence"]["warnings"] = [HOSTILE]
    body["ladder"]["tuned"]["reason"] = body["next_runs"]["note"] = HOSTILE
    body["ladder"]["checks"][1]["words"] = f"width: {HOSTILE}"
    source = scaling(body) + next_runs(body)
    assert "<script" not in source and source.count(html.escape(HOSTILE)) == 4
    assert unknown_numbers(source, body) == []
