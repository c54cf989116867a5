"""Tests of the report page: its numbers are those of report.json, at every stage of a study.

The page must also escape text, load nothing, and have the same bytes for the same report. The gates
of the example report are coordinates, transfer, fit, and data, in this order.
"""

import copy
import dataclasses
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from example_report import make_finished_body
from markupsafe import escape
from report_page import (
    HOSTILE,
    extract_text,
    find_unknown_numbers,
    render_section,
    render_without_figures,
)

from forerun._launcher.report.answers.outcome import format_choice, format_outcome, format_study
from forerun._launcher.report.figures import plots
from forerun._launcher.report.figures.panel import render_svg
from forerun._launcher.report.page.header import ReportHeader, choose_next_command, format_next_line
from forerun._launcher.report.page.page import render_report, write_report
from forerun._launcher.report.views.report_model import to_report
from forerun._launcher.study.stages.next_runs import NextRuns

STAGES = ("search", "transfer", "ladder", "fit", "frontier", "choice", "decision", "digest")


@pytest.fixture
def body():
    """JSON of a finished study's report, which a test may change."""
    return make_finished_body()


@pytest.fixture(scope="module")
def page():
    """HTML of a finished study's report."""
    return render_report(make_finished_body())


def render_decision(body, about=None):
    """Return the HTML of the page's first section, which has the headline and the gates."""
    return render_section("decision", body, about)


def test_every_number_on_the_page_is_in_the_json(page, body):
    assert find_unknown_numbers(page, body) == []


def test_number_that_is_not_in_the_json_is_found(page, body):
    planted = page.replace("</h1>", " 0.31337</h1>")
    assert find_unknown_numbers(planted, body) == ["0.31337"]
    body["choice"]["prediction"]["loss"] += 0.01
    body["decision"]["predicted"]["loss_nats"] += 0.01
    assert find_unknown_numbers(page, body), "the page shows the loss before the change"


@pytest.mark.parametrize("missing", [STAGES, STAGES[2:], STAGES[4:]])
def test_unfinished_study_names_the_missing_stages_and_their_commands(body, missing):
    body |= dict.fromkeys(missing)
    body["gates"] = []
    source = render_without_figures(body)
    text = extract_text(source)
    for stage, verb in (("search", "sweep"), ("transfer", "transfer"), ("ladder", "ladder")):
        is_missing = body[stage] is None or (stage == "ladder" and body["fit"] is None)
        assert (f"forerun {verb} PLAN" in text) == is_missing
    assert "Nothing to launch yet" in text
    assert find_unknown_numbers(source, body) == []


def make_every_run_diverge(transfer):
    """Change section `transfer` as if every run had diverged."""
    no_optimum = {
        "log2_value": None,
        "value": None,
        "interval_log2": None,
        "loss_nats": None,
        "curve": [],
        "status": "too_few",
    }
    verdicts = [test["verdict"] for test in transfer["tests"]]
    for verdict in [*verdicts, verdicts[0]["control"], transfer["together"]]:
        for optimum in verdict.get("optima", ()):
            optimum.update(no_optimum)
        verdict |= {
            "outcome": "cannot_tell",
            "transferred_value": None,
            "regret_nats": {"value": None, "interval": None},
        }
        if "optima" in verdict:
            verdict |= {
                "power": None,
                "transferred_log2": None,
                "cost_of_2x_off_nats": None,
                "noise_nats": None,
                "cost_of_2x_off_interval": None,
                "values_tried": None,
            }
            for key in ("drift_octaves_per_doubling", "offset_octaves"):
                verdict[key] = {"value": None, "interval": None}
    for test in transfer["tests"]:
        for run in test["runs"]:
            run |= {"loss_nats": None, "status": "diverged"}


def test_report_without_a_law_or_an_optimum_is_rendered(body):
    # The fit is unidentified.
    body |= dict.fromkeys(("frontier", "choice", "decision", "digest"))
    body["gates"] = []
    body["fit"] |= {"status": "unidentified", "residual_sd": None, "backtest": None}
    for member in body["fit"]["members"]:
        unknown = ("params_vs_flops", "tokens_vs_flops", "loss_at_choice_nats")
        member.update(dict.fromkeys(unknown), status="unidentified", weight=0.0)
    body["fit"]["parameters"] = dict.fromkeys(body["fit"]["parameters"])
    body["fit"]["intervals"] = dict.fromkeys(body["fit"]["intervals"])
    for rung in body["ladder"]["rungs"]:
        rung["fitted_nats"] = None
    body["ladder"]["rungs"][0]["loss_nats"] = None

    # Every run of search and transfer diverged, and the coordinate check became non-finite.
    make_every_run_diverge(body["transfer"])
    for trial in body["search"]["trials"]:
        trial |= {"loss_nats": None, "status": "diverged"}
    body["coordinates"]["sp"] |= {"layers": [], "not_finite_width": 64, "not_finite_step": 3}
    text = extract_text(render_report(body))
    for phrase in (
        "no law fits it",
        "too few",
        "width 64 became non-finite at step 3",
        "The rungs identify no law",
    ):
        assert phrase in text
    assert "The optimum against size" not in text


def test_inconclusive_forecast_is_not_the_headline(body):
    assert 'class="big"' in render_decision(
        body
    ) and "cannot be predicted yet" not in render_report(body)
    body["gates"][2] |= {"outcome": "cannot_tell", "reason": "at_bound"}
    body["accepted"] = {"fit": "we know"}
    top = render_decision(body)
    number = f"{body['decision']['predicted']['loss_nats']:.3f}"
    assert 'class="big"' not in top and number in top
    assert top.index("The loss cannot be predicted yet") < top.index(number)
    assert "the forecast is inconclusive (see the fit gate below)" in top
    assert top.count("at_bound") == 1
    ladder_section = render_section("ladder", body)
    assert "the forecast is inconclusive: the fit gate cannot tell: at_bound" in ladder_section
    body["choice"] |= {"shape": body["decision"]["shape"], "num_steps": 10}
    text = format_choice(to_report(body))
    assert text.index("the forecast is inconclusive") < text.index("choice: width")


def test_headline_follows_the_gates(body):
    assert "<h1>Ready to launch: width 32, " in render_decision(body)
    body["gates"][1] |= {"outcome": "failed", "reason": "it drifts"}
    body["gates"][2] |= {"outcome": "cannot_tell", "reason": "too few rungs"}
    assert "<h1>Do not launch yet: transfer failed</h1>" in render_decision(body)
    body["accepted"] = {"transfer": "the cost is small"}
    assert "<h1>Not ready to launch: 1 check inconclusive</h1>" in render_decision(body)
    body["accepted"]["fit"] = "a rehearsal follows"

    # An accepted failure stays a failure, on the page and in the terminal.
    text = extract_text(render_decision(body))
    # The phrase may begin with a capital or not.
    assert "Accepted failure: transfer failed" in text and "eady to launch" not in text
    body["choice"] |= {"shape": body["decision"]["shape"], "num_steps": 10}
    outcome = format_outcome(to_report(body), None)
    assert outcome.startswith("accepted failure: gate transfer failed")
    assert "eady to launch" not in format_study(to_report(body), None, Path("study"))
    with_user_trainer = to_report(body | {"own_run": {"line": "train"}})
    outcome = format_outcome(with_user_trainer, None)
    assert outcome == "accepted failure: gate transfer failed"

    # An accepted doubt is a risk.
    body["gates"][1]["outcome"] = "cannot_tell"
    text = extract_text(render_decision(body))
    assert "Ready to launch at the accepted risk" in text
    for phrase in ("Accepted by hand:", "the cost is small", "a rehearsal follows"):
        assert phrase in text


def test_equal_learning_rates_share_a_row_and_equal_outcomes_a_line(body):
    rates = {group["settings"]["learning_rate"] for group in body["decision"]["groups"]}
    body["gates"] += [{"name": "ladder_tuned", "outcome": "cannot_tell", "reason": "few seeds"}]
    body["gates"][1] |= {"outcome": "cannot_tell"}
    header = ReportHeader(
        name="a",
        date="",
        next_command="",
        device_hours=0,
        usd=None,
        lacking=("transfer", "ladder_tuned"),
    )
    text = extract_text(render_decision(body, header)).split("What is not known")[0]
    assert all(text.count(f"{rate:.4g}:") == 1 for rate in rates)
    assert "embedding, block gain, final gain" in text
    assert "transfer and ladder tuned" in text and "coordinates, fit and data" in text

    # Only the header knows that the two gates lack runs.
    text_without_header = extract_text(render_decision(body, None)).split("What is not known")[0]
    assert "Too few runs" in text and "Too few runs" not in text_without_header


def test_next_command_follows_the_study(tmp_path, body):
    frozen, plan = tmp_path / "frozen" / body["digest"], tmp_path / "plan.toml"

    def choose(body, next_runs=None, **options):
        return choose_next_command(to_report(body), next_runs, tmp_path, **options)

    # A decided study is frozen, rehearsed, launched, and watched.
    assert choose(body) == f"forerun freeze {tmp_path}"
    frozen.mkdir(parents=True)
    (frozen / "launch.json").touch()
    short_name = frozen.with_name(frozen.name[:12])
    assert choose(body) == f"forerun rehearse {short_name}"
    main_run = {"steps": [], "train_loss_nats": [], "validation_loss_nats": None}
    # A run that --steps stopped was not rehearsed.
    verbs = {"stopped": "rehearse", "interrupted": "launch", None: "watch"}
    for event, verb in verbs.items():
        with_main_run = body | {"main_run": main_run | {"event": event}}
        assert choose(with_main_run) == f"forerun {verb} {short_name}"
    assert choose(body, at_work=True) == f"forerun status {tmp_path} --follow"

    # Runs that open the one closed gate come first.
    next_runs = NextRuns(
        gates=("transfer",),
        sets=(),
        num_runs=1,
        flops=1.0,
        seconds=None,
        usd=None,
        times_spent=None,
    )
    body["gates"][1] |= {"outcome": "cannot_tell"}
    assert choose(body) == f"forerun freeze {tmp_path}"
    assert choose(body, next_runs) == f"forerun transfer {plan} --study {tmp_path} --spend"
    more_seeds = dataclasses.replace(next_runs, sets=("transfer.num_seeds=4",))
    assert choose(body, more_seeds).endswith(f"--fork {tmp_path} --set transfer.num_seeds=4")

    # These runs would not open a second closed gate.
    body["gates"][0] |= {"outcome": "cannot_tell"}
    assert choose(body, next_runs) == f"forerun freeze {tmp_path}"
    line = format_next_line(to_report(body), None, tmp_path)
    assert line.startswith(f"next: forerun freeze {tmp_path}, which ")

    # A study without a choice is forked, and a study without a fit is continued.
    without_choice = body | {"choice": None}
    assert choose(without_choice) == ""
    assert "--fork" in format_next_line(to_report(without_choice), None, tmp_path)
    body |= dict.fromkeys(("fit", "choice", "decision", "digest"))
    assert choose(body) == f"forerun run {plan} --study {tmp_path}"


def test_section_on_the_unknown_names_untested_axes(page, body):
    text = extract_text(page).split("What is not known")[1]
    section = text.split("Do the hyperparameters transfer?")[0]
    for phrase in (
        "Duration.",
        "up to 819,200; the launch is at 13.5 M, 16.5 times beyond",
        "Extrapolation.",
        "Clip norm. No test shows that it stays the same over duration.",
    ):
        assert phrase in section


def test_text_of_a_study_is_escaped(body):
    body["gates"][0] |= {"reason": HOSTILE, "outcome": "failed", "name": HOSTILE}
    body["accepted"] = {HOSTILE: HOSTILE}
    body["question"]["note"] = HOSTILE
    body["fit"]["warnings"] = [HOSTILE]
    body["ladder"]["tuned"]["reason"] = HOSTILE
    body["ladder"]["checks"][1]["words"] = f"width: {HOSTILE}"
    test = body["transfer"]["tests"][1]
    test["verdict"]["reasons"] = [HOSTILE]
    test["verdict"]["optima"][0] |= {
        "log2_value": None,
        "value": None,
        "interval_log2": None,
        "status": HOSTILE,
    }
    body["transfer"]["together"]["reasons"] = [HOSTILE]
    body["transfer"]["values"][0]["rule"] = HOSTILE
    body["coordinates"]["sp"]["layers"][0] |= {"layer": HOSTILE, "cause": HOSTILE}
    source = render_report(body)
    assert "<script" not in source
    assert str(escape(HOSTILE)) in source
    for svg in re.findall(r"<svg.*?</svg>", source, flags=re.DOTALL):
        ET.fromstring(svg)


def test_page_loads_nothing_and_is_small(page):
    bare = page.replace('xmlns="http://www.w3.org/2000/svg"', "")
    for banned in ("http", "<script", "<link", "<img", "@import", "javascript:", "src="):
        assert banned not in bare
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', bare))
    assert len(page) < 300_000


@pytest.fixture(scope="module")
def drawings():
    """SVG of every figure of the page, by its name."""
    body = make_finished_body()
    panels = [
        plots.coordinates(body, "mup"),
        plots.coordinates(body, "sp"),
        plots.search(body),
        plots.ladder(body),
        plots.aspect(body),
        plots.wider(body),
        plots.branches(body),
        plots.basins(body, arm="sp"),
    ]
    for test in body["transfer"]["tests"]:
        panels.append(plots.basins(body, test["hyperparameter"], test["axis"]))
        if test["hyperparameter"] != "clip_norm":
            panels.append(plots.drift(body, test["hyperparameter"], test["axis"]))
    return {panel.name: render_svg(panel) for panel in panels}


def test_every_figure_is_small_valid_and_titled(drawings, page):
    assert len(drawings) == page.count("<figure>")
    for name, svg in drawings.items():
        root = ET.fromstring(svg)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert root.get("aria-labelledby") == f"{name}-title"
        assert root.find("{http://www.w3.org/2000/svg}title").text
        assert len(svg) < 60_000
        assert f'id="{name}-title"' in page


def test_ids_are_unique_and_references_resolve(page):
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    references = re.findall(r'href="#([^"]*)"', page)
    references += re.findall(r"url\(#([^)]*)\)", page)
    references += re.findall(r'aria-labelledby="([^"]*)"', page)
    assert references and set(references) <= set(ids)


def test_users_matplotlib_settings_change_no_figure(body):
    import matplotlib

    before = render_svg(plots.search(body))
    with matplotlib.rc_context({"font.size": 30, "xtick.direction": "in", "ytick.labelsize": 20}):
        assert render_svg(plots.search(body)) == before
        assert matplotlib.rcParams["font.size"] == 30, "the user's settings are kept"


def test_report_is_written_as_json_and_as_deterministic_html(tmp_path, body, page):
    write_report(tmp_path, to_report(copy.deepcopy(body)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json"]
    assert json.loads((tmp_path / "report.json").read_text()) == body
    assert (tmp_path / "report.html").read_text() == page
