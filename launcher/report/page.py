"""The pages `report.html` and `compare.html`, rendered from the templates and the JSON files.

The pages are static and self-contained. The same body gives the same bytes, except for the date.
Text that comes from a study is escaped.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from launcher.figures import plots
from launcher.figures.panel import main_arm, svg_of
from launcher.figures.svg import DARK_VARIABLES, LIGHT_VARIABLES
from launcher.figures.transfer import has_optimum
from launcher.logbook.logbook import LOGBOOK_FILE
from launcher.report.about import About
from launcher.report.compare import flat, forecast_doubts
from launcher.study.decide import own_text
from launcher.study.gates import findings, forecast_warnings, points
from launcher.views import numbers, tables, transfer
from launcher.views.aspect import aspect_text
from launcher.views.batch import judged_text, law_text, looks_rows
from launcher.views.main_run import describe_outcome, measured_loss
from launcher.views.numbers import Body, Outcome, arm_name
from launcher.views.search import sentences
from launcher.views.wider import wider_text
from proxies.core import canon, notation
from proxies.core.notation import NONE
from scaling_fits.laws.forms import SHAPES

TEMPLATES = Path(__file__).with_name("templates")
_HASH = re.compile("[0-9a-f]{64}")


def typeset(value: object) -> Markup:
    """Convert a value to HTML: text is escaped, and an outcome becomes a colored label."""
    if isinstance(value, Markup):
        return value
    if isinstance(value, Outcome):
        return Markup('<span class="chip {}">{}</span>').format(numbers.tone(value), str(value))
    if value == NONE or value is None:
        return Markup("–")
    return escape(value)


_NOTATION: dict[str, Callable[..., str]] = {
    "number": notation.format_number,
    "loss": notation.format_loss,
    "interval": notation.format_interval,
    "flops": notation.format_flops,
    "count": notation.format_count,
    "percent": notation.format_percent,
    "duration": notation.format_duration,
    "learning_rate": notation.format_learning_rate,
    "significant": notation.format_significant,
    "usd": notation.format_usd,
    "counted": notation.counted,
    "estimate": transfer.estimate,
}
"""Template filters that format numbers."""


def _typeset_filter(format_number: Callable[..., str]) -> Callable[..., Markup]:
    """Wrap a function that formats a number, so that its result is typeset."""
    return lambda *arguments, **options: typeset(format_number(*arguments, **options))


def _typeset_command(line: str) -> Markup:
    """Typeset a command, which breaks only between words, even where an option has dashes."""
    words = Markup(" ").join(
        Markup('<span class="w">{}</span>').format(word) for word in line.split()
    )
    return Markup("<code>{}</code>").format(words)


def _typeset_plan_value(value: Any) -> Markup:
    """Typeset a value of a plan; a hash is shortened, with the whole hash in its tooltip."""
    if isinstance(value, list):
        return Markup(", ").join(map(_typeset_plan_value, value))
    if isinstance(value, str) and _HASH.fullmatch(value):
        return Markup('<code title="{}">{}</code>').format(value, value[:16])
    return (
        typeset(notation.format_flops(value))
        if isinstance(value, float) and abs(value) >= 1e6
        else escape(value)
    )


def _typeset_property(value: Any) -> Markup:
    """Typeset a property of the main run: a word, a count, or a number."""
    if value is None or isinstance(value, str | bool):
        return typeset(value)
    return typeset(
        notation.format_count(value) if float(value).is_integer() else notation.format_number(value)
    )


def _list_group_columns(groups: Iterable[Any]) -> list[str]:
    """Return the optimizer, the initial std, and every setting that some parameter group has."""
    return [
        "optimizer",
        "init_std",
        *sorted({name for group in groups for name in group["settings"]}),
    ]


def _merge_groups(groups: Iterable[Any], keys: Iterable[str]) -> list[dict[str, Any]]:
    """Merge parameter groups with the same values of `keys` into one row.

    A row has the kinds and the patterns of its groups, and the values of the first; a value is None
    where the group's optimizer has no such setting.
    """
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for group in groups:
        values = {**dict.fromkeys(keys), **group["settings"], **group}
        new_row: dict[str, Any] = {"kinds": [], "patterns": [], "numbers": values}
        row = merged.setdefault(tuple(values[key] for key in keys), new_row)
        row["kinds"] += [
            kind for kind in [numbers.words(group["kind"])] if kind not in row["kinds"]
        ]
        row["patterns"] += group["pattern"].split("|")
    return list(merged.values())


@functools.cache
def environment() -> Environment:
    """Return the template environment, with the filters and functions that templates may call."""
    env = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined
    )
    env.filters |= {name: _typeset_filter(write) for name, write in _NOTATION.items()}
    env.filters |= {
        "set": typeset,
        "words": numbers.words,
        "listed": numbers.listed,
        "command": _typeset_command,
        "leaf": _typeset_plan_value,
        "chosen": _typeset_property,
        "nearest": lambda curve, step: min(curve, key=lambda point: abs(point["step"] - step)),
        "has_optimum": has_optimum,
        "chip": lambda outcome: typeset(Outcome(outcome)),
        "code": lambda text: Markup("<code>{}</code>").format(text),
        "merged": _merge_groups,
        "group_columns": _list_group_columns,
        "svg": lambda panel: Markup(svg_of(panel)),
    }
    env.globals |= {
        "plots": plots,
        "tables": tables,
        "transfer": transfer,
        "main_arm": main_arm,
        "arm_name": arm_name,
        "findings": findings,
        "points": points,
        "aspect_text": aspect_text,
        "judged_text": judged_text,
        "law_text": law_text,
        "looks_rows": looks_rows,
        "wider_text": wider_text,
        "measured_loss": measured_loss,
        "describe_outcome": describe_outcome,
        "forecast_warnings": forecast_warnings,
        "forecast_doubts": forecast_doubts,
        "own_text": own_text,
        "search_sentences": sentences,
        "flat": flat,
        "logbook_file": LOGBOOK_FILE,
        "light_variables": LIGHT_VARIABLES,
        "dark_variables": DARK_VARIABLES,
        "formulas": {name: Markup(shape.formula) for name, shape in SHAPES.items()},
    }
    return env


def report_page(body: Body, about: About | None = None) -> str:
    """Render the report of a study. Every number on it comes from `body` or `about`.

    Args:
        body: Content of `report.json`.
        about: Header of the page; None to leave it out.
    """
    return environment().get_template("report.html.j2").render(body=body, about=about)


def compare_page(body: Body) -> str:
    """Render the comparison of two studies, from the body of `compare.json`."""
    return environment().get_template("compare.html.j2").render(body=body)


def write_report(study_dir: Path, body: dict[str, canon.Json], about: About | None = None) -> None:
    """Write `report.json` and `report.html` into the study's folder, each atomically.

    Args:
        study_dir: The study's folder.
        body: Body from `launcher.report.body.report_body`; sections that have not run are null, and
            the page says so.
        about: Name, date and next command, for the page alone; None to leave them out.
    """
    _write_json_and_page(study_dir, "report", body, functools.partial(report_page, about=about))


def write_comparison(out: Path, body: dict[str, canon.Json]) -> None:
    """Write `compare.json` and `compare.html` into a folder, each atomically.

    The folder is created if needed.
    """
    out.mkdir(parents=True, exist_ok=True)
    _write_json_and_page(out, "compare", body, compare_page)


def _write_json_and_page(
    folder: Path, name: str, body: dict[str, canon.Json], page: Callable[[Body], str]
) -> None:
    text = canon.pretty(body)
    canon.write_atomic(folder / f"{name}.json", text)
    # The page is rendered from the JSON as written, so that anyone can render it again.
    parsed = canon.parse(text)
    assert isinstance(parsed, dict)
    canon.write_atomic(folder / f"{name}.html", page(parsed).encode())
