"""The report's sections on transfer: what it costs, the values for the target, and every test with its evidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launcher.figures import cost as figures_cost
from launcher.figures import transfer as figures_transfer
from launcher.figures.figures import main_arm
from launcher.views import html as show
from launcher.views.html import Body
from launcher.views.transfer import NO_OPTIMUM, Test, anchor, estimated, name_of, size_name, verdicts_by_arm, wanted
from transfer.question import from_log2

_LEGEND = (
    '<p class="over">Dots: one run each, one per seed. Curves: fitted valleys; thin lines join mean losses where none '
    "is fitted. Large marks with bars: minima with their intervals. Dashed line: the value set at the base. A cross at "
    "the top: diverged. A triangle there: above the axis. Values are as set at the base, before what the "
    "parametrization itself scales by size.</p>"
)
_HEAT = (
    "Loss above the best of its row, mean over seeds: the deeper the colour, the more. Dots with bars: the fitted "
    "optima. Crosses: a run diverged."
)


def transfer(body: Body) -> str:
    """All sections on transfer, or that its runs have not ended."""
    heading = "Do the hyperparameters transfer?"
    if body["transfer"] is None:
        told = show.missing("The transfer runs have not ended.", "transfer", body["progress"].get("transfer"))
        return show.section("transfer", heading, told)
    found = body["transfer"]
    caption = "What the transferred values lose against the best ones at the target, by these runs. Dashed: the margin."
    beside = show.pair(show.figure(figures_cost.regrets(body), caption), _standing(body))
    values = f"<h3>Values for the target</h3>{_values(found['values'])}"
    return show.section("transfer", heading, beside, values) + "".join(_test(body, test) for test in found["tests"])


def _standing(body: Body) -> str:
    """The learning rate over all axes, then every test: outcome and what it rests on."""
    found = body["transfer"]
    entries = [_entry("learning rate, all axes together", found["together"], found["together"]["reasons"])]
    entries += [_entry(name_of(test), test["verdict"], test["verdict"]["reasons"][:1]) for test in found["tests"]]
    return f'<ul class="gates">{"".join(entries)}</ul>'


def _entry(name: str, of: Any, reasons: Sequence[str]) -> str:
    return f"<li><b>{show.text(name)}</b>{show.chip(of['outcome'])}<p>{show.text('; '.join(reasons))}.</p></li>"


def _values(values: Any) -> str:
    head = ("hyperparameter", "outcome", "at the base", "at the target", "octaves per doubling", "nats lost",
            "if 2x off")  # fmt: skip
    return show.table(head, [_value_row(value) for value in values], (0, 1))


def _value_row(value: Any) -> tuple[str, ...]:
    drifts = [f"{show.text(axis)} {_estimate(value['drifts'][axis], '+.2f')}" for axis in value["tested"]]
    over = f"tested over {show.text(' and '.join(value['tested']))}" if value["tested"] else "not tested"
    if value["tested"] and value["untested"]:
        over += f", not over {show.text(' and '.join(value['untested']))}"
    return (
        f'{show.words(value["hyperparameter"])}<p class="over">{show.text(value["rule"])}; {over}</p>',
        "–" if value["outcome"] is None else show.chip(value["outcome"]),
        show.number(value["base_value"]),
        show.number(value["target_value"]),
        "<br>".join(drifts) or "–",
        _estimate(value["regret_nats"], ".4f") if value["tested"] else "–",
        show.number(value["cost_of_2x_off_nats"], ".4f"),
    )


def _test(body: Body, test: Test) -> str:
    """One test: its verdict in words, what would decide it, figures, optima, and estimates."""
    arms = verdicts_by_arm(test, main_arm(body))
    verdict = test["verdict"]
    said = f"<p>{show.chip(verdict['outcome'])} {show.text('; '.join(verdict['reasons']))}.</p>"
    asked = [show.text(sentence) for sentence in wanted(verdict)]
    more = f"<h3>What would decide it</h3>{show.bullets(asked)}" if asked else ""
    first = body["transfer"]["tests"][0] is test
    panels = _panels(body, test, arms)
    panels += ["<div></div>"] * (len(panels) % 2)
    pairs = [show.pair(*panels[i : i + 2]) for i in range(0, len(panels), 2)]
    head = ("arm", "status", "size", "optimum", "interval", "loss (nats)", "runs", "diverged")
    optima = show.table(head, [row for arm, of in arms.items() for row in _optima(arm, of)], (0, 1))
    heading = show.text(name_of(test)[0].upper() + name_of(test)[1:])
    parts = (said, more, *pairs, _LEGEND if first else "", optima, _estimates(test, arms))
    return show.section(anchor(test), heading, *parts)


def _panels(body: Body, test: Test, arms: dict[str, Any]) -> list[str]:
    """Every figure of a test."""
    verdict = test["verdict"]
    panels = [
        show.figure(figures_transfer.valleys(body, test, arm), _valley_caption(of),
                    show.arm_title(arm) if len(arms) > 1 else "Valleys")
        for arm, of in arms.items()
    ]  # fmt: skip
    if any(o["log2_value"] is not None for of in arms.values() for o in of["optima"]):
        panels.append(show.figure(figures_transfer.drift(body, test), _drift_caption(arms), "The optimum against size"))
    panels.append(show.figure(figures_cost.heat(body, test), _HEAT, "Loss by size and value"))
    if verdict["alternatives"]:
        said = "By these runs; exponents as in value ~ size^exponent, everything counted. Dashed: the margin."
        panels.append(show.figure(figures_cost.rules(test), said, "What other exponents would cost"))
    return panels


def _optima(arm: str, verdict: Any) -> list[tuple[str, ...]]:
    return [
        (show.text(show.arm_name(arm)), show.chip(optimum["status"]),
         show.text(size_name(verdict["axis"], optimum["size"])), _optimum(verdict, optimum),
         _ends(verdict, optimum["interval_log2"]), show.loss(optimum["loss_nats"]),
         show.text(optimum["num_runs"]), show.text(optimum["num_diverged"]))
        for optimum in verdict["optima"]
    ]  # fmt: skip


def _optimum(verdict: Any, optimum: Any) -> str:
    shown = show.number(optimum["value"])
    if optimum["value"] is None or verdict["hyperparameter"] != "learning_rate":
        return shown
    return f"{shown} = {show.power_of_two(optimum['log2_value'])}"


def _ends(verdict: Any, ends: Any) -> str:
    """An interval of octaves as values."""
    if ends is None:
        return "–"
    if verdict["hyperparameter"] == "learning_rate":
        return f"{show.power_of_two(ends[0])} to {show.power_of_two(ends[1])}"
    low, high = sorted(from_log2(verdict["hyperparameter"], end) for end in ends)
    return f"{show.number(low, '.3g')} to {show.number(high, '.3g')}"


def _valley_caption(verdict: Any) -> str:
    def at(optimum: Any) -> str:
        return show.text(f"at {size_name(verdict['axis'], optimum['size'])}")

    rate = verdict["hyperparameter"] == "learning_rate"
    found = [
        f"{show.power_of_two(o['log2_value']) if rate else show.number(o['value'], '.3g')} {at(o)}"
        for o in verdict["optima"]
        if o["log2_value"] is not None
    ]
    lost: dict[str, list[str]] = {}
    for o in verdict["optima"]:
        if o["log2_value"] is None:
            lost.setdefault(NO_OPTIMUM.get(o["status"], o["status"].replace("_", " ")), []).append(at(o))
    minima = f"The optimum lies at {', '.join(found)}" if found else "No optimum is found"
    missing = "".join(f"; {show.text(why)} {', '.join(where)}" for why, where in lost.items())
    level = f"; intervals at level {show.percent(verdict['level'])}" if found else ""
    return f"{minima}{missing}{level}."


def _drift_caption(arms: dict[str, Any]) -> str:
    (_, verdict), *controls = arms.items()
    axis = show.text(verdict["axis"])
    said = f"Octaves per doubling of {axis}: {_estimate(verdict['drift_octaves_per_doubling'], '+.2f')}"
    for _, control in controls:
        said += f", in the control {_estimate(control['drift_octaves_per_doubling'], '+.2f')}"
    said += f"; dotted, the target, {show.text(size_name(verdict['axis'], verdict['target_size']))}"
    said += "; dashed, the value used" if verdict["transferred_log2"] is not None else ""
    if verdict["alternatives"] and verdict["target_size"] > verdict["base_size"]:
        said += "; thin, published exponents"
    return f"{said}."


def _estimates(test: Test, arms: dict[str, Any]) -> str:
    """Drift, offset and cost of every arm, and what they are held against."""
    verdict = test["verdict"]
    axis = show.text(test["axis"])
    units = (("drift_octaves_per_doubling", f"octaves per doubling of {axis}", "+.2f"),
             ("offset_octaves", "octaves between value and optimum at the target", "+.2f"),
             ("regret_nats", "nats lost at the target", ".4f"))  # fmt: skip
    names = [f"control: {show.arm_name(arm)}" if i else show.arm_name(arm) for i, arm in enumerate(arms)]
    rows = [(label, *(_estimate(of[key], spec) for of in arms.values())) for key, label, spec in units]
    table = show.table(("", *map(show.text, names)), rows)
    return show.pair(f"<div>{table}</div>", f"<div>{show.facts(_facts(verdict))}</div>")


def _facts(verdict: Any) -> list[tuple[str, str]]:
    """What is known of it besides; what is not is left out."""
    value, noise, twice = (verdict[key] for key in ("transferred_value", "noise_nats", "cost_of_2x_off_nats"))
    there = show.text(size_name(verdict["axis"], verdict["target_size"]))
    facts = [("Margin", f"{show.number(verdict['margin_nats'])} nats may be lost")]
    if value is not None:
        facts.insert(0, ("Used", f"{show.number(value)} for {there}, as set at the base"))
    if noise is not None:
        facts.append(("Noise", f"{show.number(noise, '.4f')} nats, of one run about its valley"))
    if twice is not None:
        ends = show.interval(verdict["cost_of_2x_off_interval"], ".4f")
        facts.append(("Twice off", f"a value off by a factor of two costs {show.number(twice, '.4f')} nats {ends}"))
    if verdict["values_tried"] is not None:
        tried = show.interval(verdict["values_tried"], ".3g")
        facts.append(("Against", f"the best of the values tried, {tried}, not an optimum"))
    return facts


def _estimate(found: Any, spec: str) -> str:
    if found["value"] is None:
        return "not estimated"
    value, low, high = estimated(found, lambda number: show.number(number, spec))
    return f"{value} [{low}, {high}]"
