"""What the verbs of a study say on the terminal, from report data."""

from __future__ import annotations

from typing import Any

from launcher.coordinate_view import by_role, findings, points
from launcher.own import own_text
from launcher.verbs.options import table
from proxies.canon import Json


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
    """The best trials as a table."""
    trials = body["trials"]
    assert isinstance(trials, list)
    finished = [t for t in trials if isinstance(t, dict) and isinstance(t["loss_nats"], float)]
    finished.sort(key=lambda t: t["loss_nats"])  # type: ignore[arg-type, return-value]
    rows = [
        (str(t["index"]), f"{t['learning_rate']:.3g}", f"{t['warmup_fraction']:.3f}", f"{t['clip_norm']:.3g}",
         f"{t['loss_nats']:.4f}")
        for t in finished[:5]
    ]  # fmt: skip
    head = ("trial", "lr", "warmup", "clip", "loss (nats)")
    return f"{len(trials)} trials, {len(finished)} finished; the best:\n{table(head, rows)}"


def verdict_text(body: dict[str, Json]) -> str:
    """A verdict in words and a table."""
    optima, reasons = body["optima"], body["reasons"]
    assert isinstance(optima, list) and isinstance(reasons, list)
    rows = []
    for optimum in optima:
        assert isinstance(optimum, dict)
        ends = optimum["interval_log2"]
        shown = f"2^{optimum['log2_lr']:.2f}" if optimum["log2_lr"] is not None else "-"
        span = f"[{ends[0]:.2f}, {ends[1]:.2f}]" if isinstance(ends, list) else str(optimum["status"])
        loss = f"{optimum['loss_nats']:.4f}" if optimum["loss_nats"] is not None else "-"
        rows.append((str(optimum["width"]), shown, span, loss, str(optimum["num_runs"]), str(optimum["num_diverged"])))
    head = ("width", "optimal lr", "log2 interval", "loss (nats)", "runs", "diverged")
    parts = [f"verdict: {str(body['outcome']).replace('_', ' ')}", table(head, rows)]
    parts += [f"- {reason}" for reason in reasons]
    asked = body["what_to_run"]
    assert isinstance(asked, list)
    parts += [f"- to decide: {item['text']}" for item in asked if isinstance(item, dict)]
    if isinstance(body["control"], dict):
        control = body["control"]
        drift = control["drift_octaves_per_doubling"]
        assert isinstance(drift, dict)
        moved = f"{drift['value']:+.2f} octaves per doubling" if drift["value"] is not None else "no drift estimate"
        parts.append(f"- control (standard parametrization): {str(control['outcome']).replace('_', ' ')}, {moved}")
    return "\n".join(parts)


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
    return table(("width", "params", "tokens", "loss (nats)", "fitted"), rows)


def study_text(body: dict[str, Json]) -> str:
    """A whole study, as far as it has come."""
    spend, gates, choice = body["spend"], body["gates"], body["choice"]
    assert isinstance(spend, dict) and isinstance(gates, list)
    parts = [
        f"{spend['num_runs']} runs: {spend['share_of_target']:.1%} of the main run's FLOPs",
    ]
    stages = body["progress"]
    assert isinstance(stages, dict)
    parts += [f"{name}: {count[0]} of {count[1]} runs" for name, count in stages.items() if isinstance(count, list)]
    if isinstance(body["search"], dict):
        parts.append(search_text(body["search"]))
    if isinstance(body["transfer"], dict) and isinstance(body["transfer"]["verdict"], dict):
        parts.append(verdict_text(body["transfer"]["verdict"]))
    if isinstance(body["ladder"], dict):
        parts.append(ladder_text(body["ladder"]))
    if isinstance(choice, dict) and isinstance(choice["shape"], dict) and isinstance(choice["prediction"], dict):
        ends = choice["prediction"]["interval"]
        assert isinstance(ends, list)
        low, high = ends
        parts.append(
            f"choice: width {choice['shape']['width']}, {choice['params']:.4g} params, {choice['tokens']:.4g} tokens, "
            f"{choice['num_steps']} steps; loss {choice['prediction']['loss']:.4f} nats [{low:.4f}, {high:.4f}]"
        )
    if isinstance(body["own_run"], dict):
        parts.append(own_text(body["own_run"]))
    rows = [(f"gate {g['name']}: {g['outcome']}", str(g["reason"])) for g in gates if isinstance(g, dict)]
    parts += [f"{head}\n  {reason}" for head, reason in rows]
    return "\n\n".join(parts)
