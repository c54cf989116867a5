"""The verb that judges transfer: from a study's tests, or from a table of runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from forerun._launcher.cli.names import study_option
from forerun._launcher.cli.options import (
    PATH,
    WholeAmount,
    column_option,
    full_option,
    get_typed_options,
    json_option,
    print_result,
    refuse_options,
    set_option,
    verbose_option,
)
from forerun._launcher.cli.runner import Body, exit_with_outcome, run_stages
from forerun._launcher.main_run.progress_output import StepProgress, print_progress
from forerun._launcher.report.answers.transfer_verdict import judge_table
from forerun._launcher.study.stages.gates import judge_transfer
from forerun._transfer.question import AXES
from forerun._transfer.tables.columns import OPTIMUM_COLUMNS

if TYPE_CHECKING:
    from forerun._launcher.study.stages.stages import StageRunner
    from forerun._proxies.core.canon import Json

_DEFAULT_PLAN = Path("plan.toml")
"""Plan that is used if neither PLAN nor --runs is given."""
_PLAN_OPTIONS = ("study_dir", "overrides", "spend", "verbose")
"""Parameter names of the options that have an effect only with a PLAN."""


def _parse_power(
    ctx: click.Context, param: click.Parameter, value: str
) -> float | Literal["measured"]:
    if value == "measured":
        return "measured"
    try:
        return float(value)
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is neither a number nor `measured`", ctx, param
        ) from None


@click.command()
@click.argument("plan_path", metavar="[PLAN]", type=PATH, required=False)
@study_option
@set_option
@click.option("--spend", is_flag=True, help="Run more, to decide verdicts of `cannot tell`.")
@verbose_option
@click.option(
    "--runs",
    "runs_path",
    type=PATH,
    help="Judge this table of runs instead of a PLAN.",
)
@click.option(
    "--axis",
    type=click.Choice(AXES),
    help="With --runs: the size that grows (default: the one that varies).",
)
@click.option(
    "--hyperparameter",
    type=click.Choice(list(OPTIMUM_COLUMNS)),
    metavar="NAME",
    help="With --runs: the hyperparameter to judge (default: the learning rate, or the one "
    "that varies).",
)
@click.option(
    "--target-size",
    "--target-width",
    "target_size",
    type=WholeAmount(),
    help="With --runs: size of the main run (default: twice the largest).",
)
@click.option(
    "--base-size",
    "--base-width",
    "base_size",
    type=WholeAmount(),
    help="With --runs: size at which the value was tuned (default: the smallest).",
)
@click.option(
    "--power",
    callback=_parse_power,
    default="0",
    show_default=True,
    metavar="NUMBER|measured",
    help="With --runs: the value moves as (target / base)^power; `measured`: as the optima do.",
)
@click.option(
    "--margin-nats",
    type=float,
    default=0.01,
    show_default=True,
    help="With --runs: regret that is allowed, in nats.",
)
@click.option(
    "--level",
    type=float,
    default=0.9,
    show_default=True,
    help="With --runs: level of every interval.",
)
@column_option
@full_option
@json_option
@click.pass_context
def transfer(
    context: click.Context,
    /,
    plan_path: Path | None,
    study_dir: Path,
    overrides: tuple[str, ...],
    spend: bool,
    verbose: bool,
    runs_path: Path | None,
    full: bool,
    as_json: bool,
    **table: object,
) -> None:
    """Measure learning-rate curves of PLAN over every axis, and judge transfer; or, with --runs,
    judge a table.

    A table (.csv, .tsv, .txt, .md, .jsonl, .ndjson, .parquet, or a pipe: - is standard input) has
    the columns width, lr, loss and optionally seed, or width and lr_optimum; other axes and
    hyperparameters by their names. Exit 3 if the optimum drifts, 4 if it cannot tell.
    """
    if plan_path is None and runs_path is None and _DEFAULT_PLAN.exists():
        plan_path = _DEFAULT_PLAN
    if (plan_path is None) == (runs_path is None):
        raise click.UsageError("name a PLAN, or a table with --runs FILE")
    typed = get_typed_options(context)
    if runs_path is not None:
        refuse_options(typed, _PLAN_OPTIONS, "with a PLAN: no runs can be added to a table")
        from forerun._launcher.report.answers.report_text import format_verdict

        with StepProgress(f"transfer --runs {runs_path}") as heartbeat:
            heartbeat.step("reading and judging", 0.0)
            body = judge_table(runs_path, **table)  # type: ignore[arg-type]
        text = format_verdict(body)
    else:
        assert plan_path is not None
        refuse_options(typed, table, "with --runs")
        body, text = run_stages(
            plan_path,
            study_dir,
            overrides,
            lambda runner: _run_and_judge(runner, spend=spend, full=full),
            verb="transfer",
            verbose=verbose,
        )
        text = f"{text}\n\n{_suggest_next(str(body['outcome']), plan_path, study_dir)}"
    print_result(as_json, body, text)
    exit_with_outcome(str(body["outcome"]))


def _run_and_judge(runner: StageRunner, *, spend: bool, full: bool) -> tuple[Body, str]:
    """Run what is missing, and return the verdicts as data and as text. If the verdict is open, the
    second line of the text says what would decide it.
    """
    from forerun._launcher.report.answers.outcome import format_next_decision, format_transfer
    from forerun._launcher.report.answers.report_text import (
        format_spend,
        format_text_table,
        format_transfer_tests,
    )
    from forerun._launcher.report.page.report_builder import (
        PROGRESS_LABEL,
        build_report_and_next_runs,
    )
    from forerun._launcher.report.views.tables import build_tests_table
    from forerun._launcher.study.stages.study_findings import gather_findings

    runner.transfer(spend=spend)
    print_progress(PROGRESS_LABEL)
    findings = gather_findings(runner.study, runner.ledger)
    assert findings.verdicts is not None
    gate = judge_transfer(findings.verdicts).outcome
    outcome = {"passed": "holds", "failed": "drifts"}.get(gate, gate)
    report, next_runs = build_report_and_next_runs(runner.study, runner.ledger, findings)
    assert report.transfer is not None
    lines = [format_transfer(report.transfer, outcome)]
    if gate == "cannot_tell":
        lines.append(format_next_decision(next_runs, runner.study.study_dir, report.open_gates))
    head = "\n".join(filter(None, lines))
    table = (
        format_transfer_tests(report.transfer)
        if full
        else format_text_table(build_tests_table(report.transfer))
    )
    body: dict[str, Json] = {
        **report.transfer.to_json(),
        "outcome": outcome,
        "spend": report.spend.to_json(),
    }
    return body, f"{head}\n\n{table}\n\nspent: {format_spend(report.spend)}"


def _suggest_next(outcome: str, plan_path: Path, study_dir: Path) -> str:
    """Return the line with the next step after a verdict."""
    if outcome == "holds":
        return f"next: forerun ladder {plan_path} --study {study_dir}"
    if outcome == "drifts":
        return (
            "next: a new plan with another parametrization or sizes nearer to the target; or "
            f"accept the drift: forerun freeze {study_dir} --accept transfer --reason TEXT"
        )
    return (
        f"next: forerun transfer {plan_path} --study {study_dir} --full, which says why; if no "
        "command above decides it, make a new plan: larger sizes, axes not tested yet, or a wider "
        "transfer.margin_nats"
    )
