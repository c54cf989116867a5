"""The command line `forerun VERB [ARGS]`: verbs, signals, and the entry point of the program.

Imports click and nothing heavier, so that `--help` and completion are quick.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from forerun._launcher.cli.error_report import is_reader_gone, report_error
from forerun._launcher.main_run.terminal_layout import drop_stream
from forerun._proxies.core.errors import ExitCode

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

LEAVE_SECONDS = 4.0
"""Seconds after SIGTERM until a verb is ended, unless the verb handles the signal itself."""
PROGRAM = "forerun"
COMPLETE_VARIABLE = "_FORERUN_COMPLETE"
"""Environment variable by which a shell asks for completions."""

# Verbs in the order in which a user needs them: the module of `forerun._launcher.cli.verbs` that
# has the verb, and its help in one sentence. A module is imported only if its verb is called.
VERBS = {
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


class _VerbGroup(click.Group):
    """The group of all verbs. It lists them without importing their modules."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"forerun._launcher.cli.verbs.{VERBS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        verbs = [
            CompletionItem(name, help=text)
            for name, (_, text) in VERBS.items()
            if name.startswith(incomplete)
        ]
        return verbs + click.Command.shell_complete(self, ctx, incomplete)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in VERBS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], VERBS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands, in the order you use them"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])


@click.command(
    cls=_VerbGroup,
    epilog=f"Exit codes: {', '.join(f'{code} {code.meaning}' for code in ExitCode)}.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="forerun", prog_name=PROGRAM)
def cli() -> None:
    """The runs before the run: tune on small proxies, test that the optimum transfers, predict the
    main run's loss, freeze what is launched.
    """


def main(args: list[str] | None = None) -> NoReturn:
    """Run a verb, and turn errors into messages and exit codes; the entry point of the program.

    Args:
        args: Words of the command line; None for those of this process, which then runs only the
            verb and ends soon after SIGTERM.
    """
    words = sys.argv[1:] if args is None else args
    code: int | str | None = 0
    try:
        if args is None:
            _start_signal_thread()
        _install_signal_handlers()
        run_verb(words)
    except click.exceptions.Exit as stop:  # after --help or --version
        code = stop.exit_code
    except SystemExit as stop:
        code = stop.code
    except BaseException as error:
        if not is_reader_gone(error):
            code = report_error(error, as_json="--json" in words)
    _flush_streams()
    sys.exit(code)


def run_verb(words: list[str]) -> None:
    """Run the verb that a command line names, or answer a shell that asks for completions.

    This bypasses `click.Command.main`, which would turn a closed pipe into exit code 1.
    """
    if instruction := os.environ.get(COMPLETE_VARIABLE):
        from click.shell_completion import shell_complete

        sys.exit(shell_complete(cli, {}, PROGRAM, COMPLETE_VARIABLE, instruction))
    if words and not words[0].startswith("-"):
        _refuse_other_encodings(words)
    with cli.make_context(PROGRAM, list(words)) as context:
        cli.invoke(context)


def _refuse_other_encodings(words: list[str]) -> None:
    """Check that all words are UTF-8 before any is used: a record cannot hold other names.

    Raises:
        click.UsageError: A word of the command line, or the current folder, is not UTF-8.
    """
    places = list(words)
    with contextlib.suppress(OSError):  # the current folder may have been removed
        places.append(str(Path.cwd()))
    # Python reads a byte that is not UTF-8 as a surrogate.
    wrong = [
        os.fsencode(place).decode("utf-8", "backslashreplace")
        for place in places
        if any("\udc80" <= character <= "\udcff" for character in place)
    ]
    if wrong:
        raise click.UsageError(
            f"{', '.join(wrong)}: a name must be UTF-8, as records are; rename it, or check the "
            "terminal's encoding"
        )


def _start_signal_thread() -> None:
    """Start a thread that ends this process soon after SIGTERM or SIGHUP, even if one long call
    keeps Python from handling the signal.

    The thread gives the verb some seconds to end in order. It does not end a verb that handles the
    signal itself, because that verb has something to save.
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
                        # Straight to stderr, because another thread may hold the stream's lock.
                        os.write(2, b"forerun: interrupted; finished work is recorded\n")
                    os._exit(ExitCode.INTERRUPTED)

    threading.Thread(target=wait, name="forerun-signals", daemon=True).start()


def _install_signal_handlers() -> None:
    """Install handlers that end a verb on SIGTERM, and on SIGHUP (the terminal is gone), as Ctrl-C
    does.
    """
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
