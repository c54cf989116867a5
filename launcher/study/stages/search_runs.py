"""The runs of a study's search: its phases, then repeats of the best trials, then comparisons with
conventional values.

This module imports neither torch nor Optuna.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from forerun._launcher.main_run.progress_output import print_progress
from forerun._launcher.study.experiments.search import (
    GROWTH,
    SearchState,
)
from forerun._launcher.study.plan.study import SEARCH_STAGE, Study, build_bank_key
from forerun._proxies.core.canon import Json
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.spec import RunSpec
from forerun._sweeps.search.pruning import SearchPruner
from forerun._sweeps.search.source import RunSource, Search, SearchSource, StaticSource
from forerun._sweeps.store.ledger import Ledger

Drive = Callable[[str, RunSource, Sequence[RunSpec]], None]
"""Type of a function that runs a source until it is done, or raises. It takes a label, the source,
and runs that cost as much as those of the source.
"""


def run_search(study: Study, ledger: Ledger, drive: Drive) -> None:
    """Run what the search lacks. Returns at once if the search has ended.

    Raises:
        SweepError: See `forerun._sweeps.run.driver`; everything recorded stays.
    """
    while True:
        state = SearchState(study, ledger)
        if state.losses is None:
            drive("search", _build_source(study, ledger, state), _stand_in_runs(study, state))
        elif state.growth is not None:
            ledger.append(GROWTH, f"{SEARCH_STAGE}/{len(state.phases) - 1}", state.growth)
            print_progress(f"search: {describe_growth(state.growth)}")
        elif state.repeats is not None and state.repeats.comparison is None:
            missing = [spec for spec in state.repeats.specs if spec.id not in ledger.get_results()]
            best = format_counted(len(state.repeats.candidates), "trial")
            print_progress(
                f"search: {format_counted(len(missing), 'repeat')} of the best {best} with other "
                "seeds"
            )
            drive("replicates", StaticSource(missing, build_bank_key), missing)
        elif state.ties is not None and state.ties.point is None:
            missing = [spec for spec in state.ties.specs if spec.id not in ledger.get_results()]
            print_progress(
                f"search: {format_counted(len(missing), 'run')} to compare the best trial with "
                "conventional values, seed by seed"
            )
            drive("ties", StaticSource(missing, build_bank_key), missing)
        else:
            return


def describe_growth(record: Json) -> str:
    """Return a sentence about the extension of a range."""
    body: Any = record
    changes = [
        f"{edge['axis']} from [{edge['range'][0]:.4g}, {edge['range'][1]:.4g}] to "
        f"[{edge['wider'][0]:.4g}, {edge['wider'][1]:.4g}]"
        for edge in body["edges"]
    ]
    trials = f"{format_counted(body['num_trials'], 'more trial')}"
    return f"the best trials lie at an end, which moves: {' and '.join(changes)}; {trials}"


def _build_source(study: Study, ledger: Ledger, state: SearchState) -> SearchSource:
    """Return the source of the trials of the last phase."""
    plan, phase = study.plan.search, state.phases[-1]
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
        study.build_trial,
        ledger,
        stage=SEARCH_STAGE,
        num_trials=phase.num_trials,
        given=phase.given,
        pruner=pruner,
    )


def _stand_in_runs(study: Study, state: SearchState) -> list[RunSpec]:
    """Return a run for each trial that the last phase still lacks, to estimate the time left. The
    points of these trials are not known yet, so each run is at the middle of the space.
    """
    phase = state.phases[-1]
    middle = phase.space.make_point([0.5] * phase.space.num_coordinates)
    return [study.build_trial(middle)] * (phase.num_trials - state.num_ended)
