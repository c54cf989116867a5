"""Which column of a table is what, and which drift it can be asked about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from proxies.core.hyperparameters import HYPERPARAMETERS, WITH_OPTIMUM
from proxies.core.table_files import Cells, Source
from transfer.question import AXES, Axis, Hyperparameter
from transfer.tables.cells import TableError, plain

_Name = TypeVar("_Name", bound=str)

SIZE_COLUMNS: Mapping[Axis, tuple[str, ...]] = {
    "width": ("width", "d_model", "n_embd"),
    "depth": ("depth", "layers", "num_layers", "n_layer"),
    "batch": ("batch", "batch_tokens", "batch_size"),
    "duration": ("duration", "tokens", "num_tokens", "steps", "num_steps"),
    "params": ("params", "num_params", "N"),
}
VALUE_COLUMNS: Mapping[Hyperparameter, tuple[str, ...]] = {
    name: (name, *HYPERPARAMETERS[name].aliases) for name in WITH_OPTIMUM
}
LOSS_COLUMNS = ("loss", "val_loss", "validation_loss")
OPTIMUM = "lr_optimum"
KNOWN = frozenset(
    {name for aliases in (*SIZE_COLUMNS.values(), *VALUE_COLUMNS.values()) for name in aliases}
    | {*LOSS_COLUMNS, "seed", OPTIMUM}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableColumns:
    """What a table's columns are called."""

    sizes: Mapping[Axis, str]
    values: Mapping[Hyperparameter, str]
    loss: str | None
    """None: the table is one of optima."""
    seed: str | None

    @property
    def judgeable(self) -> dict[str, str]:
        """Every axis and hyperparameter there is, and its column."""
        return dict([*self.sizes.items(), *self.values.items()])

    @property
    def used(self) -> set[str]:
        """All columns that are read."""
        return {name for name in (*self.judgeable.values(), self.loss, self.seed) if name is not None}


def find_columns(path: Source, names: Sequence[str]) -> TableColumns:
    """Recognise columns by their names; of several names for one thing the first one is used.

    Raises:
        TableError: no loss (or optimum), no size, or no hyperparameter.
    """
    loss = _first(LOSS_COLUMNS, names)
    by_optima = loss is None and OPTIMUM in names
    sizes = {axis: name for axis, aliases in SIZE_COLUMNS.items() if (name := _first(aliases, names))}
    values = {what: name for what, aliases in VALUE_COLUMNS.items() if (name := _first(aliases, names))}
    if by_optima:
        values["learning_rate"] = OPTIMUM
    shorts = ", ".join(HYPERPARAMETERS[name].short or name for name in WITH_OPTIMUM)
    needed = [
        (by_optima or loss is not None, f"loss (or {OPTIMUM})"),
        (bool(sizes), "size (width, depth, batch, tokens or params)"),
        (bool(values), f"hyperparameter ({shorts})"),
    ]
    lacking = [what for there, what in needed if not there]
    if lacking:
        raise TableError(path, [f"no column for {' and '.join(lacking)} (found: {', '.join(names) or 'none'})"])
    return TableColumns(sizes=sizes, values=values, loss=loss, seed="seed" if "seed" in names else None)


def what_to_judge(
    path: Source, sheet: Cells, columns: TableColumns, axis: Axis | None, hyperparameter: Hyperparameter | None
) -> tuple[Axis, Hyperparameter]:
    """Axis and hyperparameter: as given, else as the table leaves no choice.

    Raises:
        TableError: no column for what was given, or several that may be meant: they are listed.
    """
    given = ((axis, columns.sizes), (hyperparameter, columns.values))
    problems = [
        f"no column for {name} (found: {', '.join(sheet.columns)})"
        for name, there in given
        if name is not None and name not in there
    ]
    cells = {what: [plain(row.get(name)) for _, row in sheet.rows] for what, name in columns.judgeable.items()}
    if axis is None:
        sizes = [a for a in AXES if a in columns.sizes]
        varying = [a for a in sizes if len(set(cells[a])) > 1]
        axis = _only(varying or sizes, "axis", problems)
    if hyperparameter is None:
        values = [h for h in WITH_OPTIMUM if h in columns.values]
        moving = [h for h in values if len(set(cells[h])) > 1] or values
        hyperparameter = "learning_rate" if "learning_rate" in moving else _only(moving, "hyperparameter", problems)
    if problems or axis is None or hyperparameter is None:
        raise TableError(path, problems)
    return axis, hyperparameter


def _first(aliases: Sequence[str], names: Sequence[str]) -> str | None:
    return next((name for name in aliases if name in names), None)


def _only(choices: Sequence[_Name], option: str, problems: list[str]) -> _Name | None:
    if len(choices) == 1:
        return choices[0]
    problems.append(f"the {option} may be {', '.join(choices)}: name one with --{option}")
    return None
