"""Arguments and options that name a study or a frozen config. Imports click and nothing heavier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from launcher.base.study_names import (
    LATEST,
    NUM_SHOWN,
    StudyNameError,
    configs_in,
    default_study,
    frozen_named,
    study_named,
)

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class Named(click.Path):
    """A click path that also accepts names of studies and frozen configs; subclasses look them up
    when a verb is called.
    """

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the names of frozen configs that complete the typed text, then files."""
        from click.shell_completion import CompletionItem

        folder, _, word = incomplete.rpartition("/")
        configs = configs_in(Path(folder) if folder else default_study())
        prefix = f"{folder}/" if folder else ""
        names = [LATEST, *(config.name[:NUM_SHOWN] for config in configs)] if configs else []
        return [
            *(CompletionItem(prefix + name) for name in names if name.startswith(word)),
            *super().shell_complete(ctx, param, incomplete),
        ]


class AnyName(Named):
    """Any word; completion offers names of frozen configs."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the word as it was typed."""
        return str(value)


class FrozenName(Named):
    """A frozen config by any of its names; converts to its folder or launch file."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path that `value` names."""
        return value if isinstance(value, Path) else _find_frozen(str(value), param, ctx)


class PlanOrFrozen(FrozenName):
    """A plan by its path, or a frozen config by any of its names."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path that `value` names."""
        return (
            Path(value)
            if Path(value).suffix in (".toml", ".json")
            else super().convert(value, param, ctx)
        )


class StudyName(Named):
    """A study by its folder, or by the name of a frozen config in it; converts to its folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the folder that `value` names."""
        return value if isinstance(value, Path) else study_named(str(value))


_STUDY = "launcher.cli.names.study"
"""Key of `--study` in the `meta` of click's context."""
_Command = TypeVar("_Command", bound=Callable[..., object])


def study_of_line(ctx: click.Context) -> Path | None:
    """Return the study that `--study` names on the command line; None if the option is not
    given.
    """
    study: Path | None = ctx.meta.get(_STUDY)
    return study


def _store_study(ctx: click.Context, _: click.Parameter, value: Path | None) -> None:
    if value is not None:
        ctx.meta[_STUDY] = value


def _convert_frozen(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
    return None if ctx.resilient_parsing else _find_frozen(value, param, ctx)


def _find_frozen(
    text: str | None, param: click.Parameter | None, ctx: click.Context | None
) -> Path:
    try:
        return frozen_named(text, None if ctx is None else study_of_line(ctx))
    except StudyNameError as error:
        raise click.BadParameter(str(error), ctx, param) from error


def _convert_study(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path:
    named = study_of_line(ctx)
    if value is not None and named is not None and value != named:
        raise click.BadParameter(
            f"STUDY {value} and --study {named} are two studies: name one", ctx, param
        )
    return value or named or default_study()


lookup_option = click.option(
    # Eager, because an argument that stands before the option on the command line looks it up.
    "--study",
    "study",
    type=StudyName(),
    callback=_store_study,
    expose_value=False,
    is_eager=True,
    metavar="STUDY",
    help="Study folder. Default: ./study, else the current folder if it holds a ledger.",
)
"""Option `--study` of verbs that take the study, or a frozen config in it, as an argument."""


def frozen_argument(command: _Command) -> _Command:
    """Add the argument FROZEN: a path, a digest, or `latest` in the study that `--study` names."""
    argument = click.argument(
        "frozen", metavar="[FROZEN]", required=False, type=AnyName(), callback=_convert_frozen
    )
    return argument(lookup_option(command))


def study_argument(command: _Command) -> _Command:
    """Add the argument STUDY, which may also be given as `--study`."""
    argument = click.argument(
        "study_dir", metavar="[STUDY]", required=False, type=StudyName(), callback=_convert_study
    )
    return argument(lookup_option(command))


study_option = click.option(
    # Only a path: a new study may be called `latest` or `ab`, which must not be looked up as the
    # name of a frozen config.
    "--study",
    "study_dir",
    type=click.Path(path_type=Path),
    callback=_convert_study,
    metavar="STUDY",
    help="Study folder. Default: ./study, else the current folder if it holds a ledger.",
)
