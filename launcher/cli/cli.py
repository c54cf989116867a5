"""`forerun VERB [ARGS]`: parsing, exit codes, errors in words. Imports click and nothing
heavier.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from launcher.base.terminal import drop_stream, lay_out, print_answer, shown
from proxies.core.errors import ExitCode, ForerunError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_LINK_LOOP = "Symlink loop from "
LEAVE_SECONDS = 4.0
"""Time after SIGTERM until a verb is ended, unless it handles the signal itself."""

_BUG_ERRNOS = {errno.EBADF, errno.EFAULT, errno.EINVAL, errno.ENOTSOCK}
"""Error numbers that mean a bug of forerun if the error names no file."""
_OS_ADVICE = {
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

# Verbs in the order a user needs them: module of `launcher.verbs`, and help. A module is imported
# only when its verb is called, or its help.
_VERBS = {
    "demo": (
        "start",
        "Run the whole chain on a corpus found on this machine: minutes, CPU, no account.",
    ),
    "doctor": (
        "doctor",
        "Check this machine for what a study needs: lines of ok, warn or fail, with a fix.",
    ),
    "init": ("start", "Write a commented plan and its JSON Schema."),
    "validate": ("start", "Check a plan: every problem at once."),
    "estimate": (
        "estimate",
        "Estimate what a plan takes before anything runs: runs, FLOPs, hours, dollars, disk.",
    ),
    "tokenize": (
        "data",
        "Turn text, jsonl, parquet or .bin files into token shards with a hashed manifest.",
    ),
    "check": ("study", "Run the coordinate check: do updates keep their size as width grows?"),
    "sweep": (
        "study",
        "Search learning rate, warmup and clip at the base width, by Optuna over Ray.",
    ),
    "transfer": (
        "transfer",
        "Measure learning-rate curves over width and more; verdict: holds, drifts, cannot tell.",
    ),
    "ladder": ("study", "Train the scaling ladder at the transferred hyperparameters."),
    "run": (
        "study",
        "Run all stages in order, up to the report; resumes, never repeats finished work.",
    ),
    "repair": (
        "repair",
        "Rebuild a damaged ledger from what its hashes prove; names what was lost.",
    ),
    "status": (
        "status",
        "Show what a study has done, is doing and has found; works while it runs.",
    ),
    "fit": ("fits", "Fit scaling laws to a study or to a table of runs."),
    "predict": ("predict", "Predict the loss of a run from a fit, with an interval."),
    "allocate": ("allocate", "Find the best size and tokens for a budget, with intervals."),
    "flops": ("flops", "Count parameters and FLOPs of a shape, by a named convention."),
    "explain": (
        "explain",
        "Explain a frozen config field by field: source, evidence; or a parametrization.",
    ),
    "freeze": ("freeze", "Write the frozen launch config, if every gate passed or was accepted."),
    "verify": (
        "exports",
        "Check a frozen config's digest, attestations and exports, each with its own trainer.",
    ),
    "export": (
        "exports",
        "Write a frozen config as a trainer's own files, with a fidelity report.",
    ),
    "rehearse": (
        "rehearse",
        "Rehearse a launch: kills, cuts, corruption, NaN, a full disk, a hang.",
    ),
    "launch": (
        "launch",
        "Train a frozen config with the embedded trainer; restarts it when it dies.",
    ),
    "watch": (
        "watch",
        "Compare a main run with its forecast: alerts, end and cost; afterwards, its score.",
    ),
    "note": (
        "note",
        "Add a dated line to the logbook of a study and its main run; without text, print it.",
    ),
    "report": ("freeze", "Write report.html and report.json of a study."),
    "dashboards": (
        "dashboards",
        "Log a study to W&B: runs, verdicts, a workspace; offline unless --online is given.",
    ),
    "completion": (
        "doctor",
        "Print a script by which your shell completes commands, options, studies, digests.",
    ),
}


class _CarriedError(Exception):
    """Carries an error through click, which would otherwise end the program itself, with 1 for a
    closed pipe.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def _carry_errors() -> Iterator[None]:
    try:
        yield
    except (BrokenPipeError, EOFError) as error:
        raise _CarriedError(error) from error


class _Verbs(click.Group):
    """Lists verbs without importing them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _carry_errors():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with _carry_errors():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        module = importlib.import_module(f"launcher.verbs.{_VERBS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        verbs = [(name, text) for name, (_, text) in _VERBS.items() if name.startswith(incomplete)]
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [*(CompletionItem(name, help=text) for name, text in verbs), *options]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _VERBS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], _VERBS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands, in the order you use them"):
            formatter.write_dl([(name, text) for name, (_, text) in _VERBS.items()])


@click.command(
    cls=_Verbs,
    epilog=f"Exit codes: {', '.join(f'{code} {code.meaning}' for code in ExitCode)}.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="forerun", prog_name="forerun")
def cli() -> None:
    """The runs before the run: tune on small proxies, test that the optimum transfers, predict the
    main run's loss, freeze what is launched.
    """


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of the command that an error ends."""
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return ExitCode.INTERRUPTED
    if isinstance(error, click.ClickException):
        return ExitCode.INPUT
    if isinstance(error, ForerunError):
        return error.exit_code
    return ExitCode.BUG if _surroundings_text(error) is None else ExitCode.INPUT


def _surroundings_text(error: BaseException) -> str | None:
    """Return a message if the machine or the input caused the error, with advice; else None."""
    if isinstance(error, OSError):
        if error.filename is not None:
            return f"{error.filename}: {error.strerror}"
        if error.errno is None or error.errno in _BUG_ERRNOS:
            return None
        return (
            f"{error.strerror}; "
            f"{_OS_ADVICE.get(error.errno, 'mend that, then run the same command again')}"
        )
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        detail = str(error).partition("\n")[0]
        return (
            f"out of memory{': ' if detail else ''}{detail}; free some, or use a machine with more"
        )
    if isinstance(error, EOFError):
        return (
            f"a file or stream ends too early{': ' if str(error) else ''}{error}; it may have been "
            "cut short"
        )
    if isinstance(error, UnicodeDecodeError):
        return (
            f"text is not {error.encoding}: {error.reason} at byte {error.start}; convert the file "
            "to UTF-8"
        )
    if isinstance(error, RecursionError) and _is_parsing(error):
        return "a file or value that was read is nested too deeply; write it with fewer levels"
    return None


def _is_parsing(error: BaseException) -> bool:
    """Return whether an error came from within a parser; any other endless recursion is a bug of
    forerun.
    """
    modules = (
        str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)
    )
    return any(module.split(".")[0] in _PARSERS for module in modules)


def _unwrap(error: BaseException) -> BaseException | None:
    """Return the error that click has wrapped; an error of printing gets the name of the stream.

    Returns None if the reader of stdout has closed the pipe, which is not an error. The
    RuntimeError of `Path.resolve` for links in a circle becomes an OSError of that path.
    """
    if isinstance(error, _CarriedError):
        error = error.error
    if isinstance(error, RuntimeError) and str(error).startswith(_LINK_LOOP):
        return OSError(
            errno.ELOOP, os.strerror(errno.ELOOP), str(error).removeprefix(_LINK_LOOP).strip("'")
        )
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if frames and (frame := frames[-1]).f_code in (click.echo.__code__, print_answer.__code__):
            if isinstance(error, BrokenPipeError):
                return None
            stream = "standard error" if frame.f_locals.get("err") else "standard output"
            return OSError(error.errno, error.strerror, stream)
    return error


def message_of(error: BaseException) -> str:
    """Return the message to the user for an error of a verb."""
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return "interrupted; finished work is recorded, the same command resumes or starts over"
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, ForerunError) and error.exit_code != ExitCode.BUG:
        return str(error)
    if (text := _surroundings_text(error)) is not None:
        return text
    return (
        f"{type(error).__name__}: {error}\nThis is a bug in forerun, not in your input; no record "
        "is lost. FORERUN_TRACEBACK=1 shows where it happened."
    )


def main(args: list[str] | None = None) -> NoReturn:
    """Run a verb, and turn errors into messages and exit codes; the entry point of the program."""
    typed = sys.argv[1:] if args is None else args
    try:
        if args is None:  # this process runs the verb alone
            _end_in_time()
        _handle_signals()
        _refuse_other_encodings(typed)
        code = cli.main(args=typed, prog_name="forerun", standalone_mode=False)
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except BaseException as error:
        cause = _unwrap(error)
        code = 0 if cause is None else _report_error(cause, typed)
    _flush_streams()
    sys.exit(code if isinstance(code, int) else 0)


def _end_in_time() -> None:
    """End this process soon after SIGTERM or SIGHUP, even if one long call keeps Python from
    handling them.

    The signal wakes a thread, which gives the verb some seconds to end in order. A verb that
    handles the signal itself, because it has something to save, is not ended.
    """
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def wait() -> None:
        while True:
            for number in os.read(awake, 64):
                ending = number in (signal.SIGTERM, signal.SIGHUP)
                if ending and signal.getsignal(number) is signal.default_int_handler:
                    time.sleep(LEAVE_SECONDS)
                    with contextlib.suppress(OSError):
                        os.write(2, b"forerun: interrupted; finished work is recorded\n")
                    os._exit(ExitCode.INTERRUPTED)

    threading.Thread(target=wait, name="forerun-signals", daemon=True).start()


def _refuse_other_encodings(typed: list[str]) -> None:
    """Check that paths are UTF-8 before they are used: a record cannot hold other names.

    Raises:
        click.UsageError: A word of the command line, or the current folder, is not UTF-8.
    """
    if not typed or typed[0].startswith("-"):  # help
        return
    words = typed
    if typed[0] == "note":  # `note` reports a text that is not UTF-8 itself
        words = [word for before, word in itertools.pairwise(typed) if before == "--study"]
    places = [("", word) for word in words]
    with contextlib.suppress(OSError):  # the current folder may have been removed
        places.append(("the current folder ", str(Path.cwd())))
    named = [
        f"{prefix}{os.fsencode(word).decode('utf-8', 'backslashreplace')}"
        for prefix, word in places
        if not _is_utf8(word)
    ]
    if named:
        raise click.UsageError(
            f"{', '.join(named)}: a name must be UTF-8, as records are; rename it"
        )


def _is_utf8(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def _handle_signals() -> None:
    """End a verb on SIGTERM or SIGHUP (the terminal is gone) in the same way as on Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # `nohup` ignores it, and that stays
            signal.signal(number, signal.default_int_handler)


def _flush_streams() -> None:
    """Flush stdout and stderr, and drop output that cannot be written: Python would exit with 120
    for it.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            drop_stream(stream)


def _choose_redaction(error: BaseException) -> tuple[Callable[[str], str], BaseException]:
    """Return a function that removes secrets from messages, and the error to report.

    A user's own code may raise an exception that holds a secret. Our own messages keep their words;
    only text that came with somebody else's exception is searched. If another package hides one of
    ours, that is the error to report, whatever it caused.
    """
    from launcher.doctor.findings import NamesError, found
    from launcher.doctor.findings import foreign as strangers

    if wrong := strangers(found()):
        return str, NamesError(wrong)
    from proxies.core.redaction import redact_message, redacted

    if not isinstance(error, ForerunError | click.ClickException):
        return redacted, error
    foreign_texts, cause = list[str](), error.__cause__ or error.__context__
    while cause is not None:
        foreign_texts += [] if isinstance(cause, ForerunError) else [str(cause)]
        cause = cause.__cause__ or cause.__context__
    return lambda text: redact_message(text, foreign_texts), error


def _report_error(error: BaseException, typed: list[str]) -> int:
    """Print an error on stderr, with `--json` also on stdout, and return the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else ExitCode.BUG
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return ExitCode.INPUT
    redacted, error = _choose_redaction(error)
    code, message = exit_code_of(error), redacted(message_of(error))
    problems = [redacted(str(problem)) for problem in getattr(error, "problems", None) or [message]]
    with contextlib.suppress(OSError):  # if the stream is closed, the exit code still tells
        if os.environ.get("FORERUN_TRACEBACK") == "1":
            click.echo(
                shown(redacted("".join(traceback.format_exception(error)))), err=True, nl=False
            )
        if isinstance(error, click.UsageError) and error.ctx is not None:
            click.echo(error.ctx.get_usage(), err=True)
        click.echo(lay_out(f"forerun: {shown(message)}", sys.stderr), err=True)
    if "--json" in typed:
        body = {
            "error": type(error).__name__,
            "exit_code": code,
            "message": message,
            "problems": problems,
        }
        with contextlib.suppress(OSError):
            click.echo(json.dumps(body, sort_keys=True))
    return code
