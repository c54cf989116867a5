"""The verb that teaches a shell our words: completion."""

from __future__ import annotations

import json

import click

SHELLS = {
    "bash": 'eval "$(forerun completion bash)"    # in ~/.bashrc; bash 4.4 or newer',
    "zsh": 'eval "$(forerun completion zsh)"     # in ~/.zshrc, after compinit',
    "fish": "forerun completion fish | source     # in ~/.config/fish/config.fish",
}
"""The line that turns it on."""
PROGRAM, VARIABLE = "forerun", "_FORERUN_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(list(SHELLS)))
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else there.")
@click.pass_context
def completion(context: click.Context, shell: str, as_json: bool) -> None:
    """Print the script that has SHELL complete verbs, options, plans, studies and frozen digests.

    \b
    eval "$(forerun completion bash)"    # in ~/.bashrc; bash 4.4 or newer
    eval "$(forerun completion zsh)"     # in ~/.zshrc, after compinit
    forerun completion fish | source     # in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    completer = kind(context.find_root().command, {}, PROGRAM, VARIABLE)
    script = completer.source_template % completer.source_vars()  # `source` asks for bash's version, in bash
    click.echo(json.dumps({"shell": shell, "line": SHELLS[shell], "script": script}) if as_json else script)
