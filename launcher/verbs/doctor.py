"""The verb that looks at the environment: doctor. Imports click and launcher.doctor alone: all else may be broken."""

from __future__ import annotations

import json
from pathlib import Path

import click

from launcher.completing import plans, studies
from launcher.doctor.findings import body_of, line_of, worst
from launcher.talk import shown


@click.command()
@click.argument("plan_path", metavar="[PLAN]", required=False, type=click.Path(path_type=Path), shell_complete=plans)
@click.option("--study", "study_dir", type=click.Path(path_type=Path), default=Path("study"), show_default=True,
              help="Where the study lies, or will.", shell_complete=studies)  # fmt: skip
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a value of PLAN.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else there.")
def doctor(plan_path: Path | None, study_dir: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Is all here that a study needs, and PLAN? Each line is ok, warn or fail, with what mends it; some 10 seconds.

    Exit 0 if nothing fails (warnings are allowed), 2 if something does.
    """
    from launcher.doctor.examine import examine

    if overrides and plan_path is None:
        raise click.UsageError("--set changes a plan: name one")
    found = []
    for finding in examine(study_dir, plan_path, overrides):
        found.append(finding)
        if not as_json:
            click.echo(shown(line_of(finding)))
    outcome, body = worst(found), body_of(found)
    if as_json:
        click.echo(json.dumps(body, indent=2, sort_keys=True))
    else:
        after = f"forerun run {plan_path} --study {study_dir}" if plan_path else "forerun demo"
        after = "mend what fails, then forerun doctor" if outcome == "fail" else after
        click.echo(f"\n{body['num_ok']} ok, {body['num_warn']} warnings, {body['num_fail']} fail\nnext: {shown(after)}")
    if outcome == "fail":
        raise SystemExit(2)
