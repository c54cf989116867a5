"""Options that several verbs share, and the output of a verb's answer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from forerun._launcher.cli.names import study_option
from forerun._launcher.main_run.terminal_layout import escape_control_characters, print_answer
from forerun._proxies.core import canon
from forerun._proxies.core.tables.numerals import parse_amount

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
PATH = click.Path(path_type=Path)

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
plan_argument = click.argument("plan_path", metavar="[PLAN]", type=PATH, default=Path("plan.toml"))


def _parse_columns(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    """Parse NAME=THEIRS as a mapping from forerun's column name to the table's."""
    columns: dict[str, str] = {}
    for value in values:
        name, _, their_name = (part.strip() for part in value.partition("="))
        if not name or not their_name:
            raise click.BadParameter(
                f"{value!r}: must be NAME=THEIRS, such as loss=val_bpb", ctx, param
            )
        if name in columns:
            raise click.BadParameter(f"{name} is named twice: name it once", ctx, param)
        columns[name] = their_name
    return columns


column_option = click.option(
    "--column",
    "columns",
    multiple=True,
    metavar="NAME=THEIRS",
    callback=_parse_columns,
    help="Take the table's column THEIRS for NAME (loss, params, lr, ...); repeatable.",
)


def get_typed_options(context: click.Context) -> dict[str, str]:
    """Return the options that were given on the command line, by parameter name, with the first
    spelling of each, such as `--flops`. Arguments are not among them.
    """
    return {
        str(param.name): param.opts[0]
        for param in context.command.params
        if isinstance(param, click.Option)
        and context.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE
    }


def refuse_options(typed: dict[str, str], names: Collection[str], condition: str) -> None:
    """Refuse options that would have no effect in this call.

    Args:
        typed: Options that were given (`get_typed_options`).
        names: Parameter names of the options that have no effect here.
        condition: Condition under which they have an effect, such as `with --runs`.

    Raises:
        click.UsageError: Some of them were given.
    """
    if wrong := [option for name, option in typed.items() if name in names]:
        raise click.UsageError(f"{', '.join(wrong)}: only {condition}")


def add_plan_options(command: _Command) -> _Command:
    """Add PLAN, --study, --set and --json to a command."""
    # click lists options in the reverse order of the calls, as it does for stacked decorators.
    for option in (json_option, set_option, study_option, plan_argument):
        command = option(command)
    return command


def print_result(as_json: bool, body: object, text: str) -> None:
    """Print the answer of a verb on stdout: one JSON object, or text for people."""
    print_answer(
        canon.to_pretty_json(body).decode().rstrip("\n")
        if as_json
        else escape_control_characters(text)
    )


def write_job(path: Path, script: str, as_json: bool) -> None:
    """Write a SLURM job to a file, and print how to submit it."""
    canon.write_atomic(path, script.encode())
    print_result(as_json, {"sbatch": str(path)}, f"wrote {path}\nnext: sbatch {path}")
