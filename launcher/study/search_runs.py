"""Runs a study's search out: phase by phase, repeats of the best trials, ties. No torch, no
Optuna.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from launcher.base.talk import say
from launcher.experiments.search import (
    GROWTH,
    Phase,
    ended_losses,
    growth,
    phases,
    replicated,
    ties,
    trial_results,
)
from launcher.plan.study import SEARCH_STAGE, Study
from proxies.core.canon import Json
from proxies.core.notation import counted
from proxies.core.spec import RunSpec
from sweeps.search.pruning import SearchPruner
from sweeps.search.source import RunSource, Search, SearchSource, StaticSource
from sweeps.store.ledger import Ledger

Drive = Callable[[str, RunSource, Sequence[RunSpec]], None]
"""Runs a source until it is done, or raises: its label, and runs that cost what those it will give
do."""


def run_search(
    study: Study, ledger: Ledger, drive: Drive, bank_key: Callable[[RunSpec], str]
) -> None:
    """Run what the search lacks; returns at once where it has ended.

    Raises:
        SweepError: see `sweeps.run.driver`; what is recorded stands.
    """
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
        best = counted(len(again.candidates), "trial")
        say(f"search: {counted(len(missing), 'repeat')} of the best {best} with other seeds")
        drive("replicates", StaticSource(missing, bank_key), missing)
    while (found := ties(study, ledger, losses)) is not None and found.point is None:
        missing = [spec for spec in found.specs if spec.id not in ledger.results()]
        say(
            f"search: {counted(len(missing), 'run')} to compare the best trial with conventional "
            "values, seed by seed"
        )
        drive("ties", StaticSource(missing, bank_key), missing)


def said(record: Json) -> str:
    """A growth as a sentence."""
    body: Any = record
    moved = [
        f"{edge['axis']} from [{edge['range'][0]:.4g}, {edge['range'][1]:.4g}] to "
        f"[{edge['wider'][0]:.4g}, "
        f"{edge['wider'][1]:.4g}]"
        for edge in body["edges"]
    ]
    more = f"{counted(body['num_trials'], 'more trial')}"
    return f"the best trials lie at an end, which moves: {' and '.join(moved)}; {more}"


def _source(study: Study, ledger: Ledger, phase: Phase) -> SearchSource:
    plan = study.plan.search
    search = Search(
        phase.space,
        plan.seed,
        plan.parallelism,
        sampler=plan.sampler,
        num_startup=plan.num_startup,
        num_known=phase.num_known,
    )
    pruner = None
    if plan.pruner != "none":
        pruner = SearchPruner(search, study.study_dir, num_steps=study.plan.proxy.num_steps)
    return SearchSource(
        search,
        study.trial,
        ledger,
        stage=SEARCH_STAGE,
        num_trials=phase.num_trials,
        given=phase.given,
        pruner=pruner,
    )


def _left(study: Study, ledger: Ledger, phase: Phase) -> list[RunSpec]:
    """A run that costs what each of the rest of a phase will, as often: which points it will ask
    for is not known.
    """
    number = phase.num_trials - sum(result is not None for result in trial_results(study, ledger))
    return [study.trial(phase.space.at([0.5] * phase.space.num_coordinates))] * number
