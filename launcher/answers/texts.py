"""What the verbs of a study say on the terminal, from report data."""

from __future__ import annotations

from typing import Any

from launcher.cli.options import table
from launcher.study.gates import by_role, findings, forecast_warnings, points
from launcher.study.own import own_text
from launcher.views.calibration import calibration_line
from launcher.views.search import sentences, value_text
from launcher.views.transfer import axis_name, estimated, exponent, name_of, short_size, size_name, wanted
from proxies.core.canon import Json
from proxies.core.hyperparameters import HYPERPARAMETERS
from transfer.question import from_log2, written


def model_text(model: Any) -> str:
    """A factory's parameters as they are understood, one row each kind and factor."""
    rows: dict[tuple[str, float], list[str]] = {}
    for scale in model["parameters"]:
        rows.setdefault((scale["kind"].replace("_", " "), scale["factor"]), []).append(scale["name"])
    shown = [
        (kind, str(len(names)), names[0], "as built" if factor == 1 else f"times {factor:.4g}")
        for (kind, factor), names in rows.items()
    ]
    head = ("kind", "parameters", "the first", f"initial values at width {model['width']}")
    return "\n".join([table(head, shown), *(f"- note: {note}" for note in model["notes"])])


def coordinate_text(found: dict[str, Any]) -> str:
    """The checks of a study as tables, one row a role."""
    parts = []
    for name, check in found.items():
        rows = []
        for role, layers in by_role(check):
            worst, passing = layers[0], sum(layer["outcome"] == "passes" for layer in layers)
            low, high = worst["interval"]
            rows.append(
                (role.replace("_", " "), f"{passing} of {len(layers)}", worst["layer"], f"{worst['slope']:+.2f}",
                 f"[{low:+.2f}, {high:+.2f}]", worst["outcome"].replace("_", " "))
            )  # fmt: skip
        head = ("role", "pass", "worst layer", "slope", f"{check['level']:.0%} interval", "outcome")
        said = [f"{name}: {check['outcome'].replace('_', ' ')} over {check['axis']}s {points(check)}"]
        said += [table(head, rows)] if rows else []
        said += [f"- {sentence}" for sentence in findings(check)]
        said += [f"- note: {note}" for note in check["notes"]]
        parts.append("\n".join(said))
    return "\n\n".join(parts)


def search_text(body: dict[str, Json]) -> str:
    """The best trials as a table, and what is to be said of the search."""
    search: Any = body
    finished = sorted((t for t in search["trials"] if t["loss_nats"] is not None), key=lambda t: t["loss_nats"])
    names = [name for name in HYPERPARAMETERS if name in search["best"]]
    rows = [
        (str(t["index"]), *(value_text(name, t[name]) for name in names), f"{t['loss_nats']:.4f}") for t in finished[:5]
    ]
    head = ("trial", *(SHORT.get(name, name.replace("_", " ")) for name in names), "loss (nats)")
    said = "".join(f"\n- {sentence}" for sentence in sentences(search))
    return f"{len(search['trials'])} trials, {len(finished)} finished; the best:\n{table(head, rows)}{said}"


SHORT = {one.name: one.short for one in HYPERPARAMETERS.values() if one.short}


def verdict_text(body: dict[str, Json]) -> str:
    """One verdict (`transfer.verdict.summary.verdict_summary`) in words and tables."""
    verdict: Any = body
    rows = [_optimum_row(verdict, optimum) for optimum in verdict["optima"]]
    head = (axis_name(verdict["axis"]), "optimum", "interval", "loss (nats)", "runs", "diverged")
    parts = [f"verdict: {_words(verdict['outcome'])} ({name_of(verdict)})"]
    if rows:  # else optima were given, and the reasons have the drift
        drift = verdict["drift_octaves_per_doubling"]
        parts.append(table(head, rows))
        parts += [f"- {_moved(verdict)}"] if drift["value"] is not None else []
    parts += [f"- {reason}" for reason in verdict["reasons"]]
    parts += [f"- to decide: {sentence}" for sentence in wanted(verdict)]
    if verdict["control"] is not None:
        parts.append(f"- {_control(verdict['control'])}")
    parts += [f"- note: {note}" for note in verdict.get("notes", ())]
    return "\n".join(parts + _rules(verdict))


def _moved(verdict: Any) -> str:
    """How the optimum moves, in a sentence."""
    drift = _estimate(verdict["drift_octaves_per_doubling"], "+.2f")
    return f"the optimum moves by {drift} octaves per doubling of {verdict['axis']}"


def _control(control: Any) -> str:
    known = control["drift_octaves_per_doubling"]["value"] is not None
    why = _moved(control) if known else control["reasons"][0]
    return f"control (standard parametrization): {_words(control['outcome'])}; {why}"


def _optimum_row(verdict: Any, optimum: Any) -> tuple[str, ...]:
    name, ends = verdict["hyperparameter"], optimum["interval_log2"]
    found = optimum["log2_value"] is not None
    low, high = sorted(ends, key=lambda end: from_log2(name, end)) if found else (0.0, 0.0)
    return (
        short_size(optimum["size"]),
        written(name, optimum["log2_value"]) if found else "-",
        f"[{written(name, low)}, {written(name, high)}]" if found else _words(optimum["status"]),
        "-" if optimum["loss_nats"] is None else f"{optimum['loss_nats']:.4f}",
        str(optimum["num_runs"]),
        str(optimum["num_diverged"]),
    )


def _rules(verdict: Any) -> list[str]:
    """The exponent that is used and published ones, with their cost at the target."""
    if not verdict["alternatives"]:
        return []
    used = "measured here" if verdict["power_is_measured"] else "used here"
    every = [{"power": verdict["power"], "source": used, "regret_nats": verdict["regret_nats"]}]
    every += verdict["alternatives"]
    rows = [(exponent(r["power"]), r["source"], _estimate(r["regret_nats"], ".4f")) for r in every]
    there = size_name(verdict["axis"], verdict["target_size"])
    return [f"{name_of(verdict)}, exponents and what they cost at {there}:",
            table(("exponent", "source", "nats lost"), rows)]  # fmt: skip


def transfer_text(body: dict[str, Json]) -> str:
    """The transfer tests of a study (a report's `transfer`): outcomes, what does not hold and why, values."""
    transfer: Any = body
    tests, together = transfer["tests"], transfer["together"]
    rows = [_test_row(name_of(test), test["verdict"]) for test in tests]
    rows.append(_test_row("learning rate, all axes", together))
    head = ("test", "outcome", "octaves per doubling", "nats lost", "set to")
    parts = [table(head, rows)]
    for name, of in [("learning rate, all axes", together), *((name_of(test), test["verdict"]) for test in tests)]:
        if of["outcome"] != "holds":
            said = [f"{name}: {_words(of['outcome'])}", *(f"- {reason}" for reason in of["reasons"])]
            asked = [] if of is together else [f"- to decide: {sentence}" for sentence in wanted(of)]
            parts.append("\n".join(said + asked))
    for test in tests:
        control = test["verdict"]["control"]
        if control is not None:
            parts.append(f"{name_of(test)}, {_control(control)}")
        parts += ["\n".join(_rules(test["verdict"]))] if test["verdict"]["alternatives"] else []
    return "\n\n".join([*parts, _values(transfer["values"])])


def _test_row(name: str, of: Any) -> tuple[str, ...]:
    drift = of.get("drift_octaves_per_doubling")
    value = of["transferred_value"]
    return (
        name,
        _words(of["outcome"]),
        "" if drift is None else _estimate(drift, "+.2f"),
        _estimate(of["regret_nats"], ".4f"),
        "-" if value is None else f"{value:.4g}",
    )


def _values(values: Any) -> str:
    rows = [
        (value["hyperparameter"].replace("_", " "), *(_number(value[key]) for key in ("base_value", "target_value")),
         ", ".join(value["tested"]) or "not tested", "-" if value["outcome"] is None else _words(value["outcome"]),
         _estimate(value["regret_nats"], ".4f"), _number(value["cost_of_2x_off_nats"], ".4f"))
        for value in values
    ]  # fmt: skip
    head = ("value", "at the base", "at the target", "tested over", "outcome", "nats lost", "if 2x off")
    rules = [f"- {value['hyperparameter'].replace('_', ' ')}: {value['rule']}" for value in values]
    rules = [
        rule + (f"; not tested over {', '.join(value['untested'])}" if value["untested"] else "")
        for rule, value in zip(rules, values, strict=True)
    ]
    return "\n".join([table(head, rows), *rules])


def _number(value: float | None, spec: str = ".4g") -> str:
    return "-" if value is None else f"{value:{spec}}"


def _estimate(found: Any, spec: str) -> str:
    if found["value"] is None:
        return "-"
    value, low, high = estimated(found, lambda number: f"{number:{spec}}")
    return f"{value} [{low}, {high}]"


def _words(name: str) -> str:
    return name.replace("_", " ")


def ladder_text(body: dict[str, Json]) -> str:
    """The rungs as a table."""
    rungs = body["rungs"]
    assert isinstance(rungs, list)
    rows = []
    for rung in rungs:
        assert isinstance(rung, dict)
        loss = f"{rung['loss_nats']:.4f}" if rung["loss_nats"] is not None else "diverged"
        expected = f"{rung['fitted_nats']:.4f}" if rung["fitted_nats"] is not None else "-"
        rows.append((str(rung["width"]), f"{rung['params']:.4g}", f"{rung['tokens']:.4g}", loss, expected))
    found = [table(("width", "params", "tokens", "loss (nats)", "fitted"), rows)]
    return "\n\n".join(found + ([checks_text(body)] if body.get("checks") else []))


def checks_text(body: Any) -> str:
    """Rungs that were run at other rates too, one row a rate, and what they say."""
    rows = []
    for one in body["checks"]:
        rows += [
            (str(one["width"]), f"{one['tokens']:.4g}", f"{tried['octaves']:+g}", f"{tried['learning_rate']:.4g}",
             "diverged" if tried["loss_nats"] is None else f"{tried['loss_nats']:.4f}",
             _estimate(one["excess_nats"], ".4f") if tried["octaves"] == 0 else "")
            for tried in one["offsets"]
        ]  # fmt: skip
    head = ("width", "tokens", "octaves", "rate", "loss (nats)", "over the best rate (nats)")
    said = [f"- {_words(one['outcome'])}: {one['words']}" for one in body["checks"]]
    moved = body["sensitivity"]
    if moved is not None:
        said.append(f"- without that excess the forecast moves by {_estimate(moved['shift_nats'], '+.4f')} nats")
        if moved["with_better_neighbours_nats"] is not None:
            said.append(
                f"- with the better neighbours' losses in the fit, {moved['with_better_neighbours_nats']:+.4f}; they "
                "are not in it: the lower of noisy losses is too low"
            )
    return "\n".join(["checked at other rates:", table(head, rows), *said])


def spend_text(body: dict[str, Json]) -> str:
    """What all runs of a study cost, beside the main run."""
    spend = body["spend"]
    assert isinstance(spend, dict)
    return f"{spend['num_runs']} runs: {spend['share_of_target']:.2%} of the main run's FLOPs"


def study_text(body: dict[str, Json]) -> str:
    """A whole study, as far as it has come."""
    gates, choice = body["gates"], body["choice"]
    assert isinstance(gates, list)
    parts = [spend_text(body)]
    parts += [calibration_line(body["calibration"])] if body["calibration"] else []
    stages = body["progress"]
    assert isinstance(stages, dict)
    parts += [f"{name}: {count[0]} of {count[1]} runs" for name, count in stages.items() if isinstance(count, list)]
    if isinstance(body["search"], dict):
        parts.append(search_text(body["search"]))
    if isinstance(body["transfer"], dict):
        parts.append(transfer_text(body["transfer"]))
    if isinstance(body["ladder"], dict):
        parts.append(ladder_text(body["ladder"]))
    if isinstance(choice, dict) and isinstance(choice["shape"], dict) and isinstance(choice["prediction"], dict):
        ends = choice["prediction"]["interval"]
        assert isinstance(ends, list)
        low, high = ends
        chosen = (
            f"choice: width {choice['shape']['width']}, {choice['params']:.4g} params, {choice['tokens']:.4g} tokens, "
            f"{choice['num_steps']} steps; loss {choice['prediction']['loss']:.4f} nats [{low:.4f}, {high:.4f}]"
        )
        parts.append("\n".join([*forecast_warnings(gates), chosen]))
    if isinstance(body["own_run"], dict):
        parts.append(own_text(body["own_run"]))
    rows = [(f"gate {g['name']}: {g['outcome']}", str(g["reason"])) for g in gates if isinstance(g, dict)]
    parts += [f"{head}\n  {reason}" for head, reason in rows]
    return "\n\n".join(parts)
