"""Verbs that run the stages of a study, and the one that looks on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.verbs.options import answer, json_option, plan_verb, study_argument
from launcher.verbs.texts import coordinate_text, ladder_text, model_text, search_text, study_text, verdict_text
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
    if study.factory is not None:  # so that a model which cannot be built yet pins nothing
        from launcher.own import own_model

        own_model(study)
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
        body: dict[str, Json] = {"coordinates": found, "outcome": gate.outcome, "reason": gate.reason}
        text = coordinate_text(found)
        if runner.study.factory is not None:
            from launcher.own import own_model

            body["own_model"] = own_model(runner.study)
            text = f"{model_text(body['own_model'])}\n\n{text}"
        return body, text

    body, text = _with_runner(plan_path, study_dir, overrides, work)
    after = f"\n\nnext: forerun sweep {plan_path} --study {study_dir}" if outcome == "passed" else ""
    answer(as_json, body, f"{text}{after}")
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
    after = f"\n\nnext: forerun ladder {plan_path} --study {study_dir}" if outcome == "passed" else ""
    answer(as_json, found, f"{text}{after}")
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
