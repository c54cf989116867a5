"""records.md: fields of the records, from their dataclasses and the texts below the fields."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
import typing
from typing import Any

from launcher.frozen.frozen import Decision
from proxies.core import canon
from proxies.core.hyperparameters import HYPERPARAMETERS, RUN_WIDE
from proxies.core.spec import RunResult, RunSpec
from reference_pages.command_line import cell
from reference_pages.source import trees

_HEAD = """# Records

Frozen dataclasses, checked when they are made; their text is canonical JSON (sorted keys, shortest floats, no NaN)
and their name is its sha256. Losses are in nats per token, learning rates absolute.

"""  # noqa: E501
_ROOTS: dict[str, tuple[str, type]] = {
    "A run's question": ("What is asked of a worker; its content id is the run's id.", RunSpec),
    "A run's answer": ("What the ledger keeps of it.", RunResult),
    "The frozen decision": (
        (
            "What `launch.json` holds beside its digest. Explained in [the frozen launch "
            "config](../launch-config.md)."
        ),
        Decision,
    ),
}


def _children(kind: Any) -> list[type]:
    """Records of ours inside a type."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return [kind]
    return [child for inner in typing.get_args(kind) for child in _children(inner)]


def below(root: type) -> list[type]:
    """A record and all that it is made of, each once, in the order of the fields."""
    found = [root]
    for record in found:
        for kind in typing.get_type_hints(record).values():
            found += [child for child in _children(kind) if child not in found]
    return found


def fields_of(record: type) -> list[tuple[str, str, str, str]]:
    """Name, type, default and sentence of each field, those of a record that it adds to first."""
    rows = {
        row[0]: row
        for base in record.__bases__
        if dataclasses.is_dataclass(base)
        for row in fields_of(base)
    }
    tree = ast.parse(textwrap.dedent(inspect.getsource(record))).body[0]
    assert isinstance(tree, ast.ClassDef)
    known = {one.name: one for one in dataclasses.fields(record)}
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or ast.unparse(node.target) not in known:
            continue
        one = known[ast.unparse(node.target)]
        said = (
            str(after.value.value)
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            else ""
        )
        rows[one.name] = (
            one.name,
            _spelled_out(node.annotation, record),
            _default(one),
            said.strip(),
        )
    # `launcher.frozen.frozen.with_run_wide` adds fields that the class does not spell out
    for name in RUN_WIDE:
        if name in known and name not in rows:
            rows[name] = (
                name,
                str(known[name].type),
                _default(known[name]),
                HYPERPARAMETERS[name].meaning,
            )
    return list(rows.values())


def _default(one: dataclasses.Field[Any]) -> str:
    if one.default_factory is not dataclasses.MISSING:
        return str(getattr(one.default_factory, "__name__", one.default_factory))
    if dataclasses.is_dataclass(one.default):
        return f"{type(one.default).__name__}()"
    return "" if one.default is dataclasses.MISSING else repr(one.default)


def _spelled_out(annotation: ast.expr, record: type) -> str:
    """A type as text, sets of words by their words rather than their name."""
    named = vars(sys.modules[record.__module__])
    words = {
        name: str(value).removeprefix("typing.")
        for name, value in named.items()
        if typing.get_origin(value) is typing.Literal
    }
    words |= {name: "str" for name, value in named.items() if value is str}
    return re.sub(r"\w+", lambda found: words.get(found[0], found[0]), ast.unparse(annotation))


def _record(record: type, title: str) -> list[str]:
    said = inspect.cleandoc(record.__doc__ or "").split("\n\n")[0]
    lines = [
        f"### {title}\n",
        " ".join(said.split()) + "\n",
        "| field | type | default | what |",
        "|---|---|---|---|",
    ]
    for name, kind, default, sentence in fields_of(record):
        shown = f"`{cell(default)}`" if default else ""
        lines.append(f"| `{name}` | `{cell(kind)}` | {shown} | {cell(sentence)} |")
    return [*lines, ""]


def _attestations() -> list[str]:
    """Kinds of attestations, and the module that writes each: every call of `attest` in the
    code.
    """
    rows = set()
    for module, tree in trees(r"\battest\("):
        texts = {
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
                rows |= {(kind, module) for kind in _kinds(node.args[1], texts)}
    return [f"| `{kind}` | `{module}` |" for kind, module in sorted(rows)]


def _kinds(node: ast.expr, texts: dict[str, Any]) -> list[str]:
    """The names that an attestation may get from one call."""
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
    if name in texts:
        return [str(texts[name])]
    from launcher.frozen.frozen_folder import ATTESTED

    return list(ATTESTED)


def records_page() -> str:
    """records.md."""
    lines, seen = [_HEAD], set[type]()
    for title, (said, root) in _ROOTS.items():
        lines += [f"## {title}\n", said + "\n"]
        for record in below(root):
            if record not in seen:
                seen.add(record)
                lines += _record(record, record.__name__)
    lines += [
        "## Attestations\n",
        (
            "Beside a frozen config, `attestations/KIND.json`: `kind`, `digest` (of the config), "
            "`created_at` (UTC, ISO"
        ),
        (
            "8601), `body`, and `sha256`, the content id of the other four. It may be written "
            "anew, "
            "the decision not.\n"
        ),
        "| kind | written by |",
        "|---|---|",
        *_attestations(),
        "",
        f"A content id has {canon.ID_LENGTH} hex digits.",
    ]
    return "\n".join(lines).rstrip() + "\n"
