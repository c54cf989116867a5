"""What is wrong with the runs that a plan will ask for: better said before the first than after the search."""

from __future__ import annotations

from collections.abc import Callable

from launcher.arms import axis_sizes, run_at
from launcher.rungs import ladder_runs
from launcher.study import Study
from proxies.checks import SpecError
from proxies.numbers import KINDS
from proxies.rules import decay_share, decays
from proxies.spec import RunSpec
from sweeps.space import Params, SearchSpace
from transfer.question import AXES


def implied_problems(study: Study, space: SearchSpace) -> list[str]:
    """What is wrong with the runs of every stage, at the ends of what is searched."""
    makers: dict[str, Callable[[Params], list[RunSpec]]] = {
        "search": lambda point: [study.trial(point)],
        "transfer": lambda point: [
            run_at(study, axis, size, point, 0) for axis in AXES if axis != "params" for size in axis_sizes(study, axis)
        ],
        "ladder": lambda point: ladder_runs(study, point),
    }
    problems: dict[str, None] = {}
    for stage, make in makers.items():
        for point in (space.lowest, space.highest):
            try:
                found = [problem for run in make(point) for problem in _decay_problems(run)]
            except SpecError as error:
                found = error.problems
            problems.update(dict.fromkeys(f"{stage}: {problem}" for problem in found))
    return list(problems)


def _decay_problems(run: RunSpec) -> list[str]:
    """A step must leave something of a weight, at every size and duration."""
    rate, decay = run.hparams.learning_rate, run.hparams.weight_decay
    shares = {
        kind: decay_share(run.parametrization, kind, run.ratios, rate, decay)
        for kind in KINDS
        if decays(run.parametrization, kind)
    }
    return [
        f"weight_decay = {decay} at learning rate {rate}: a step would take {share:.3g} of a {kind} weight at width "
        f"{run.shape.width} and {run.schedule.num_steps} steps"
        for kind, share in shares.items()
        if share >= 1
    ][:1]
