"""The verb that judges transfer: from a study's tests, or from a table of runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.answers.transfer_verdict import judge_table, table_options
from launcher.base.talk import Heartbeat
from launcher.cli.names import study_option
from launcher.cli.options import (
    answer,
    full_option,
    json_option,
    set_option,
    typed_options,
    verbose_option,
)
from launcher.cli.runner import exit_by, with_runner
from proxies.core.canon import Json

if TYPE_CHECKING:
    from launcher.study.stages import Runner

_DEFAULT_PLAN = Path("plan.toml")
"""Plan in the current folder, which is used as by the other stages; not used with --runs."""
_OUTCOMES = {"holds": "passed", "drifts": "failed"}


@click.command()
@click.argument("plan_path", metavar="[PLAN]", type=click.Path(path_type=Path), required=False)
@study_option
@set_option
@click.option("--spend", is_flag=True, help="Run more, to decide verdicts of `cannot tell`.")
@verbose_option
@table_options
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
    typed = typed_options(context)
    if runs_path is not None:
        if given := [
            typed[name] for name in ("study_dir", "overrides", "spend", "verbose") if name in typed
        ]:
            raise click.UsageError(
                f"{', '.join(given)}: only with a PLAN: no runs can be added to a table"
            )
        from launcher.answers.texts import verdict_text

        with Heartbeat(f"transfer --runs {runs_path}") as heartbeat:
            heartbeat.step("reading and judging", 0.0)
            body = judge_table(runs_path, **table)  # type: ignore[arg-type]
        answer(as_json, body, verdict_text(body))
        exit_by(_OUTCOMES.get(str(body["outcome"]), "cannot_tell"))
        return
    if given := [option for name, option in typed.items() if name in table]:
        raise click.UsageError(f"{', '.join(given)}: only with --runs")
    assert plan_path is not None
    study_body, text = with_runner(
        plan_path,
        study_dir,
        overrides,
        lambda runner: _run_and_judge(runner, spend=spend, full=full),
        verb="transfer",
        verbose=verbose,
    )
    assert isinstance(study_body, dict)
    outcome = _OUTCOMES.get(str(study_body["outcome"]), "cannot_tell")
    answer(
        as_json, study_body, f"{text}\n\n{_suggest_next(outcome, plan_path, study_dir)}".rstrip()
    )
    exit_by(outcome)


def _run_and_judge(runner: Runner, *, spend: bool, full: bool) -> tuple[Json, str]:
    """Run what is missing, and return the verdicts. The second line of the text says what would
    decide open ones.
    """
    from launcher.answers.outcome import decide_line, transfer_line
    from launcher.answers.texts import shown_table, spend_text, transfer_text
    from launcher.base.talk import say
    from launcher.report.body import FINDING, body_and_next
    from launcher.study.evidence import gather
    from launcher.study.gates import open_gates, transfer_gate
    from launcher.views.tables import tests_table

    runner.transfer(spend=spend)
    say(FINDING)
    findings = gather(runner.study, runner.ledger)
    assert findings.verdicts is not None
    gate = transfer_gate(findings.verdicts).outcome
    outcome = next((word for word, of in _OUTCOMES.items() if of == gate), gate)
    body, after = body_and_next(runner.study, runner.ledger, findings)
    transfer_body = body["transfer"]
    assert isinstance(transfer_body, dict)
    deciding = (
        decide_line(after, runner.study.study_dir, open_gates(body))
        if gate == "cannot_tell"
        else ""
    )
    head = "\n".join(filter(None, [transfer_line(transfer_body, outcome), deciding]))
    table = transfer_text(transfer_body) if full else shown_table(tests_table(transfer_body))
    return {
        **transfer_body,
        "outcome": outcome,
        "spend": body["spend"],
    }, f"{head}\n\n{table}\n\nspent: {spend_text(body)}"


def _suggest_next(outcome: str, plan_path: Path, study_dir: Path) -> str:
    """Return the line with the next step after a verdict."""
    if outcome == "passed":
        return f"next: forerun ladder {plan_path} --study {study_dir}"
    if outcome == "failed":
        return (
            "next: a new plan with another parametrization or sizes nearer to the target; or "
            f"accept the drift: forerun freeze {study_dir} --accept transfer --reason TEXT"
        )
    return (
        f"next: forerun transfer {plan_path} --study {study_dir} --full, which says why; if no "
        "command above decides it, make a new plan: larger sizes, axes not tested yet, or a wider "
        "transfer.margin_nats"
    )
