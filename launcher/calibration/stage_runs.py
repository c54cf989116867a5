"""The runs of a study's stages, as the plan requests them before any has ended."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.experiments.conventions import num_tie_runs
from launcher.experiments.ladder import ladder_runs, stage_specs
from launcher.experiments.sweep_grids import first_runs, warmup_runs
from launcher.experiments.transferred_values import target_guess
from launcher.plan.study import Study
from proxies.core.hyperparameters import warmup_of, with_warmup
from proxies.core.spec import RunSpec
from sweeps.search.growth import PROBES
from sweeps.search.space import Params

MOST_ASKED = 2
"""Number of additional learning rates per size and round that a loss basin cut off at one end
needs; where runs diverge it may be more.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRuns:
    """Runs of one stage, as the plan requests them before any has ended."""

    name: str
    runs: list[RunSpec]
    more: list[RunSpec]
    """Additional runs with all extensions that the plan allows."""
    num_again: int = 0
    """Number of `runs` that are second executions: they cost time and are no runs of the ledger."""


def runs_of(study: Study) -> list[StageRuns]:
    """Return the runs of every stage in order; some specs represent several runs of their kind."""
    point, search = study.space.lowest, study.plan.search
    transfer_runs, transfer_extensions = _plan_transfer_runs(study, point)
    # The activations of a command cannot be read, so it has no checks.
    rows = (
        [row for runs in study.coordinate_checks.values() for row in runs]
        if study.plan.command is None
        else []
    )
    checks = [run for row in rows for run in row]
    trial, (ties, most_ties) = study.trial(point), num_tie_runs(study)
    return [
        StageRuns(name="check", runs=checks, more=[]),
        StageRuns(
            name="sweep",
            runs=[trial]
            * (search.num_trials + search.num_replicates + study.replays_winner + ties),
            more=[trial]
            * (search.max_extensions * max(search.extension_trials, PROBES) + most_ties - ties),
            num_again=int(study.replays_winner),
        ),
        StageRuns(name="transfer", runs=transfer_runs, more=transfer_extensions),
        StageRuns(name="ladder", runs=stage_specs(study, ladder_runs(study, point)), more=[]),
    ]


def _plan_transfer_runs(study: Study, point: Params) -> tuple[list[RunSpec], list[RunSpec]]:
    """Return the grids that the first verdicts request, and the runs that extensions of them may
    add.
    """
    target = target_guess(study)
    # At the highest values: a warmup that is long at the base is the one that the two rules
    # transfer differently.
    compared, _ = warmup_runs(study, with_warmup(point, warmup_of(study.space.highest)), target, {})
    first = {spec.id: spec for spec in compared}
    more: list[RunSpec] = []
    for specs in first_runs(study, point, target).values():
        first |= {spec.id: spec for spec in specs}
        seeds = {
            (spec.shape, spec.num_tokens, spec.parametrization, spec.seed): spec for spec in specs
        }
        more += [*seeds.values()] * (MOST_ASKED * study.plan.transfer.max_extensions)
    return list(first.values()), more
