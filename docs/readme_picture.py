"""Draw the README's picture, docs/pictures/learning-rate-over-width.png.

    PYTHONPATH=. python docs/readme_picture.py

`make pictures` does the same. The picture shows loss against learning rate at each width, for muP
and for the standard parametrization. The losses are those in
benchmarks/results/gpu_transfer_bpe-*.csv, of runs that were trained on a GPU with a learned
vocabulary (protocol of `benchmarks/gpu/gpu_transfer.py`). The lines join the runs. The bar below
each line is the interval of the optimum, which `forerun transfer --runs` computes.
"""

from __future__ import annotations

import csv
import io
import json
import math
import subprocess
import sys
from pathlib import Path

from PIL import Image

from forerun._launcher.report.figures.panel import MARKERS, Panel, draw_interval_marks
from forerun._launcher.report.figures.svg import INK, choose_shade
from forerun._launcher.report.figures.transfer import draw_basins
from forerun._launcher.report.views.transfer_findings import TransferTest
from forerun._launcher.report.views.wording import format_arm

PICTURE = Path(__file__).parent / "pictures" / "learning-rate-over-width.png"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
ARMS = ("mup", "sp")
"""Parametrizations, from left to right; each has a table of runs and a panel of the picture."""
TARGET_WIDTH = 2048
"""Width of the main run that `forerun transfer` is asked about."""
DPI = 110
BAR_GAP, ROOM_FOR_BARS = 0.035, 0.08
"""Distance of a bar below the lowest loss of its size, and space below the panel's lowest loss, as
shares of the panel's height.
"""


def write_row_of_panels(panels: list[Panel], path: Path) -> None:
    """Write the panels as one picture, from left to right, on white."""
    images = []
    for panel in panels:
        buffer = io.BytesIO()
        panel.savefig(buffer, format="png", dpi=DPI, facecolor="white")
        images.append(Image.open(buffer).convert("RGB"))
    picture = Image.new(
        "RGB",
        (sum(image.width for image in images), max(image.height for image in images)),
        "white",
    )
    left = 0
    for image in images:
        picture.paste(image, (left, 0))
        left += image.width
    picture.quantize(128).save(path, optimize=True)  # a palette takes a third of the bytes


def run_transfer_test() -> TransferTest:
    """Run `forerun transfer` on the recorded tables, and return muP's test over width.

    The control of this test is the same test in the standard parametrization.
    """
    runs, verdicts = [], {}
    for arm in ARMS:
        path = RESULTS / f"gpu_transfer_bpe-{arm}.csv"
        command = [
            sys.executable,
            "-m",
            "forerun",
            "transfer",
            "--runs",
            str(path),
            "--target-width",
            str(TARGET_WIDTH),
            "--json",
        ]
        # The exit code depends on the verdict, so a code above 0 is no failure.
        verdicts[arm] = json.loads(subprocess.run(command, capture_output=True, check=False).stdout)
        with path.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                loss, log2_value = float(row["loss"]), math.log2(float(row["lr"]))
                runs.append(
                    {
                        "arm": arm,
                        "size": int(row["width"]),
                        "log2_value": log2_value,
                        "status": "finished",
                        "loss_nats": loss if math.isfinite(loss) else None,
                    }
                )
    verdict = {**verdicts["mup"], "control": verdicts["sp"]}
    return TransferTest.model_validate(
        {"hyperparameter": "learning_rate", "axis": "width", "runs": runs, "verdict": verdict}
    )


def draw_arm(test: TransferTest, arm: str) -> Panel:
    """Draw the runs of a parametrization, joined by lines.

    The interval of each size's optimum is a bar below the lowest loss of that size.
    """
    verdict = test.list_verdicts("mup")[arm]
    # Without fitted optima, `draw_basins` joins the runs instead of drawing fitted curves.
    no_fits = [optimum.model_copy(update={"log2_value": None}) for optimum in verdict.optima]
    panel = draw_basins(test, verdict.model_copy(update={"optima": no_fits}), arm)
    [axes] = panel.axes
    low, high = axes.get_ylim()
    for rank, optimum in enumerate(verdict.optima):
        assert optimum.minimum is not None
        log2_value, interval, _ = optimum.minimum
        # At the base width both parametrizations are equal, and the runs are stored as muP's.
        arms = (arm, "mup") if optimum.size == verdict.base_size else (arm,)
        losses = [
            run.loss_nats
            for run in test.runs
            if run.arm in arms and run.size == optimum.size and run.loss_nats is not None
        ]
        points = [(log2_value, min(losses) - BAR_GAP * (high - low))]
        draw_interval_marks(
            axes,
            points,
            [interval],
            along="x",
            fmt=MARKERS[rank],
            elinewidth=2,
            capsize=4,
            color=choose_shade(rank, len(verdict.optima)),
            markersize=6.5,
            markeredgecolor=INK,
        )
    for line in axes.lines:
        line.set_alpha(1.0)
    axes.set_ylim(low - ROOM_FOR_BARS * (high - low), high)
    return panel


def main() -> None:
    """Draw both parametrizations next to each other, on one scale."""
    test = run_transfer_test()
    panels = [draw_arm(test, arm) for arm in ARMS]

    # Give both panels the widest limits of the two axes.
    limits = [(panel.axes[0].get_xlim(), panel.axes[0].get_ylim()) for panel in panels]
    left, low = (min(panel_limits[i][0] for panel_limits in limits) for i in (0, 1))
    right, high = (max(panel_limits[i][1] for panel_limits in limits) for i in (0, 1))
    for panel, arm in zip(panels, ARMS, strict=True):
        panel.axes[0].set_xlim(left, right)
        panel.axes[0].set_ylim(low, high)
        panel.axes[0].set_title(format_arm(arm), loc="left", fontweight="bold")
    write_row_of_panels(panels, PICTURE)
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
