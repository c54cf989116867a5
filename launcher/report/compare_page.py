"""`compare.html`: two studies side by side on one static page, drawn from `compare.json` alone; differences on top."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.figures import compare as figures_compare
from launcher.report.compare_top import forecast_doubts, top
from launcher.report.differences import NOT_THERE
from launcher.report.page import whole_page, words
from launcher.views import html as show
from launcher.views.html import Body
from launcher.views.transfer import anchor, estimated, name_of, size_name
from proxies.core import canon

HTML_FILE, JSON_FILE = "compare.html", "compare.json"
_UNITS = {"regret_nats": ("nats lost at the target", ".4f"),
          "drift_octaves_per_doubling": ("octaves per doubling", "+.2f")}  # fmt: skip
_HASH = re.compile("[0-9a-f]{64}")
_ABOUT = {"losses": "Losses", "values": "Optima and values", "forecasts": "Forecasts"}
_CAN = {"yes": "good", "with_care": "open", "no": "bad"}


def write_comparison(out: Path, body: dict[str, canon.Json]) -> None:
    """Write `compare.json` and `compare.html` into a folder, made if need be; each wholly or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    written = canon.pretty(body)
    canon.write_atomic(out / JSON_FILE, written)
    read = canon.parse(written)  # the page is drawn from the file, so that anyone can draw it again
    assert isinstance(read, dict)
    canon.write_atomic(out / HTML_FILE, page(read).encode())


def page(body: Body) -> str:
    """The whole page. No number on it that does not come from `body`."""
    parts = [top(body), _limits(body), _question(body), _transfer(body), _values(body), _forecast(body),
             _fit(body), _gates(body), _spend(body), words()]  # fmt: skip
    return whole_page("forerun comparison", parts)


def _limits(body: Body) -> str:
    rows = []
    for what, name in _ABOUT.items():
        found = body["comparable"][what]
        kind = _CAN[found["comparable"]]
        chip = f'<span class="chip {kind}">{show.words(found["comparable"])}</span>'
        rows.append((name, chip, show.text("; ".join(found["reasons"]))))
    return show.section("limits", "What can be compared", show.table(("", "", "why"), rows, left=(0, 1, 2)))


def _question(body: Body) -> str:
    rows = [(f"<code>{show.text(row['key'])}</code>", _leaf(row["a"]), _leaf(row["b"])) for row in body["question"]]
    if not rows:
        return show.section("question", "The questions", "<p>The plans ask the same.</p>")
    return show.section("question", "The questions", show.table(("key", "A", "B"), rows, left=(0, 1, 2)))


def _leaf(value: Any) -> str:
    if value == NOT_THERE:
        return f'<span class="over">{show.text(value)}</span>'
    if isinstance(value, list):
        return ", ".join(map(_leaf, value))
    if isinstance(value, float) and abs(value) >= 1e6:
        return show.number(value)
    said = show.text(value)
    return f'<code title="{said}">{said[:16]}</code>' if _HASH.fullmatch(said) else said


def _transfer(body: Body) -> str:
    if not body["tests"]:
        return show.section("transfer", "Transfer", "<p>Neither study has ended its transfer runs.</p>")
    return "".join(_test(body, test) for test in body["tests"])


def _test(body: Body, test: Any) -> str:
    """One test: outcomes, costs, drifts, optima at every size, and both studies' valleys and optima drawn."""
    heading = show.text(name_of(test)[0].upper() + name_of(test)[1:])
    chips = [show.chip(test["outcome"][side]) if test["outcome"][side] else "not there" for side in "ab"]
    rows = [("outcome", *chips, "")]
    rows += [
        (label, *(_estimate(test[key][side], spec) for side in "ab"), _difference(test[key]["difference"], spec))
        for key, (label, spec) in _UNITS.items()
    ]
    estimates = show.table(("", "A", "B", "B less A"), rows)
    optima = [
        (show.text(size_name(test["axis"], row["size"])), *(_optimum(test, row[side]) for side in "ab"),
         _difference(row["difference_octaves"], "+.2f", " octaves"))
        for row in test["optima"]
    ]  # fmt: skip
    panels = []
    if body["comparable"]["losses"]["comparable"] != "no" and figures_compare.shared_sizes(test):
        said = "Fitted valleys where both have one. A: full; B: dashed and hollow."
        panels.append(show.figure(figures_compare.valleys(test), said, "Valleys"))
    if body["comparable"]["values"]["comparable"] != "no" and _drawable(test):
        said = "Minima of the valleys with their intervals, against size."
        panels.append(show.figure(figures_compare.optima(test), said, "The optimum against size"))
    table = show.table(("optimum", "A", "B", "B less A"), optima)
    return show.section(anchor(test), heading, estimates, show.pair(*panels) if panels else "", table)


def _drawable(test: Any) -> bool:
    """Whether both have an optimum somewhere."""
    return all(any(row[side] and row[side]["log2_value"] is not None for row in test["optima"]) for side in "ab")


def _optimum(test: Any, optimum: Any) -> str:
    if optimum is None:
        return "not run"
    if optimum["log2_value"] is None:
        return show.chip(optimum["status"])
    value = show.number(optimum["value"], ".3g")
    if test["hyperparameter"] != "learning_rate":
        return f"{value}<br>{show.interval(optimum['interval'], '.3g')}"
    ends = " to ".join(show.power_of_two(end) for end in optimum["interval_log2"])
    return f"{value} = {show.power_of_two(optimum['log2_value'])}<br>{ends}"


def _estimate(found: Any, spec: str) -> str:
    if found is None:
        return "–"
    if found["value"] is None:
        return "not estimated"
    value, *ends = estimated(found, lambda number: show.number(number, spec))
    return f"{value} [{', '.join(ends)}]" if ends else f"{value} {show.interval(None)}"


def _difference(found: Any, spec: str, unit: str = "") -> str:
    """A difference with its interval, and whether that tells the two apart."""
    if found is None:
        return "not comparable"
    if found["value"] is None:
        return "–"
    shown = f"{show.number(found['value'], spec)}{unit} {show.interval(found['interval'], spec)}"
    if found["apart"] is None:
        return shown
    kind, said = ("bad", "apart") if found["apart"] else ("open", "not told apart")
    return f'{shown}<br><span class="chip {kind}">{said}</span>'


def _values(body: Body) -> str:
    if not body["values"]:
        return ""
    rows = [
        (show.words(row["hyperparameter"]), *(show.number((row[side] or {}).get(key)) for key in
                                              ("base_value", "target_value") for side in "ab"))
        for row in body["values"]
    ]  # fmt: skip
    head = ("hyperparameter", "A, base", "B, base", "A, target", "B, target")
    return show.section("values", "Values carried to the target", show.table(head, rows))


def _forecast(body: Body) -> str:
    """The main runs: what would be launched, and what it is expected to lose."""
    found, heading = body["forecast"], "The main runs"
    parts = []
    sides = body["ladder"] or {}
    if sides and all(sides.values()):
        said = "A: full; B: dashed and hollow. Shaded: each band for one new run. Stars: the main runs."
        parts.append(f'<div class="wide">{show.figure(figures_compare.ladders(sides), said, "Both ladders")}</div>')
    rows: list[tuple[str, ...]] = []
    if found is not None:
        parts += [f"<p>{show.text(doubt)}</p>" for doubt in forecast_doubts(found)]
        rows.append(("expected loss (nats)", *(_loss(found[side]) for side in "ab"),
                     _difference(found["difference_nats"], "+.4f")))  # fmt: skip
        at = found["at_one_compute"]
        if at is not None:
            here = [f"{show.loss(at[side]['loss_nats'])} {show.interval(at[side]['interval'])}" for side in "ab"]
            rows.append((f"on the frontier at {show.flops(at['flops'])} FLOPs", *here,
                         _difference(at["difference_nats"], "+.4f")))  # fmt: skip
    rows += [(show.words(row["key"]), *(_choice(row["key"], row[side]) for side in "ab"), "") for row in body["choice"]]
    if not rows:
        return show.section("forecast", heading, *parts, "<p>Neither study has chosen a main run.</p>")
    return show.section("forecast", heading, *parts, show.table(("", "A", "B", "B less A"), rows))


def _loss(side: Any) -> str:
    return "–" if side is None else f"{show.loss(side['loss'])} {show.interval(side['interval'])}"


def _choice(key: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return "–" if value is None else show.text(value)
    if key.endswith("flops"):
        return show.flops(value)
    return show.count(value) if float(value).is_integer() else show.number(value)


def _fit(body: Body) -> str:
    found = body["fit"]
    if found is None:
        return ""
    laws = [("runs fitted", *(show.text(found["num_runs"][side] or "–") for side in "ab"), ""),
            ("heaviest law", *(show.text(found["heaviest_law"][side] or "–") for side in "ab"), "")]  # fmt: skip
    rows = [
        (show.words(row["name"]), *(_estimate(row[side], ".3g") for side in "ab"),
         _difference(row["difference"], "+.3g"))
        for row in found["rows"]
    ]  # fmt: skip
    return show.section("fit", "The laws", show.table(("", "A", "B", "B less A"), laws + rows))


def _gates(body: Body) -> str:
    def side(of: Any) -> str:
        if of is None:
            return "not there"
        by_hand = f'<p class="over">accepted by hand: {show.text(of["accepted"])}</p>' if of["accepted"] else ""
        return f'{show.chip(of["outcome"])}<p class="over">{show.text(of["reason"])}</p>{by_hand}'

    rows = [(show.words(gate["name"]), side(gate["a"]), side(gate["b"])) for gate in body["gates"]]
    return show.section("gates", "Gates", show.table(("gate", "A", "B"), rows, left=(0, 1, 2))) if rows else ""


def _spend(body: Body) -> str:
    shown: Sequence[tuple[str, str, Any]] = (
        ("num_runs", "runs", show.count), ("num_imported", "runs taken over", show.count),
        ("flops_causal", "FLOPs (causal convention)", show.flops),
        ("worker_seconds", "worker time, on each one's machines", show.seconds),
        ("share_of_target", "of the main run's budget", show.percent),
    )  # fmt: skip
    spend = body["spend"]
    rows = [
        (label, *("–" if spend[side][key] is None else form(spend[side][key]) for side in "ab"))
        for key, label, form in shown
    ]
    return show.section("spend", "What each cost", show.table(("", "A", "B"), rows))
