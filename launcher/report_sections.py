"""The report's sections: each figure with its numbers, or what is missing and the command that runs it."""

from __future__ import annotations

from typing import Any

from launcher import figures
from launcher import report_html as show
from launcher.report_html import Body

_NUM_TOP_TRIALS = 8
_NUM_BUDGETS = 6


def _missing(body: Body, stage: str, what: str) -> str:
    return show.missing(what, "sweep" if stage == "search" else stage, body["progress"].get(stage))


def search(body: Body) -> str:
    """The search at the base width: every trial, and the best as a table."""
    heading = "Search at the base width"
    if body["search"] is None:
        return show.section("search", heading, _missing(body, "search", "The search has not ended."))
    asked, best = body["question"]["search"], body["search"]["best"]
    finished = sorted((t for t in body["search"]["trials"] if t["loss_nats"] is not None), key=lambda t: t["loss_nats"])
    head = ("trial", "learning rate", "warmup (share)", "clip", "loss (nats)")
    rows = [
        (show.text(trial["index"]), show.number(trial["learning_rate"]), show.number(trial["warmup_fraction"], ".3f"),
         show.number(trial["clip_norm"], ".3g"), show.number(trial["loss_nats"], ".4f"))
        for trial in finished[:_NUM_TOP_TRIALS]
    ]  # fmt: skip
    caption = (
        f"{asked['num_trials']} trials at width {body['question']['proxy']['base_width']}; best learning rate "
        f"{show.number(best['learning_rate'])}, warmup {show.number(best['warmup_fraction'], '.3f')} of the steps, "
        f"clip {show.number(best['clip_norm'])}. Colour: clip, from {show.number(asked['clip_norm'][0])} to "
        f"{show.number(asked['clip_norm'][1])}."
    )
    beside = f"<div><h3>The best trials</h3>{show.table(head, rows)}</div>"
    return show.section("search", heading, show.pair(show.figure(figures.search(body), caption), beside))


def scaling(body: Body) -> str:
    """Ladder, fit, frontier and residuals."""
    heading = "What will the main run's loss be?"
    if body["ladder"] is None or body["fit"] is None:
        return show.section("scaling", heading, _missing(body, "ladder", "The scaling ladder has not ended."))
    fit = body["fit"]
    panels = [show.figure(figures.scaling(body), _scaling_caption(body), "Loss against compute")]
    if fit["residual_sd"] is not None:
        caption = (
            f"The fit misses its {fit['num_runs']} rungs by {show.percent(fit['residual_sd'])} of the loss (one "
            "standard deviation, shaded)."
        )
        panels.append(show.figure(figures.residuals(body), caption, "What the fit misses"))
    warnings = f"<h3>Warnings of the fit</h3>{show.bullets([show.text(w) for w in fit['warnings']])}"
    return show.section("scaling", heading, show.pair(*panels), show.pair(_law(fit), _backtest(fit)),
                        warnings if fit["warnings"] else "")  # fmt: skip


def _scaling_caption(body: Body) -> str:
    if body["choice"] is None:
        return f"The ladder's {body['fit']['num_runs']} rungs identify no law, so there is no frontier to draw."
    predicted = body["choice"]["prediction"]
    return (
        f"Rungs by width, the best loss for each compute with its {show.percent(predicted['level'])} band, and the "
        f"main run at {show.flops(predicted['flops'])} FLOPs: {show.loss(predicted['loss'])} nats "
        f"{show.interval(predicted['interval'])}."
    )


def _law(fit: Any) -> str:
    rows = [
        (show.text(name), show.number(value), show.interval(fit["intervals"][name], ".3g"))
        for name, value in fit["parameters"].items()
    ]
    growth = [
        (show.words(name), show.number(found["value"], ".3f"), show.interval(found["interval"]))
        for name, found in fit["exponents"].items()
    ]
    members = ", ".join(
        f"{show.text(member['form'])} {show.percent(member['weight'])} ({show.words(member['status'])})"
        for member in fit["members"]
    )
    return (
        f"<div><h3>The law {show.chip(fit['status'])}</h3><p>Pooled forms: {members}; the heaviest "
        f"one's parameters.</p>{show.table(('parameter', 'value', 'interval'), rows + growth)}</div>"
    )


def _backtest(fit: Any) -> str:
    backtest = fit["backtest"]
    if backtest is None:
        return "<div><h3>Back-test</h3><p>Too few rungs to hold the largest ones out.</p></div>"
    head = ("params", "tokens", "measured", "predicted", "interval", "covered")
    rows = [
        (show.count(run["params"]), show.count(run["tokens"]), show.loss(run["loss"]), show.loss(run["predicted"]),
         show.interval(run["interval"]), {True: "yes", False: "no", None: "–"}[run["covered"]])
        for run in backtest["runs"]
    ]  # fmt: skip
    said = (
        f"<p>{backtest['num_held_out']} of the rungs, up to {show.number(backtest['extrapolation'], '.3g')} times the "
        f"compute of those left in, predicted from the other {backtest['num_fitted']}: at most "
        f"{show.percent(backtest['largest_error'])} off.</p>"
    )
    return f"<div><h3>Back-test</h3>{said}{show.table(head, rows)}</div>"


def choice(body: Body) -> str:
    """The fitted optimum beside the whole shape chosen, the flat range, and other budgets."""
    chosen = body["choice"]
    if chosen is None:
        if body["fit"] is None:
            return ""
        return show.section("choice", "The choice", '<p class="missing">The fit identifies no law to choose by.</p>')
    best, predicted = chosen["allocation"], chosen["prediction"]
    head = ("", "params", "tokens", "loss (nats)", "interval")
    rows = [
        ("fitted optimum", show.count(best["params"]), show.count(best["tokens"]), show.loss(best["loss"]),
         show.interval(best["interval"])),
        ("chosen shape", show.count(chosen["params"]), show.count(chosen["tokens"]), show.loss(predicted["loss"]),
         show.interval(predicted["interval"])),
    ]  # fmt: skip
    flat = best["flat_range"]["params"]
    said = (
        f"<p>For {show.flops(chosen['budget_flops'])} FLOPs. The optimum is flat: from {show.count(flat[0])} to "
        f"{show.count(flat[1])} parameters the predicted loss stays about the same. Interval of the optimum: "
        f"{_counts(best['params_interval'])} parameters, {_counts(best['tokens_interval'])} tokens; "
        f"{show.number(best['tokens_per_param'], '.3g')} tokens per parameter.</p>"
    )
    return show.section(
        "choice", "The choice, and what else was possible", said, show.table(head, rows), _budgets(body)
    )


def _counts(ends: Any) -> str:
    return "unknown" if ends is None else f"{show.count(ends[0])} to {show.count(ends[1])}"


def _budgets(body: Body) -> str:
    frontier = body["frontier"]
    if not frontier:
        return ""
    last = len(frontier) - 1
    picked = [frontier[round(i * last / (_NUM_BUDGETS - 1))] for i in range(_NUM_BUDGETS)] if last else frontier
    rows = [
        (show.flops(p["flops"]), show.count(p["params"]), show.loss(p["loss_nats"]), show.interval(p["interval"]))
        for p in picked
    ]
    return f"<h3>At other budgets</h3>{show.table(('FLOPs', 'best params', 'loss (nats)', 'interval'), rows)}"
