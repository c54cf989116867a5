"""Reading of plans: from TOML to a `Plan`, with every problem at once and its line.
`forerun._launcher.study.plan.writing` writes them.
"""

from __future__ import annotations

import difflib
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
from pydantic import BaseModel

from forerun._launcher.study.plan.axes import UserAxis
from forerun._launcher.study.plan.plan import Plan
from forerun._launcher.study.plan.problems import find_plan_problems
from forerun._launcher.study.plan.search import AXIS_FORMS
from forerun._proxies.core.errors import InputError
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.plain_files import open_plain, read_plain
from forerun._proxies.core.redaction import find_secret, redact

MAX_BYTES = 2**20
"""Maximum size of a plan file in bytes."""
MAX_DEPTH = 10
"""Maximum depth of nested tables and lists; the deepest key of a plan, a point of
search.warm_start, has depth four."""
TODO = "TODO"
"""Placeholder that `forerun init --from` writes where it does not understand a script."""
_MAX_SHOWN = 80
"""Maximum number of characters of a wrong value that are shown."""
_LINE = re.compile(r"\s*(?:\[\s*(?P<section>[\w.]+)\s*\]|(?P<key>\w+)\s*=).*")
"""Line of a plan that begins a section or sets a key."""


class PlanError(InputError):
    """A plan has problems. `problems` lists every one, without secrets."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.problems = problems = [redact(problem) for problem in problems]
        lines = "".join(f"\n  {problem}" for problem in problems)
        super().__init__(f"{source}: {format_counted(len(problems), 'problem')}{lines}")


def load_plan(path: Path, overrides: tuple[str, ...] = ()) -> Plan:
    """Read and check a plan.

    Args:
        path: Plan file.
        overrides: Values of `--set`: `section.key=value`, with the value in TOML.

    Raises:
        PlanError: The plan has problems; the message lists all of them.
    """
    plan, problems = check_plan(path, overrides)
    if problems:
        raise PlanError(str(path), problems)
    return plan


def check_plan(path: Path, overrides: tuple[str, ...] = ()) -> tuple[Plan, list[str]]:
    """Return a plan and everything that is wrong with it. Keys with a wrong value have their
    defaults.

    Raises:
        PlanError: The file cannot be read, or is not TOML.
    """
    raw = read_plan(path)
    problems = [problem for given in overrides if (problem := set_override(raw, given))]
    problems += find_text_problems(raw)
    bad: list[Any] = []
    try:
        plan = Plan.model_validate(_to_tuples(raw))
    except pydantic.ValidationError as error:
        # Pydantic also calls a list too short if its items were refused, which it reports anyway.
        bad = [
            e
            for e in error.errors()
            if e["type"] != "too_short" or len(e["input"]) < e["ctx"]["min_length"]
        ]
        for error_at in error.errors():
            _remove_key(raw, [str(part) for part in error_at["loc"]])
        plan = Plan.model_validate(_to_tuples(raw))
    problems += map(_format_error, bad)
    # Do not report problems that only the defaults of wrong keys cause. The text of a problem names
    # every key that it depends on. A location is (section, key, ...), or (section,) alone.
    defaulted = [str(e["loc"][min(1, len(e["loc"]) - 1)]) for e in bad]
    problems += [
        sentence
        for sentence in find_plan_problems(plan)
        if not any(key in sentence for key in defaulted)
    ]
    return plan, add_line_numbers(path, problems, overrides)


def add_line_numbers(
    path: Path, problems: Sequence[str], overrides: tuple[str, ...] = ()
) -> list[str]:
    """Add to each problem the line of the key or section that it begins with. A key that `--set`
    overrides has no line.
    """
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(read_plain(path).decode("utf-8-sig").split("\n"), start=1):
        if match := _LINE.fullmatch(line.rstrip("\r")):
            section = match["section"] or section
            lines.setdefault(f"{section}.{match['key']}" if match["key"] else section, number)
    for given in overrides:
        lines.pop(given.partition("=")[0].strip(), None)

    def with_line(problem: str) -> str:
        match = re.match(r"[\w.]+", problem)
        section, _, subkey = match[0].partition(".") if match else ("", "", "")
        key = f"{section}.{subkey.partition('.')[0]}" if subkey else section
        return f"{problem} (line {lines[key]})" if key in lines else problem

    return [with_line(problem) for problem in problems]


def _remove_key(raw: dict[str, Any], path: Sequence[str]) -> None:
    """Remove a wrong key from a plan, or a wrong section, given the location of the problem. The
    whole key is removed, also if only a part of its value is wrong.
    """
    section = raw.get(path[0])
    if isinstance(section, dict) and len(path) > 1:
        section.pop(path[1], None)
    else:
        raw.pop(path[0], None)


def read_plan(path: Path) -> dict[str, Any]:
    """Return the parsed TOML of a plan file, unchecked.

    Raises:
        PlanError: The file cannot be read, or is not TOML.
    """
    try:
        with open_plain(path) as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        advice = f"write one by `forerun init --out {shlex.quote(str(path))}`, or name another"
        raise PlanError(str(path), [f"cannot be read: {error.strerror}: {advice}"]) from error
    except OSError as error:
        raise PlanError(
            str(path), [f"cannot be read: {error.strerror}: name a plan, a TOML file"]
        ) from error
    if len(content) > MAX_BYTES:
        raise PlanError(str(path), [f"is longer than {MAX_BYTES} bytes: no plan is that long"])
    try:
        # Editors on Windows begin a file with a byte order mark.
        plan = tomllib.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise PlanError(str(path), ["is not UTF-8: save it as UTF-8"]) from error
    except RecursionError as error:
        raise PlanError(str(path), [_TOO_DEEP]) from error
    except ValueError as error:
        raise PlanError(str(path), [f"is not TOML: {error}"]) from error
    if _is_too_deep(plan):
        raise PlanError(str(path), [_TOO_DEEP])
    return plan


_TOO_DEEP = f"is nested more than {MAX_DEPTH} levels deep, which no plan is"


def _is_too_deep(value: object) -> bool:
    """Return whether tables and lists are nested too deeply. The loop needs no recursion, which a
    deep value would exhaust.
    """
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        inner = [
            each.values() if isinstance(each, dict) else each
            for each in level
            if isinstance(each, dict | list)
        ]
        level, depth = [value for values in inner for value in values], depth + 1
    return depth > MAX_DEPTH


def find_todos(plan: Plan) -> list[str]:
    """Return a problem for each key whose text still has a `TODO`."""
    return [
        f"{key} has a {TODO}{f' ({match[1]})' if match[1] else ''}: write what your script needs "
        "there"
        for key, text in _iterate_texts(plan.model_dump(), "")
        if (match := re.search(rf"\b{TODO}\b(?:: ([^()]+))?", text))
    ]


def set_override(raw: dict[str, Any], given: str) -> str:
    """Set `section.key=value` in a plan's sections. Return the problem if that is not possible,
    else an empty text.
    """
    name, equals, text = given.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        return f"--set {given}: must be section.key=value"
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except RecursionError:
        return f"--set {name.strip()}: {_TOO_DEEP}"
    except tomllib.TOMLDecodeError:
        if not re.fullmatch(r"[A-Za-z_][\w.:-]*", text):
            return f"--set {given}: {text!r} is not a TOML value (strings need quotes)"
        value = text  # a plain word needs no quotes
    table = raw.setdefault(section, {})
    if not isinstance(table, dict):
        return f"--set {given}: {section} is not a section"
    if _is_too_deep(value):
        return f"--set {name.strip()}: {_TOO_DEEP}"
    table[key] = value
    return ""


def find_text_problems(raw: Mapping[str, Any]) -> list[str]:
    """Return the problems with the texts of a plan, by key. The texts themselves are never
    shown.
    """
    problems = []
    for key, text in _iterate_texts(raw, ""):
        if secret := find_secret(text):
            problems.append(
                f"{key} holds what looks like {secret}: a plan is kept and shown. Put it into the "
                "environment, which a command inherits, or into a file that only you can read"
            )
        if "\0" in text:
            problems.append(f"{key} holds a zero byte, which paths and commands must not have")
    return problems


def _iterate_texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield every text in a value, with the dotted key under which it stands. The names of keys are
    texts too.
    """
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield key or "a section's name", name
            yield from _iterate_texts(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for inner in value:
            yield from _iterate_texts(inner, key)


def _to_tuples(value: Any) -> Any:
    """Convert TOML arrays to tuples, which strict pydantic requires."""
    if isinstance(value, dict):
        return {key: _to_tuples(item) for key, item in value.items()}
    return tuple(_to_tuples(item) for item in value) if isinstance(value, list) else value


_PLAIN = {
    "Input should be": "must be",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
    "a valid boolean": "true or false",
    "a valid dictionary": "a table",
    "a valid tuple": "a list",
    "Tuple": "List",
}
"""Words of pydantic's messages, and the words that replace them."""


def _format_error(error: Any) -> str:
    """Format one of pydantic's errors: key, value, and what it must be."""
    path = [str(part) for part in error["loc"] if part not in AXIS_FORMS]
    where = ".".join(path).removesuffix(".[key]")
    if error["type"] == "extra_forbidden":
        known = list(_find_section(path[:-1]).model_fields)
        # The same name in another section is a better guess than a similar name in this one.
        near = [
            f"{section}.{path[-1]}"
            for section in Plan.model_fields
            if path[-1] in _find_section([section]).model_fields
        ]
        near = (
            near
            if len(path) == 2 and near
            else difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        )
        return f"{where} is unknown: " + (
            f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
        )
    sentence = "must be a section" if error["type"] == "model_type" else str(error["msg"])
    if error["type"] == "too_short":
        sentence = f"must have at least {format_counted(error['ctx']['min_length'], 'value')}"
    for pydantic_words, plain_words in _PLAIN.items():
        sentence = sentence.replace(pydantic_words, plain_words)
    return f"{where} = {_format_value(error['input'])}: {sentence}"


def _find_section(path: Sequence[str]) -> type[BaseModel]:
    """Return the class of the table at a path: a section, or an axis that the plan declares, which
    is the only other kind of table.
    """
    section: type[BaseModel] = Plan
    for part in path:
        kind = section.model_fields[part].annotation if part in section.model_fields else None
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return UserAxis
        section = kind
    return section


def _format_value(value: object) -> str:
    plain_value = list(value) if isinstance(value, tuple) else value
    try:
        sentence = repr(plain_value)
    except ValueError:  # Python refuses to format integers of thousands of digits
        sentence = "a number that is too long to show"
    return sentence if len(sentence) <= _MAX_SHOWN else f"{sentence[:_MAX_SHOWN]}..."
