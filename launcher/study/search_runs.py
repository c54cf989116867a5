"""The runs of a study's search: its phases, then repeats of the best trials, then comparisons with
conventional values. No torch, no Optuna.
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
"""Type of a function that runs a source until it is done, or raises. It takes a label, the source,
and runs that cost as much as those of the source.
"""


def run_search(
    study: Study, ledger: Ledger, drive: Drive, bank_key: Callable[[RunSpec], str]
) -> None:
    """Run what the search lacks. Returns at once if the search has ended.

    Raises:
        SweepError: See `sweeps.run.driver`; everything recorded stays.
    """
    while True:
        if ended_losses(study, ledger) is None:
            phase = phases(study, ledger)[-1]
            drive(
                "search", _build_source(study, ledger, phase), _stand_in_runs(study, ledger, phase)
            )
        losses = ended_losses(study, ledger)
        assert losses is not None
        extension = growth(study, ledger, losses)
        if extension is None:
            break
        ledger.append(GROWTH, f"{SEARCH_STAGE}/{len(ledger.records(GROWTH))}", extension)
        say(f"search: {said(extension)}")
    while (repeats := replicated(study, ledger, losses)) is not None and repeats.comparison is None:
        missing = [spec for spec in repeats.specs if spec.id not in ledger.results()]
        best = counted(len(repeats.candidates), "trial")
        say(f"search: {counted(len(missing), 'repeat')} of the best {best} with other seeds")
        drive("replicates", StaticSource(missing, bank_key), missing)
    while (comparison := ties(study, ledger, losses)) is not None and comparison.point is None:
        missing = [spec for spec in comparison.specs if spec.id not in ledger.results()]
        say(
            f"search: {counted(len(missing), 'run')} to compare the best trial with conventional "
            "values, seed by seed"
        )
        drive("ties", StaticSource(missing, bank_key), missing)


def said(record: Json) -> str:
    """Return a sentence about the extension of a range."""
    body: Any = record
    changes = [
        f"{edge['axis']} from [{edge['range'][0]:.4g}, {edge['range'][1]:.4g}] to "
        f"[{edge['wider'][0]:.4g}, {edge['wider'][1]:.4g}]"
        for edge in body["edges"]
    ]
    trials = f"{counted(body['num_trials'], 'more trial')}"
    return f"the best trials lie at an end, which moves: {' and '.join(changes)}; {trials}"


def _build_source(study: Study, ledger: Ledger, phase: Phase) -> SearchSource:
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


def _stand_in_runs(study: Study, ledger: Ledger, phase: Phase) -> list[RunSpec]:
    """Return as many runs as a phase still has trials, each at the cost of a trial; the points
    themselves are not known yet.
    """
    number = phase.num_trials - sum(result is not None for result in trial_results(study, ledger))
    return [study.trial(phase.space.at([0.5] * phase.space.num_coordinates))] * number
