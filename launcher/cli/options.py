"""Options that several verbs share, a collector for their problems, and the answer of a verb."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from launcher.base.talk import say
from launcher.base.terminal import lay_out_table, print_answer, shown, terminal_columns
from launcher.cli.names import study_option
from proxies.core import canon
from proxies.core.tables.numerals import parse_amount

if TYPE_CHECKING:
    from launcher.frozen.frozen import Decision

_Command = TypeVar("_Command", bound=Callable[..., object])


class Amount(click.types.FloatParamType):
    """Number of parameters, tokens, FLOPs, or dollars: a number, optionally followed by K, M, B, or
    T, such as `7B` or `1.5T`.
    """

    name = "amount"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number that `value` spells."""
        number = parse_amount(str(value))
        if number is None:
            self.fail(
                f"{value!r} is not an amount: must be a number, or a number followed by K, M, B or "
                "T, such as 7B.",
                param,
                ctx,
            )
        return number


class WholeAmount(Amount):
    """An `Amount` that must be a whole number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the whole number that `value` spells."""
        number = super().convert(value, param, ctx)
        if not number.is_integer():
            self.fail(f"{value!r} is not a whole number.", param, ctx)
        return int(number)


AMOUNT = Amount()

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else."
)
verbose_option = click.option(
    "--verbose", is_flag=True, help="Print a line on stderr for every run that has ended."
)
full_option = click.option("--full", is_flag=True, help="Print all details, not the answer alone.")
set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Override a plan value (TOML); repeatable.",
)
plan_argument = click.argument(
    "plan_path", metavar="[PLAN]", type=click.Path(path_type=Path), default=Path("plan.toml")
)


def _parse_columns(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    columns: dict[str, str] = {}
    for value in values:
        role, _, name = (part.strip() for part in value.partition("="))
        if not role or not name:
            raise click.BadParameter(
                f"{value!r}: must be NAME=THEIRS, such as loss=val_bpb", ctx, param
            )
        if role in columns:
            raise click.BadParameter(f"{role} is named twice: name it once", ctx, param)
        columns[role] = name
    return columns


column_option = click.option(
    "--column",
    "columns",
    multiple=True,
    metavar="NAME=THEIRS",
    callback=_parse_columns,
    help="Take the table's column THEIRS for NAME (loss, params, lr, ...); repeatable.",
)


class OptionProblems(click.UsageError):
    """Some options are wrong; `problems` has one message each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(problems))


class Collected:
    """A collector of problems, so that the problems of several records are raised together."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Catch what a record or a table refuses within the block, keep its problems, and
        continue.
        """
        from launcher.base.reference import UnknownNameError
        from proxies.core.checks import SpecError

        try:
            yield
        except SpecError as error:
            self.problems += error.problems
        except UnknownNameError as error:
            self.problems.append(str(error))

    def done(self) -> None:
        """Raise `OptionProblems` with all problems, each once, if there are any."""
        if self.problems:
            raise OptionProblems(list(dict.fromkeys(self.problems)))


def typed_options(context: click.Context) -> dict[str, str]:
    """Return the options that were given on the command line: parameter name -> first spelling."""
    return {
        str(param.name): param.opts[0]
        for param in context.command.params
        if isinstance(param, click.Option)
        and context.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE
    }


def folder_of(frozen: Path) -> Path:
    """Return the folder of a frozen config that is given as the folder, its launch file, or a link
    to either.
    """
    if frozen.is_dir():
        return frozen
    return (frozen.resolve() if frozen.is_symlink() else frozen).parent


def sound_config(frozen: Path) -> tuple[Decision, Path]:
    """Return the decision and the folder of a frozen config, and warn of problems that were
    accepted.

    Raises:
        FrozenError: There is no launch config.
        TamperedError: The config was edited, its attestations are missing or belong to another
            config, or the ledger lacks its evidence; and nobody has accepted that.
    """
    from launcher.frozen.config_checks import require_sound
    from launcher.frozen.launch_file import read_launch

    decision, folder = read_launch(frozen), folder_of(frozen)
    if accepted := require_sound(folder, decision.digest):
        say(f"warning: {accepted}")
    return decision, folder


def corpus_of(folder: Path, given: Path | None) -> Path:
    """Return the corpus `given`; if it is None, that of the study around a frozen config's folder.

    Raises:
        UsageError: The study has no corpus.
        PlanError, DataError: There is no study, or it is not sound.
    """
    from launcher.study.study_folder import recorded_study

    corpus = given or recorded_study(folder.resolve().parent.parent).corpus
    if corpus is None:
        raise click.UsageError("the study has no corpus: name one with --data")
    return corpus


def code_of(folder: Path, decision: Decision) -> Path | None:
    """Return the folder with the code of a user's own model: as the plan of the study around the
    config says, else the current folder.

    None for a config whose model is forerun's.
    """
    from launcher.frozen.frozen_folder import study_of
    from launcher.study.study_folder import recorded

    if decision.model is None:
        return None
    study_dir = study_of(folder)
    return Path() if study_dir is None else recorded(study_dir)[0].code_dir


def plan_verb(command: _Command) -> _Command:
    """Add PLAN, --study, --set and --json to a command."""
    for option in (json_option, set_option, study_option, plan_argument):
        command = option(command)
    return command


def answer(as_json: bool, body: object, text: str) -> None:
    """Print the answer of a verb on stdout: one JSON object, or text for people."""
    print_answer(canon.pretty(body).decode().rstrip("\n") if as_json else shown(text))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Return a table for the terminal: columns below their names.

    Args:
        head: Name of each column.
        rows: Cells of each row.
        left: Indexes of the columns that are aligned left; the others are aligned right.

    On a terminal, cells are wrapped to its width, and no word or number is cut. Elsewhere nothing
    is wrapped.
    """
    return lay_out_table(
        head, rows, left, terminal_columns(sys.stdout) if sys.stdout.isatty() else None
    )
