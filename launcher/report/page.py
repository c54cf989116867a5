"""A whole page of a report: its head, its parts, and its drawings in few characters. Standard library only."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

from launcher.figures.svg import DARK_VARIABLES, LIGHT_VARIABLES
from launcher.views import html as show

_WORDS = (
    ("nats", ("the unit of loss: the mean of minus the natural logarithm of each next token's probability. Less is "
             "better. Losses of other tokenizers are not on one scale.")),
    ("proxy, base", "a small model trained in place of the main one; the base is the one that was searched."),
    ("muP, SP", ("rules of how initial values and learning rates scale with width. Under muP the best learning rate "
                "should stay put as the model grows; SP, the standard, is the control.")),
    ("gate", ("a condition for a launch. It passes, fails, or cannot tell for lack of evidence; somebody may accept "
             "one as it is, with a reason that is kept.")),
    ("coordinates", ("how much a layer's output changes in the first steps. If that grows or shrinks with width, the "
                    "rules are not kept somewhere.")),
    ("valley", "loss against one hyperparameter at one size; its lowest point is the optimum there."),
    ("octave", "a factor of two."),
    ("drift", "how far the optimum moves when the size doubles, in octaves."),
    ("margin", "how many nats a carried value may cost at the target; a test holds if all of its interval lies under."),
    ("rung, ladder", ("models of several sizes, each trained with the values that were carried to it; laws of loss are "
                     "fitted to them.")),
    ("frontier", "the best loss that a law gives for each amount of compute, over all sizes of the model."),
    ("back-test", "the largest rungs, foretold from the smaller ones alone."),
    ("ND", "parameters times training tokens: six FLOPs each, the usual count of a training run's compute."),
    ("interval, level", "where the true value, or one new run, should lie as often as the level says."),
    ("digest", "a hash of every number of the launch: the same launch, the same digest."),
)  # fmt: skip


def words() -> str:
    """A section that explains the terms of the page."""
    return show.section("words", "Words on this page", show.facts([(show.text(w), show.text(m)) for w, m in _WORDS]))


_LIGHT = (
    "--ink:#1b1f24;--soft:#57606a;--page:#fff;--card:#f6f7f9;--line:#d9dde3;--good:#0a6b4b;--bad:#b3261e;--open:#8a5a00"
)
_DARK = (
    "--ink:#e8eaed;--soft:#a3abb8;--page:#14171b;--card:#1c2026;--line:#343a43;"
    "--good:#4fd1a1;--bad:#ff8a80;--open:#f0b93a"
)

CSS = f"""
:root{{color-scheme:light dark;{_LIGHT};{LIGHT_VARIABLES}}}
@media screen and (prefers-color-scheme:dark){{:root{{{_DARK};{DARK_VARIABLES}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--page);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
font-variant-numeric:tabular-nums;-webkit-text-size-adjust:100%}}
main{{max-width:70rem;margin:0 auto;padding:2rem 1rem 4rem}}
h1{{font-size:clamp(1.6rem,4.5vw,2.4rem);line-height:1.15;letter-spacing:-.02em;margin:.2rem 0 .6rem;text-wrap:balance}}
h2{{font-size:1.35rem;letter-spacing:-.01em;margin:3.2rem 0 .8rem;padding-top:1rem;border-top:1px solid var(--line)}}
h3{{font-size:1rem;margin:1.4rem 0 .4rem}}
p,ul{{max-width:46rem}} p{{margin:.6rem 0}} ul{{padding-left:1.2rem;margin:.4rem 0}} li{{margin:.35rem 0}}
.over{{color:var(--soft);font-size:.85rem;margin:0}}
.lead{{font-size:1.08rem}}
.w{{white-space:nowrap}}
code{{font:.86em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}}
pre{{font:.86em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre-wrap;overflow-wrap:anywhere}}
.card{{background:var(--card);border:1px solid var(--line);border-radius:.6rem;padding:1rem 1.2rem;min-width:0}}
.card h2{{border:0;margin:0 0 .5rem;padding:0;font-size:1.05rem}}
.big{{font-size:2rem;font-weight:650;letter-spacing:-.02em;line-height:1.2;margin:.1rem 0}}
.facts{{margin:0;display:grid;gap:.15rem;max-width:46rem}}
.facts div{{display:grid;grid-template-columns:minmax(7.5rem,34%) 1fr;gap:.8rem;padding:.22rem 0}}
dt{{color:var(--soft)}} dd{{margin:0;overflow-wrap:anywhere;min-width:0}}
.gates{{list-style:none;padding:0;margin:0;max-width:none}}
.gates li{{padding:.55rem 0;border-top:1px solid var(--line);margin:0}} .gates li:first-child{{border:0}}
.gates b{{margin-right:.5rem}} .gates p{{margin:.2rem 0 0;color:var(--soft);font-size:.92rem;overflow-wrap:anywhere}}
.chip{{display:inline-block;border:1px solid currentColor;border-radius:1rem;padding:0 .55rem;font-size:.78rem;
line-height:1.45;white-space:nowrap;font-weight:600}}
.good{{color:var(--good)}} .bad{{color:var(--bad)}} .open{{color:var(--open)}}
.pair{{display:grid;gap:1.2rem 2rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));
align-items:start}}
.decision{{columns:2 24rem;column-gap:2rem;margin:1.4rem 0}}
.decision .card{{break-inside:avoid;margin:0 0 1.2rem}}
.decision #gates{{break-inside:auto;-webkit-box-decoration-break:clone;box-decoration-break:clone}}
.gates li{{break-inside:avoid}}
#unknown ul{{columns:2 24rem;column-gap:2rem;max-width:none}} #unknown li{{break-inside:avoid;margin:0 0 .6rem}}
.pair>*{{min-width:0}}
figure{{margin:.6rem 0;max-width:36rem}} figure h3{{margin:.2rem 0}}
.wide figure{{max-width:42rem}}
figure svg{{display:block;width:100%;height:auto;font-family:inherit}}
figcaption{{color:var(--soft);font-size:.9rem;line-height:1.45;margin-top:.4rem}}
.scroll{{overflow-x:auto;margin:.8rem 0}}
table{{border-collapse:collapse;font-size:.9rem;min-width:min(100%,20rem)}}
th{{text-align:left;font-weight:600;color:var(--soft);border-bottom:1px solid var(--line);vertical-align:bottom}}
th,td{{padding:.3rem 1.1rem .3rem 0}} td{{border-bottom:1px solid var(--line);vertical-align:top}}
th:last-child,td:last-child{{padding-right:0}}
td:first-child{{min-width:7rem}}
td.n,th.n{{text-align:right}} td.n{{white-space:nowrap}}
td code{{overflow-wrap:normal;white-space:nowrap}}
.missing{{border-left:3px solid var(--open);padding:.3rem 0 .3rem .9rem}}
footer{{margin-top:3rem;color:var(--soft);font-size:.85rem}}
sup{{line-height:0;font-size:.72em}}
@media print{{
body{{font-size:10.5pt}} main{{max-width:none;padding:0}}
.pair{{grid-template-columns:1fr 1fr}} figure,.card,tr{{break-inside:avoid}}
h2,h3{{break-after:avoid}}
.scroll{{overflow:visible}} table{{font-size:8.5pt}} th,td{{padding-right:.5rem}} td:first-child{{min-width:0}}
td.n,td code{{white-space:normal;overflow-wrap:anywhere}}
}}
"""


_DRAWING = re.compile(r"<svg .*?</svg>", re.DOTALL)
_STYLE = re.compile(r' style="([^"]*)"')
_ID = re.compile(r'\bid="([^"]*-\d+)"')
_REFERENCE = re.compile(r'(?<=url\(#)[^)]*|(?<=\bhref="#)[^"]*|(?<=\bid=")[^"]*')
_RULE = re.compile(r"\.(d\d+)\{([^}]*)\}")


def whole_page(title: str, parts: Iterable[str]) -> str:
    """One HTML document.

    What its drawings say again and again is said once: a style is a class of the page, and an id is a number.

    Args:
        title: of the browser's tab.
        parts: HTML of the page's sections; drawings as `launcher.figures.svg.finish` makes them.
    """
    body = "".join(parts)
    drawn = "".join(_DRAWING.findall(body))
    ids = {long: f"i{number}" for number, long in enumerate(dict.fromkeys(_ID.findall(drawn)))}
    classes = {style: f"d{number}" for number, style in enumerate(dict.fromkeys(_STYLE.findall(drawn)))}

    def said_once(drawing: re.Match[str]) -> str:
        short = _REFERENCE.sub(lambda found: ids.get(found.group(), found.group()), drawing.group())
        return _STYLE.sub(lambda found: f' class="{classes[found[1]]}"', short)

    rules = "".join(f".{name}{{{style}}}" for style, name in classes.items())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><title>{html.escape(title)}</title><style>{CSS}{rules}</style></head>'
        f"<body><main>{_DRAWING.sub(said_once, body)}</main></body></html>\n"
    )


def rules_of(page: str, drawing: str) -> str:
    """The style rules of a page that one of its drawings needs to stand alone."""
    used = set(re.findall(r'class="(d\d+)"', drawing))
    return "".join(found.group() for found in _RULE.finditer(page) if found[1] in used)
