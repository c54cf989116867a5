"""The report's figures for notebooks: each a matplotlib `Figure`, from `report.json` as it was read.

    import json
    from launcher.figures import plots

    report = json.load(open("study/report.json"))
    plots.valleys(report)

Importing this loads matplotlib, and no pyplot: nothing opens a window, no global setting changes, and the figures are
those of the page, drawn by the same functions. A notebook shows a figure by its name at the end of a cell; elsewhere
`figure.savefig("valleys.png")` writes it. Every function takes the body of one report, and raises `MissingError` where
the study has not come so far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure

from launcher.figures import cost as figures_cost
from launcher.figures import figures
from launcher.figures import fits as figures_fits
from launcher.figures import main_run as figures_main_run
from launcher.figures import transfer as figures_transfer
from launcher.views.html import Body
from launcher.views.transfer import name_of, verdicts_by_arm


class MissingError(ValueError):
    """The report lacks what a figure draws: the stage has not ended, or there is no such test or arm."""


def _one(draw: Callable[[], str]) -> Figure:
    """The figure that a drawing function of the report composes."""
    with figures.kept() as found:
        draw()
    return found[0]


def _part(report: Body, key: str, stage: str) -> Any:
    found = report.get(key)
    if not found:
        raise MissingError(f"the report has no {key}: {stage}")
    return found


def _fitted(report: Body) -> None:
    _part(report, "ladder", "`forerun ladder PLAN` runs it")
    _part(report, "fit", "`forerun ladder PLAN` runs what it needs")


def _test(report: Body, hyperparameter: str, axis: str) -> Any:
    tests = _part(report, "transfer", "`forerun transfer PLAN` runs what it needs")["tests"]
    for test in tests:
        if (test["hyperparameter"], test["axis"]) == (hyperparameter, axis):
            return test
    there = ", ".join(name_of(test) for test in tests)
    raise MissingError(f"{hyperparameter} over {axis} was not tested; there is: {there}")


def valleys(
    report: Body, hyperparameter: str = "learning_rate", axis: str = "width", arm: str | None = None
) -> Figure:  # fmt: skip
    """Loss against a hyperparameter at every size: runs, fitted valleys, minima with intervals.

    Args:
        report: the body of `report.json`.
        hyperparameter: `learning_rate`, `clip_norm`, ... as in the plan.
        axis: `width`, `depth`, `batch` or `duration`.
        arm: the parametrization; the study's own if None, `sp` for the control.

    Raises:
        MissingError: the transfer runs have not ended, or there is no such test or arm.
    """
    test, own = _test(report, hyperparameter, axis), figures.main_arm(report)
    arms, chosen = verdicts_by_arm(test, own), own if arm is None else arm
    if chosen not in arms:
        raise MissingError(f"no arm {chosen} in {name_of(test)}; there is: {', '.join(arms)}")
    return _one(lambda: figures_transfer.valleys(report, test, chosen))


def drift(report: Body, hyperparameter: str = "learning_rate", axis: str = "width") -> Figure:
    """The optimum against size with intervals, the value carried to the target, and what is expected there.

    Raises:
        MissingError: the transfer runs have not ended, or there is no such test, or it found no optimum.
    """
    test = _test(report, hyperparameter, axis)
    arms = verdicts_by_arm(test, figures.main_arm(report))
    if all(optimum["log2_value"] is None for of in arms.values() for optimum in of["optima"]):
        raise MissingError(f"{name_of(test)} found no optimum")
    return _one(lambda: figures_transfer.drift(report, test))


def heat(report: Body, hyperparameter: str = "learning_rate", axis: str = "width") -> Figure:
    """Loss above the best of its size, for every size and value.

    Raises:
        MissingError: the transfer runs have not ended, or there is no such test.
    """
    test = _test(report, hyperparameter, axis)
    return _one(lambda: figures_cost.heat(report, test))


def regrets(report: Body) -> Figure:
    """What every carried value costs at the target, in nats with intervals.

    Raises:
        MissingError: the transfer runs have not ended.
    """
    _part(report, "transfer", "`forerun transfer PLAN` runs what it needs")
    return _one(lambda: figures_cost.regrets(report))


def coordinates(report: Body, arm: str | None = None) -> Figure:
    """Change of each role's worst layer against width, of the study's parametrization, of `sp`, or over `depth`.

    Raises:
        MissingError: the coordinate check has not run, or not of this arm.
    """
    checks = _part(report, "coordinates", "`forerun check PLAN` runs the check")
    chosen = figures.main_arm(report) if arm is None else arm
    if chosen not in checks:
        raise MissingError(f"no coordinate check {chosen}; there is: {', '.join(checks)}")
    return _one(lambda: figures.coordinates(report, chosen))


def search(report: Body) -> Figure:
    """Loss of every trial of the search against its learning rate, coloured by gradient clip.

    Raises:
        MissingError: the search has not ended.
    """
    _part(report, "search", "`forerun sweep PLAN` runs it")
    return _one(lambda: figures.search(report))


def ladder(report: Body) -> Figure:
    """Loss against compute: rungs, back-test, the laws' frontiers with their band, and the main run.

    Raises:
        MissingError: the ladder has not ended.
    """
    _fitted(report)
    return _one(lambda: figures_fits.laws(report))


def residuals(report: Body) -> Figure:
    """Measured over fitted loss of every rung, in percent.

    Raises:
        MissingError: the ladder has not ended.
    """
    _fitted(report)
    return _one(lambda: figures_fits.residuals(report))


def main_run(report: Body) -> Figure:
    """Training loss of the main run over the band that was expected.

    Raises:
        MissingError: it was not launched in its usual place, or no curve was expected.
    """
    _part(report, "main_run", "`forerun launch FROZEN` starts it")
    decided = _part(report, "decision", "the study has not come to one")
    if not decided["predicted"]["curve"]:
        raise MissingError("the ladder had too few runs to expect a curve")
    return _one(lambda: figures_main_run.loss_curve(report))
