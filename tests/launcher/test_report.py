"""The page says what the body says: every number, at every moment of a study, safely, and the same
each time.
"""

import copy
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from example_report import finished_body
from markupsafe import escape

from launcher.answers.outcome import choice_text, closing_text, outcome_line
from launcher.figures import plots
from launcher.figures.panel import svg_of
from launcher.report.about import About, next_command, next_line
from launcher.report.page import environment, report_page, write_report
from proxies.core.notation import format_duration

HOSTILE = '<script>alert("1")</script> & $\\frac{a}{b}$ \' </svg>'
STAGES = ("search", "transfer", "ladder", "fit", "frontier", "choice", "decision", "digest")


@pytest.fixture
def body():
    return finished_body()


@pytest.fixture(scope="module")
def whole():
    return report_page(finished_body())


def undrawn(body, page=report_page):
    """The page with its figures composed and not written, which is what takes time: for tests of
    what stands beside.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("launcher.report.page.svg_of", lambda panel: "")
        return page(body)


def part_of(name, body, about=None):
    """One template by itself."""
    return undrawn(
        body,
        lambda body: environment().get_template(f"{name}.html.j2").render(body=body, about=about),
    )


def decision(body, about=None):
    return part_of("decision", body, about)


class _Text(HTMLParser):
    """What a reader reads: no style, no axis ticks; a superscript as ^."""

    def __init__(self):
        super().__init__()
        self.parts, self.silent = [], []

    def handle_starttag(self, tag, attrs):
        if self.silent or tag == "style" or ("class", "tick") in attrs:
            self.silent.append(tag)
        elif tag == "sup":
            self.parts.append("^")
        elif tag != "span":
            self.parts.append(" ")

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        if self.silent and self.silent[-1] == tag:
            self.silent.pop()

    def handle_data(self, data):
        if not self.silent:
            self.parts.append(data)


def text_of(source):
    reader = _Text()
    # Void elements open nothing that ends.
    reader.feed(re.sub(r"<(br|meta)[^>]*>", " ", source))
    return " ".join("".join(reader.parts).replace("\u00a0", " ").replace("−", "-").split())


def leaves_of(value):
    if isinstance(value, dict):
        value = [*value.values(), *value]
    return (
        [leaf for item in value for leaf in leaves_of(item)] if isinstance(value, list) else [value]
    )


NUMBER = re.compile(
    r"(?<![\w.])[+-]?(?P<digits>\d{1,3}(?:,\d{3})+|\d+)(?:\.(?P<decimals>\d+))?"
    r"(?:e(?P<power>[+-]\d+)|(?P<suffix> ?[kMBT])\b)?(?![\w])"
)
SUFFIXES = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def derived(body):
    """What follows from the body: cells' loss above their size's best, intervals as values, the
    target's reach.
    """
    found = []
    for test in (body["transfer"] or {"tests": []})["tests"]:
        cells = {}
        for run in test["runs"]:
            cells.setdefault((run["arm"], run["size"]), {}).setdefault(
                run["log2_value"], []
            ).append(run["loss_nats"])
        for row in cells.values():
            means = [sum(losses) / len(losses) for losses in row.values() if None not in losses]
            found += [mean - min(means) for mean in means]
        verdict = test["verdict"]
        found += [
            2.0**end for optimum in verdict["optima"] for end in optimum["interval_log2"] or ()
        ]
        found += [
            o["lowest_run_nats"] - o["loss_nats"]
            for o in verdict["optima"]
            if o["loss_nats"] is not None
        ]
        found.append(verdict["target_size"] / max(optimum["size"] for optimum in verdict["optima"]))
    return found


def unknown_numbers(source, body):
    """Numbers of a page that no number of the body, as it is, in percent, minutes or hours, rounds
    to, nor a " "duration."""
    leaves, shown = leaves_of(body), text_of(source).replace("2^", " ")
    known = [
        abs(leaf) for leaf in leaves if isinstance(leaf, int | float) and not isinstance(leaf, bool)
    ]
    known += [value * factor for value in known for factor in (100, 1 / 60, 1 / 3600)]
    known += derived(body)
    for duration in {format_duration(leaf) for leaf in leaves if isinstance(leaf, int | float)}:
        shown = shown.replace(duration, " ") if duration.count(" ") > 1 else shown  # 3 min 05 s
    for said in sorted(
        {leaf for leaf in leaves if isinstance(leaf, str) and re.search(r"\d", leaf)}, key=len
    )[::-1]:
        shown = shown.replace(said.replace("−", "-"), " ")
    missing = []
    for match in NUMBER.finditer(shown):
        scale = 10.0 ** int(match["power"] or 0) * SUFFIXES.get((match["suffix"] or "").strip(), 1)
        value = float(f"{match['digits'].replace(',', '')}.{match['decimals'] or 0}") * scale
        # Four digits at most are shown of a large plain number's mantissa, so a zero at the end may
        # be dropped.
        rounding = 0.5001 * scale * 10.0 ** -len(match["decimals"] or "") + 1e-9 * value
        if not any(abs(value - candidate) <= rounding for candidate in known):
            missing.append(match.group())
    return missing


def test_every_number_on_the_page_is_in_the_json(whole, body):
    assert unknown_numbers(whole, body) == []


def test_a_number_from_nowhere_is_noticed(whole, body):
    planted = whole.replace("</h1>", " 0.31337</h1>")
    assert unknown_numbers(planted, body) == ["0.31337"]
    body["choice"]["prediction"]["loss"] += 0.01
    body["decision"]["predicted"]["loss_nats"] += 0.01
    assert unknown_numbers(whole, body), "a loss that is not the body's"


@pytest.mark.parametrize("missing", [STAGES, STAGES[2:], STAGES[4:]])
def test_a_half_done_study_says_what_is_missing_and_how_to_run_it(body, missing):
    body |= dict.fromkeys(missing)
    body["gates"] = []
    source = undrawn(body)
    shown = text_of(source)
    for stage, verb in (("search", "sweep"), ("transfer", "transfer"), ("ladder", "ladder")):
        assert (f"forerun {verb} PLAN" in shown) == (
            body[stage] is None or (stage == "ladder" and body["fit"] is None)
        )
    assert "Nothing to launch yet" in shown
    assert unknown_numbers(source, body) == []


def know_nothing(transfer):
    """Every run diverged."""
    nothing = {
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
            optimum.update(nothing)
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


def test_evidence_that_decides_nothing_still_shows(body):
    """No law, no optimum, runs that all diverged, a check that blew up at once: each is said, none
    crashes.
    """
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
    know_nothing(body["transfer"])
    for trial in body["search"]["trials"]:
        trial |= {"loss_nats": None, "status": "diverged"}
    body["coordinates"]["sp"] |= {"layers": [], "not_finite_width": 64, "not_finite_step": 3}
    shown = text_of(report_page(body))
    for said in (
        "no law fits it",
        "too few",
        "width 64 became non-finite at step 3",
        "The rungs identify no law",
    ):
        assert said in shown
    assert "The optimum against size" not in shown


def test_an_inconclusive_forecast_is_no_headline(body):
    assert 'class="big"' in decision(body) and "cannot be predicted yet" not in report_page(body)
    body["gates"][2] |= {"outcome": "cannot_tell", "reason": "at_bound"}
    body["accepted"] = {"fit": "we know"}
    top = decision(body)
    number = f"{body['decision']['predicted']['loss_nats']:.3f}"
    assert 'class="big"' not in top and number in top
    assert top.index("The loss cannot be predicted yet") < top.index(number)
    assert (
        "the forecast is inconclusive (see the fit gate below)" in top
        and top.count("at_bound") == 1
    )
    assert "the forecast is inconclusive: the fit gate cannot tell: at_bound" in part_of(
        "ladder", body
    )
    body["choice"] |= {"shape": body["decision"]["shape"], "num_steps": 10}
    told = choice_text(body)
    assert told.index("the forecast is inconclusive") < told.index("choice: width")


def test_the_headline_follows_the_gates(body):
    assert "<h1>Ready to launch: width 32, " in decision(body)
    body["gates"][1] |= {"outcome": "failed", "reason": "it drifts"}
    body["gates"][2] |= {"outcome": "cannot_tell", "reason": "too few rungs"}
    assert "<h1>Do not launch yet: transfer failed</h1>" in decision(body)
    body["accepted"] = {"transfer": "the cost is small"}
    assert "<h1>Not ready to launch: 1 check inconclusive</h1>" in decision(body)
    body["accepted"]["fit"] = "a rehearsal follows"
    shown = text_of(decision(body))
    assert "Accepted failure: transfer failed" in shown and "eady to launch" not in shown
    body["choice"] |= {"shape": body["decision"]["shape"], "num_steps": 10}
    assert outcome_line(body, None).startswith("accepted failure: gate transfer failed")
    assert "eady to launch" not in closing_text(body, None, Path("study"))
    assert (
        outcome_line(body | {"own_run": {"line": "train"}}, None)
        == "accepted failure: gate transfer failed"
    )
    body["gates"][1]["outcome"] = "cannot_tell"
    shown = text_of(decision(body))
    assert "Ready to launch at the accepted risk" in shown
    assert (
        "Accepted by hand:" in shown
        and "the cost is small" in shown
        and "a rehearsal follows" in shown
    )


def test_equal_learning_rates_are_one_row_and_gates_that_lack_runs_one_line(body):
    rates = {group["settings"]["learning_rate"] for group in body["decision"]["groups"]}
    body["gates"] += [{"name": "ladder_tuned", "outcome": "cannot_tell", "reason": "few seeds"}]
    body["gates"][1] |= {"outcome": "cannot_tell"}
    shown = About(
        name="a",
        date="",
        next_command="",
        device_hours=0,
        usd=None,
        lacking=("transfer", "ladder_tuned"),
    )
    first, alone = (
        text_of(decision(body, at)).split("What is not known")[0] for at in (shown, None)
    )
    assert (
        all(first.count(f"{rate:.4g}:") == 1 for rate in rates)
        and "embedding, block gain, final gain" in first
    )
    assert "transfer and ladder tuned" in first and "coordinates, fit and data" in first
    # what they lack is not known from their outcomes
    assert "Too few runs" in first and "Too few runs" not in alone


def test_the_next_command_follows_the_study(tmp_path, body):
    frozen, plan = tmp_path / "frozen" / body["digest"], tmp_path / "plan.toml"
    after = {"gates": ["transfer"], "sets": []}
    assert next_command(body, None, tmp_path) == f"forerun freeze {tmp_path}"
    frozen.mkdir(parents=True)
    (frozen / "launch.json").touch()
    named = frozen.with_name(frozen.name[:12])
    assert next_command(body, None, tmp_path) == f"forerun rehearse {named}"
    # nobody rehearsed; --steps stopped it
    begun = {"stopped": "rehearse", "interrupted": "launch", None: "watch"}
    for event, verb in begun.items():
        assert (
            next_command(body | {"main_run": {"event": event}}, None, tmp_path)
            == f"forerun {verb} {named}"
        )
    assert next_command(body, None, tmp_path, at_work=True) == f"forerun status {tmp_path} --follow"
    body["gates"][1] |= {"outcome": "cannot_tell"}
    assert next_command(body, None, tmp_path) == f"forerun freeze {tmp_path}"
    assert (
        next_command(body, after, tmp_path) == f"forerun transfer {plan} --study {tmp_path} --spend"
    )
    more = after | {"sets": ["transfer.num_seeds=4"]}
    assert next_command(body, more, tmp_path).endswith(
        f"--fork {tmp_path} --set transfer.num_seeds=4"
    )
    body["gates"][0] |= {"outcome": "cannot_tell"}  # those runs would not open this one
    assert next_command(body, after, tmp_path) == f"forerun freeze {tmp_path}"
    assert next_line(body, None, tmp_path).startswith(f"next: forerun freeze {tmp_path}, which ")
    none = body | {"choice": None}
    assert next_command(none, None, tmp_path) == "" and "--fork" in next_line(none, None, tmp_path)
    body |= dict.fromkeys(("fit", "choice", "decision", "digest"))
    assert next_command(body, None, tmp_path) == f"forerun run {plan} --study {tmp_path}"


def test_the_unknown_is_told(whole, body):
    told = text_of(whole).split("What is not known")[1].split("Do the hyperparameters transfer?")[0]
    for said in (
        "Duration.",
        "up to 819,200; the launch is at 13.5 M, 16.5 times beyond",
        "Extrapolation.",
        "Clip norm. No test shows that it stays the same over duration.",
    ):
        assert said in told


def test_what_a_study_says_is_escaped(body):
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
    source = report_page(body)
    assert "<script" not in source
    assert str(escape(HOSTILE)) in source
    for svg in re.findall(r"<svg.*?</svg>", source, flags=re.DOTALL):
        ET.fromstring(svg)


def test_the_page_needs_nothing_from_anywhere(whole):
    bare = whole.replace('xmlns="http://www.w3.org/2000/svg"', "")
    for banned in ("http", "<script", "<link", "<img", "@import", "javascript:", "src="):
        assert banned not in bare
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', bare))
    assert len(whole) < 300_000


@pytest.fixture(scope="module")
def drawings():
    body = finished_body()
    drawn = [plots.coordinates(body, arm) for arm in ("mup", "sp")]
    drawn += [
        draw(body)
        for draw in (plots.search, plots.ladder, plots.aspect, plots.wider, plots.branches)
    ]
    drawn.append(plots.basins(body, arm="sp"))
    for test in body["transfer"]["tests"]:
        drawn.append(plots.basins(body, test["hyperparameter"], test["axis"]))
        if test["hyperparameter"] != "clip_norm":
            drawn.append(plots.drift(body, test["hyperparameter"], test["axis"]))
    return {panel.name: svg_of(panel) for panel in drawn}


def test_every_figure_is_small_sound_and_titled(drawings, whole):
    assert len(drawings) == whole.count("<figure>")
    for name, svg in drawings.items():
        root = ET.fromstring(svg)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert root.get("aria-labelledby") == f"{name}-title"
        assert root.find("{http://www.w3.org/2000/svg}title").text
        assert len(svg) < 60_000
        assert f'id="{name}-title"' in whole


def test_ids_do_not_clash_and_references_hold(whole):
    ids = re.findall(r'\bid="([^"]*)"', whole)
    assert len(ids) == len(set(ids))
    used = re.findall(r'href="#([^"]*)"', whole) + re.findall(r"url\(#([^)]*)\)", whole)
    used += re.findall(r'aria-labelledby="([^"]*)"', whole)
    assert used and set(used) <= set(ids)


def test_a_users_matplotlib_settings_change_nothing(body):
    import matplotlib

    before = svg_of(plots.search(body))
    with matplotlib.rc_context({"font.size": 30, "xtick.direction": "in", "ytick.labelsize": 20}):
        assert svg_of(plots.search(body)) == before
        assert matplotlib.rcParams["font.size"] == 30, "and they are left as they were"


def test_both_files_are_written_and_the_same_body_gives_the_same_bytes(tmp_path, body, whole):
    write_report(tmp_path, copy.deepcopy(body))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json"]
    assert json.loads((tmp_path / "report.json").read_text()) == body
    assert (tmp_path / "report.html").read_text() == whole
