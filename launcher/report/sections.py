"""The report's sections: each figure with its numbers, or what is missing and the command that runs it."""

from __future__ import annotations

from typing import Any

from launcher.figures import figures
from launcher.study.gates import by_role, findings, points
from launcher.views import html as show
from launcher.views.html import Body
from launcher.views.search import sentences, value_text
from proxies.core.hyperparameters import HYPERPARAMETERS


def coordinates(body: Body) -> str:
    """The study's coordinate checks: its own parametrization, the standard one, and over depths if there is a rule."""
    heading, checks = "Do updates keep their size as the model grows?", body["coordinates"]
    if not checks:
        return show.section("coordinates", heading, show.missing("The coordinate check has not run.", "check"))
    arms = sorted(checks, key=lambda arm: (arm != figures.main_arm(body), arm != "depth"))
    panels = [show.figure(figures.coordinates(body, arm), _caption(checks[arm]), show.arm_title(arm)) for arm in arms]
    note = (
        '<p class="over">Slope: log2 of the change per doubling; about none when updates keep their size. Drawn: the '
        "worst layer of every role; bold: blows up or vanishes; dashed: cannot tell.</p>"
    )
    head = ("", "role", "layers that pass", "the worst", "slope", "interval", "outcome")
    rows = [
        (show.arm_title(arm), show.words(role), f"{sum(x['outcome'] == 'passes' for x in layers)} of {len(layers)}",
         show.text(layers[0]["layer"]), *_cells(layers[0]))
        for arm in arms for role, layers in by_role(checks[arm])
    ]  # fmt: skip
    panels += ["<div></div>"] * (len(panels) % 2)
    pairs = [show.pair(*panels[i : i + 2]) for i in range(0, len(panels), 2)]
    return show.section("coordinates", heading, *pairs, note, show.table(head, rows, (0, 1, 3, 6)))


def _cells(layer: Any) -> tuple[str, str, str]:
    return show.number(layer["slope"], "+.2f"), show.interval(layer["interval"], "+.2f"), show.chip(layer["outcome"])


def _caption(check: Any) -> str:
    said = "; ".join(show.text(sentence) for sentence in findings(check))
    over = ", ".join(map(str, points(check)))
    return (
        f"{show.chip(check['outcome'])}{f': {said}.' if said else ''} {show.text(check['axis']).capitalize()}s {over}, "
        f"{check['num_steps']} steps at learning rate {show.number(check['learning_rate'])}, "
        f"{check['num_seeds']} seeds." + "".join(f" {show.text(note)}." for note in check["notes"])
    )


_NUM_TOP_TRIALS = 8
_COLUMNS = {name: name.replace("_", " ") for name in HYPERPARAMETERS} | {
    "warmup_fraction": "warmup (share)", "clip_norm": "clip", "embedding_multiplier": "embedding",
    "output_multiplier": "output",
}  # fmt: skip
_NUM_BUDGETS = 6


def search(body: Body) -> str:
    """The search at the base width: every trial, and the best as a table."""
    heading = "Search at the base width"
    if body["search"] is None:
        missing = show.missing("The search has not ended.", "sweep", body["progress"].get("search"))
        return show.section("search", heading, missing)
    found, best = body["search"], body["search"]["best"]
    finished = sorted((t for t in found["trials"] if t["loss_nats"] is not None), key=lambda t: t["loss_nats"])
    names = [name for name in _COLUMNS if name in best]
    rows = [
        (show.text(trial["index"]), *(show.text(value_text(name, trial[name])) for name in names),
         show.number(trial["loss_nats"], ".4f"))
        for trial in finished[:_NUM_TOP_TRIALS]
    ]  # fmt: skip
    head = ("trial", *(_COLUMNS[name] for name in names), "loss (nats)")
    clips = found["ranges"]["clip_norm"]
    caption = (
        f"{len(found['trials'])} trials at width {body['question']['proxy']['base_width']}; best: "
        + ", ".join(f"{_COLUMNS[name]} {value_text(name, best[name])}" for name in names)
        + f". Colour: clip, from {show.number(min(clips))} to {show.number(max(clips))}."
    )
    said = "".join(f"<li>{show.text(sentence)}</li>" for sentence in sentences(found))
    beside = f"<div><h3>The best trials</h3>{show.table(head, rows)}<ul>{said}</ul></div>"
    return show.section("search", heading, show.pair(show.figure(figures.search(body), caption), beside))


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
    about = "The chosen shape lies outside the sizes that the fit takes for about as good. "
    if flat[0] <= chosen["params"] <= flat[1]:
        about = (
            f"The optimum is flat: from {show.count(flat[0])} to {show.count(flat[1])} parameters the predicted loss "
            "stays about the same. "
        )
    said = (
        f"<p>For {show.flops(chosen['budget_flops'])} FLOPs. {about}Interval of the optimum: "
        f"{_counts(best['params_interval'])} parameters, {_counts(best['tokens_interval'])} tokens; "
        f"{show.number(best['tokens_per_param'], '.3g')} tokens per parameter.</p>"
    )
    return show.section(
        "choice", "The choice, and what else was possible", said, show.table(head, rows), _budgets(body)
    )


def _counts(ends: Any) -> str:
    return "not determined" if ends is None else f"{show.count(ends[0])} to {show.count(ends[1])}"


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
