"""Errors that end a command: exit codes, messages with advice, and their output without secrets."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import traceback
from collections.abc import Callable

import click

from forerun._launcher.main_run.terminal_layout import (
    escape_control_characters,
    lay_out,
    print_answer,
)
from forerun._proxies.core.errors import ExitCode, ForerunError

_BUG_ERRNOS = {errno.EBADF, errno.EFAULT, errno.EINVAL, errno.ENOTSOCK}
"""Error numbers that mean a bug of forerun if the error names no file."""
_ADVICE_BY_ERRNO = {
    errno.ENOSPC: "free space on the disk, then run the same command again",
    errno.EDQUOT: "free space within your quota, then run the same command again",
    errno.EMFILE: "raise the limit of open files: `ulimit -n 65536`",
    errno.ENFILE: "close files of other programs: the machine has too many open",
    errno.ENOMEM: "free memory, or use a machine with more",
    errno.EAGAIN: "raise the limit of processes (`ulimit -u`), or end some",
    errno.EROFS: "name a folder that can be written",
    errno.EPIPE: "a program at the other end of a pipe has ended: run the same command again",
}
_PARSERS = {"json", "tomllib", "tomli", "yaml"}
"""Packages that parse input. If one exceeds the recursion limit, the input is nested too deeply."""
_LINK_LOOP = "Symlink loop from "
"""Beginning of the message of the RuntimeError that `Path.resolve` raises if links form a loop."""


def describe_error(error: BaseException) -> tuple[int, str]:
    """Return the exit code of the command that an error ends, and the message to the user."""
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return (
            ExitCode.INTERRUPTED,
            "interrupted; finished work is recorded, the same command resumes or starts over",
        )
    if isinstance(error, click.ClickException):
        return ExitCode.INPUT, error.format_message()
    if isinstance(error, ForerunError) and error.exit_code != ExitCode.BUG:
        return error.exit_code, str(error)
    if cause := _describe_cause(error):
        return ExitCode.INPUT, cause
    message = (
        f"{type(error).__name__}: {error}\nThis is a bug in forerun, not in your input; no record "
        "is lost. FORERUN_TRACEBACK=1 shows where it happened."
    )
    return ExitCode.BUG, message


def _describe_cause(error: BaseException) -> str | None:
    """Return a message with advice if the machine or the input caused the error; None if it is a
    bug.
    """
    text = str(error)
    if isinstance(error, OSError):
        if name := error.filename or _name_stream(error):
            return f"{name}: {error.strerror}"
        if error.errno is None or error.errno in _BUG_ERRNOS:
            return None
        advice = _ADVICE_BY_ERRNO.get(error.errno, "mend that, then run the same command again")
        return f"{error.strerror}; {advice}"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        detail = f": {text.splitlines()[0]}" if text else ""
        return f"out of memory{detail}; free some, or use a machine with more"
    if isinstance(error, EOFError):
        detail = f": {text}" if text else ""
        return f"a file or stream ends too early{detail}; it may have been cut short"
    if isinstance(error, UnicodeDecodeError):
        return (
            f"text is not {error.encoding}: {error.reason} at byte {error.start}; convert the file "
            "to UTF-8"
        )
    if isinstance(error, RecursionError) and _is_parsing(error):
        return "a file or value that was read is nested too deeply; write it with fewer levels"
    if isinstance(error, RuntimeError) and text.startswith(_LINK_LOOP):
        path = text.removeprefix(_LINK_LOOP).strip("'")
        return f"{path}: {os.strerror(errno.ELOOP)}"
    return None


def _is_parsing(error: BaseException) -> bool:
    """Return whether a parser raised an error. A RecursionError from elsewhere is a bug in
    forerun.
    """
    modules = (
        str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)
    )
    return any(module.split(".")[0] in _PARSERS for module in modules)


def _name_stream(error: OSError) -> str:
    """Return the stream that could not be written to; empty if the error did not come from
    printing.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames or frames[-1].f_code not in (click.echo.__code__, print_answer.__code__):
        return ""
    return "standard error" if frames[-1].f_locals.get("err") else "standard output"


def is_reader_gone(error: BaseException) -> bool:
    """Return whether the reader of an output stream has closed the pipe (`| head`), which is no
    failure.
    """
    return isinstance(error, BrokenPipeError) and bool(_name_stream(error))


def _choose_redaction(error: BaseException) -> Callable[[str], str]:
    """Return a function that removes secrets from the messages of an error.

    A user's own code may raise an exception that holds a secret. Our own messages keep their words;
    only text that came with somebody else's exception is searched.
    """
    from forerun._proxies.core.redaction import redact, redact_message

    if not isinstance(error, ForerunError | click.ClickException):
        return redact
    foreign_texts, cause = list[str](), error.__cause__ or error.__context__
    while cause is not None:
        foreign_texts += [] if isinstance(cause, ForerunError) else [str(cause)]
        cause = cause.__cause__ or cause.__context__
    return lambda text: redact_message(text, foreign_texts)


def report_error(error: BaseException, *, as_json: bool) -> int:
    """Print an error on stderr, with `as_json` also on stdout, and return the exit code."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return ExitCode.INPUT
    redact = _choose_redaction(error)
    code, text = describe_error(error)
    message = redact(text)
    problems = [redact(str(problem)) for problem in getattr(error, "problems", None) or [message]]
    with contextlib.suppress(OSError):  # if the stream is closed, the exit code still tells
        if isinstance(error, KeyboardInterrupt):
            click.echo(err=True)  # ends the terminal's line of ^C
        if os.environ.get("FORERUN_TRACEBACK") == "1":
            trace = "".join(traceback.format_exception(error))
            click.echo(escape_control_characters(redact(trace)), err=True, nl=False)
        if isinstance(error, click.UsageError) and error.ctx is not None:
            click.echo(error.ctx.get_usage(), err=True)
        click.echo(lay_out(f"forerun: {escape_control_characters(message)}", sys.stderr), err=True)
    if as_json:
        body = {
            "error": type(error).__name__,
            "exit_code": code,
            "message": message,
            "problems": problems,
        }
        with contextlib.suppress(OSError):
            click.echo(json.dumps(body, sort_keys=True))
    return code
