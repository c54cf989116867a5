"""Columns of a table of runs, by the names that people give them: one list for every command that reads a table.

Messages and docstrings call forerun's own name of a column its role: `learning_rate` is the role of `config/lr`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from proxies.core.hyperparameters import HYPERPARAMETERS, WITH_OPTIMUM
from proxies.core.optimizers import OPTIMIZERS
from proxies.core.tables.numerals import NumberColumn, NumberKind, has_grouped_dot, read_numbers, to_number
from proxies.core.tables.table_files import Cells, Rows

BATCH_SIZE = "batch_size"
"""Name of the batch as a hyperparameter, of which a table may hold optima; as a size it is the role `batch`."""
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
_OPTIMUM_FORMS = (
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
    f"{name}_optimum": tuple(form.format(alias) for form in _OPTIMUM_FORMS for alias in aliases)
    for name, aliases in {
        **{name: (*HYPERPARAMETERS[name].aliases, name) for name in WITH_OPTIMUM},
        BATCH_SIZE: _BATCH,
    }.items()
}
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
"""Names of the column of each role, the preferred one first. Case and the character between words do not count."""

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
_ACTUAL = {"actual", "achieved", "measured", "observed", "real", "realized", "seen", "true"}
_PLANNED = {"planned", "target", "requested", "nominal", "intended", "ideal", "expected", "estimated"}
_IS_PLANNED = 2
_MARKED = {"params", "tokens", "flops"}
"""Roles that some tables have twice: as planned and as measured."""
_KINDS: Mapping[str, NumberKind] = {
    **dict.fromkeys(("params", "tokens", "flops", "budget", "batch", "duration", BATCH_SIZE), "amount"),
    **dict.fromkeys(("width", "depth", "seed"), "whole"),
}
_OPTUNA_OBJECTIVE = "value"
_OPTUNA_COLUMNS = ({"number", "state"}, {"number", "datetime_start"})

_UNFINISHED = re.compile(
    "abort|active$|cancel|crash|creat|dead|err|evict|fail|hung$|incomplete|init|interrupt|kill|launch|lost$|memory$|not$"
    "|oom$|paus|pend|preempt|prepar|progress|provision|prun|queu|requeu|resiz|revok|run|schedul|start|stopping|stuck"
    "|submit|suspend|timed|timeout|unfinish|wait|inprogress"
)
"""Beginnings of the words of states in which a run has no final loss, as W&B, Optuna, Ray, MLflow, ClearML, cloud
services and Slurm write them; `$` ends a word. One such word is enough: `NODE_FAIL`, `Crashed (OOM)`."""
_FINISHED = re.compile(
    "clos|complete|converg|diverg|done$|end|finish|good$|inactive|ok$|pass|publish|succe|terminat|valid"
)
"""The same for states in which it has one."""
_FLAGS = {"true": True, "t": True, "yes": True, "y": True, "false": False, "f": False, "no": False, "n": False}
_SLURM_EXIT_CODE = re.compile("([0-9]+):([0-9]+)")
"""Exit code and signal, as Slurm's `sacct` writes them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnChoice:
    """The columns of a table that were chosen for the roles asked for."""

    columns: dict[str, str]
    """Column by role; a role without a column is not in the mapping."""
    notes: list[str] = field(default_factory=list)
    """Choices among several columns whose names mean the same thing."""
    problems: list[str] = field(default_factory=list)


def choose_columns(names: Sequence[str], wanted: Iterable[str], given: Mapping[str, str]) -> ColumnChoice:
    """Choose the column of each role by its name.

    Args:
        names: Names of the table's columns.
        wanted: Roles to look for. One that `COLUMN_NAMES` does not have is looked for by its own name.
        given: Columns that the user chose, by role or by another name of the role.

    Returns:
        The columns. A problem is a chosen column that does not exist, a column that appears twice, or a role for which
        two columns are equally good.
    """
    choice = ColumnChoice(columns={})
    wanted = tuple(wanted)
    chosen: dict[str, str] = {}
    for key, name in given.items():
        role = _find_role(key, wanted)
        if role is None:
            choice.problems.append(f"--column {key}: unknown: must be one of {', '.join(wanted)}")
        elif name not in names:
            choice.problems.append(f"--column {key}={name}: no such column (it has {list_names(names)})")
        else:
            chosen[role] = name
    for role in wanted:
        ranked = sorted((rank, name) for name in dict.fromkeys(names) if (rank := _rank_name(name, role)) is not None)
        if role in chosen:
            choice.columns[role] = chosen[role]
        elif len(ranked) > 1 and ranked[0][0] == ranked[1][0]:
            tied = [name for rank, name in ranked if rank == ranked[0][0]]
            choice.problems.append(f"{role} may be {' or '.join(map(repr, tied))}: choose with --column {role}=NAME")
        elif ranked:
            choice.columns[role] = ranked[0][1]
            if ranked[0][0][0] == _IS_PLANNED:
                choice.notes.append(
                    f"{role} is column {ranked[0][1]!r}, planned by its name; --column {role}=NAME takes another"
                )
            elif len(ranked) > 1:
                unused = " and ".join(repr(name) for _, name in ranked[1:])
                choice.notes.append(
                    f"{role} is column {ranked[0][1]!r}, not {unused}; --column {role}=NAME takes another"
                )
        elif role == "loss" and _OPTUNA_OBJECTIVE in names and any(known <= set(names) for known in _OPTUNA_COLUMNS):
            choice.columns[role] = _OPTUNA_OBJECTIVE
            choice.notes.append("loss is column 'value', the objective of an Optuna study, taken for nats per token")
    repeated = sorted({name for name in choice.columns.values() if names.count(name) > 1})
    choice.problems.extend(f"the column {name!r} appears twice: remove one" for name in repeated)
    return choice


def describe_missing(roles: Sequence[str], names: Sequence[str]) -> str:
    """Return the message that a table has no column for `roles`: what it has, and which names are known."""
    missing = " or ".join(map(repr, roles))
    known = "; ".join(f"{role}: {', '.join(COLUMN_NAMES.get(role, (role,)))}" for role in roles)
    return (
        f"has no column {missing} (it has {list_names(names)}); --column {roles[0]}=NAME takes any of them; known "
        f"names are {known}"
    )


def list_names(names: Sequence[str]) -> str:
    """Return the names of a table's columns, quoted, for a message."""
    return ", ".join(map(repr, filter(None, names))) or "none"


def is_known_name(name: str) -> bool:
    """Return whether a column has a name by which some role is recognized."""
    return name == _OPTUNA_OBJECTIVE or any(_rank_name(name, role) is not None for role in COLUMN_NAMES)


def find_hyperparameter(name: str, known: Collection[str]) -> str | None:
    """Return the hyperparameter that a name in a table or an Optuna study means, such as `optimizer.lr`.

    Args:
        name: The name.
        known: Hyperparameters to choose from.

    Returns:
        One of `known`; None if the name means none of them, or several.
    """
    if name in known:
        return name
    matches = [role for role in known if role in COLUMN_NAMES and _rank_name(name, role) is not None]
    return matches[0] if len(matches) == 1 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRows:
    """The rows of a table whose runs have finished."""

    rows: Rows
    dropped: list[tuple[int, str]]
    """(row, reason) of the rows that are left out."""
    bad_cells: list[str]
    """Cells of a column of `STATE_ROLES` that do not tell whether the run has finished, though others do."""
    warnings: list[str]
    """Columns that are not used, and states that are not known."""


def drop_unfinished(cells: Cells, columns: Mapping[str, str]) -> FinishedRows:
    """Leave out the rows of runs that did not finish.

    Args:
        cells: The table.
        columns: Column by role; those of `STATE_ROLES` count.
    """
    dropped = dict(cells.dropped)
    unclear: list[tuple[int, str]] = []
    warnings: list[str] = []
    for role in (role for role in STATE_ROLES if role in columns):
        name = columns[role]
        states = {line: _read_state(role, record.get(name)) for line, record in cells.rows}
        texts = {line: _to_text(record.get(name)) for line, record in cells.rows}
        if role != "state" and all(state is None for state in states.values()):
            if example := next(filter(None, texts.values()), ""):
                warnings.append(
                    f"column {name!r} does not tell whether a run has finished ({example[:40]!r}): not used"
                )
            continue
        for line, state in states.items():
            if state is False:
                dropped.setdefault(line, f"{name} is {texts[line]!r}: the run did not finish")
            elif state is None and role != "state":
                must = "a whole number" if role == "exit_code" else "true or false"
                shown = repr(texts[line][:40]) if texts[line] else "missing"
                unclear.append((line, f"column {name!r}: {shown}: must be {must}"))
    rows = [(line, record) for line, record in cells.rows if line not in dropped]
    return FinishedRows(
        rows=rows,
        dropped=sorted(dropped.items()),
        bad_cells=[f"row {line}, {problem}" for line, problem in sorted(unclear) if line not in dropped],
        warnings=[*warnings, *_describe_unknown_states(rows, columns.get("state"))],
    )


def _describe_unknown_states(rows: Rows, column: str | None) -> list[str]:
    """Return a warning if the state of a run that counts is not known to mean that it has finished."""
    states = Counter(_to_text(record.get(column)) for _, record in rows) if column is not None else Counter()
    unknown = [state for state in states if _read_state("state", state) is None]
    if not unknown:
        return []
    named = ", ".join(f"{state[:40]!r} ({states[state]})" for state in unknown[:5]) + (", ..." if unknown[5:] else "")
    warning = f"column {column!r} has states that forerun does not know, with their rows: {named}"
    return [f"{warning}. They count as finished: remove those that did not finish"]


def _to_text(cell: object) -> str:
    return "" if cell is None else str(cell).strip()


def read_columns(cells: Cells, rows: Rows, columns: Mapping[str, str]) -> tuple[dict[str, NumberColumn], list[str]]:
    """Read columns as numbers.

    Args:
        cells: The table.
        rows: Its rows that count.
        columns: Column by role.

    Returns:
        Numbers by role, and a problem for each column whose commas or dots have two readings.
    """
    numbers = {
        role: read_numbers(
            [record.get(name) for _, record in rows],
            _KINDS.get(role, "real"),
            splits_at_commas=cells.splits_at_commas,
        )
        for role, name in columns.items()
    }
    doubts = [f"column {columns[role]!r}: {column.doubt}" for role, column in numbers.items() if column.doubt]
    proof = next((columns[role] for role, column in numbers.items() if column.uses_dots_for_thousands), None)
    if proof is not None:
        for role, name in columns.items():
            if numbers[role].uses_dots_for_thousands:
                continue
            dotted = next((cell for _, record in rows if has_grouped_dot(cell := record.get(name))), None)
            if dotted is not None:
                doubts.append(
                    f"column {name!r}: the dot of {dotted!r} may separate thousands, since column {proof!r} has "
                    "decimal commas or dots for thousands: write both columns with one dot, and without separators"
                )
    return numbers, doubts


def _find_role(name: str, wanted: Sequence[str]) -> str | None:
    """Return the role that a user means by one of its names; None if it is none of those wanted."""
    return name if name in wanted else next((role for role in wanted if name in COLUMN_NAMES.get(role, ())), None)


@cache
def _rank_name(name: str, role: str) -> tuple[int, int, int] | None:
    """Return how well a column's name fits a role.

    Returns:
        (0 if marked as measured, 2 if marked as planned, else 1; number of sections before the name; place among the
        role's names), the smallest being the best; None if the name does not fit.
    """
    names = COLUMN_NAMES.get(role, (role,))
    if name in names:
        return (1, 0, names.index(name))

    # Sections before the name: `config/lr`, `optimizer.lr`
    sections = _LOSS_SECTIONS if role == "loss" else _SECTIONS
    parts = [re.sub(r"[^0-9a-z]+", "_", part.lower()).strip("_") for part in re.split(r"[/.]", name)]
    num_sections = next((num for num, part in enumerate(parts[:-1]) if part not in sections), len(parts) - 1)
    word = "_".join(parts[num_sections:])
    prefix = "" if role == "loss" or word in names else next(filter(word.startswith, _PREFIXES), "")
    prefix = prefix if word.removeprefix(prefix) in names else ""
    word, num_sections = word.removeprefix(prefix), num_sections + bool(prefix)
    planned = 1
    if role in _MARKED:
        first, _, after = word.partition("_")
        before, _, last = word.rpartition("_")
        for mark, unmarked in ((first, after), (last, before)):
            if mark in _ACTUAL | _PLANNED and unmarked:
                planned, word = _IS_PLANNED if mark in _PLANNED else 0, unmarked
                break
    if word not in names or word in _EXACT_CASE:
        return None
    return (planned, num_sections, names.index(word))


def _read_state(role: str, cell: object) -> bool | None:
    """Return whether the run of a cell in a column of `STATE_ROLES` has finished; None if the cell does not tell."""
    text, number = _to_text(cell).lower(), to_number(cell)
    if role == "exit_code":
        if match := _SLURM_EXIT_CODE.fullmatch(text):
            return int(match[1]) == int(match[2]) == 0
        return number == 0 if number is not None and number.is_integer() else None
    if role in ("finished", "failed"):
        flag = _FLAGS.get(text) if number is None else {0.0: False, 1.0: True}.get(number)
        return flag if flag is None or role == "finished" else not flag
    words = re.findall("[a-z]+", text)
    if any(map(_UNFINISHED.match, words)):
        return False
    return True if not text or any(map(_FINISHED.match, words)) else None
