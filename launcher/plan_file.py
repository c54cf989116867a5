"""Reading and writing plans: TOML in, every problem at once; a commented plan and its JSON Schema out."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pydantic
from pydantic import BaseModel

from launcher.plan import Plan
from launcher.plan_cluster import cluster_problems, rank_problems
from launcher.plan_ladder import ladder_problems
from launcher.plan_proxy import proxy_problems
from launcher.plan_search import search_problems
from launcher.plan_sections import RuleChoices
from launcher.plan_texts import text_problems
from launcher.plan_transfer import transfer_lists, transfer_problems
from proxies.checks import SpecError
from sweeps.redaction import redacted


class PlanError(ValueError):
    """A plan with problems: `problems` lists every one."""

    def __init__(self, source: str, problems: list[str]) -> None:
        self.problems = problems
        lines = "".join(f"\n  {problem}" for problem in problems)
        super().__init__(f"{source}: {len(problems)} problem{'s' if len(problems) > 1 else ''}{lines}")


def load_plan(path: Path, overrides: tuple[str, ...] = ()) -> Plan:
    """Read and check a plan; `overrides` are `section.key=value`, the value in TOML.

    Raises:
        PlanError: everything that is wrong, at once.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(str(path), [f"cannot be read: {error.strerror}"]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(str(path), [f"is not TOML: {error}"]) from error
    problems = [problem for given in overrides if (problem := override(raw, given))]
    problems += text_problems(raw)
    try:
        plan = Plan.model_validate(_tuples(raw))
    except pydantic.ValidationError as error:
        bad = [e for e in error.errors() if not _is_echo(e)]
        problems += [_say(e) for e in bad] + _cross_checks_of_the_rest(raw, bad)
        raise PlanError(str(path), [redacted(problem) for problem in problems]) from None
    problems += _cross_checks(plan)
    if problems:
        raise PlanError(str(path), [redacted(problem) for problem in problems])
    return plan


def _cross_checks_of_the_rest(raw: dict[str, Any], bad: list[Any]) -> list[str]:
    """What else is wrong, with the bad keys at their defaults; silent about what a default may have caused."""
    sections = {str(e["loc"][0]) for e in bad}
    kept = {name: value for name, value in raw.items() if name not in sections}
    try:
        return [p for p in _cross_checks(Plan.model_validate(_tuples(kept))) if not any(s in p for s in sections)]
    except pydantic.ValidationError:  # a section of the wrong kind altogether: said already
        return []


def override(raw: dict[str, Any], given: str) -> str:
    """Set `section.key=value` in a plan's sections; why that cannot be, or nothing."""
    name, equals, text = given.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        return f"--set {given}: section.key=value is wanted"
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        if not re.fullmatch(r"[A-Za-z_][\w.:-]*", text):
            return f"--set {given}: {text!r} is no TOML value (strings need quotes)"
        value = text  # a word needs none
    table = raw.setdefault(section, {})
    if not isinstance(table, dict):
        return f"--set {given}: {section} is no section"
    table[key] = value
    return ""


def _tuples(value: Any) -> Any:
    """TOML arrays as tuples, whole numbers where a key wants a float as they are: strict pydantic takes both."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _is_echo(error: Any) -> bool:
    """Pydantic calls a list too short whose items were refused, and said so already."""
    return bool(error["type"] == "too_short" and len(error["input"]) >= error["ctx"]["min_length"])


def _say(error: Any) -> str:
    """One problem in our words: where, what is there, what is wanted."""
    path = [str(part) for part in error["loc"]]
    where = ".".join(path)
    if error["type"] == "extra_forbidden":
        known = list(Plan.model_fields)
        if len(path) > 1 and path[0] in Plan.model_fields:
            section = Plan.model_fields[path[0]].annotation
            assert isinstance(section, type) and issubclass(section, BaseModel)
            known = list(section.model_fields)
        if path[:2] == ["proxy", "rules"] and len(path) == 3:
            known = list(RuleChoices.model_fields)
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        return f"{where} is unknown: {hint}"
    if path[-1] == "[key]":
        return f"{'.'.join(path[:-1])} is unknown: {_wanted(error)} is wanted"
    value = error["input"]
    shown = list(value) if isinstance(value, tuple) else value
    if error["type"] == "missing":  # all keys have defaults: this is the end of a range
        return f"{'.'.join(path[:-1])} = {shown!r}: one more value is wanted"
    return f"{where} = {shown!r}: {_wanted(error)} is wanted"


def _wanted(error: Any) -> str:
    """What pydantic would have liked, without its own vocabulary."""
    words = {"model_type": "a section", "tuple_type": "a list"}
    if error["type"] == "too_short":
        return f"a list of at least {error['ctx']['min_length']}"
    if error["type"] == "too_long":
        return f"a list of {error['ctx']['max_length']}"
    if error["type"] == "less_than_equal":
        return f"less than or equal to {error['ctx']['le']:g}"
    return words.get(error["type"], str(error["msg"]).removeprefix("Input should be "))


def _list_checks(plan: Plan) -> list[str]:
    """Every width gives a whole shape, and no list names a value twice."""
    problems: list[str] = []
    widths = {
        "proxy.base_width": (plan.proxy.base_width,),
        "transfer.widths": plan.transfer.widths,
        "transfer.hyperparameter_widths": plan.transfer.hyperparameter_widths,
        "transfer.control_widths": plan.transfer.control_widths,
        "transfer.check_widths": () if plan.proxy.command else plan.transfer.check_widths,
        "ladder.widths": plan.ladder.widths,
    }
    for name, values in widths.items():
        for width in values:
            try:
                plan.shape(width, vocab_size=2)
            except SpecError as error:
                problems += [f"{name}: {problem}" for problem in error.problems]
    lists: dict[str, Sequence[float]] = {
        **widths,
        **transfer_lists(plan),
        "ladder.num_steps": plan.ladder.num_steps,
        "ladder.check_offsets_octaves": plan.ladder.check_offsets_octaves,
    }
    return problems + [
        f"{name} = {list(values)}: each value once" for name, values in lists.items() if len(set(values)) < len(values)
    ]


def _cross_checks(plan: Plan) -> list[str]:
    """What single keys cannot show."""
    problems = _list_checks(plan) + proxy_problems(plan) + cluster_problems(plan.cluster) + rank_problems(plan)
    problems += transfer_problems(plan)
    if any(problem.startswith("proxy.command: ") for problem in problems):
        return problems  # the others ask what the command can be told
    return problems + search_problems(plan) + ladder_problems(plan)


def commented_plan(values: dict[str, dict[str, object]]) -> str:
    """A plan with every key, its value and its sentence; `values` replace defaults."""
    lines = [
        "#:schema ./plan.schema.json",
        "# A forerun plan. Every key is shown with its value; delete what you leave alone.",
        "",
    ]
    for name, field in Plan.model_fields.items():
        section = field.annotation
        assert isinstance(section, type) and issubclass(section, BaseModel)
        lines += [f"[{name}]  # {(section.__doc__ or '').strip()}"]
        for key, inner in section.model_fields.items():
            value = values.get(name, {}).get(key, inner.default)
            lines += [f"# {inner.description}{_choices(inner.annotation)}", f"{key} = {_toml(value)}"]
        lines.append("")
    return "\n".join(lines)


def _choices(annotation: Any) -> str:
    options = get_args(annotation) if not isinstance(annotation, type) else ()
    return f" One of: {', '.join(options)}." if options and all(isinstance(o, str) for o in options) else ""


def _toml(value: object) -> str:
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_none=True)
    if isinstance(value, dict):
        pairs = [f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items() if item is not None]
        return "{ " + ", ".join(pairs) + " }" if pairs else "{}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, float):
        short = f"{value:g}".replace("e+", "e")
        return short if "e" in short and float(short) == value else repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML knows no surrogate pairs


def plan_schema() -> dict[str, Any]:
    """JSON Schema of the plan, for editors."""
    return Plan.model_json_schema()
