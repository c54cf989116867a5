"""`forerun VERB [ARGS]`: parsing, exit codes, errors in words. Imports click and nothing heavier."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

EXIT_BUG, EXIT_INPUT, EXIT_GATE, EXIT_CANNOT_TELL, EXIT_CORRUPT = 1, 2, 3, 4, 5
EXIT_HELD, EXIT_INTERRUPTED = 75, 130
EXIT_CODES = {
    0: "done",
    EXIT_BUG: "our bug",
    EXIT_INPUT: "bad input",
    EXIT_GATE: "a gate failed",
    EXIT_CANNOT_TELL: "cannot tell",
    EXIT_CORRUPT: "corrupt or tampered",
    EXIT_HELD: "another driver holds the study",
    EXIT_INTERRUPTED: "interrupted (resumable)",
}

# Errors of the rooms are bad input (2) unless named here.
_EXIT_CODES = {
    "GateError": EXIT_GATE,
    "CannotTellError": EXIT_CANNOT_TELL,
    "UnseenError": EXIT_CANNOT_TELL,
    "NoFinishedTrialError": EXIT_CANNOT_TELL,
    "BudgetSpent": EXIT_CANNOT_TELL,
    "LedgerCorrupt": EXIT_CORRUPT,
    "LedgerLost": EXIT_CORRUPT,
    "CurveCorrupt": EXIT_CORRUPT,
    "TamperedError": EXIT_CORRUPT,
    "FitTamperedError": EXIT_CORRUPT,
    "CorruptError": EXIT_CORRUPT,
    "StudyHeld": EXIT_HELD,
    "StaleDriver": EXIT_HELD,
    "InterruptedStudyError": EXIT_INTERRUPTED,
    "CorruptCorpusError": EXIT_CORRUPT,
    "SourceStuck": EXIT_BUG,
    "DuplicateRecord": EXIT_BUG,
}
_OUR_BUGS = {"SourceStuck", "DuplicateRecord"}

# In the order of the story; the module is loaded when its verb is called, or its help asked for.
_VERBS = {
    "demo": ("start", "The whole chain on a corpus found on this machine: minutes, CPU, no account."),
    "doctor": ("doctor", "Is all here that a study needs? Each line ok, warn or fail, with what mends it."),
    "init": ("start", "Write a commented plan and its JSON Schema."),
    "validate": ("start", "Check a plan: every problem at once."),
    "estimate": ("estimate", "What a plan takes before anything runs: runs, FLOPs, hours, dollars, disk."),
    "tokenize": ("data", "Text, jsonl, parquet or .bin files into shards with a hashed manifest."),
    "check": ("study", "Coordinate check: do updates keep their size as width grows?"),
    "sweep": ("study", "Optuna over Ray at the base width: learning rate, warmup, clip."),
    "transfer": ("transfer", "Valleys over width and other axes, and the verdict: holds, drifts or cannot tell."),
    "ladder": ("study", "The scaling ladder at the transferred hyperparameters."),
    "run": ("study", "All stages in order, up to the report; resumes, never repeats finished work."),
    "repair": ("repair", "Copy a damaged ledger and save what its hashes prove; names what was lost."),
    "status": ("status", "What a study is doing, has done and found; works while it runs."),
    "fit": ("fits", "Scaling fit of a study or of a table of runs."),
    "predict": ("predict", "Loss of a run from a fit, with its interval."),
    "allocate": ("allocate", "The best size and tokens for a budget, with intervals."),
    "flops": ("flops", "Parameters and FLOPs of a shape, by named convention."),
    "explain": ("explain", "A frozen config, field by field: source, strength, what would change it. Or a rule."),
    "freeze": ("freeze", "Write the frozen launch config, if every gate passed or was accepted."),
    "verify": ("exports", "Digest, attestations and exports of a frozen config, each proven by its own trainer."),
    "export": ("exports", "A frozen config as a trainer's own files, with a fidelity report."),
    "rehearse": ("rehearse", "The drills before a launch: kills, cuts, corruption, NaN, a full disk, a hang."),
    "launch": ("launch", "Run a frozen config with the embedded trainer, restarted when it dies."),
    "watch": ("watch", "A main run against its forecast: alerts, end and cost; afterwards, how it went."),
    "note": ("note", "Add a dated line to the logbook of the study and its main run; alone: print it."),
    "report": ("freeze", "report.html and report.json of a study."),
    "dashboards": ("dashboards", "A study in W&B: runs, verdicts, a workspace; offline unless told."),
    "completion": ("doctor", "A script that has your shell complete verbs, options, studies and digests."),
}


class _Verbs(click.Group):
    """Lists verbs without importing them."""

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
            ctx.fail(f"No such verb {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs, in the order of the story"):
            formatter.write_dl([(name, text) for name, (_, text) in _VERBS.items()])


@click.command(
    cls=_Verbs,
    epilog=f"Exit codes: {', '.join(f'{code} {meaning}' for code, meaning in EXIT_CODES.items())}.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="forerun", prog_name="forerun")
def cli() -> None:
    """The runs before the run: tune on small proxies, prove the optimum transfers, predict the big run's loss, freeze
    what is launched.
    """


def exit_code_of(error: BaseException) -> int:
    """The exit code an error stands for."""
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return EXIT_INTERRUPTED
    if isinstance(error, click.ClickException):
        return EXIT_INPUT
    if _is_ours(error):
        code = getattr(error, "exit_code", None)  # of a command that the demo ran
        if isinstance(code, int):
            return code
        return _EXIT_CODES.get(type(error).__name__, EXIT_INPUT)
    # A path that cannot be read or written is not our bug.
    return EXIT_INPUT if isinstance(error, OSError) and error.filename is not None else EXIT_BUG


def _named(error: BaseException) -> BaseException:
    """The error, naming the stream if it came of printing: a full disk behind `>` has no file name."""
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if frame.f_code is click.echo.__code__:
            stream = "the standard error" if frame.f_locals["err"] else "the standard output"
            return OSError(error.errno, error.strerror, stream)
    return error


def message_of(error: BaseException) -> str:
    """What an error of a verb says to the user."""
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return "interrupted; everything finished is recorded, the same command continues, or starts anew"
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if _is_ours(error) and type(error).__name__ not in _OUR_BUGS:
        return str(error)
    return (
        f"{type(error).__name__}: {error}\nThis is a bug in forerun, not in what you typed; nothing recorded is lost. "
        "FORERUN_TRACEBACK=1 shows where it happened."
    )


def _is_ours(error: BaseException) -> bool:
    from launcher.doctor.findings import PACKAGES

    return type(error).__module__.split(".")[0] in PACKAGES


def main(args: list[str] | None = None) -> NoReturn:
    """Entry point: run a verb, turn errors into words and exit codes."""
    typed = sys.argv[1:] if args is None else args
    try:
        _listen()
        code = cli.main(args=typed, prog_name="forerun", standalone_mode=False)
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except BrokenPipeError:
        _let_go_of_stdout()
        code = 0
    except BaseException as error:
        code = _complain(_named(error), typed)
        _let_go_of_stdout()
    sys.exit(code if isinstance(code, int) else 0)


def _listen() -> None:
    """Have a verb that is asked to end (SIGTERM, or a terminal that goes) leave as it does on Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # of `nohup` it is ignored, and stays so
            signal.signal(number, signal.default_int_handler)


def _let_go_of_stdout() -> None:
    """Send what nobody takes nowhere: Python flushes once more on its way out, and would complain."""
    try:
        if sys.stdout is not None:  # closed by `>&-`
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _redactor(error: BaseException) -> tuple[Callable[[str], str], BaseException]:
    """What takes secrets out of what is said, for a user's own code may name one in what it raises; and the error.

    Where another package hides one of ours, that is the error, whatever came of it: and all that is said of it.
    """
    from launcher.doctor.findings import NamesError, foreign, found

    if wrong := foreign(found()):
        return str, NamesError(wrong)
    from proxies.core.redaction import redacted

    return redacted, error


def _complain(error: BaseException, typed: list[str]) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else EXIT_BUG
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return EXIT_INPUT
    from launcher.base.talk import shown

    redacted, error = _redactor(error)
    code, message = exit_code_of(error), redacted(message_of(error))
    problems = [redacted(str(problem)) for problem in getattr(error, "problems", None) or [message]]
    with contextlib.suppress(OSError):  # a stream that takes no more: the exit code says it still
        if os.environ.get("FORERUN_TRACEBACK") == "1":
            click.echo(shown(redacted("".join(traceback.format_exception(error)))), err=True, nl=False)
        if isinstance(error, click.UsageError) and error.ctx is not None:
            click.echo(error.ctx.get_usage(), err=True)
        click.echo(f"forerun: {shown(message)}", err=True)
    if "--json" in typed:
        body = {"error": type(error).__name__, "exit_code": code, "message": message, "problems": problems}
        with contextlib.suppress(OSError):
            click.echo(json.dumps(body, sort_keys=True))
    return code
