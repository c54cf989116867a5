"""Verbs of the user's environment: doctor, completion. They import only click and the standard
library.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from forerun._launcher.cli.cli import COMPLETE_VARIABLE, PROGRAM
from forerun._launcher.cli.doctor.examine import examine
from forerun._launcher.cli.doctor.findings import find_worst_state, format_finding, to_json
from forerun._launcher.cli.names import study_option
from forerun._launcher.cli.options import json_option
from forerun._launcher.main_run.terminal_layout import escape_control_characters, print_answer
from forerun._proxies.core.errors import ExitCode

SHELLS = {
    "bash": 'eval "$(forerun completion bash)"    # in ~/.bashrc; bash 4.4 or newer',
    "zsh": 'eval "$(forerun completion zsh)"     # in ~/.zshrc, after compinit',
    "fish": "forerun completion fish | source     # in ~/.config/fish/config.fish",
}
"""The line that turns completion on, for each shell. The help of `completion` repeats these lines,
because click takes it from the docstring."""


@click.command()
@study_option
@json_option
def doctor(study_dir: Path, as_json: bool) -> None:
    """Check this machine for what a study needs. Each line is ok, warn or fail, with a fix; some 5
    seconds.

    Exit 0 if nothing fails (warnings are allowed), 2 if something does.
    """
    findings = []
    for finding in examine(study_dir):
        findings.append(finding)
        if not as_json:
            print_answer(escape_control_characters(format_finding(finding)))
    outcome, body = find_worst_state(findings), to_json(findings)
    if as_json:
        print_answer(json.dumps(body, indent=2, sort_keys=True))
    else:
        next_step = "fix what fails, then forerun doctor" if outcome == "fail" else "forerun demo"
        counts = f"{body['num_ok']} ok, {body['num_warn']} warnings, {body['num_fail']} fail"
        print_answer(f"\n{counts}\nnext: {next_step}")
    if outcome == "fail":
        raise SystemExit(ExitCode.INPUT)


@click.command()
@click.argument("shell", type=click.Choice(list(SHELLS)))
@json_option
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
    completer = kind(context.find_root().command, {}, PROGRAM, COMPLETE_VARIABLE)
    # click's own `source()` runs bash to check its version; format the template directly instead.
    script = completer.source_template % completer.source_vars()
    body = {"shell": shell, "line": SHELLS[shell], "script": script}
    print_answer(json.dumps(body) if as_json else script)
