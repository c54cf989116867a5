"""Numbers and pieces of the report as HTML. Whatever comes from a study passes through `text`, and is escaped."""

from __future__ import annotations

import html
from collections.abc import Collection, Mapping, Sequence
from typing import Any

Body = Mapping[str, Any]
"""What `launcher.report.body.report_body` gives."""

_SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"))


def text(value: object) -> str:
    """Anything as escaped text."""
    return html.escape(str(value))


def words(value: object) -> str:
    """A name of the records as words: `cannot_tell` is "cannot tell"."""
    return text(str(value).replace("_", " "))


def _signed(shown: str) -> str:
    return shown.replace("-", "−")


def arm_name(arm: str) -> str:
    """A parametrization as people write it."""
    return {"mup": "muP", "sp": "SP"}.get(arm, arm)


def arm_title(arm: str) -> str:
    """The heading of an arm's figure; `depth` is the coordinate check over depths."""
    titles = {"sp": "Standard parametrization (SP)", "depth": "Over depths"}
    return titles.get(arm) or text(arm_name(arm))


def number(value: float | None, spec: str = ".4g") -> str:
    """A number by its format spec, with a true minus sign and ten's powers written out; None is a dash."""
    if value is None:
        return "–"
    spec = ".4g" if abs(value) >= 1e6 and spec.endswith("f") else spec
    shown = format(value, f"+z{spec[1:]}" if spec[0] == "+" else f"z{spec}")  # z: what rounds to nothing has no sign
    if "e" not in shown:
        return _signed(shown)
    digits, exponent = shown.split("e")
    return f"{_signed(digits)}\u00a0×\u00a010<sup>{_signed(str(int(exponent)))}</sup>"


def loss(value: float | None) -> str:
    """Nats, to a thousandth."""
    return number(value, ".3f")


def interval(ends: Sequence[float] | None, spec: str = ".3f") -> str:
    """Both ends in brackets, or that there are none."""
    return "no interval" if ends is None else f"[{number(ends[0], spec)}, {number(ends[1], spec)}]"


def flops(value: float | None) -> str:
    """Three digits and a power of ten."""
    return number(value, ".2e")


def count(value: float | None) -> str:
    """Things counted: whole below a million, then in millions (M), billions (B), trillions (T)."""
    if value is None:
        return "–"
    for size, suffix in _SUFFIXES:
        if value >= size:
            return f"{value / size:.3g}\u00a0{suffix}" if value < 1000 * size else f"{value / size:,.0f}\u00a0{suffix}"
    return f"{value:,.0f}"


def percent(value: float | None, spec: str = ".3g") -> str:
    """A share in percent."""
    return "–" if value is None else f"{_signed(format(100 * value, spec))}\u00a0%"


def seconds(value: float) -> str:
    """A duration in seconds, minutes or hours."""
    if value < 600:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 36_000 else f"{value / 3600:.1f} h"


def power_of_two(exponent: float | None) -> str:
    """A learning rate by its exponent."""
    return "–" if exponent is None else f"2<sup>{number(exponent, '.2f')}</sup>"


def command(line: str) -> str:
    """A command to type; it breaks between words only, also where an option begins with dashes."""
    return "<code>" + " ".join(f'<span class="w">{text(word)}</span>' for word in line.split()) + "</code>"


def chip(outcome: str) -> str:
    """An outcome as a coloured label; its words say the same as its colour."""
    good = {"passed", "passes", "holds", "converged", "finished", "ok", "tuned"}
    bad = {"failed", "drifts", "blows_up", "vanishes", "diverged", "unidentified", "mis_tuned"}
    kind = "good" if outcome in good else "bad" if outcome in bad else "open"
    return f'<span class="chip {kind}">{words(outcome)}</span>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """A table of cells that are HTML already; all columns but those in `left` are numbers, and align right."""

    def line(tag: str, cells: Sequence[str]) -> str:
        marks = [f"<{tag}>" if i in left else f'<{tag} class="n">' for i in range(len(cells))]
        return "<tr>" + "".join(f"{mark}{cell}</{tag}>" for mark, cell in zip(marks, cells, strict=True)) + "</tr>"

    top, body = line("th", head), "".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table><thead>{top}</thead><tbody>{body}</tbody></table></div>'


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and values (HTML already) as a list of definitions."""
    return '<dl class="facts">' + "".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in pairs) + "</dl>"


def bullets(items: Sequence[str]) -> str:
    """A list of HTML items."""
    return "<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>"


def figure(svg: str, caption: str, heading: str = "") -> str:
    """One figure with its caption, and, where it stands beside another, a heading."""
    over = f"<h3>{heading}</h3>" if heading else ""
    return f"<figure>{over}{svg}<figcaption>{caption}</figcaption></figure>"


def pair(*parts: str) -> str:
    """Side by side where there is room."""
    return f'<div class="pair">{"".join(parts)}</div>'


def section(anchor: str, heading: str, *parts: str) -> str:
    """A section of the page."""
    return f'<section id="{anchor}"><h2>{heading}</h2>{"".join(parts)}</section>'


def missing(what: str, verb: str, runs: Sequence[int] | None = None) -> str:
    """That a stage has not ended, how many `runs` (done, asked for) it has, and the command that runs it."""
    done = "" if runs is None else f" {count(runs[0])} of {count(runs[1])} runs are done."
    return f'<p class="missing">{what}{done} {command(f"forerun {verb} PLAN")} runs it, or resumes it.</p>'


def leaves(value: Any, path: str = "") -> list[tuple[str, str]]:
    """Every leaf of JSON data with its path, escaped; a list of plain values is one leaf."""
    if isinstance(value, dict):
        return [leaf for k, v in value.items() for leaf in leaves(v, f"{path}.{k}" if path else str(k))]
    if isinstance(value, list):
        return [(text(path), ", ".join(text(item) for item in value))]
    return [(text(path), text(value))]
