"""Tests of `forerun.plots`, the report's figures as functions, and of the example notebook."""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from example_report import make_finished_body
from matplotlib.figure import Figure

from forerun._launcher.report.figures import plots
from forerun._proxies.core import canon

NOTEBOOK = Path(__file__).parents[4] / "examples" / "notebook" / "study.ipynb"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def report():
    """JSON of a finished study's report."""
    return make_finished_body()


NOISE_SECTION = {
    "noise_scale": {
        "level": 0.9,
        "judged": None,
        "law": None,
        "looks": [
            {
                "width": 32,
                "tokens": 1024 * n,
                "batch_tokens": 512,
                "scale_tokens": 900.0 * n,
                "inverse": 1 / (900 * n),
                "inverse_error": 1e-4,
                "interval": [500.0 * n, None if n > 2 else 2000.0 * n],
            }
            for n in (1, 2, 4)
        ],
    }
}
"""Part of a report with section `noise_scale`. It has three looks, which are measurements of the
gradient noise scale."""
PLOTS = {name: getattr(plots, name) for name in plots.__all__ if name != "MissingError"}
"""Functions of `forerun.plots` by name."""


def get_axis_labels(figure):
    """Return the labels of the x axis and of the y axis."""
    (axes,) = figure.axes
    return axes.get_xlabel(), axes.get_ylabel()


def test_every_function_draws_its_figure(report):
    labels_by_name = {
        "basins": ("learning rate", "validation loss (nats per token)"),
        "drift": ("width", "optimal learning rate"),
        "coordinates": ("width", "mean absolute change of output"),
        "search": ("learning rate", "validation loss (nats per token)"),
        "ladder": ("training compute, 6ND (FLOPs)", "validation loss (nats per token)"),
        "aspect": ("width per layer", "loss beyond the law (%)"),
        "wider": ("optimizer steps", "training loss (nats per token)"),
        "branches": ("optimizer steps", "training loss (nats per token)"),
        "noise": ("tokens trained on", "noise scale (tokens)"),
    }
    # This report has no main run; test_figures_ladder.py draws the figure `main_run`.
    assert {*labels_by_name, "main_run"} == PLOTS.keys()
    for name, labels in labels_by_name.items():
        figure = PLOTS[name](report | NOISE_SECTION)
        assert isinstance(figure, Figure)
        assert get_axis_labels(figure) == labels
        assert figure.get_label(), "a title for screen readers"
        figure.canvas.draw()
        ticks = [
            tick.get_text()
            for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis)
            for tick in axis.get_ticklabels(which="both")
        ]
        assert not any("$" in tick for tick in ticks), ticks


def test_import_of_the_figures_does_not_load_pyplot():
    """pyplot chooses a window system when it is imported."""
    script = (
        "import sys, forerun._launcher.report.figures.plots\n"
        "assert 'matplotlib.figure' in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_arguments_choose_the_test_and_the_arm(report):
    labels = get_axis_labels(plots.basins(report, "clip_norm"))
    assert labels == ("clip norm", "validation loss (nats per token)")
    labels = get_axis_labels(plots.drift(report, axis="duration"))
    assert labels == ("tokens", "optimal learning rate")
    assert plots.basins(report).get_label().endswith(", muP")
    assert plots.basins(report, arm="sp").get_label().endswith(", SP")
    assert plots.coordinates(report, "sp").get_label().startswith("Coordinate check, SP")


def test_figure_of_a_missing_part_is_refused(report):
    for call in (
        lambda: plots.basins(report, "momentum"),
        lambda: plots.basins(report, arm="adam"),
        lambda: plots.coordinates(report, "depth"),
        lambda: plots.drift(report, "clip_norm"),
    ):
        with pytest.raises(plots.MissingError):
            call()
    empty = report | dict.fromkeys(("transfer", "search", "ladder", "fit")) | {"coordinates": {}}
    for plot in PLOTS.values():
        with pytest.raises(plots.MissingError, match="the report has no"):
            plot(empty)


def build_script(notebook):
    """Return the code cells as one script, which prints the last value of each cell.

    Instead of a figure, the script prints whether the figure's image is a PNG.
    """
    lines = ["def show(value):", "    if hasattr(value, '_repr_png_'):"]
    lines += [f"        print(value._repr_png_()[:{len(PNG_SIGNATURE)}] == {PNG_SIGNATURE!r})"]
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            tree = ast.parse("".join(cell["source"]))
            if isinstance(tree.body[-1], ast.Expr):
                last = tree.body[-1]
                last.value = ast.Call(
                    func=ast.Name("show", ast.Load()), args=[last.value], keywords=[]
                )
            lines.append(ast.unparse(ast.fix_missing_locations(tree)))
    return "\n".join(lines)


def test_notebook_runs_and_shows_five_figures(report, frozen_study, tmp_path):
    shutil.copytree(frozen_study, tmp_path / "study")
    (tmp_path / "study" / "report.json").write_bytes(canon.to_pretty_json(report))
    (tmp_path / "cells.py").write_text(build_script(json.loads(NOTEBOOK.read_text())))
    done = subprocess.run(
        [sys.executable, "-W", "error", "cells.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("True") == 5 and "False" not in lines
    predicted = report["choice"]["prediction"]
    low, _ = predicted["interval"]
    assert f"expected loss {predicted['loss']:.3f} nats, between {low:.3f} and" in done.stdout
    assert "clip_norm over width at 64: flat" in lines
    assert {"control.png", "ladder.pdf"} <= {path.name for path in tmp_path.iterdir()}
