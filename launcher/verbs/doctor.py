"""Verbs of the user's environment: doctor, completion. They import only click and
launcher.doctor.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from launcher.base.terminal import print_answer, shown
from launcher.cli.names import study_option
from launcher.doctor.findings import body_of, line_of, worst
from proxies.core.errors import ExitCode

SHELLS = {
    "bash": 'eval "$(forerun completion bash)"    # in ~/.bashrc; bash 4.4 or newer',
    "zsh": 'eval "$(forerun completion zsh)"     # in ~/.zshrc, after compinit',
    "fish": "forerun completion fish | source     # in ~/.config/fish/config.fish",
}
"""The line that turns completion on, for each shell."""
PROGRAM, VARIABLE = "forerun", "_FORERUN_COMPLETE"


@click.command()
@study_option
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else."
)
def doctor(study_dir: Path, as_json: bool) -> None:
    """Check this machine for what a study needs. Each line is ok, warn or fail, with a fix; some 5
    seconds.

    Exit 0 if nothing fails (warnings are allowed), 2 if something does.
    """
    from launcher.doctor.examine import examine

    findings = []
    for finding in examine(study_dir):
        findings.append(finding)
        if not as_json:
            print_answer(shown(line_of(finding)))
    outcome, body = worst(findings), body_of(findings)
    if as_json:
        print_answer(json.dumps(body, indent=2, sort_keys=True))
    else:
        next_step = "fix what fails, then forerun doctor" if outcome == "fail" else "forerun demo"
        print_answer(
            "\n"
            f"{body['num_ok']} ok, {body['num_warn']} warnings, {body['num_fail']} fail\nnext: "
            f"{next_step}"
        )
    if outcome == "fail":
        raise SystemExit(ExitCode.INPUT)


@click.command()
@click.argument("shell", type=click.Choice(list(SHELLS)))
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else."
)
@click.pass_context
def completion(context: click.Context, shell: str, as_json: bool) -> None:
    """Print the script by which SHELL completes commands, options, plans, studies and frozen
    digests.

    \b
    eval "$(forerun completion bash)"    # in ~/.bashrc; bash 4.4 or newer
    eval "$(forerun completion zsh)"     # in ~/.zshrc, after compinit
    forerun completion fish | source     # in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    completer = kind(context.find_root().command, {}, PROGRAM, VARIABLE)
    # click's own `source()` runs bash to check its version; format the template directly instead.
    script = completer.source_template % completer.source_vars()
    print_answer(
        json.dumps({"shell": shell, "line": SHELLS[shell], "script": script}) if as_json else script
    )
