"""Points that a search begins with, from the best trials of an Optuna study. They are points alone:
a loss that was measured elsewhere, on other data or at another size, says nothing here.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from launcher.study.first_plan import FirstPlan
from proxies.core.hyperparameters import hyperparameter_named
from proxies.core.notation import counted
from proxies.core.tables.columns import find_hyperparameter
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
    """A first plan with the points of `warm_start`, and where they are from, which also stands in
    its head.
    """
    found = warm_start(text, space)
    values = plan.values | {"search": plan.values.get("search", {}) | {"warm_start": found.points}}
    return dataclasses.replace(
        plan, values=values, head=(*plan.head, found.sentence)
    ), found.sentence


def warm_start(text: str, space: SearchSpace) -> WarmStart:
    """Return the points with which a search begins.

    Args:
        text: FILE or FILE:STUDY. Both may hold colons: the longest path that exists is the file.
        space: What the search varies. A parameter counts by its name, or by one of its names in
            tables (`lr`, `optimizer.lr`).

    Raises:
        OptunaStorageError: see `best_trials`; or no parameter of the study is searched here.
    """
    file, study = _split_study(text)
    found = best_trials(Path(file), study, most=MOST_POINTS)
    by_name = {axis.name: axis for axis in space.axes}
    axes = {
        name: by_name[role]
        for params in found.params
        for name in params
        if (role := find_hyperparameter(name, by_name)) is not None
    }
    points: list[Params] = []
    unused, moved = set[str](), set[str]()
    for params in found.params:
        point: Params = {}
        for name, value in params.items():
            number = (
                isinstance(value, int | float)
                and not isinstance(value, bool)
                and math.isfinite(value)
            )
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
            f"{file}: study {found.study!r} varies {', '.join(sorted(unused)) or 'nothing'}; none "
            "of them is searched "
            f"here: {', '.join(name for axis in space.axes for name in (axis.name, *_other_names(axis.name)))}"  # noqa: E501
        )
    best = f"the best {len(points)} of" if len(points) > 1 else "the best of"
    trials = counted(found.num_finished, "finished trial")
    parts = [f"search.warm_start: {best} {trials} of Optuna's study {found.study!r} in {file}"]
    parts += [f"moved into their ranges: {', '.join(sorted(moved))}"] if moved else []
    parts += [f"not used: {', '.join(sorted(unused))}"] if unused else []
    return WarmStart(points=tuple(points), sentence="; ".join(parts))


def _split_study(text: str) -> tuple[str, str]:
    """Split FILE[:STUDY] into the file and the name of the study."""
    places = [place for place, character in enumerate(text) if character == ":"]
    splits = [(text, ""), *((text[:place], text[place + 1 :]) for place in reversed(places))]
    return next(
        (split for split in splits if Path(split[0]).exists()), splits[min(1, len(splits) - 1)]
    )


def _other_names(name: str) -> tuple[str, ...]:
    return hyperparameter_named(name).aliases
