"""Verbs that run the stages of a study: check, sweep, ladder, run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from forerun._launcher.cli.options import (
    PATH,
    add_plan_options,
    full_option,
    print_result,
    verbose_option,
    write_job,
)
from forerun._launcher.cli.runner import Body, exit_with_outcome, run_stages
from forerun._launcher.main_run.progress_output import print_progress
from forerun._launcher.main_run.supervisor.slurm import format_study_script
from forerun._launcher.study.stages.gates import (
    advise_on_check,
    find_failed_check,
    judge_coordinates,
    refuse_failed,
)

if TYPE_CHECKING:
    from forerun._launcher.study.stages.stages import StageRunner


@click.command()
@add_plan_options
def check(plan_path: Path, study_dir: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Run the coordinate check of PLAN: do updates keep their size as width grows?

    Exit 3 if they do not, 4 if the check cannot tell.
    """
    from forerun._launcher.report.answers.report_text import format_coordinate_checks, format_model
    from forerun._launcher.study.stages.user_model import describe_user_model

    def work(runner: StageRunner) -> tuple[Body, str]:
        checks = runner.check()
        gate = judge_coordinates(checks, runner.study.plan.proxy.parametrization)
        body: Body = {
            "coordinates": {
                name: check.model_dump(mode="json", exclude_unset=True)
                for name, check in checks.items()
            },
            "outcome": gate.outcome,
            "reason": gate.reason,
        }
        if runner.study.factory is None:
            return body, format_coordinate_checks(checks)
        body["own_model"] = describe_user_model(runner.study)
        return body, f"{format_model(body['own_model'])}\n\n{format_coordinate_checks(checks)}"

    body, text = run_stages(plan_path, study_dir, overrides, work, verb="check")
    outcome = str(body["outcome"])
    next_step = f"forerun sweep {plan_path} --study {study_dir}"
    if outcome != "passed":
        next_step = f"{advise_on_check(outcome)}, then forerun check {plan_path} --study ANOTHER"
    print_result(as_json, body, f"{text}\n\nnext: {next_step}")
    exit_with_outcome(outcome)


@click.command()
@add_plan_options
@verbose_option
def sweep(
    plan_path: Path, study_dir: Path, overrides: tuple[str, ...], as_json: bool, verbose: bool
) -> None:
    """Search learning rate, warmup, clip and what else PLAN names, at its base width."""

    def work(runner: StageRunner) -> tuple[Body, str]:
        from forerun._launcher.report.answers.report_text import format_search
        from forerun._launcher.report.page.report_builder import build_report

        runner.sweep()
        search = build_report(runner.study, runner.ledger).search
        assert search is not None
        return search.to_json(), format_search(search)

    body, text = run_stages(plan_path, study_dir, overrides, work, verb="sweep", verbose=verbose)
    print_result(as_json, body, f"{text}\n\nnext: forerun transfer {plan_path} --study {study_dir}")


@click.command()
@add_plan_options
@verbose_option
def ladder(
    plan_path: Path, study_dir: Path, overrides: tuple[str, ...], as_json: bool, verbose: bool
) -> None:
    """Train the scaling ladder of PLAN at the transferred hyperparameters, and fit it."""

    def work(runner: StageRunner) -> tuple[Body, str]:
        from forerun._launcher.report.answers.report_text import format_ladder
        from forerun._launcher.report.page.report_builder import build_report

        runner.ladder()
        report = build_report(runner.study, runner.ledger)
        assert report.ladder is not None and report.fit is not None
        body: Body = {"ladder": report.ladder.to_json(), "fit": report.fit.to_json()}
        return body, format_ladder(report.ladder)

    body, text = run_stages(plan_path, study_dir, overrides, work, verb="ladder", verbose=verbose)
    print_result(as_json, body, f"{text}\n\nnext: forerun freeze {study_dir}")


@click.command()
@add_plan_options
@verbose_option
@click.option(
    "--fork",
    "parent_dir",
    metavar="STUDY",
    type=PATH,
    help="Import the finished runs of another study on the same data first.",
)
@full_option
@click.option(
    "--sbatch",
    "sbatch_file",
    metavar="FILE",
    type=PATH,
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
    """Run all stages of PLAN in order, up to the report. It resumes, and never repeats finished
    work.
    """
    if sbatch_file is not None:
        if verbose or full:
            raise click.UsageError("--verbose and --full: only without --sbatch")
        from forerun._launcher.study.plan.file import load_plan

        # Load the plan as the job will load it.
        options = load_plan(plan_path, (*overrides, "cluster.address=auto")).cluster.slurm_options
        script = format_study_script(plan_path, study_dir, overrides, parent_dir, options)
        write_job(sbatch_file, script, as_json)
        return
    body, text = run_stages(
        plan_path,
        study_dir,
        overrides,
        lambda runner: _run_all_stages(runner, study_dir, full=full),
        parent_dir,
        verb="run",
        verbose=verbose,
    )
    print_result(as_json, body, text)


def _run_all_stages(runner: StageRunner, study_dir: Path, *, full: bool) -> tuple[Body, str]:
    from forerun._launcher.report.answers.outcome import format_gates, format_study
    from forerun._launcher.report.answers.report_text import format_details, format_spend
    from forerun._launcher.report.page.header import build_header, format_next_line
    from forerun._launcher.report.page.page import write_report
    from forerun._launcher.report.page.report_builder import build_report_and_next_runs

    ledger = runner.ledger
    if runner.study.plan.command is None:  # activations of a command cannot be checked
        refuse_failed(runner.study, ledger, find_failed_check(runner.study, runner.check()))
    runner.ladder()
    study = runner.study  # the stages have replaced it by its calibrated version
    print_progress(
        f"fit: scaling laws of the ladder with {study.plan.ladder.bootstrap} refits, verdicts, "
        "report"
    )
    runner.reporter.draw()
    report, next_runs = build_report_and_next_runs(study, ledger)
    write_report(study_dir, report, build_header(study, ledger, report, next_runs))
    parts = [format_study(report, next_runs, study_dir), f"spent: {format_spend(report.spend)}"]
    if full:
        parts += [format_details(report), *format_gates(report, next_runs, full=True)]
    parts.append(
        f"report: {study_dir / 'report.html'}\n{format_next_line(report, next_runs, study_dir)}"
    )
    return report.to_json(), "\n\n".join(parts)
