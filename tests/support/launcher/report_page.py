"""Helpers for tests of the report page: rendering parts of it, and reading its text and numbers."""

import collections
import re
from html.parser import HTMLParser

import pytest

from forerun._launcher.report.page.page import create_environment, render_report
from forerun._launcher.report.views.report_model import to_report
from forerun._proxies.core.notation import format_duration

HOSTILE = '<script>alert("1")</script> & $\\frac{a}{b}$ \' </svg>'
"""Text that breaks a page or a figure unless it is escaped."""


def render_without_figures(body, render=render_report):
    """Render a page with empty figures, because writing figures takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forerun._launcher.report.page.page.render_svg", lambda panel: "")
        return render(body)


def render_section(name, body, about=None):
    """Render the template of one section with empty figures."""

    def render(body):
        template = create_environment().get_template(f"{name}.html.j2")
        return template.render(body=to_report(body), about=about)

    return render_without_figures(body, render)


class _TextReader(HTMLParser):
    """A parser that collects the visible text, without axis ticks, and with ^ for superscripts."""

    def __init__(self):
        super().__init__()
        self.parts = []
        self.hidden_tags = []
        """Open tags inside a hidden element, that element included."""

    def handle_starttag(self, tag, attrs):
        if self.hidden_tags or tag == "style" or ("class", "tick") in attrs:
            self.hidden_tags.append(tag)
        elif tag == "sup":
            self.parts.append("^")
        elif tag != "span":
            self.parts.append(" ")

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        if self.hidden_tags and self.hidden_tags[-1] == tag:
            self.hidden_tags.pop()

    def handle_data(self, data):
        if not self.hidden_tags:
            self.parts.append(data)


def extract_text(source):
    """Return the visible text of a page, with plain spaces and minus signs."""
    reader = _TextReader()
    # Void elements have no end tag.
    reader.feed(re.sub(r"<(br|meta)[^>]*>", " ", source))
    return " ".join("".join(reader.parts).replace("\u00a0", " ").replace("−", "-").split())


def list_leaves(value):
    """Return every value and key of nested JSON."""
    if isinstance(value, dict):
        value = [*value.values(), *value]
    if not isinstance(value, list):
        return [value]
    return [leaf for item in value for leaf in list_leaves(item)]


NUMBER = re.compile(
    r"(?<![\w.])[+-]?(?P<digits>\d{1,3}(?:,\d{3})+|\d+)(?:\.(?P<decimals>\d+))?"
    r"(?:e(?P<power>[+-]\d+)|(?P<suffix> ?[kMBT])\b)?(?![\w])"
)
SUFFIXES = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def derive_numbers(test):
    """Return the numbers that the page computes from a transfer test.

    These are the mean losses above the best of their size, the ends of intervals as values, the
    lowest run above the fitted minimum, and how far the target is beyond the largest size.
    """
    numbers = []
    cells = collections.defaultdict(lambda: collections.defaultdict(list))
    for run in test["runs"]:
        cells[run["arm"], run["size"]][run["log2_value"]].append(run["loss_nats"])
    for losses_by_value in cells.values():
        means = [
            sum(losses) / len(losses) for losses in losses_by_value.values() if None not in losses
        ]
        numbers += [mean - min(means) for mean in means]
    verdict = test["verdict"]
    for optimum in verdict["optima"]:
        numbers += [2.0**end for end in optimum["interval_log2"] or ()]
        if optimum["loss_nats"] is not None:
            numbers.append(optimum["lowest_run_nats"] - optimum["loss_nats"])
    largest_size = max(optimum["size"] for optimum in verdict["optima"])
    numbers.append(verdict["target_size"] / largest_size)
    return numbers


def remove_texts_of_body(text, leaves):
    """Return a page's text without durations, and without the report's strings that have digits."""
    numbers = [leaf for leaf in leaves if isinstance(leaf, int | float)]
    for duration in {format_duration(number) for number in numbers}:
        has_two_units = duration.count(" ") > 1  # 3 min 05 s
        if has_two_units:
            text = text.replace(duration, " ")
    strings = {leaf for leaf in leaves if isinstance(leaf, str) and re.search(r"\d", leaf)}
    for string in sorted(strings, key=len, reverse=True):
        text = text.replace(string.replace("−", "-"), " ")
    return text


def find_unknown_numbers(source, body):
    """Return the numbers of a page that are not rounded from a number of the report.

    A number of the report may be shown as it is, in percent, in minutes, or in hours.
    """
    leaves = list_leaves(body)
    known = [
        abs(leaf) for leaf in leaves if isinstance(leaf, int | float) and not isinstance(leaf, bool)
    ]
    known += [value * factor for value in known for factor in (100, 1 / 60, 1 / 3600)]
    for test in (body["transfer"] or {"tests": []})["tests"]:
        known += derive_numbers(test)
    unknown = []
    text = remove_texts_of_body(extract_text(source).replace("2^", " "), leaves)
    for match in NUMBER.finditer(text):
        scale = 10.0 ** int(match["power"] or 0) * SUFFIXES.get((match["suffix"] or "").strip(), 1)
        value = float(f"{match['digits'].replace(',', '')}.{match['decimals'] or 0}") * scale
        # A number is rounded to its last digit, so it is off by at most half of that digit's unit.
        rounding = 0.5001 * scale * 10.0 ** -len(match["decimals"] or "") + 1e-9 * value
        if not any(abs(value - candidate) <= rounding for candidate in known):
            unknown.append(match.group())
    return unknown
