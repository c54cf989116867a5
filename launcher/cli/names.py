"""Arguments and options that name a study or a frozen config. Imports click and nothing heavier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from forerun._launcher.main_run.frozen.config_names import (
    LATEST,
    NUM_SHOWN,
    StudyNameError,
    find_default_study,
    find_frozen_config,
    find_study,
    list_frozen_configs,
)

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_Command = TypeVar("_Command", bound=Callable[..., object])
_STUDY = "forerun._launcher.cli.names.study"
"""Key of `--study` in the `meta` of click's context."""


class NameParameter(click.Path):
    """A path, or the name of a study or a frozen config; completion offers the names."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the names of frozen configs that begin with the typed text, then files."""
        from click.shell_completion import CompletionItem

        folder, slash, word = incomplete.rpartition("/")
        configs = list_frozen_configs(Path(folder) if folder else find_default_study())
        names = [LATEST, *(config.name[:NUM_SHOWN] for config in configs)] if configs else []
        return [
            *(CompletionItem(folder + slash + name) for name in names if name.startswith(word)),
            *super().shell_complete(ctx, param, incomplete),
        ]


class AnyName(NameParameter):
    """Any word, which the verb looks up itself."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the word as it was typed."""
        return str(value)


class PlanOrFrozen(NameParameter):
    """A plan by its path, or a frozen config by any of its names."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path of the plan, or the config's folder or launch file."""
        path = Path(value)
        return path if path.suffix in (".toml", ".json") else _find_frozen(str(value), param, ctx)


class StudyName(NameParameter):
    """A study by its folder, or by the name of a frozen config in it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the study's folder."""
        return find_study(str(value))


def get_study_option(ctx: click.Context) -> Path | None:
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
        return find_frozen_config(text, None if ctx is None else get_study_option(ctx))
    except StudyNameError as error:
        raise click.BadParameter(str(error), ctx, param) from error


def _convert_study(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path:
    named = get_study_option(ctx)
    if value is not None and named is not None and value != named:
        raise click.BadParameter(
            f"STUDY {value} and --study {named} are two studies: name one", ctx, param
        )
    return value or named or find_default_study()


_STUDY_HELP = "Study folder. Default: ./study, else the current folder if it holds a ledger."

lookup_option = click.option(
    # Eager, because an argument that stands before the option on the command line looks it up.
    "--study",
    "study",
    type=StudyName(),
    callback=_store_study,
    expose_value=False,
    is_eager=True,
    metavar="STUDY",
    help=_STUDY_HELP,
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
    help=_STUDY_HELP,
)
"""Option `--study` of verbs that may create the study."""
