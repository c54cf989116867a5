"""The pages `report.html` and `compare.html`, rendered from the templates and the JSON files.

The pages are static and self-contained. The same body gives the same bytes, except for the date.
Text that comes from a study is escaped.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from forerun._launcher.main_run.logbook.logbook import LOGBOOK_FILE
from forerun._launcher.report.figures import plots
from forerun._launcher.report.figures.panel import render_svg
from forerun._launcher.report.figures.svg import DARK_VARIABLES, LIGHT_VARIABLES
from forerun._launcher.report.page.compare import flatten_plan, list_forecast_doubts
from forerun._launcher.report.page.comparison import Comparison
from forerun._launcher.report.page.header import ReportHeader
from forerun._launcher.report.views import tables, transfer, wording
from forerun._launcher.report.views.aspect import format_aspect_choice
from forerun._launcher.report.views.finding import Finding
from forerun._launcher.report.views.noise_scale import (
    build_look_rows,
    format_batch_comparison,
    format_noise_law,
)
from forerun._launcher.report.views.report_model import AnyReport, Report, to_report
from forerun._launcher.report.views.search import describe_search
from forerun._launcher.report.views.wording import (
    Outcome,
    describe_outcome,
    format_arm,
    format_user_run,
)
from forerun._launcher.study.stages.gates import build_forecast_warnings
from forerun._proxies.core import canon, notation
from forerun._proxies.core.notation import NONE
from forerun._scaling_fits.laws.forms import FORMS

TEMPLATES = Path(__file__).with_name("templates")
_SHA256 = re.compile("[0-9a-f]{64}")


def typeset(value: object) -> Markup:
    """Convert a value to HTML: text is escaped, and an outcome becomes a colored label."""
    if isinstance(value, Markup):
        return value
    if isinstance(value, Outcome):
        return Markup('<span class="chip {}">{}</span>').format(
            wording.find_tone(value), str(value)
        )
    if value == NONE or value is None:
        return Markup("–")
    return escape(value)


_NUMBER_FORMATS: tuple[Callable[..., str], ...] = (
    notation.format_number,
    notation.format_loss,
    notation.format_interval,
    notation.format_flops,
    notation.format_count,
    notation.format_percent,
    notation.format_duration,
    notation.format_learning_rate,
    notation.format_significant,
    notation.format_usd,
    transfer.format_estimate,
)
"""Functions that are template filters, under their names without `format_`."""
_TEMPLATE_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    format_arm,
    format_aspect_choice,
    format_batch_comparison,
    format_noise_law,
    build_look_rows,
    describe_outcome,
    build_forecast_warnings,
    list_forecast_doubts,
    format_user_run,
    describe_search,
    flatten_plan,
)
"""Functions that templates call by their names."""


def _typeset_filter(format_number: Callable[..., str]) -> Callable[..., Markup]:
    """Wrap a function that formats a number, so that its result is typeset."""
    return lambda *arguments, **options: typeset(format_number(*arguments, **options))


def _typeset_command(line: str) -> Markup:
    """Typeset a command. Lines break only between its words, not at the dashes of an option."""
    words = Markup(" ").join(
        Markup('<span class="w">{}</span>').format(word) for word in line.split()
    )
    return Markup("<code>{}</code>").format(words)


def _typeset_plan_value(value: Any) -> Markup:
    """Typeset a value of a plan; a hash is shortened, with the whole hash in its tooltip."""
    if isinstance(value, list):
        return Markup(", ").join(map(_typeset_plan_value, value))
    if isinstance(value, str) and _SHA256.fullmatch(value):
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

    A row has the kinds and the patterns of its groups, and the values of its first group. A value
    is None if the group's optimizer has no such setting.
    """
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for group in groups:
        values = {**dict.fromkeys(keys), **group["settings"], **group}
        new_row: dict[str, Any] = {"kinds": [], "patterns": [], "numbers": values}
        row = merged.setdefault(tuple(values[key] for key in keys), new_row)
        if (kind := wording.to_words(group["kind"])) not in row["kinds"]:
            row["kinds"].append(kind)
        row["patterns"] += group["pattern"].split("|")
    return list(merged.values())


@functools.cache
def create_environment() -> Environment:
    """Return the template environment, with the filters and functions that templates may call."""
    env = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined
    )
    env.filters |= {
        write.__name__.removeprefix("format_"): _typeset_filter(write) for write in _NUMBER_FORMATS
    }
    env.filters |= {
        "typeset": typeset,
        "to_words": wording.to_words,
        "join_names": wording.join_names,
        "command": _typeset_command,
        "plan_value": _typeset_plan_value,
        "property_value": _typeset_property,
        "find_nearest": lambda curve, step: min(curve, key=lambda point: abs(point.step - step)),
        "chip": lambda outcome: typeset(Outcome(outcome)),
        "code": lambda text: Markup("<code>{}</code>").format(text),
        "merge_groups": _merge_groups,
        "list_group_columns": _list_group_columns,
        "svg": lambda panel: Markup(render_svg(panel)),
    }
    env.globals |= {function.__name__: function for function in _TEMPLATE_FUNCTIONS}
    env.globals |= {
        "plots": plots,
        "tables": tables,
        "transfer": transfer,
        "logbook_file": LOGBOOK_FILE,
        "light_variables": LIGHT_VARIABLES,
        "dark_variables": DARK_VARIABLES,
        "formulas": {name: Markup(spec.formula) for name, spec in FORMS.items()},
    }
    return env


def render_report(report: AnyReport, about: ReportHeader | None = None) -> str:
    """Render the report of a study. Every number of the page comes from `report` or `about`.

    Args:
        report: The report, or the content of `report.json`.
        about: Header of the page; None to leave it out.
    """
    template = create_environment().get_template("report.html.j2")
    return template.render(body=to_report(report), about=about)


def render_comparison(comparison: Mapping[str, Any] | Comparison) -> str:
    """Render the comparison of two studies, or the content of `compare.json`."""
    template = create_environment().get_template("compare.html.j2")
    return template.render(body=Comparison.model_validate(comparison))


def write_report(study_dir: Path, report: Report, about: ReportHeader | None = None) -> None:
    """Write `report.json` and `report.html` into the study's folder, each atomically.

    Args:
        study_dir: The study's folder.
        report: The report; the page says which sections have not run.
        about: Header of the page; None to leave it out.
    """
    _write_json_and_page(study_dir, "report", report, functools.partial(render_report, about=about))


def write_comparison(out: Path, comparison: Comparison) -> None:
    """Write `compare.json` and `compare.html` into a folder, each atomically.

    The folder is created if needed.
    """
    out.mkdir(parents=True, exist_ok=True)
    _write_json_and_page(out, "compare", comparison, render_comparison)


def _write_json_and_page(
    folder: Path, name: str, content: Finding, render: Callable[[Any], str]
) -> None:
    """Write `name.json`, and `name.html` as `render` makes it from the content of the JSON."""
    text = canon.to_pretty_json(content.to_json())
    canon.write_atomic(folder / f"{name}.json", text)
    # The page is rendered from the JSON as written, so that anyone can render it again.
    canon.write_atomic(folder / f"{name}.html", render(canon.parse(text)).encode())
