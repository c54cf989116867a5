"""Arguments and options that name a study or a frozen config. Imports click and nothing heavier."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    """A path that has other names too; what they name is looked for when a verb is called."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The names of frozen configs that fit what is typed, then files."""
        from click.shell_completion import CompletionItem

        where, _, word = incomplete.rpartition("/")
        configs = configs_in(Path(where) if where else default_study())
        begin = f"{where}/" if where else ""
        names = [LATEST, *(one.name[:NUM_SHOWN] for one in configs)] if configs else []
        return [
            *(CompletionItem(begin + name) for name in names if name.startswith(word)),
            *super().shell_complete(ctx, param, incomplete),
        ]


class AnyName(Named):
    """Any word; a frozen config's names are offered."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The word as it was typed."""
        return str(value)


class FrozenName(Named):
    """A frozen config by any of its names; converts to its folder or launch file."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path that `value` names."""
        return value if isinstance(value, Path) else _found(str(value), param, ctx)


class PlanOrFrozen(FrozenName):
    """A plan by its path, or a frozen config by any of its names."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path that `value` names."""
        return Path(value) if Path(value).suffix in (".toml", ".json") else super().convert(value, param, ctx)


class StudyName(Named):
    """A study by its folder, or by the name of a frozen config in it; converts to its folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The folder that `value` names."""
        return value if isinstance(value, Path) else study_named(str(value))


def _frozen_given(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    return value if value is not None or ctx.resilient_parsing else _found(None, param, ctx)


def _found(text: str | None, param: click.Parameter | None, ctx: click.Context | None) -> Path:
    try:
        return frozen_named(text)
    except StudyNameError as error:
        raise click.BadParameter(str(error), ctx, param) from error


def _study_given(_: click.Context, __: click.Parameter, value: Path | None) -> Path:
    return default_study() if value is None else value


frozen_argument = click.argument(
    "frozen", metavar="[FROZEN]", required=False, type=FrozenName(), callback=_frozen_given
)  # fmt: skip
study_argument = click.argument(
    "study_dir", metavar="[STUDY]", required=False, type=StudyName(), callback=_study_given
)  # fmt: skip
study_option = click.option(
    # A path alone: a new study may be called `latest` or `ab`, and must not become the study of such a config.
    "--study", "study_dir", type=click.Path(path_type=Path), callback=_study_given, metavar="STUDY",
    help="Study folder. Default: ./study, else the current folder if it holds a ledger.",
)  # fmt: skip
