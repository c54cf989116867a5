"""Verbs that run the stages of a study."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.options import answer, full_option, plan_verb, verbose_option
from launcher.cli.runner import exit_by, with_runner
from proxies.core import canon
from proxies.core.canon import Json

if TYPE_CHECKING:
    from launcher.study.stages import Runner


@click.command()
@plan_verb
def check(plan_path: Path, study_dir: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Run the coordinate check: do updates keep their size as width grows? Exit 3 if not, 4 if it
    cannot tell.
    """
    from launcher.answers.texts import coordinate_text, model_text
    from launcher.study.gates import check_advice, coordinate_gate

    def work(runner: Runner) -> tuple[Json, str]:
        checks = runner.check()
        gate = coordinate_gate(checks, runner.study.plan.proxy.parametrization)
        body: dict[str, Json] = {
            "coordinates": checks,
            "outcome": gate.outcome,
            "reason": gate.reason,
        }
        text = coordinate_text(checks)
        if runner.study.factory is not None:
            from launcher.study.own_count import own_model

            body["own_model"] = own_model(runner.study)
            text = f"{model_text(body['own_model'])}\n\n{text}"
        return body, text

    body, text = with_runner(plan_path, study_dir, overrides, work, verb="check")
    assert isinstance(body, dict)
    next_step = f"forerun sweep {plan_path} --study {study_dir}"
    if body["outcome"] != "passed":
        next_step = (
            f"{check_advice(str(body['outcome']))}, then forerun check {plan_path} --study ANOTHER"
        )
    answer(as_json, body, f"{text}\n\nnext: {next_step}")
    exit_by(str(body["outcome"]))


@click.command()
@plan_verb
@verbose_option
def sweep(
    plan_path: Path, study_dir: Path, overrides: tuple[str, ...], as_json: bool, verbose: bool
) -> None:
    """Search learning rate, warmup, clip and what else PLAN names, at its base width."""

    def work(runner: Runner) -> tuple[Json, str]:
        from launcher.answers.texts import search_text
        from launcher.report.body import body_of

        runner.sweep()
        body = body_of(runner.study, runner.ledger)["search"]
        assert isinstance(body, dict)
        return body, search_text(body)

    body, text = with_runner(plan_path, study_dir, overrides, work, verb="sweep", verbose=verbose)
    answer(as_json, body, f"{text}\n\nnext: forerun transfer {plan_path} --study {study_dir}")


@click.command()
@plan_verb
@verbose_option
def ladder(
    plan_path: Path, study_dir: Path, overrides: tuple[str, ...], as_json: bool, verbose: bool
) -> None:
    """Train the scaling ladder of PLAN at the transferred hyperparameters, and its fit."""

    def work(runner: Runner) -> tuple[Json, str]:
        from launcher.answers.texts import ladder_text
        from launcher.report.body import body_of

        runner.ladder()
        body = body_of(runner.study, runner.ledger)
        assert isinstance(body["ladder"], dict)
        return {"ladder": body["ladder"], "fit": body["fit"]}, ladder_text(body["ladder"])

    body, text = with_runner(plan_path, study_dir, overrides, work, verb="ladder", verbose=verbose)
    answer(as_json, body, f"{text}\n\nnext: forerun freeze {study_dir}")


@click.command()
@plan_verb
@verbose_option
@click.option(
    "--fork",
    "parent_dir",
    metavar="STUDY",
    type=click.Path(path_type=Path),
    help="Import the finished runs of another study on the same data first.",
)
@full_option
@click.option(
    "--sbatch",
    "sbatch_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write this command as a SLURM job, with cluster.slurm_options; run nothing.",
)
def run(
    plan_path: Path,
    study_dir: Path,
    overrides: tuple[str, ...],
    as_json: bool,
    parent_dir: Path | None,
    sbatch_file: Path | None,
    verbose: bool,
    full: bool,
) -> None:
    """Run all stages of PLAN in order, up to the report. Resumes; finished work is never
    repeated.
    """
    if sbatch_file is not None:
        from launcher.plan.file import load_plan
        from launcher.supervisor.slurm import study_script

        # Load the plan as the job will load it.
        options = load_plan(plan_path, (*overrides, "cluster.address=auto")).cluster.slurm_options
        text = study_script(plan_path, study_dir, overrides, parent_dir, options)
        canon.write_atomic(sbatch_file, text.encode())
        answer(
            as_json,
            {"sbatch": str(sbatch_file)},
            f"wrote {sbatch_file}\nnext: sbatch {sbatch_file}",
        )
        return

    def work(runner: Runner) -> tuple[Json, str]:
        from launcher.answers.outcome import closing_text, gate_lines
        from launcher.answers.texts import details_text, spend_text
        from launcher.base.talk import say
        from launcher.report.about import about, next_line
        from launcher.report.body import body_and_next
        from launcher.report.page import write_report
        from launcher.study.gates import find_failed_check, refuse_failed

        if runner.study.plan.command is None:  # activations of a command cannot be checked
            failed = find_failed_check(runner.study, runner.check())
            refuse_failed(runner.study, runner.ledger, failed)
        runner.ladder()
        say(
            f"fit: scaling laws of the ladder with {runner.study.plan.ladder.bootstrap} refits, "
            "verdicts, report"
        )
        runner.reporter.draw()
        body, after = body_and_next(runner.study, runner.ledger)
        write_report(study_dir, body, about(runner.study, runner.ledger, body, after))
        parts = [closing_text(body, after, study_dir), f"spent: {spend_text(body)}"]
        parts += [details_text(body), *gate_lines(body, after, full=True)] if full else []
        parts.append(f"report: {study_dir / 'report.html'}\n{next_line(body, after, study_dir)}")
        return body, "\n\n".join(parts)

    body, text = with_runner(
        plan_path, study_dir, overrides, work, parent_dir, verb="run", verbose=verbose
    )
    answer(as_json, body, text)
