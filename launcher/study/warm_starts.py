"""First points of a search that come from elsewhere: other studies' best, and published laws. No torch.

They are suggestions, not outcomes: another study's losses are of other data, or of another size.
"""

from __future__ import annotations

from pathlib import Path

from launcher.experiments.searching import trial_points
from launcher.experiments.sweep_grids import base_sizes, transferred_rate
from launcher.experiments.transferred import StageMissingError, Transferred, transferred
from launcher.plan.plan import Plan
from launcher.plan.search import LAW, WARM_TRIALS
from launcher.plan.study import Study
from launcher.study.opening import recorded
from proxies.core.canon import Json
from proxies.core.flops import count_params
from proxies.core.powers import Ratios
from proxies.core.rules import scaled
from scaling_fits.compute.published_laws import published
from sweeps.search.growth import ranked
from sweeps.search.space import Params
from sweeps.store.errors import SweepError
from sweeps.store.ledger import LEDGER_NAME, Ledger


class WarmStartError(ValueError):
    """A warm start that gives no point."""


def warm_problems(plan: Plan, folder: Path) -> list[str]:
    """Warm starts that are not there, of a plan in a folder."""
    return [
        f"search.warm_start: {entry!r} holds no study: name a study's folder, relative to the plan"
        for entry in plan.search.warm_start
        if not entry.startswith(LAW) and not (folder / entry / LEDGER_NAME).is_file()
    ]


def warm_start(study: Study) -> dict[str, Json]:
    """The record of a study's warm start: `points`, and where each is from.

    Raises:
        WarmStartError: a study that cannot be read, or in which no trial has finished; all of them, at once.
    """
    points: list[Json] = []
    problems = []
    for entry in study.plan.search.warm_start:
        try:
            found = [_law_point(study, entry)] if entry.startswith(LAW) else _study_points(study, Path(entry))
        except (ValueError, SweepError) as error:
            problems.append(f"search.warm_start: {entry}: {error}")
            continue
        points += found
    if problems:
        raise WarmStartError("; ".join(problems))
    return {"points": points}


def _law_point(study: Study, entry: str) -> dict[str, Json]:
    """The law's learning rate at the base, the other values in the middle. N is taken without embeddings."""
    law = next(law for law in published("learning_rate") if law.name == entry.removeprefix(LAW))
    params = count_params(study.base_shape).non_embedding
    rate = law.at(params, base_sizes(study).duration)
    return _point(study, {"learning_rate": rate}, f"{entry} ({law.source})", "")


def _study_points(study: Study, folder: Path) -> list[dict[str, Json]]:
    """The best trials of another study, carried to this one's base; first what its transfer tests settled on, if so."""
    other, ledger = recorded(folder)
    points = trial_points(ledger)
    results = [ledger.results().get(other.trial(point).id) for point in points]
    best_first = ranked([None if result is None else result.loss_nats for result in results])
    if not best_first:
        raise WarmStartError("no trial of it has finished")
    found = _found(other, ledger)
    best = ([found.point] if found else []) + [points[index] for index in best_first]
    return [
        _point(study, _carried(study, other, point, found), _last_two(folder), ledger.head_hash)
        for point in best[:WARM_TRIALS]
    ]


def _last_two(folder: Path) -> str:
    """Most studies' folders have one name, `study`: with the folder around it."""
    return "/".join(folder.parts[-2:])


def _found(other: Study, ledger: Ledger) -> Transferred | None:
    try:
        return transferred(other, ledger)
    except StageMissingError:
        return None


def _carried(study: Study, other: Study, point: Params, found: Transferred | None) -> dict[str, float]:
    """A point of another study at this one's base.

    At a base every parametrization is the same function, so this study's own rules carry every value, as
    for hidden matrices; the exponents that the other measured, beyond the same rules, come on top.
    """
    here, there = base_sizes(study), base_sizes(other)
    ratios = Ratios(
        width=here.width / there.width, depth=here.depth / there.depth, batch=here.batch / there.batch,
        duration=here.duration / there.duration,
    )  # fmt: skip
    rules = study.plan.parametrization
    values = {
        name: scaled(rules, name, value, ratios)
        for name in study.space.names
        if (value := _value(other, point, name)) is not None
    }
    powers = found.powers if found and other.plan.parametrization == study.plan.parametrization else {}
    rate = transferred_rate(point["learning_rate"], powers, there, here)
    return {**values, "learning_rate": scaled(rules, "learning_rate", rate, ratios)}


def _value(other: Study, point: Params, name: str) -> float | None:
    if name in point:
        return point[name]
    value = getattr(other.hparams(point), name, None)
    return None if value is None else float(value)


def _point(study: Study, values: dict[str, float], source: str, ledger_head: str) -> dict[str, Json]:
    """One of the record's points, within the ranges; with what it would have been, and the ledger it was read from."""
    return {
        "point": {**study.space.nearest(values)},
        "learning_rate": values["learning_rate"],
        "source": source,
        "ledger_head": ledger_head,
    }
