"""Verbs that run the stages of a study, and the one that looks on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.verbs.options import answer, json_option, plan_verb, study_argument
from launcher.verbs.runner import exit_by, with_runner
from launcher.verbs.texts import coordinate_text, ladder_text, model_text, search_text, study_text
from proxies.canon import Json

if TYPE_CHECKING:
    from launcher.stages import Runner


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

    body, text = with_runner(plan_path, study_dir, overrides, work)
    after = f"\n\nnext: forerun sweep {plan_path} --study {study_dir}" if outcome == "passed" else ""
    answer(as_json, body, f"{text}{after}")
    exit_by(outcome)


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

    body, text = with_runner(plan_path, study_dir, overrides, work)
    answer(as_json, body, f"{text}\n\nnext: forerun transfer {plan_path} --study {study_dir}")


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

    body, text = with_runner(plan_path, study_dir, overrides, work)
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

    body, text = with_runner(plan_path, study_dir, overrides, work)
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
