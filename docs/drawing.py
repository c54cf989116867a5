"""The pictures of the docs, from a study's report.json: docs/pictures/learning-rate-over-width.png.

    python docs/drawing.py demo/study          # or: make pictures STUDY=demo/study

Drawn by the functions that draw the report's figures (`launcher.figures.plots`). `forerun report STUDY` writes
report.json anew.
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

from PIL import Image

from launcher.figures import plots
from launcher.figures.panel import Panel
from launcher.views.numbers import arm_name

OUT = Path(__file__).parent / "pictures"
DPI = 110


def side_by_side(panels: list[Panel], path: Path) -> None:
    """Write the panels as one picture, from left to right, on white."""
    images = []
    for panel in panels:
        buffer = io.BytesIO()
        panel.savefig(buffer, format="png", dpi=DPI, facecolor="white")
        images.append(Image.open(buffer).convert("RGB"))
    whole = Image.new("RGB", (sum(image.width for image in images), max(image.height for image in images)), "white")
    left = 0
    for image in images:
        whole.paste(image, (left, 0))
        left += image.width
    whole.quantize(128).save(path, optimize=True)  # a palette: a third of the bytes


def learning_rate_over_width(report: dict[str, Any], path: Path) -> None:
    """Loss against learning rate at each width: in the study's parametrization, and in its control by the standard one.

    Raises:
        MissingError: the transfer runs have not ended, or the study has no control.
    """
    panels = [plots.basins(report), plots.basins(report, arm="sp")]
    limits = [(panel.axes[0].get_xlim(), panel.axes[0].get_ylim()) for panel in panels]
    left, low = (min(both[i][0] for both in limits) for i in (0, 1))
    right, high = (max(both[i][1] for both in limits) for i in (0, 1))
    for panel, arm in zip(panels, (report["question"]["proxy"]["parametrization"], "sp"), strict=True):
        panel.axes[0].set_xlim(left, right)
        panel.axes[0].set_ylim(low, high)
        panel.axes[0].set_title(arm_name(arm), loc="left", fontweight="bold")
    side_by_side(panels, path)


PICTURES = {"learning-rate-over-width.png": learning_rate_over_width}


def main() -> None:
    """Draw every picture from the study that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="a finished study, such as demo/study after `make demo`")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for the pictures")
    given = parser.parse_args()
    path = given.study / "report.json"
    if not path.exists():
        parser.error(f"there is no {path}: `forerun report {given.study}` writes it")
    report = json.loads(path.read_text(encoding="utf-8"))
    given.out.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        draw(report, given.out / name)
        print(f"wrote {given.out / name}")


if __name__ == "__main__":
    main()
