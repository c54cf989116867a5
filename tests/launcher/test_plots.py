"""The figures as functions: the page's own, as matplotlib's, without pyplot; and the notebook that
shows them.
"""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from example_report import finished_body
from matplotlib.figure import Figure

from launcher.figures import plots
from proxies.core import canon

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook" / "study.ipynb"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def report():
    return finished_body()


NOISE = {
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


def every_plot(report):
    return {name: getattr(plots, name) for name in plots.__all__ if name != "MissingError"}


def label(figure):
    (axes,) = figure.axes
    return axes.get_xlabel(), axes.get_ylabel()


def test_every_function_gives_the_figure_that_its_name_says(report):
    wanted = {
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
    assert {*wanted, "main_run"} == every_plot(report).keys()
    for name, labels in wanted.items():
        figure = every_plot(report)[name](report | NOISE)
        assert isinstance(figure, Figure)
        assert label(figure) == labels
        assert figure.get_label(), "its title, for a reader who does not see it"
        figure.canvas.draw()
        ticks = [
            tick.get_text()
            for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis)
            for tick in axis.get_ticklabels(which="both")
        ]
        assert not any("$" in tick for tick in ticks), ticks
    assert "matplotlib.pyplot" not in plots.__dict__


def test_arguments_choose_the_test_and_the_arm(report):
    assert label(plots.basins(report, "clip_norm")) == (
        "clip norm",
        "validation loss (nats per token)",
    )
    assert label(plots.drift(report, axis="duration")) == ("tokens", "optimal learning rate")
    own, control = plots.basins(report), plots.basins(report, arm="sp")
    assert [figure.get_label().rsplit(", ", 1)[1] for figure in (own, control)] == ["muP", "SP"]
    assert plots.coordinates(report, "sp").get_label().startswith("Coordinate check, SP")


def test_what_is_not_there_is_said_with_what_is(report):
    for call in (
        lambda: plots.basins(report, "momentum"),
        lambda: plots.basins(report, arm="adam"),
        lambda: plots.coordinates(report, "depth"),
        lambda: plots.drift(report, "clip_norm"),
    ):
        with pytest.raises(plots.MissingError):
            call()
    empty = report | dict.fromkeys(("transfer", "search", "ladder", "fit")) | {"coordinates": {}}
    for plot in every_plot(report).values():
        with pytest.raises(plots.MissingError, match="the report has no"):
            plot(empty)


def script_of(notebook):
    """Its code cells, one after the other; what a cell ends in is shown, as a notebook does."""
    lines = ["def show(shown):", "    if hasattr(shown, '_repr_png_'):"]
    lines += [f"        print(shown._repr_png_()[:{len(PNG)}] == {PNG!r})"]
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


def test_the_notebook_runs_from_its_first_cell_to_its_last(report, frozen_once, tmp_path):
    shutil.copytree(frozen_once, tmp_path / "study")
    (tmp_path / "study" / "report.json").write_bytes(canon.pretty(report))
    (tmp_path / "cells.py").write_text(script_of(json.loads(NOTEBOOK.read_text())))
    done = subprocess.run(
        [sys.executable, "-W", "error", "cells.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown = done.stdout.splitlines()
    assert shown.count("True") == 5 and "False" not in shown
    predicted = report["choice"]["prediction"]
    assert (
        f"expected loss {predicted['loss']:.3f} nats, between {predicted['interval'][0]:.3f} and"
        in done.stdout
    )
    assert "clip_norm over width at 64: flat" in shown
    assert {"control.png", "ladder.pdf"} <= {path.name for path in tmp_path.iterdir()}
