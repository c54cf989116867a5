"""The README's picture, docs/pictures/learning-rate-over-width.png, from
benchmarks/results/gpu_transfer_bpe-*.csv.

    PYTHONPATH=. python docs/drawing.py          # or: make pictures

The tables are those of runs on a GPU with a learned vocabulary (protocol of
`benchmarks/gpu/gpu_transfer.py`), and `forerun transfer --runs` judges them. The lines join the
runs; a bar below each line is the verdict's interval of its optimum.
"""

from __future__ import annotations

import csv
import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

from PIL import Image

from launcher.figures import plots
from launcher.figures.panel import MARKERS, Panel, interval_marks
from launcher.figures.svg import INK, shade
from launcher.views.numbers import arm_name

PICTURE = Path(__file__).parent / "pictures" / "learning-rate-over-width.png"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
ARMS = ("mup", "sp")
DPI = 110


def side_by_side(panels: list[Panel], path: Path) -> None:
    """Write the panels as one picture, from left to right, on white."""
    images = []
    for panel in panels:
        buffer = io.BytesIO()
        panel.savefig(buffer, format="png", dpi=DPI, facecolor="white")
        images.append(Image.open(buffer).convert("RGB"))
    whole = Image.new(
        "RGB",
        (sum(image.width for image in images), max(image.height for image in images)),
        "white",
    )
    left = 0
    for image in images:
        whole.paste(image, (left, 0))
        left += image.width
    whole.quantize(128).save(path, optimize=True)  # a palette: a third of the bytes


def report_of_tables() -> dict[str, Any]:
    """The part of a report that the picture needs: muP's verdict, and the standard form's as its
    control.
    """
    runs, verdicts = [], {}
    for arm in ARMS:
        path = RESULTS / f"gpu_transfer_bpe-{arm}.csv"
        line = [
            sys.executable,
            "-m",
            "launcher",
            "transfer",
            "--runs",
            str(path),
            "--target-width",
            "2048",
            "--json",
        ]
        verdicts[arm] = json.loads(subprocess.run(line, capture_output=True, check=False).stdout)
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
    test = {"hyperparameter": "learning_rate", "axis": "width", "runs": runs, "verdict": verdict}
    return {"question": {"proxy": {"parametrization": "mup"}}, "transfer": {"tests": [test]}}


def draw_arm(report: dict[str, Any], arm: str) -> Panel:
    """Draw the runs of an arm, joined, and below each size's lowest loss the interval of its
    optimum.
    """
    test = report["transfer"]["tests"][0]
    optima = (test["verdict"] if arm == "mup" else test["verdict"]["control"])["optima"]
    joined = [{**optimum, "log2_value": None} for optimum in optima]
    shown = {
        **test["verdict"],
        "optima": joined,
        "control": {**test["verdict"]["control"], "optima": joined},
    }
    panel = plots.basins({**report, "transfer": {"tests": [{**test, "verdict": shown}]}}, arm=arm)
    [axes] = panel.axes
    low, high = axes.get_ylim()
    for rank, optimum in enumerate(optima):
        # The base width of the standard form is muP's, so its runs carry that name.
        arms = (arm, "mup") if optimum["size"] == test["verdict"]["base_size"] else (arm,)
        losses = [
            run["loss_nats"]
            for run in test["runs"]
            if run["arm"] in arms
            and run["size"] == optimum["size"]
            and run["loss_nats"] is not None
        ]
        at = [(optimum["log2_value"], min(losses) - 0.035 * (high - low))]
        interval_marks(
            axes,
            at,
            [optimum["interval_log2"]],
            along="x",
            fmt=MARKERS[rank],
            elinewidth=2,
            capsize=4,
            color=shade(rank, len(optima)),
            markersize=6.5,
            markeredgecolor=INK,
        )
    for line in axes.lines:
        line.set_alpha(1.0)
    axes.set_ylim(low - 0.08 * (high - low), high)
    return panel


def main() -> None:
    """Loss against learning rate at each width: muP, and beside it the standard parametrization, on
    one scale.
    """
    report = report_of_tables()
    panels = [draw_arm(report, arm) for arm in ARMS]
    limits = [(panel.axes[0].get_xlim(), panel.axes[0].get_ylim()) for panel in panels]
    left, low = (min(both[i][0] for both in limits) for i in (0, 1))
    right, high = (max(both[i][1] for both in limits) for i in (0, 1))
    for panel, arm in zip(panels, ARMS, strict=True):
        panel.axes[0].set_xlim(left, right)
        panel.axes[0].set_ylim(low, high)
        panel.axes[0].set_title(arm_name(arm), loc="left", fontweight="bold")
    side_by_side(panels, PICTURE)
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
