"""Texts of docs/reference/cli.md and docs/reference/exit-codes.md.

cli.md lists every verb with its arguments and options, read from the click commands. exit-codes.md
lists every exit code with the error classes that end a verb with it, read from the source.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import json
import re

import click

from forerun._launcher.cli import cli
from forerun._proxies.core.errors import ExitCode
from reference_pages.markdown import format_cell
from reference_pages.source import parse_modules

_HEAD = """# Commands

`forerun VERB [ARGS]`, in the order in which a study uses the verbs. Every verb takes `--help` and ends with one of the
[exit codes](exit-codes.md). [Another page](json.md) lists the keys of `--json`. [The command line](../command-line.md)
says how the verbs work together.

"""  # noqa: E501
_EXITS = """# Exit codes

If a verb gives a code a special meaning, [its help text](cli.md) says so.
[The command line](../command-line.md#exit-codes) says what to do about each code.

Errors that are not in this table end with one of two codes. The code is 2 (bad input) if forerun defines the error. It
is also 2 if the machine or the input causes the error: a path that cannot be read or written, a full disk, too little
memory, or text that is not UTF-8. Any other error is a bug in forerun, and its code is 1.

| code | means | errors |
|---|---|---|
"""  # noqa: E501


def load_commands() -> dict[str, click.Command]:
    """Return every verb, loaded, in the order in which a study uses them."""
    commands = {}
    for verb in cli.cli.list_commands(click.Context(cli.cli)):
        command = cli.cli.get_command(click.Context(cli.cli), verb)
        assert command is not None
        commands[verb] = command
    return commands


def _describe_value(param: click.Parameter) -> str:
    """Return the type of an option's value, in words that do not depend on the version of click."""
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


def _format_default(option: click.Option) -> str:
    """Return the default of an option, or an empty text if its help text does not show one."""
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


def _format_argument(param: click.Argument) -> str:
    """Return an argument as the usage line shows it: `[STUDY]` if it may be left out."""
    name = (param.metavar or (param.name or "").upper()).strip("[]")
    # The verbs name this parameter `study_dir`; help texts and messages say STUDY.
    name = {"STUDY_DIR": "STUDY"}.get(name, name) + ("..." if param.nargs != 1 else "")
    return name if param.required else f"[{name}]"


def _format_help(command: click.Command) -> str:
    """Return the help text of a verb as Markdown.

    A paragraph that begins with a backspace character (`\\b`) becomes a code block: with this mark
    click does not rewrap the paragraph.
    """
    blocks = []
    for block in [*inspect.cleandoc(command.help or "").split("\n\n"), command.epilog or ""]:
        if block.startswith("\b\n"):
            blocks.append("```\n" + block.removeprefix("\b\n") + "\n```")
        else:
            blocks.append(" ".join(block.split()).replace("<", "&lt;"))
    return "\n\n".join(filter(None, blocks))


def _format_verb(name: str, command: click.Command) -> str:
    """Return the section of one verb."""
    arguments = [
        _format_argument(param) for param in command.params if isinstance(param, click.Argument)
    ]
    options = [
        param for param in command.params if isinstance(param, click.Option) and not param.hidden
    ]
    usage = " ".join(["forerun", name, *(["[OPTIONS]"] if options else []), *arguments])
    lines = [f"## {name}\n", f"```text\n{usage}\n```\n", _format_help(command) + "\n"]
    lines += ["| option | takes | default | what |", "|---|---|---|---|"]
    for option in options:
        names = ", ".join(f"`{text}`" for text in (*option.opts, *option.secondary_opts))
        lines.append(
            f"| {names} | {_describe_value(option)} | {_format_default(option)} | "
            f"{format_cell(option.help or '')} |"
        )
    return "\n".join(lines) + "\n"


def format_commands_page() -> str:
    """Return the text of cli.md."""
    return _HEAD + "\n".join(
        _format_verb(name, command) for name, command in load_commands().items()
    )


def _list_errors() -> dict[str, dict[str, str]]:
    """Return the first paragraph of the docstring of each error class, by exit code and class name.

    Classes that declare no exit code are left out.
    """
    sentences: dict[str, dict[str, str]] = {}
    for _, tree in parse_modules(r"(?m)^    exit_code = ExitCode\."):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and (
                declared := re.search(r"exit_code = ExitCode\.(\w+)", ast.unparse(node))
            ):
                sentence = (ast.get_docstring(node) or "").split("\n\n")[0]
                sentences.setdefault(declared[1], {})[node.name] = sentence
    return sentences


def _read_error_as_json() -> str:
    """Run `forerun note` on a study that does not exist, and return the JSON that it prints."""
    out = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        cli.main(["note", "--study", "no/such/study", "--json"])
    return json.dumps(json.loads(out.getvalue()), indent=2)


def format_exit_codes_page() -> str:
    """Return the text of exit-codes.md."""
    errors, lines = _list_errors(), []
    for code in ExitCode:
        names = "<br>".join(
            f"`{name}`: {format_cell(text)}"
            for name, text in sorted(errors.get(code.name, {}).items())
        )
        lines.append(f"| {code} | {code.meaning} | {names} |")
    ending = "\n\n## An error as JSON\n\nWith `--json` an error is one object too. For example, "
    ending += "`forerun note --study no/such/study --json` prints:\n\n"
    return _EXITS + "\n".join(lines) + ending + f"```json\n{_read_error_as_json()}\n```\n"
