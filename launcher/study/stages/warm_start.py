"""Starting points of a search, from the best trials of an Optuna study.

Only the points are used, not their losses: losses on other data or at another size cannot be
compared with those of this search.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from forerun._launcher.study.stages.first_plan import FirstPlan
from forerun._proxies.core.hyperparameters import get_hyperparameter
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.tables.columns import find_hyperparameter
from forerun._sweeps.search.optuna_storage import OptunaStorageError, read_best_trials
from forerun._sweeps.search.space import Params, SearchSpace

MAX_POINTS = 3
"""Maximum number of points. A search has 24 trials, and a few good points help as much as many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStart:
    """The starting points that an Optuna study gives a search."""

    points: tuple[Params, ...]
    """Points with forerun's names and values within the ranges, the best trial's first."""
    sentence: str
    """Sentence about the origin of the points, and about values that are moved or not used."""


def use_warm_start(new: FirstPlan, text: str, space: SearchSpace) -> str:
    """Make the search of a first plan begin with the points of `read_warm_start`. Return the
    sentence about their origin, which is also added to the plan's head comment.
    """
    start = read_warm_start(text, space)
    new.set("search", warm_start=start.points)
    new.head = (*new.head, start.sentence)
    return start.sentence


def read_warm_start(text: str, space: SearchSpace) -> WarmStart:
    """Return the points with which a search begins.

    Args:
        text: FILE or FILE:STUDY. Both may hold colons: the longest path that exists is the file.
        space: Search space. A parameter is matched by its name, or by one of its names in tables
            (`lr`, `optimizer.lr`).

    Raises:
        OptunaStorageError: See `read_best_trials`; or no parameter of the study is searched here.
    """
    file, study = _split_study(text)
    best = read_best_trials(Path(file), study, max_trials=MAX_POINTS)
    by_name = {axis.name: axis for axis in space.axes}
    axes = {
        name: by_name[hyperparameter]
        for params in best.params
        for name in params
        if (hyperparameter := find_hyperparameter(name, by_name)) is not None
    }
    points: list[Params] = []
    unused, moved = set[str](), set[str]()
    for params in best.params:
        point: Params = {}
        for name, value in params.items():
            is_number = (
                isinstance(value, int | float)
                and not isinstance(value, bool)
                and math.isfinite(value)
            )
            if name not in axes or not is_number:
                unused.add(name)
                continue
            axis = axes[name]
            point[axis.name] = axis.nearest(float(value))  # type: ignore[arg-type]
            if point[axis.name] != value:
                moved.add(f"{name} = {value:.4g} to {point[axis.name]:.4g}")
        if point and point not in points:
            points.append(point)
    if not points:
        searched = (
            name
            for axis in space.axes
            for name in (axis.name, *get_hyperparameter(axis.name).aliases)
        )
        raise OptunaStorageError(
            f"{file}: study {best.study!r} varies {', '.join(sorted(unused)) or 'nothing'}; none "
            f"of them is searched here: {', '.join(searched)}"
        )
    selection = f"the best {len(points)} of" if len(points) > 1 else "the best of"
    trials = format_counted(best.num_finished, "finished trial")
    parts = [f"search.warm_start: {selection} {trials} of Optuna's study {best.study!r} in {file}"]
    parts += [f"moved into their ranges: {', '.join(sorted(moved))}"] if moved else []
    parts += [f"not used: {', '.join(sorted(unused))}"] if unused else []
    return WarmStart(points=tuple(points), sentence="; ".join(parts))


def _split_study(text: str) -> tuple[str, str]:
    """Split FILE[:STUDY] into the file and the name of the study."""
    # Prefer the longest file that exists. If none does, split at the last colon.
    places = [place for place, character in enumerate(text) if character == ":"]
    splits = [(text, ""), *((text[:place], text[place + 1 :]) for place in reversed(places))]
    return next(
        (split for split in splits if Path(split[0]).exists()), splits[min(1, len(splits) - 1)]
    )
