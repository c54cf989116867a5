"""cli.md and exit-codes.md: verbs and options as click has them, exit codes and the errors behind
each.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import json
import re

import click

from launcher.cli import cli
from proxies.core.errors import ExitCode
from reference_pages.source import trees

_HEAD = """# Commands

`forerun VERB [ARGS]`, in the order of the story. Every verb takes `--help`, and ends with one of the
[exit codes](exit-codes.md); what `--json` holds is on [its own page](json.md). How they go together: [the command
line](../command-line.md).

"""  # noqa: E501
_EXITS = """# Exit codes

Those that a verb gives in a way of its own are said with [the verb](cli.md); what to do about each is on the page of
[the command line](../command-line.md#exit-codes). An error that is not named here is bad input (2) if it is one of
forerun's own, or if it says what the machine or the input lacks: a path that cannot be read or written, a full disk, no
memory, text that is not UTF-8. Any other is a bug in forerun (1).

| code | means | errors |
|---|---|---|
"""  # noqa: E501


def commands() -> dict[str, click.Command]:
    """Every verb, loaded, in the order of the story."""
    found = {}
    for verb in cli.cli.list_commands(click.Context(cli.cli)):
        command = cli.cli.get_command(click.Context(cli.cli), verb)
        assert command is not None
        found[verb] = command
    return found


def cell(text: str) -> str:
    """A text as one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _kind(param: click.Parameter) -> str:
    """What an option takes, in words that no version of click changes."""
    kind = param.type
    if isinstance(param, click.Option) and (param.is_flag or param.count):
        return "flag"
    if isinstance(kind, click.Choice):
        words = " \\| ".join(str(choice) for choice in kind.choices)
    elif isinstance(kind, click.IntRange | click.FloatRange):
        low, high = kind.min, kind.max
        name = "whole number" if isinstance(kind, click.IntRange) else "number"
        bounds = [
            f"from {low}" if low is not None else "",
            f"to {high}" if high is not None else "",
        ]
        words = " ".join([name, *filter(None, bounds)])
    else:
        words = {"integer": "whole number", "float": "number", "amount": "number (7B, 1.5T)"}.get(
            kind.name, kind.name
        )
    words = f"`{param.metavar}`" if param.metavar and not isinstance(kind, click.Choice) else words
    return f"{words}, repeatable" if getattr(param, "multiple", False) else words


def _default(option: click.Option) -> str:
    if option.required:
        return "must be given"
    if (
        not option.show_default
        or option.is_flag
        or callable(option.default)
        or option.default is None
    ):
        return ""
    return f"`{option.default}`"


def _argument(param: click.Argument) -> str:
    name = (param.metavar or (param.name or "").upper()).strip("[]")
    name = {"STUDY_DIR": "STUDY"}.get(name, name) + ("..." if param.nargs != 1 else "")
    return name if param.required else f"[{name}]"


def _help(command: click.Command) -> str:
    """The verb's own words; what click must not wrap becomes a block."""
    blocks = []
    for block in [*inspect.cleandoc(command.help or "").split("\n\n"), command.epilog or ""]:
        if block.startswith("\b\n"):
            blocks.append("```\n" + block.removeprefix("\b\n") + "\n```")
        else:
            blocks.append(" ".join(block.split()).replace("<", "&lt;"))
    return "\n\n".join(filter(None, blocks))


def _verb(name: str, command: click.Command) -> str:
    arguments = [_argument(param) for param in command.params if isinstance(param, click.Argument)]
    options = [
        param for param in command.params if isinstance(param, click.Option) and not param.hidden
    ]
    usage = " ".join(["forerun", name, *(["[OPTIONS]"] if options else []), *arguments])
    lines = [f"## {name}\n", f"```text\n{usage}\n```\n", _help(command) + "\n"]
    lines += ["| option | takes | default | what |", "|---|---|---|---|"]
    for option in options:
        names = ", ".join(f"`{text}`" for text in (*option.opts, *option.secondary_opts))
        lines.append(
            f"| {names} | {_kind(option)} | {_default(option)} | {cell(option.help or '')} |"
        )
    return "\n".join(lines) + "\n"


def commands_page() -> str:
    """cli.md."""
    return _HEAD + "\n".join(_verb(name, command) for name, command in commands().items())


def _list_errors() -> dict[str, dict[str, str]]:
    """Return the first sentence of every error class that declares an exit code, by code and
    class.
    """
    sentences: dict[str, dict[str, str]] = {}
    for _, tree in trees(r"(?m)^    exit_code = ExitCode\."):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and (
                declared := re.search(r"exit_code = ExitCode\.(\w+)", ast.unparse(node))
            ):
                sentence = (ast.get_docstring(node) or "").split("\n\n")[0]
                sentences.setdefault(declared[1], {})[node.name] = sentence
    return sentences


def _error_as_json() -> str:
    """What a verb prints for an error: asked for, not made up."""
    out = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        cli.main(["note", "--study", "no/such/study", "--json"])
    return json.dumps(json.loads(out.getvalue()), indent=2)


def exit_codes_page() -> str:
    """exit-codes.md."""
    errors, lines = _list_errors(), []
    for code in ExitCode:
        names = "<br>".join(
            f"`{name}`: {cell(text)}" for name, text in sorted(errors.get(code.name, {}).items())
        )
        lines.append(f"| {code} | {code.meaning} | {names} |")
    after = "\n\n## An error as JSON\n\nWith `--json` an error is one object too, "
    after += "`forerun note --study no/such/study --json` for one:\n\n"
    return _EXITS + "\n".join(lines) + after + f"```json\n{_error_as_json()}\n```\n"
