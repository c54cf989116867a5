"""Verbs that run the stages of a study, and the one that looks on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.coordinate_view import by_role, findings, points
from launcher.verbs.options import answer, json_option, plan_verb, study_argument, table
from proxies.canon import Json

if TYPE_CHECKING:
    from launcher.stages import Runner


def _with_runner(
    plan_path: Path, study_dir: Path, overrides: tuple[str, ...], work: Callable[[Runner], tuple[Json, str]]
) -> tuple[Json, str]:
    from launcher.opening import open_ledger, plan_study, verified_corpus
    from launcher.stages import Runner

    study = plan_study(plan_path, study_dir, overrides)
    store = verified_corpus(study)  # before the study folder is touched
    with open_ledger(study) as ledger, Runner(study, ledger, store).running() as runner:
        return work(runner)


@click.command()
@plan_verb
def check(plan_path: Path, study_dir: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Coordinate check of PLAN: do updates keep their size as width grows? Exit 3 if not, 4 if it cannot tell."""
    from launcher.gates import coordinate_gate

    outcome = ""

    def work(runner: Runner) -> tuple[Json, str]:
        nonlocal outcome
        found = runner.check()
        gate = coordinate_gate(found, runner.study.plan.proxy.parametrization)
        outcome = gate.outcome
        return {"coordinates": found, "outcome": gate.outcome, "reason": gate.reason}, coordinate_text(found)

    body, text = _with_runner(plan_path, study_dir, overrides, work)
    answer(as_json, body, f"{text}\n\nnext: forerun sweep {plan_path} --study {study_dir}")
    _exit_by(outcome)


@click.command()
@plan_verb
def sweep(plan_path: Path, study_dir: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Search learning rate, warmup and clip at PLAN's base width."""

    def work(runner: Runner) -> tuple[Json, str]:
        from launcher.evidence import gather
        from launcher.report_body import report_body

        runner.sweep()
        body = report_body(runner.study, runner.ledger, gather(runner.study, runner.ledger))["search"]
        assert isinstance(body, dict)
        return body, search_text(body)

    body, text = _with_runner(plan_path, study_dir, overrides, work)
    answer(as_json, body, f"{text}\n\nnext: forerun transfer {plan_path} --study {study_dir}")


@click.command()
@click.argument("plan_path", metavar="[PLAN]", type=click.Path(path_type=Path), required=False)
@click.option("--study", "study_dir", type=click.Path(path_type=Path), default=Path("study"), show_default=True)
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a plan value.")
@click.option("--runs", "runs_path", type=click.Path(path_type=Path), help="Judge this table of runs instead.")
@click.option("--target-width", type=int, help="With --runs: the main run's width (default: the largest, doubled).")
@click.option("--base-width", type=int, help="With --runs: where the rate was tuned (default: the smallest).")
@click.option("--margin-nats", type=float, default=0.01, show_default=True, help="With --runs: the cost allowed.")
@click.option("--level", type=float, default=0.9, show_default=True, help="With --runs: of every interval.")
@json_option
def transfer(
    plan_path: Path | None, study_dir: Path, overrides: tuple[str, ...], runs_path: Path | None, as_json: bool,
    target_width: int | None, base_width: int | None, margin_nats: float, level: float,
) -> None:  # fmt: skip
    """Valleys at every width of PLAN, and the verdict; or, with --runs, the verdict on a table of runs.

    A table (.csv, .jsonl, .parquet) has the columns width, lr, loss and optionally seed, or width and lr_optimum.
    Exit 3 if the optimum drifts, 4 if it cannot tell.
    """
    if (plan_path is None) == (runs_path is None):
        raise click.UsageError("name a PLAN, or a table with --runs FILE")
    if runs_path is not None:
        body = _judge_table(runs_path, target_width, base_width, margin_nats, level)
        answer(as_json, body, verdict_text(body))
        _exit_by({"holds": "passed", "drifts": "failed"}.get(str(body["outcome"]), "cannot_tell"))
        return
    assert plan_path is not None
    outcome = ""

    def work(runner: Runner) -> tuple[Json, str]:
        nonlocal outcome
        from launcher.evidence import gather
        from launcher.report_body import report_body

        runner.transfer()
        body = report_body(runner.study, runner.ledger, gather(runner.study, runner.ledger))["transfer"]
        assert isinstance(body, dict) and isinstance(body["verdict"], dict)
        outcome = {"holds": "passed", "drifts": "failed"}.get(str(body["verdict"]["outcome"]), "cannot_tell")
        return body, verdict_text(body["verdict"])

    found, text = _with_runner(plan_path, study_dir, overrides, work)
    answer(as_json, found, f"{text}\n\nnext: forerun ladder {plan_path} --study {study_dir}")
    _exit_by(outcome)


def _judge_table(
    path: Path, target_width: int | None, base_width: int | None, margin_nats: float, level: float
) -> dict[str, Json]:
    from transfer.by_optima import judge_optima
    from transfer.summary import verdict_summary
    from transfer.table import read_runs
    from transfer.verdict import judge

    runs = read_runs(path)
    widths = [p.width for p in runs.points] or [width for width, _ in runs.optima]
    target = target_width if target_width is not None else 2 * max(widths)
    base = base_width if base_width is not None else min(widths)
    if runs.points:
        verdict = judge(runs.points, target_width=target, base_width=base, margin_nats=margin_nats, level=level)
    else:
        verdict = judge_optima(runs.optima, target_width=target, base_width=base, margin_nats=margin_nats, level=level)
    return verdict_summary(verdict)


@click.command()
@plan_verb
def ladder(plan_path: Path, study_dir: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """The scaling ladder of PLAN at the transferred hyperparameters, and its fit."""

    def work(runner: Runner) -> tuple[Json, str]:
        from launcher.evidence import gather
        from launcher.report_body import report_body

        runner.ladder()
        body = report_body(runner.study, runner.ledger, gather(runner.study, runner.ledger))
        assert isinstance(body["ladder"], dict)
        return {"ladder": body["ladder"], "fit": body["fit"]}, ladder_text(body["ladder"])

    body, text = _with_runner(plan_path, study_dir, overrides, work)
    answer(as_json, body, f"{text}\n\nnext: forerun freeze {study_dir}")


@click.command()
@plan_verb
def run(plan_path: Path, study_dir: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """All stages of PLAN in order, up to the report. Resumes; finished work is never repeated."""

    def work(runner: Runner) -> tuple[Json, str]:
        from launcher.evidence import gather
        from launcher.report import write_report
        from launcher.report_body import report_body

        if runner.study.plan.command is None:  # else nobody sees activations
            runner.check()
        runner.ladder()
        body = report_body(runner.study, runner.ledger, gather(runner.study, runner.ledger))
        write_report(study_dir, body)
        return body, study_text(body)

    body, text = _with_runner(plan_path, study_dir, overrides, work)
    assert isinstance(body, dict) and isinstance(body["gates"], list)
    closed = [str(g["name"]) for g in body["gates"] if isinstance(g, dict) and g["outcome"] != "passed"]
    after = f"{len(closed)} gates closed ({', '.join(closed)})" if closed else f"next: forerun freeze {study_dir}"
    if isinstance(body["own_run"], dict) and not closed:
        after = "every gate passed: start your main run as shown above"
    answer(as_json, body, f"{text}\n\nreport: {study_dir / 'report.html'}\n{after}")


@click.command()
@study_argument
@json_option
def status(study_dir: Path, as_json: bool) -> None:
    """What STUDY has done and found so far; works while a driver runs."""
    from launcher.report_body import recorded_body

    body = recorded_body(study_dir)
    answer(as_json, body, study_text(body))


def _exit_by(outcome: str) -> None:
    if outcome != "passed":
        raise SystemExit(3 if outcome == "failed" else 4)


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
        from launcher.own import own_text

        parts.append(own_text(body["own_run"]))
    rows = [(f"gate {g['name']}: {g['outcome']}", str(g["reason"])) for g in gates if isinstance(g, dict)]
    parts += [f"{head}\n  {reason}" for head, reason in rows]
    return "\n\n".join(parts)
