"""WarmupRuns a study's search out: phase by phase, repeats of the best trials, ties. No torch, no Optuna."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from launcher.base.talk import say
from launcher.experiments.searching import (
    GROWTH,
    WARM_START,
    Phase,
    ended_losses,
    growth,
    phases,
    replicated,
    ties,
    trial_points,
    trial_results,
)
from launcher.experiments.sweep_grids import base_sizes, transferred_rate
from launcher.experiments.transferred import StageMissingError, Transferred, transferred
from launcher.plan.search import LAW, WARM_TRIALS
from launcher.plan.study import SEARCH_STAGE, Study
from launcher.study.opening import recorded
from proxies.core.canon import Json
from proxies.core.flops import count_params
from proxies.core.powers import Ratios
from proxies.core.rules import scaled
from proxies.core.spec import RunSpec
from scaling_fits.compute.published_laws import PUBLISHED
from sweeps.search.growth import ranked
from sweeps.search.pruning import SearchPruner
from sweeps.search.source import SearchSource, Source, StaticSource
from sweeps.search.space import Params
from sweeps.store.errors import SweepError
from sweeps.store.ledger import Ledger

Drive = Callable[[str, Source, Sequence[RunSpec]], None]
"""Runs a source until it is done, or raises: its label, and the runs it will give, to estimate the time left."""


def run_search(study: Study, ledger: Ledger, drive: Drive, bank_key: Callable[[RunSpec], str]) -> None:
    """Run what the search lacks; returns at once where it has ended.

    Raises:
        WarmStartError: the plan's warm start gives no points.
        SweepError: see `sweeps.run.drive`; what is recorded stands.
    """
    _begin(study, ledger)
    while True:
        if ended_losses(study, ledger) is None:
            phase = phases(study, ledger)[-1]
            drive("search", _source(study, ledger, phase), _left(study, ledger, phase))
        losses = ended_losses(study, ledger)
        assert losses is not None
        wider = growth(study, ledger, losses)
        if wider is None:
            break
        ledger.append(GROWTH, f"{SEARCH_STAGE}/{len(ledger.records(GROWTH))}", wider)
        say(f"search: {said(wider)}")
    while (again := replicated(study, ledger, losses)) is not None and again.comparison is None:
        missing = [spec for spec in again.specs if spec.id not in ledger.results()]
        say(f"search: {len(missing)} repeats of the best {len(again.candidates)} trials with other seeds")
        drive("replicates", StaticSource(missing, bank_key), missing)
    while (found := ties(study, ledger, losses)) is not None and found.point is None:
        missing = [spec for spec in found.specs if spec.id not in ledger.results()]
        say(f"search: {len(missing)} runs compare the best trial's values with conventional ones, seed by seed")
        drive("ties", StaticSource(missing, bank_key), missing)


def said(record: Json) -> str:
    """A growth as a sentence."""
    body: Any = record
    moved = [
        f"{edge['axis']} from [{edge['range'][0]:.4g}, {edge['range'][1]:.4g}] to [{edge['wider'][0]:.4g}, "
        f"{edge['wider'][1]:.4g}]"
        for edge in body["edges"]
    ]
    return f"the best trials lay at an end: {' and '.join(moved)}, {body['num_trials']} further trials"


def _begin(study: Study, ledger: Ledger) -> None:
    """Record the warm start before the first trial: a search that is resumed needs its sources no more."""
    if not study.plan.search.warm_start or ledger.find(WARM_START, SEARCH_STAGE) is not None:
        return
    found = warm_start(study)
    ledger.append(WARM_START, SEARCH_STAGE, found)
    for one in cast(list[dict[str, Any]], found["points"]):
        held = one["point"]["learning_rate"]
        clipped = "" if one["learning_rate"] == held else f" (held to its range: {held:.3g})"
        say(f"search: begins with learning rate {one['learning_rate']:.3g}{clipped}, from {one['source']}")


def _source(study: Study, ledger: Ledger, phase: Phase) -> SearchSource:
    search = study.plan.search
    return SearchSource(
        phase.space,
        study.trial,
        ledger,
        stage=SEARCH_STAGE,
        study_seed=search.seed,
        num_trials=phase.num_trials,
        parallelism=search.parallelism,
        sampler=search.sampler,
        num_startup=search.num_startup,
        given=phase.given,
        num_known=phase.num_known,
        pruner=_pruner(study, phase),
    )


def _pruner(study: Study, phase: Phase) -> SearchPruner | None:
    search = study.plan.search
    if search.pruner == "none":
        return None
    return SearchPruner(
        search.pruner,
        phase.space,
        study.study_dir,
        num_steps=study.plan.proxy.num_steps,
        parallelism=search.parallelism,
        num_startup=search.num_startup,
    )


def _left(study: Study, ledger: Ledger, phase: Phase) -> list[RunSpec]:
    """Runs that cost what the rest of a phase will: which points it will ask for is not known."""
    middle = [0.5] * (phase.space.num_coordinates - 1)
    number = phase.num_trials - sum(result is not None for result in trial_results(study, ledger))
    return [study.trial(phase.space.at((i / number, *middle))) for i in range(number)]


class WarmStartError(ValueError):
    """A warm start that gives no point."""


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
    law = next(law for law in PUBLISHED if law.name == entry.removeprefix(LAW))
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
        _point(study, _carried(study, other, point, found), "/".join(folder.parts[-2:]), ledger.head_hash)
        for point in best[:WARM_TRIALS]
    ]


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
