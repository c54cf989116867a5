"""Points that a search begins with, from the best trials of an Optuna study. They are points alone: a loss that was
measured elsewhere, on other data or at another size, says nothing here.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from launcher.study.first_plan import FirstPlan
from proxies.core.hyperparameters import hyperparameter_named
from sweeps.search.optuna_storage import OptunaStorageError, best_trials
from sweeps.search.space import Params, SearchSpace

MOST_POINTS = 3
"""Of 24 trials; a few good points are worth as much as many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStart:
    """What an Optuna study gives a search."""

    points: tuple[Params, ...]
    """Values by our names, each in its range; the best trial's first."""
    sentence: str
    """Where they are from, and what of it is not used."""


def with_warm_start(plan: FirstPlan, text: str, space: SearchSpace) -> tuple[FirstPlan, str]:
    """A first plan with the points of `warm_start`, and where they are from, which also stands in its head."""
    found = warm_start(text, space)
    values = plan.values | {"search": plan.values.get("search", {}) | {"warm_start": found.points}}
    return dataclasses.replace(plan, values=values, head=(*plan.head, found.sentence)), found.sentence


def warm_start(text: str, space: SearchSpace) -> WarmStart:
    """The points that a search begins with.

    Args:
        text: FILE or FILE:STUDY; a path that exists wins.
        space: what the search varies. A parameter counts by its name, or by one of its names in tables (`lr`).

    Raises:
        OptunaStorageError: see `best_trials`; or no parameter of the study is searched here.
    """
    file, _, study = (text, "", "") if Path(text).exists() or ":" not in text else text.rpartition(":")
    found = best_trials(Path(file), study, most=MOST_POINTS)
    axes = {name: axis for axis in space.axes for name in (axis.name, *hyperparameter_named(axis.name).aliases)}
    points: list[Params] = []
    unused, moved = set[str](), set[str]()
    for params in found.params:
        point: Params = {}
        for name, value in params.items():
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if name not in axes or not number:
                unused.add(name)
                continue
            axis = axes[name]
            point[axis.name] = axis.nearest(float(value))  # type: ignore[arg-type]
            if point[axis.name] != value:
                moved.add(f"{name} = {value:.4g} to {point[axis.name]:.4g}")
        if point and point not in points:
            points.append(point)
    if not points:
        raise OptunaStorageError(
            f"{file}: study {found.study!r} varies {', '.join(sorted(unused)) or 'nothing'}; none of them is searched "
            f"here: {', '.join(axes)}"
        )
    best = f"the best {len(points)} of {found.num_finished}" if len(points) > 1 else f"the best of {found.num_finished}"
    parts = [f"search.warm_start: {best} finished trials of Optuna's study {found.study!r} in {file}"]
    parts += [f"moved into their ranges: {', '.join(sorted(moved))}"] if moved else []
    parts += [f"not used: {', '.join(sorted(unused))}"] if unused else []
    return WarmStart(points=tuple(points), sentence="; ".join(parts))
