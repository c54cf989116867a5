"""The report's sections on the ladder and its fit: laws, back-test, rungs that decide, rates checked, next runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launcher.figures import fits as figures_fits
from launcher.study.gates import forecast_warnings
from launcher.views import html as show
from launcher.views.fit import rung_names
from launcher.views.html import Body
from scaling_fits.laws.forms import SHAPES

NUM_INFLUENTIAL = 5
_WEIGHTING = {
    "even": "All rungs count alike: their residuals look like noise, or they are too few to weigh any less.",
    "near_frontier": (
        "No law fits all rungs to within their noise, so a rung counts the more, the nearer its loss is to the best "
        "for its compute."
    ),
}


def scaling(body: Body) -> str:
    """What each law says, what the fit misses, what it hangs on, and whether the rungs' rates were right."""
    heading = "What will the main run's loss be?"
    if body["ladder"] is None or body["fit"] is None:
        missing = show.missing("The scaling ladder has not ended.", "ladder", body["progress"].get("ladder"))
        return show.section("scaling", heading, missing)
    fit = body["fit"]
    figure = show.figure(figures_fits.laws(body), _laws_caption(body), "What each law says")
    parts = [f'<div class="wide">{figure}</div>', _members(body)]
    beside = [f"<div>{_backtest(fit)}{_law(fit)}</div>"]
    if fit["residual_sd"] is not None:
        beside.insert(0, show.figure(figures_fits.residuals(body), _residuals_caption(body), "What the fit misses"))
    warnings = f"<h3>Warnings of the fit</h3>{show.bullets([show.text(w) for w in fit['warnings']])}"
    parts += [show.pair(*beside), _influence(body), _checks(body["ladder"])]
    return show.section("scaling", heading, *parts, warnings if fit["warnings"] else "")


def _laws_caption(body: Body) -> str:
    if body["choice"] is None:
        return f"The ladder's {body['fit']['num_runs']} rungs identify no law, so there is no frontier to draw."
    predicted, backtest = body["choice"]["prediction"], body["fit"]["backtest"]
    said = "".join(f"{show.text(warning)}. " for warning in forecast_warnings(body["gates"])) + (
        f"The best loss for each compute, with its {show.percent(predicted['level'])} band for one new run. The main "
        f"run, at {show.flops(predicted['flops'])} FLOPs: {show.loss(predicted['loss'])} nats "
        f"{show.interval(predicted['interval'])}, {show.number(predicted['extrapolation'], '.3g')} times beyond the "
        "largest rung, right of which no run checks any line. "
    )
    if drawn_apart(body["fit"]):
        said += "Each law's own frontier is a thin line: where these part, the law matters more than the rungs' noise. "
    if backtest is not None and backtest["num_covered"] is not None:
        said += (
            f"Diamonds: the largest rungs as those below them foretold; {backtest['num_covered']} of "
            f"{backtest['num_held_out']} came to lie within their intervals."
        )
    return said


def drawn_apart(fit: Any) -> bool:
    """Whether there are several laws to hold beside each other."""
    return sum(member["frontier"] is not None for member in fit["members"]) > 1


def _residuals_caption(body: Body) -> str:
    fit, rungs = body["fit"], body["ladder"]["rungs"]
    said = (
        f"Shaded: one and two standard deviations ({show.percent(fit['residual_sd'])} each) of the {fit['num_runs']} "
        "rungs about the heaviest law. Dots should lie on both sides at every width and every compute; a slope or a "
        "bow is a law that is wrong there. "
    )
    if fit["influence"] is None:
        return said
    all_names = rung_names(rungs)
    names = [all_names[row["rung"]] for row in fit["influence"]["rows"] if row["outlier"]]
    if not names:
        return f"{said}By the scatter of the others, no rung is an outlier."
    return f"{said}Off by more than the scatter of the others takes a rung of its weight: {'; '.join(names)}."


def _members(body: Body) -> str:
    """Every law with its weight and what it says of the main run."""
    fit = body["fit"]
    rows = [
        (f"{show.text(member['form'])}: {SHAPES[member['form']].formula}", show.percent(member["weight"], ".0f"),
         show.chip(member["status"]), show.loss(member["parameters"].get("E")),
         show.number(member["params_vs_flops"], ".2f"), show.number(member["tokens_vs_flops"], ".2f"),
         show.loss(member["loss_at_choice_nats"]))
        for member in fit["members"]
    ]  # fmt: skip
    head = ("law", "weight", "status", "E (nats)", "N grows as C to the", "D grows as C to the", "main run (nats)")
    said = "Laws have their weights from how well each foretold larger budgets, held out, from smaller ones. "
    if len(rows) == 1:
        said = "One law, as the plan asks; others might say otherwise. "
    said += _WEIGHTING[fit["weighting"]]
    if not any(member["weight"] for member in fit["members"]):
        said = "The rungs identify none of these laws; the fit's warnings say why."
    said += " N: parameters; D: tokens; C: compute, 6ND."
    return f"<h3>The laws</h3>{show.table(head, rows, left=(0, 2))}<p>{said}</p>"


def _law(fit: Any) -> str:
    rows = [
        (show.text(name), show.number(value), show.interval(fit["intervals"][name], ".3g"))
        for name, value in fit["parameters"].items()
    ]
    growth = [
        (show.words(name), show.number(found["value"], ".3f"), show.interval(found["interval"]))
        for name, found in fit["exponents"].items()
    ]
    return (
        f"<h3>The heaviest law's parameters {show.chip(fit['status'])}</h3>"
        f"{show.table(('parameter', 'value', 'interval'), rows + growth)}"
    )


def _backtest(fit: Any) -> str:
    backtest = fit["backtest"]
    if backtest is None:
        return "<h3>Back-test</h3><p>Too few rungs to hold the largest ones out.</p>"
    head = ("params", "tokens", "measured", "predicted", "interval", "in it")
    rows = [
        (show.count(run["params"]), show.count(run["tokens"]), show.loss(run["loss"]), show.loss(run["predicted"]),
         show.interval(run["interval"]), {True: "yes", False: "no", None: "–"}[run["covered"]])
        for run in backtest["runs"]
    ]  # fmt: skip
    said = (
        f"<p>{backtest['num_held_out']} of the rungs, up to {show.number(backtest['extrapolation'], '.3g')} times the "
        f"compute of those left in, predicted from the other {backtest['num_fitted']}: mean error "
        f"{show.percent(backtest['mean_error'], '+.1f')}, at most {show.percent(backtest['largest_error'])} off.</p>"
    )
    return f"<h3>Back-test</h3>{said}{show.table(head, rows)}"


def _influence(body: Body) -> str:
    """The rungs without which the choice would move most."""
    found, names = body["fit"]["influence"], rung_names(body["ladder"]["rungs"])
    if found is None:
        return ""
    rows = [
        (show.text(names[row["rung"]]), _shift(row["params_shift"]), _shift(row["loss_shift"]),
         show.percent(row["share_of_arm"], ".0f"), show.number(row["residual_sds"], "+.1f"))
        for row in found["rows"][:NUM_INFLUENTIAL]
    ]  # fmt: skip
    head = ("without this rung", "best size", "main run's loss", "of its interval's arm", "off the law (sd)")
    said = (
        f"How the {show.text(found['form'])} law, fitted again without one rung, would move the best size and the main "
        "run's loss. The rungs that move them most come first."
    )
    warnings = found["warnings"]
    verdict = (
        show.bullets([show.text(warning) for warning in warnings])
        if warnings
        else "<p>The choice hangs on no single rung: none moves it by half an arm of its interval.</p>"
    )
    return f"<h3>What the choice hangs on</h3><p>{said}</p>{show.table(head, rows)}{verdict}"


def _shift(share: float | None) -> str:
    """How far a choice moves; without a number the other rungs do not tell it."""
    return "not determined" if share is None else show.percent(share, "+.2g" if abs(share) < 0.995 else "+.0f")


def _checks(ladder: Any) -> str:
    """Rungs that were run at other rates too, and what these say of the forecast."""
    tuned, checks = ladder.get("tuned"), ladder.get("checks") or []
    chip = f" {show.chip(tuned['outcome'])}" if tuned else ""
    parts = [f"<h3>Were the rungs' learning rates right?{chip}</h3>"]
    if tuned:
        parts.append(f"<p>{show.text(tuned['reason'])}</p>")
    if not checks:
        parts.append("<p>No rung was run at other rates, so nothing here tells it.</p>" if not tuned else "")
        return "".join(parts)
    head = (
        "rung",
        "octaves off",
        "learning rate",
        "loss (nats)",
        "over the best (nats)",
        "best at (octaves)",
        "verdict",
    )
    parts.append(show.table(head, [_check_row(check) for check in checks], left=(0, 6)))
    reason = tuned["reason"] if tuned else ""
    untold = [check["words"] for check in checks if check["outcome"] != "tuned" and check["words"] not in reason]
    parts.append(show.bullets([show.text(words) for words in untold]) if untold else "")
    parts.append(_sensitivity(ladder["sensitivity"]))
    return "".join(parts)


def _check_row(check: Any) -> Sequence[str]:
    tried, excess, optimum = check["offsets"], check["excess_nats"], check["optimum_octaves"]
    return (
        f"width {check['width']}, {show.count(check['num_steps'])} steps",
        "<br>".join(show.number(one["octaves"], "+g") if one["octaves"] else "0" for one in tried),
        "<br>".join(show.number(one["learning_rate"], ".3g") for one in tried),
        "<br>".join(show.number(one["loss_nats"], ".4f") for one in tried),
        f"{show.number(excess['value'], '.4f')}<br>{show.interval(excess['interval'], '.4f')}",
        f"{show.number(optimum['value'], '+.2f')}<br>{show.interval(optimum['interval'], '+.2f')}",
        show.chip(check["outcome"]),
    )


def _sensitivity(found: Any) -> str:
    """How the forecast would move if the rungs had their best rates."""
    if found is None:
        return ""
    shift = found["shift_nats"]
    said = (
        "If every rung lost what a line through the checked ones says, and this were taken off, the main run's "
        f"forecast would move by {show.number(shift['value'], '+.4f')} nats {show.interval(shift['interval'], '+.4f')}"
    )
    if found["with_better_neighbours_nats"] is not None:
        said += (
            "; with the better neighbours' losses in the rungs' place, by "
            f"{show.number(found['with_better_neighbours_nats'], '+.4f')} nats"
        )
    return f"<p>{said}. The fit itself uses the rungs as they are.</p>"


def next_runs(body: Body) -> str:
    """Runs that would narrow the main run's interval most for their compute."""
    found, heading = body.get("next_runs"), "What would narrow this most"
    if found is None:
        return ""
    if not found["runs"]:
        return show.section("next", heading, f"<p>No run to add is worth its compute: {show.text(found['note'])}.</p>")
    rows = [
        (show.text(run["width"]), show.count(run["params"]), show.count(run["tokens"]), show.flops(run["flops"]),
         show.percent(run["budget_share"], ".2g"), show.percent(run["interval_shrink"], ".0f"))
        for run in found["runs"]
    ]  # fmt: skip
    head = ("width about", "params", "tokens", "FLOPs (6ND)", "of the main run's", "narrows the interval by")
    what = "A rung" if len(rows) == 1 else "Rungs, in this order,"
    said = (
        f"<p>{what} to add to the ladder, expected to narrow the main run's interval by "
        f"{show.percent(found['interval_shrink'], '.0f')}{'' if len(rows) == 1 else ' together'}. This goes "
        f"{show.text(found['note'])}.</p>"
    )
    return show.section("next", heading, said, show.table(head, rows, left=()))
