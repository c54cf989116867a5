"""The report's section on coordinates: figures of the worst layers, findings, and every layer's slope."""

from __future__ import annotations

from typing import Any

from launcher import figures
from launcher import report_html as show
from launcher.coordinate_view import by_role, findings, points
from launcher.report_html import Body


def coordinates(body: Body) -> str:
    """The study's coordinate checks: its own parametrization, the standard one, and over depths if there is a rule."""
    heading, checks = "Do updates keep their size as the model grows?", body["coordinates"]
    if not checks:
        return show.section("coordinates", heading, show.missing("The coordinate check has not run.", "check"))
    arms = sorted(checks, key=lambda arm: (arm != figures.main_arm(body), arm != "depth"))
    panels = [show.figure(figures.coordinates(body, arm), _caption(checks[arm]), show.arm_title(arm)) for arm in arms]
    note = (
        '<p class="over">Slope: log2 of the change per doubling; about none when updates keep their size. Drawn: the '
        "worst layer of every role; bold: blows up or vanishes; dashed: cannot tell.</p>"
    )
    head = ("", "role", "layers that pass", "the worst", "slope", "interval", "outcome")
    rows = [
        (show.arm_title(arm), show.words(role), f"{sum(x['outcome'] == 'passes' for x in layers)} of {len(layers)}",
         show.text(layers[0]["layer"]), *_cells(layers[0]))
        for arm in arms for role, layers in by_role(checks[arm])
    ]  # fmt: skip
    panels += ["<div></div>"] * (len(panels) % 2)
    pairs = [show.pair(*panels[i : i + 2]) for i in range(0, len(panels), 2)]
    return show.section("coordinates", heading, *pairs, note, show.table(head, rows, (0, 1, 3, 6)))


def _cells(layer: Any) -> tuple[str, str, str]:
    return show.number(layer["slope"], "+.2f"), show.interval(layer["interval"], "+.2f"), show.chip(layer["outcome"])


def _caption(check: Any) -> str:
    said = "; ".join(show.text(sentence) for sentence in findings(check))
    over = ", ".join(map(str, points(check)))
    return (
        f"{show.chip(check['outcome'])}{f': {said}.' if said else ''} {show.text(check['axis']).capitalize()}s {over}, "
        f"{check['num_steps']} steps at learning rate {show.number(check['learning_rate'])}, "
        f"{check['num_seeds']} seeds." + "".join(f" {show.text(note)}." for note in check["notes"])
    )
