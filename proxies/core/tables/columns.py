"""Columns of a table of runs: their roles, the choice of a column for each role, and their cells.

The role of a column is forerun's own name for its content: a column `config/lr` has the role
`learning_rate`. All commands that read tables recognize columns by the names in `COLUMN_NAMES`.
This module also leaves out the rows of runs that did not finish.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from forerun._proxies.core.hyperparameters import HYPERPARAMETERS, WITH_OPTIMUM
from forerun._proxies.core.optimizers import OPTIMIZERS
from forerun._proxies.core.tables.numerals import (
    NumberColumn,
    NumberKind,
    has_grouped_dot,
    read_numbers,
    to_number,
)
from forerun._proxies.core.tables.table_files import Cells, Rows

BATCH_SIZE = "batch_size"
"""Role of the batch size as a hyperparameter, whose optimum a table may contain. The batch size as
a size of the run has the role `batch`."""
_TOKENS = (
    "tokens",
    "num_tokens",
    "n_tokens",
    "total_tokens",
    "tokens_trained",
    "train_tokens",
    "training_tokens",
    "token_count",
)
_BATCH = ("batch_tokens", "batch", "batch_size")
_OPTIMUM_TEMPLATES = (
    "{}_optimum",
    "optimal_{}",
    "best_{}",
    "{}_opt",
    "opt_{}",
    "{}_best",
    "{}_optimal",
    "optimum_{}",
)
_OPTIMA = {
    f"{name}_optimum": tuple(
        template.format(alias) for template in _OPTIMUM_TEMPLATES for alias in aliases
    )
    for name, aliases in {
        **{name: (*HYPERPARAMETERS[name].aliases, name) for name in WITH_OPTIMUM},
        BATCH_SIZE: _BATCH,
    }.items()
}
"""Names of the columns with optimal hyperparameters, by role, such as `learning_rate_optimum`."""
COLUMN_NAMES: Mapping[str, tuple[str, ...]] = {
    "params": (
        "params",
        "num_params",
        "n_params",
        "total_params",
        "params_total",
        "parameters",
        "num_parameters",
        "parameter_count",
        "param_count",
        "N",
    ),
    "tokens": (*_TOKENS, "D"),
    "loss": ("loss", "val_loss", "validation_loss", "valid_loss", "eval_loss"),
    "flops": ("flops", "num_flops", "total_flops", "train_flops", "training_flops"),
    "budget": ("budget", "flops_budget", "budget_flops", "compute_budget"),
    "weight": ("weight",),
    "seed": ("seed", "random_seed"),
    "state": ("state", "run_state", "trial_state", "status", "run_status"),
    "finished": ("finished", "is_finished", "has_finished", "completed", "is_completed"),
    "failed": ("failed", "is_failed", "has_failed", "crashed", "is_crashed", "has_crashed"),
    "exit_code": ("exit_code", "exitcode", "exit_status", "return_code", "returncode"),
    "width": ("width", "d_model", "n_embd"),
    "depth": ("depth", "layers", "num_layers", "n_layer"),
    "batch": _BATCH,
    "duration": ("duration", *_TOKENS, "steps", "num_steps"),
    **{name: (name, *hyperparameter.aliases) for name, hyperparameter in HYPERPARAMETERS.items()},
    **_OPTIMA,
}
"""Names by which the column of each role is recognized, the preferred name first. Case and the
characters between words do not count."""

STATE_ROLES = ("state", "finished", "failed", "exit_code")
"""Roles of the columns that tell whether a run has finished."""
_EXACT_CASE = {"N", "D", "duration"}
"""Names that must match in case: W&B's `Duration` is in seconds, and `n` may count anything."""
_SECTIONS = {
    "config",
    "cfg",
    "hparams",
    "hyperparameters",
    "hyperparams",
    "params",
    "optimizer",
    "optim",
    "opt",
    *OPTIMIZERS,
    "model",
    "training",
    "train",
    "trainer",
    "args",
    "data",
    "user_attrs",
    "sweep",
    "run",
    "summary",
    "trial",
}
"""Sections that may precede a name, as in `config/lr` and `optimizer.lr`."""
_LOSS_SECTIONS = {"summary", "metrics", "user_attrs", "run"}
"""Sections that may precede a loss; `train/loss` and `model.loss` are not the validation loss."""
_PREFIXES = ("params_", "config_", "user_attrs_")
"""Sections that Optuna's and W&B's exports join to the name with an underscore."""
_MEASURED_MARKS = {"actual", "achieved", "measured", "observed", "real", "realized", "seen", "true"}
_PLANNED_MARKS = {
    "planned",
    "target",
    "requested",
    "nominal",
    "intended",
    "ideal",
    "expected",
    "estimated",
}
_MEASURED_RANK, _UNMARKED_RANK, _PLANNED_RANK = 0, 1, 2
"""Ranks of columns whose names have a mark of a measured value, no mark, or a mark of a planned
value. The smallest rank is the best."""
_ROLES_WITH_MARKS = {"params", "tokens", "flops"}
"""Roles for which some tables have two columns: a planned and a measured count."""
_KINDS: Mapping[str, NumberKind] = {
    **dict.fromkeys(
        ("params", "tokens", "flops", "budget", "batch", "duration", BATCH_SIZE), "amount"
    ),
    **dict.fromkeys(("width", "depth", "seed"), "whole"),
}
"""Kinds of numbers by role. All other roles have real numbers."""
_OPTUNA_OBJECTIVE = "value"
"""Column of the objective in tables that Optuna exports from a study of one objective."""
_OPTUNA_COLUMNS = ({"number", "state"}, {"number", "datetime_start"})
"""Sets of columns. A table that has all columns of one set, and the objective, is from Optuna."""

_UNFINISHED = re.compile(
    "abort|active$|cancel|crash|creat|dead|err|evict|fail|hung$|incomplete|init|interrupt|kill|launch|lost$|memory$|not$"
    "|oom$|paus|pend|preempt|prepar|progress|provision|prun|queu|requeu|resiz|revok|run|schedul|start|stopping|stuck"
    "|submit|suspend|timed|timeout|unfinish|wait|inprogress"
)
"""Beginnings of words in states of runs without a final loss, as W&B, Optuna, Ray, MLflow, ClearML,
cloud services, and Slurm write them. `$` marks the end of a whole word. One such word in a state is
enough: `NODE_FAIL`, `Crashed (OOM)`."""
_FINISHED = re.compile(
    "clos|complete|converg|diverg|done$|end|finish|good$|inactive|ok$|pass|publish|succe|terminat|valid"
)
"""Beginnings of words in states of runs with a final loss. They count only in a state without a
word of `_UNFINISHED`."""
_FLAGS = {
    "true": True,
    "t": True,
    "yes": True,
    "y": True,
    "false": False,
    "f": False,
    "no": False,
    "n": False,
}
_SLURM_EXIT_CODE = re.compile("([0-9]+):([0-9]+)")
"""Exit code and signal, as Slurm's `sacct` writes them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnChoice:
    """The columns of a table that were chosen for the roles asked for."""

    columns: dict[str, str]
    """Column by role; a role without a column is not in the mapping."""
    notes: list[str] = field(default_factory=list)
    """Sentences about choices among several columns whose names mean the same thing, and about the
    objective of an Optuna study that is taken for the loss."""
    problems: list[str] = field(default_factory=list)
    """Messages about columns that are missing, repeated, or equally good for a role."""


def choose_columns(
    names: Sequence[str], roles: Iterable[str], given: Mapping[str, str]
) -> ColumnChoice:
    """Choose the column of each role among the names of a table.

    Args:
        names: Names of the table's columns.
        roles: Roles to look for. A role that is not in `COLUMN_NAMES` is looked for by its own
            name.
        given: Columns that the user chose, by role or by one of the role's names.

    Returns:
        The columns, with a problem for each chosen column that does not exist, each column that
        appears twice, and each role for which two columns are equally good.
    """
    roles = tuple(roles)
    choice = ColumnChoice(columns={})
    chosen: dict[str, str] = {}
    for key, name in given.items():
        role = _find_role(key, roles)
        if role is None:
            choice.problems.append(f"--column {key}: unknown: must be one of {', '.join(roles)}")
        elif name not in names:
            choice.problems.append(
                f"--column {key}={name}: no such column (it has {list_names(names)})"
            )
        else:
            chosen[role] = name
    for role in roles:
        if role in chosen:
            choice.columns[role] = chosen[role]
        else:
            _choose_column(role, names, choice)
    repeated = sorted({name for name in choice.columns.values() if names.count(name) > 1})
    choice.problems.extend(f"the column {name!r} appears twice: remove one" for name in repeated)
    return choice


def _choose_column(role: str, names: Sequence[str], choice: ColumnChoice) -> None:
    """Add the column whose name fits a role best to a choice, or a problem if two fit equally."""
    ranks = {name: rank for name in names if (rank := _rank_name(name, role)) is not None}
    if not ranks:
        if role == "loss" and _is_optuna_table(names):
            choice.columns[role] = _OPTUNA_OBJECTIVE
            choice.notes.append(
                "loss is column 'value', the objective of an Optuna study, taken for nats per token"
            )
        return
    best_rank = min(ranks.values())
    best, *tied = sorted(name for name in ranks if ranks[name] == best_rank)
    if tied:
        choice.problems.append(
            f"{role} may be {' or '.join(map(repr, (best, *tied)))}: choose with "
            f"--column {role}=NAME"
        )
        return
    choice.columns[role] = best
    unused = [name for name in sorted(ranks, key=lambda name: (ranks[name], name)) if name != best]
    if best_rank[0] == _PLANNED_RANK:
        choice.notes.append(
            f"{role} is column {best!r}, planned by its name; --column {role}=NAME takes another"
        )
    elif unused:
        choice.notes.append(
            f"{role} is column {best!r}, not {' and '.join(map(repr, unused))}; "
            f"--column {role}=NAME takes another"
        )


def _is_optuna_table(names: Sequence[str]) -> bool:
    """Return whether a table was exported from an Optuna study of one objective."""
    return _OPTUNA_OBJECTIVE in names and any(known <= {*names} for known in _OPTUNA_COLUMNS)


def describe_missing(roles: Sequence[str], names: Sequence[str]) -> str:
    """Return the message that a table has no column for any of `roles`, with their known names."""
    missing = " or ".join(map(repr, roles))
    known = "; ".join(f"{role}: {', '.join(COLUMN_NAMES.get(role, (role,)))}" for role in roles)
    return (
        f"has no column {missing} (it has {list_names(names)}); --column {roles[0]}=NAME takes any "
        f"of them; known names are {known}"
    )


def list_names(names: Sequence[str]) -> str:
    """Return the names of a table's columns, quoted, for a message."""
    return ", ".join(map(repr, filter(None, names))) or "none"


def is_known_name(name: str) -> bool:
    """Return whether some role is recognized by this name of a column."""
    return name == _OPTUNA_OBJECTIVE or any(
        _rank_name(name, role) is not None for role in COLUMN_NAMES
    )


def find_hyperparameter(name: str, known: Collection[str]) -> str | None:
    """Return the hyperparameter that a name means, such as `learning_rate` for `optimizer.lr`.

    Args:
        name: The name.
        known: Hyperparameters to choose from.

    Returns:
        One of `known`; None if the name means none of them, or several.
    """
    if name in known:
        return name
    matches = [
        role for role in known if role in COLUMN_NAMES and _rank_name(name, role) is not None
    ]
    return matches[0] if len(matches) == 1 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRows:
    """The rows of a table whose runs have finished."""

    rows: Rows
    dropped: list[tuple[int, str]]
    """(row, reason) of the rows that are left out."""
    bad_cells: list[str]
    """Messages about cells that do not tell whether the run has finished, although other cells of
    the same column do."""
    warnings: list[str]
    """Sentences about columns that are not used, and about states that forerun does not know."""


def drop_unfinished_rows(cells: Cells, columns: Mapping[str, str]) -> FinishedRows:
    """Leave out the rows of runs that did not finish.

    Args:
        cells: The table.
        columns: Column by role; only the roles of `STATE_ROLES` are used.
    """
    dropped = dict(cells.dropped)
    unclear: list[tuple[int, str]] = []
    warnings: list[str] = []
    for role in (role for role in STATE_ROLES if role in columns):
        name = columns[role]
        states = {line: _read_state(role, record.get(name)) for line, record in cells.rows}
        texts = {line: _to_text(record.get(name)) for line, record in cells.rows}
        # A column such as `failed` with a date in every row is about something else
        if role != "state" and all(state is None for state in states.values()):
            if example := next(filter(None, texts.values()), ""):
                warnings.append(
                    f"column {name!r} does not tell whether a run has finished ({example[:40]!r}): "
                    "not used"
                )
            continue
        for line, state in states.items():
            if state is False:
                dropped.setdefault(line, f"{name} is {texts[line]!r}: the run did not finish")
            elif state is None and role != "state":  # an unknown state counts as finished
                must = "a whole number" if role == "exit_code" else "true or false"
                shown = repr(texts[line][:40]) if texts[line] else "missing"
                unclear.append((line, f"column {name!r}: {shown}: must be {must}"))
    rows = [(line, record) for line, record in cells.rows if line not in dropped]
    return FinishedRows(
        rows=rows,
        dropped=sorted(dropped.items()),
        bad_cells=[
            f"row {line}, {problem}" for line, problem in sorted(unclear) if line not in dropped
        ],
        warnings=[*warnings, *_describe_unknown_states(rows, columns.get("state"))],
    )


def _describe_unknown_states(rows: Rows, column: str | None) -> list[str]:
    """Return a warning if some of these rows have states that forerun does not know."""
    if column is None:
        return []
    states = Counter(_to_text(record.get(column)) for _, record in rows)
    unknown = [
        f"{state[:40]!r} ({num_rows})"
        for state, num_rows in states.items()
        if _read_state("state", state) is None
    ]
    if not unknown:
        return []
    shown = ", ".join([*unknown[:5], *(["..."] if unknown[5:] else [])])
    warning = f"column {column!r} has states that forerun does not know, with their rows: {shown}"
    return [f"{warning}. They count as finished: remove those that did not finish"]


def _to_text(cell: object) -> str:
    """Return a cell as text without spaces around it; empty for a missing cell."""
    return "" if cell is None else str(cell).strip()


def read_columns(
    cells: Cells, rows: Rows, columns: Mapping[str, str]
) -> tuple[dict[str, NumberColumn], list[str]]:
    """Read columns as numbers.

    Args:
        cells: The table.
        rows: The rows to read, without those of unfinished runs.
        columns: Column by role.

    Returns:
        Numbers by role, and a problem for each column whose commas or dots could be read in two
        ways.
    """
    numbers = {
        role: read_numbers(
            [record.get(name) for _, record in rows],
            _KINDS.get(role, "real"),
            splits_at_commas=cells.splits_at_commas,
        )
        for role, name in columns.items()
    }
    doubts = [
        f"column {columns[role]!r}: {column.doubt}"
        for role, column in numbers.items()
        if column.doubt
    ]
    with_dots = [columns[role] for role in columns if numbers[role].uses_dots_for_thousands]
    if not with_dots:
        return numbers, doubts
    for name in columns.values():
        cells_of_column = (record.get(name) for _, record in rows)
        dotted_cell = next(filter(has_grouped_dot, cells_of_column), None)
        if dotted_cell is not None and name not in with_dots:
            doubts.append(
                f"column {name!r}: the dot of {dotted_cell!r} may separate thousands, since column "
                f"{with_dots[0]!r} has decimal commas or dots for thousands: write both columns "
                "with one dot, and without separators"
            )
    return numbers, doubts


def _find_role(name: str, roles: Sequence[str]) -> str | None:
    """Return the role that a user names, by the role's own name or an alias; None if unknown."""
    if name in roles:
        return name
    return next((role for role in roles if name in COLUMN_NAMES.get(role, ())), None)


@cache
def _rank_name(name: str, role: str) -> tuple[int, int, int] | None:
    """Return how well a column's name fits a role.

    Returns:
        (rank by the mark, number of sections before the name, index in the role's names); the
        smallest tuple is the best fit. None if the name does not fit.
    """
    names = COLUMN_NAMES.get(role, (role,))
    if name in names:
        return (_UNMARKED_RANK, 0, names.index(name))

    # Sections before the name: `config/lr`, `optimizer.lr`
    sections = _LOSS_SECTIONS if role == "loss" else _SECTIONS
    parts = [
        re.sub(r"[^0-9a-z]+", "_", part.lower()).strip("_") for part in re.split(r"[/.]", name)
    ]
    num_sections = next(
        (num for num, part in enumerate(parts[:-1]) if part not in sections), len(parts) - 1
    )
    word = "_".join(parts[num_sections:])

    # A section that is joined with an underscore: `params_lr`, but not the name `params` itself
    if role != "loss" and word not in names:
        prefix = next(filter(word.startswith, _PREFIXES), "")
        if prefix and word.removeprefix(prefix) in names:
            word, num_sections = word.removeprefix(prefix), num_sections + 1

    # A mark before or after the name: `actual_params`, `tokens_planned`
    mark_rank = _UNMARKED_RANK
    if role in _ROLES_WITH_MARKS:
        first_word, _, after = word.partition("_")
        before, _, last_word = word.rpartition("_")
        for mark, unmarked in ((first_word, after), (last_word, before)):
            if mark in _MEASURED_MARKS | _PLANNED_MARKS and unmarked:
                mark_rank = _PLANNED_RANK if mark in _PLANNED_MARKS else _MEASURED_RANK
                word = unmarked
                break
    if word not in names or word in _EXACT_CASE:
        return None
    return (mark_rank, num_sections, names.index(word))


def _read_state(role: str, cell: object) -> bool | None:
    """Return whether a run has finished, by its cell in a column of a role of `STATE_ROLES`; None
    if the cell does not tell.
    """
    text, number = _to_text(cell).lower(), to_number(cell)
    if role == "exit_code":
        if match := _SLURM_EXIT_CODE.fullmatch(text):
            return int(match[1]) == int(match[2]) == 0
        return number == 0 if number is not None and number.is_integer() else None
    if role in ("finished", "failed"):
        flag = _FLAGS.get(text) if number is None else {0.0: False, 1.0: True}.get(number)
        if flag is None:
            return None
        return flag if role == "finished" else not flag
    words = re.findall("[a-z]+", text)
    if any(map(_UNFINISHED.match, words)):
        return False
    return True if not text or any(map(_FINISHED.match, words)) else None
