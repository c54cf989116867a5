"""The runs of a study's stages, as the plan requests them before any has ended."""

from __future__ import annotations

from dataclasses import dataclass

from forerun._launcher.study.experiments.conventions import count_tie_runs
from forerun._launcher.study.experiments.ladder import build_ladder, build_stage_runs
from forerun._launcher.study.experiments.transfer_results import guess_target_sizes
from forerun._launcher.study.experiments.transfer_tests import build_first_runs, build_warmup_runs
from forerun._launcher.study.plan.calibration_records import Part
from forerun._launcher.study.plan.study import Study
from forerun._proxies.core.hyperparameters import get_warmup, replace_warmup
from forerun._proxies.core.spec import RunSpec
from forerun._sweeps.search.growth import NUM_PROBES
from forerun._sweeps.search.space import Params

NUM_EXTRA_RATES = 2
"""Number of additional learning rates, per size and round, if the optimum lies at an end of the
grid. More are needed if runs diverge.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRuns:
    """Runs of one stage, as the plan requests them before any has ended."""

    name: str
    runs: list[RunSpec]
    extensions: list[RunSpec]
    """Additional runs if the plan's extensions are all used."""
    num_replays: int = 0
    """Number of `runs` that are second executions of a run: they take time, and the ledger does not
    count them as runs.
    """

    @property
    def part(self) -> Part:
        """Section of the plan that sets how the runs are computed."""
        return "ladder" if self.name == "ladder" else "proxy"


def list_stage_runs(study: Study) -> list[StageRuns]:
    """Return the runs of every stage in order.

    Where the points of runs are not yet known, one spec is repeated for all runs of its kind.
    """
    point, search = study.space.lowest, study.plan.search
    transfer_runs, transfer_extensions = _plan_transfer_runs(study, point)
    # The activations of a command cannot be read, so it has no checks.
    rows = (
        [row for runs in study.coordinate_checks.values() for row in runs]
        if study.plan.command is None
        else []
    )
    checks = [run for row in rows for run in row]
    trial, (ties, most_ties) = study.build_trial(point), count_tie_runs(study)
    return [
        StageRuns(name="check", runs=checks, extensions=[]),
        StageRuns(
            name="sweep",
            runs=[trial]
            * (search.num_trials + search.num_replicates + study.replays_winner + ties),
            extensions=[trial]
            * (search.max_extensions * max(search.extension_trials, NUM_PROBES) + most_ties - ties),
            num_replays=int(study.replays_winner),
        ),
        StageRuns(name="transfer", runs=transfer_runs, extensions=transfer_extensions),
        StageRuns(
            name="ladder", runs=build_stage_runs(study, build_ladder(study, point)), extensions=[]
        ),
    ]


def _plan_transfer_runs(study: Study, point: Params) -> tuple[list[RunSpec], list[RunSpec]]:
    """Return the grids that the first verdicts request, and the runs that extensions of them may
    add.
    """
    target = guess_target_sizes(study)
    # Use the longest warmup of the search space: the two rules differ most for a long warmup.
    compared, _ = build_warmup_runs(
        study, replace_warmup(point, get_warmup(study.space.highest)), target, {}
    )
    first = {spec.id: spec for spec in compared}
    more: list[RunSpec] = []
    for specs in build_first_runs(study, point, target).values():
        first |= {spec.id: spec for spec in specs}
        seeds = {
            (spec.shape, spec.num_tokens, spec.parametrization, spec.seed): spec for spec in specs
        }
        # Each round may add some rates to every size, and each rate runs with every seed.
        more += [*seeds.values()] * (NUM_EXTRA_RATES * study.plan.transfer.max_extensions)
    return list(first.values()), more
