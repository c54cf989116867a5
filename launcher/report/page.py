"""The pages: `report.html` and `compare.html`, from the templates beside this file and the data of
their JSON files.

Static and self-contained; the same body gives the same bytes, but for the date. Whatever comes from
a study is escaped.
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
    """Plain text as HTML, an outcome as a label in the colour of its tone."""
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
"""Filters of the templates that write a number."""


def _set(shown: Callable[..., str]) -> Callable[..., Markup]:
    """A way to write a number, typeset."""
    return lambda *given, **options: typeset(shown(*given, **options))


def _command(line: str) -> Markup:
    """A command to type; it breaks between words only, also where an option begins with dashes."""
    words = Markup(" ").join(
        Markup('<span class="w">{}</span>').format(word) for word in line.split()
    )
    return Markup("<code>{}</code>").format(words)


def _leaf(value: Any) -> Markup:
    """A value of a plan: of a hash its beginning, the rest where the mouse rests."""
    if isinstance(value, list):
        return Markup(", ").join(map(_leaf, value))
    if isinstance(value, str) and _HASH.fullmatch(value):
        return Markup('<code title="{}">{}</code>').format(value, value[:16])
    return (
        typeset(notation.format_flops(value))
        if isinstance(value, float) and abs(value) >= 1e6
        else escape(value)
    )


def _chosen(value: Any) -> Markup:
    """A property of the main run: a word, a count, or a number."""
    if value is None or isinstance(value, str | bool):
        return typeset(value)
    return typeset(
        notation.format_count(value) if float(value).is_integer() else notation.format_number(value)
    )


def _merged(groups: Iterable[Any], keys: Iterable[str]) -> list[dict[str, Any]]:
    """Parameter groups with the same numbers as one: its kinds, its patterns, and the first group's
    numbers.
    """
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for group in groups:
        row = merged.setdefault(
            tuple(group[key] for key in keys), {"kinds": [], "patterns": [], "numbers": group}
        )
        row["kinds"] += [
            kind for kind in [numbers.words(group["kind"])] if kind not in row["kinds"]
        ]
        row["patterns"] += group["pattern"].split("|")
    return list(merged.values())


@functools.cache
def environment() -> Environment:
    """The templates with what they may call."""
    made = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined
    )
    made.filters |= {name: _set(write) for name, write in _NOTATION.items()}
    made.filters |= {
        "set": typeset,
        "words": numbers.words,
        "listed": numbers.listed,
        "command": _command,
        "leaf": _leaf,
        "chosen": _chosen,
        "nearest": lambda curve, step: min(curve, key=lambda point: abs(point["step"] - step)),
        "has_optimum": has_optimum,
        "chip": lambda outcome: typeset(Outcome(outcome)),
        "code": lambda text: Markup("<code>{}</code>").format(text),
        "merged": _merged,
        "svg": lambda panel: Markup(svg_of(panel)),
    }
    made.globals |= {
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
    return made


def report_page(body: Body, about: About | None = None) -> str:
    """The report of a study. Every number on it comes from `body`, which is that of `report.json`,
    or from `about`.
    """
    return environment().get_template("report.html.j2").render(body=body, about=about)


def compare_page(body: Body) -> str:
    """Two studies side by side, from the body of `compare.json`."""
    return environment().get_template("compare.html.j2").render(body=body)


def write_report(study_dir: Path, body: dict[str, canon.Json], about: About | None = None) -> None:
    """Write `report.json` and `report.html` into the study's folder, each wholly or not at all.

    Args:
        study_dir: the study's folder.
        body: what `launcher.report.body.report_body` gives; parts that have not run are null, and
            the page says so.
        about: name, date and next command, for the page alone; None: the page has none.
    """
    _write(study_dir, "report", body, functools.partial(report_page, about=about))


def write_comparison(out: Path, body: dict[str, canon.Json]) -> None:
    """Write `compare.json` and `compare.html` into a folder, made if need be; each wholly or not at
    all.
    """
    out.mkdir(parents=True, exist_ok=True)
    _write(out, "compare", body, compare_page)


def _write(
    folder: Path, name: str, body: dict[str, canon.Json], page: Callable[[Body], str]
) -> None:
    written = canon.pretty(body)
    canon.write_atomic(folder / f"{name}.json", written)
    read = canon.parse(written)  # the page is drawn from the file, so that anyone can draw it again
    assert isinstance(read, dict)
    canon.write_atomic(folder / f"{name}.html", page(read).encode())
