"""What a study's calibration chose and why, as data, as a line, and in the report."""

from __future__ import annotations

from typing import Any, cast

from launcher.calibration.calibrating import calibrations
from launcher.plan.calibration_records import mode_name, size_name
from launcher.views import html as show
from proxies.core import canon
from proxies.core.canon import Json
from sweeps.store.ledger import Ledger


def calibration_body(ledger: Ledger) -> list[Json]:
    """Every choice in the ledger's order, with what it was chosen from; none of a plan whose numbers are given."""
    body: list[Json] = []
    for found in calibrations(ledger):
        asked, best = found.asked, found.figure
        record = cast(dict[str, Json], canon.to_json(found))
        body.append(
            {
                "part": asked.part, "width": asked.shape.width, "num_layers": asked.shape.num_layers,
                "batch_tokens": asked.batch_tokens, "mode": mode_name(found.chosen, asked.given), "why": found.why,
                "trial_steps_per_second": None if best is None else best.trial_steps_per_second,
                "planned_seconds": None if best is None else best.planned_seconds,
                "device": found.device, "num_workers": found.num_workers,
                "numerics": record["chosen"], "figures": record["figures"],
            }
        )  # fmt: skip
    return body


def calibration_line(body: Any) -> str:
    """All choices in a line: which sizes compute how."""
    widths: dict[tuple[str, str], dict[str, None]] = {}
    for one in body:
        widths.setdefault((one["part"], one["mode"]), {})[str(one["width"])] = None
    measured = sum(bool(one["figures"]) for one in body)
    chosen = [f"{'ladder: ' if part == 'ladder' else ''}{mode} at width {', '.join(of)}"
              for (part, mode), of in widths.items()]  # fmt: skip
    return f"calibration ({measured} of {len(body)} measured): {'; '.join(chosen)}"


def calibration_section(body: Any) -> str:
    """The report's block; nothing where nothing was chosen."""
    if not body["calibration"]:
        return ""
    rows = [
        (show.text(size_name(*(one[key] for key in ("part", "width", "num_layers", "batch_tokens")))),
         show.text(one["mode"]), show.number(one["trial_steps_per_second"], ".3g"),
         "–" if one["planned_seconds"] is None else show.seconds(one["planned_seconds"]), show.text(one["why"]))
        for one in body["calibration"]
    ]  # fmt: skip
    said = (
        "<p>Chosen before the first run, by the workers that ran it, and recorded: a resumed study computes alike. A "
        "mode other than one slot is taken where it is surely faster by a tenth over the planned runs.</p>"
    )
    head = ("runs of", "how", "trial-steps a second of a worker", "planned work", "why")
    return show.section("calibration", "How runs compute", said, show.table(head, rows, (0, 1, 4)))
