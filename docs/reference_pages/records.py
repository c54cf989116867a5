"""Text of docs/reference/records.md, which lists the fields of the records that forerun stores.

A record is a frozen dataclass. Types and defaults come from the dataclass, and the descriptions
from the docstrings below the fields.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
import typing
from typing import Any, NamedTuple

from forerun._launcher.main_run.frozen.frozen import Decision
from forerun._proxies.core import canon
from forerun._proxies.core.hyperparameters import HYPERPARAMETERS, RUN_WIDE
from forerun._proxies.core.spec import RunResult, RunSpec
from reference_pages.markdown import format_cell
from reference_pages.source import parse_modules

_HEAD = """# Records

Records are frozen dataclasses that are checked when they are made. Their text is canonical JSON (sorted keys, shortest
floats, no NaN), and their id is its sha256. Losses are in nats per token, and learning rates are absolute.

"""  # noqa: E501
_ROOTS: dict[str, tuple[str, type]] = {
    "A run's question": ("The request to a worker. Its content id is the run's id.", RunSpec),
    "A run's answer": ("The result that the ledger keeps.", RunResult),
    "The frozen decision": (
        (
            "The content of `launch.json`, without its digest. [The frozen launch "
            "config](../launch-config.md) explains it."
        ),
        Decision,
    ),
}


def _list_records_in_type(kind: Any) -> list[type]:
    """Return forerun's records inside a type."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return [kind]
    return [child for inner in typing.get_args(kind) for child in _list_records_in_type(inner)]


def list_records_below(root: type) -> list[type]:
    """Return a record and all records that it contains, each once, in the order of the fields."""
    records = [root]
    # The list grows while the loop runs, so records inside records are visited too.
    for record in records:
        for kind in typing.get_type_hints(record).values():
            records += [child for child in _list_records_in_type(kind) if child not in records]
    return records


class FieldDescription(NamedTuple):
    """Texts that describe a field of a record."""

    name: str
    type: str
    default: str
    """The default as Python writes it; empty if there is none."""
    description: str
    """Docstring below the field; empty if there is none."""


def describe_fields(record: type) -> list[FieldDescription]:
    """Describe each field of a record, inherited fields first."""
    rows = {
        row.name: row
        for base in record.__bases__
        if dataclasses.is_dataclass(base)
        for row in describe_fields(base)
    }
    tree = ast.parse(textwrap.dedent(inspect.getsource(record))).body[0]
    assert isinstance(tree, ast.ClassDef)
    fields = {field.name: field for field in dataclasses.fields(record)}
    for node, next_node in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or ast.unparse(node.target) not in fields:
            continue
        field = fields[ast.unparse(node.target)]
        docstring = (
            str(next_node.value.value)
            if isinstance(next_node, ast.Expr) and isinstance(next_node.value, ast.Constant)
            else ""
        )
        rows[field.name] = FieldDescription(
            field.name,
            _format_type(node.annotation, record),
            _format_default(field),
            docstring.strip(),
        )
    # `add_run_wide_fields` in `forerun._launcher.main_run.frozen.frozen` adds fields that the class
    # does not spell out.
    for name in RUN_WIDE:
        if name in fields and name not in rows:
            rows[name] = FieldDescription(
                name,
                str(fields[name].type),
                _format_default(fields[name]),
                HYPERPARAMETERS[name].meaning,
            )
    return list(rows.values())


def _format_default(field: dataclasses.Field[Any]) -> str:
    """Return the default of a field; empty if there is none."""
    if field.default_factory is not dataclasses.MISSING:
        return str(getattr(field.default_factory, "__name__", field.default_factory))
    if dataclasses.is_dataclass(field.default):
        return f"{type(field.default).__name__}()"
    return "" if field.default is dataclasses.MISSING else repr(field.default)


def _format_type(annotation: ast.expr, record: type) -> str:
    """Return a type as text.

    The name of a `Literal` type is replaced by its words, and an alias of `str` by `str`.
    """
    module_names = vars(sys.modules[record.__module__])
    words = {
        name: str(value).removeprefix("typing.")
        for name, value in module_names.items()
        if typing.get_origin(value) is typing.Literal
    }
    words |= {name: "str" for name, value in module_names.items() if value is str}
    return re.sub(r"\w+", lambda match: words.get(match[0], match[0]), ast.unparse(annotation))


def _format_record(record: type, title: str) -> list[str]:
    """Return the section of one record."""
    summary = inspect.cleandoc(record.__doc__ or "").split("\n\n")[0]
    lines = [
        f"### {title}\n",
        " ".join(summary.split()) + "\n",
        "| field | type | default | what |",
        "|---|---|---|---|",
    ]
    for field in describe_fields(record):
        default = f"`{format_cell(field.default)}`" if field.default else ""
        lines.append(
            f"| `{field.name}` | `{format_cell(field.type)}` | {default} | "
            f"{format_cell(field.description)} |"
        )
    return [*lines, ""]


def _list_attestations() -> list[str]:
    """Return a table row for each kind of attestation, with the module that writes it.

    Kinds and modules are read from the calls of `attest` in the source.
    """
    rows = set()
    for module, tree in parse_modules(r"\battest\("):
        constants = {
            ast.unparse(node.targets[0]): node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "attest"
            ):
                rows |= {(kind, module) for kind in _list_kinds(node.args[1], constants)}
    return [f"| `{kind}` | `{module}` |" for kind, module in sorted(rows)]


def _list_kinds(node: ast.expr, constants: dict[str, Any]) -> list[str]:
    """Return the kinds that one call of `attest` may write.

    Args:
        node: The call's argument for the kind.
        constants: Values of the constants of the calling module, by name.
    """
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        return [
            "".join(
                str(part.value) if isinstance(part, ast.Constant) else "TRAINER"
                for part in node.values
            )
        ]
    name = ast.unparse(node)
    if name in constants:
        return [str(constants[name])]
    # A variable may be any of the kinds that a frozen config's folder has.
    from forerun._launcher.main_run.frozen.frozen_folder import ATTESTED

    return list(ATTESTED)


def format_records_page() -> str:
    """Return the text of records.md."""
    lines, printed = [_HEAD], set[type]()
    for title, (sentence, root) in _ROOTS.items():
        lines += [f"## {title}\n", sentence + "\n"]
        for record in list_records_below(root):
            if record not in printed:
                printed.add(record)
                lines += _format_record(record, record.__name__)
    lines += [
        "## Attestations\n",
        (
            "A file `attestations/KIND.json` next to a frozen config has `kind`, `digest` (of the "
            "config), `created_at` (UTC, ISO"
        ),
        (
            "8601), `body`, and `sha256`, the content id of the other four. An attestation may be "
            "written again; the decision may not.\n"
        ),
        "| kind | written by |",
        "|---|---|",
        *_list_attestations(),
        "",
        f"A content id has {canon.ID_LENGTH} hex digits.",
    ]
    return "\n".join(lines).rstrip() + "\n"
