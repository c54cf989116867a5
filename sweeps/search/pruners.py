"""Optuna's pruners, each made anew for one question and shown the trials before it in index order. A door to Optuna.

- `asha`: SuccessiveHalvingPruner (Li 2020): at each rung the best third of those that came as far goes on.
- `hyperband`: HyperbandPruner (Li 2018): the same in brackets, the more patient of which begin at a later rung.
- `median`: MedianPruner (Golovin 2017): whoever is worse than the median of the finished, at the same step, ends.

They compare losses at one step, whatever the learning rate and however much of its decay is to come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sweeps.search.samplers import quiet

if TYPE_CHECKING:
    import optuna

Named = Literal["asha", "hyperband", "median"]
REDUCTION = 3
"""One in so many goes on at a rung, and rungs lie this factor apart: what hyperband has by default."""
FIRST_SHARE = 9
"""The first rung of `asha` and `hyperband` is at one part in so many of the steps."""
MOST_SHOWN = 100
"""Trials that a pruner is shown, the latest: to make a study of 10,000 would take half a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A trial as a pruner sees it."""

    number: int
    """Its index in the search."""
    values_nats: Mapping[int, float]
    """Loss by step, ascending, where it was looked at."""
    loss_nats: float | None
    """At the end, if it finished."""


def halving_rungs(num_steps: int) -> tuple[int, ...]:
    """Steps at which `asha` and `hyperband` look: a ninth and a third of all; nothing is saved by a look at the end."""
    rungs = [max(1, num_steps // FIRST_SHARE)]
    while 2 * rungs[-1] * REDUCTION <= num_steps:
        rungs.append(rungs[-1] * REDUCTION)
    return tuple(rung for rung in rungs if rung < num_steps)


def prunes(name: Named, *, study_seed: int, num_steps: int, trial: Report, others: Sequence[Report]) -> bool:
    """Whether the pruner gives `trial` up at the last step of its values.

    Args:
        name: the pruner.
        study_seed: decides, with the number, which of hyperband's brackets a trial is in.
        num_steps: of a whole run.
        trial: the one in question.
        others: by index, as far as they came to that step; the latest `MOST_SHOWN` are looked at.
    """
    import optuna  # 0.2 s, and only a search that prunes needs it

    step = max(trial.values_nats)
    with quiet():
        study = _study(name, study_seed, num_steps)
        _, marks = _walked(study, trial)
        study = _study(name, study_seed, num_steps)
        for other in others[-MOST_SHOWN:]:
            frozen = optuna.trial.create_trial(
                state=optuna.trial.TrialState.PRUNED if other.loss_nats is None else optuna.trial.TrialState.COMPLETE,
                value=other.loss_nats,
                intermediate_values={step: other.values_nats[step]},
                system_attrs=dict.fromkeys(marks, other.values_nats[step]),
            )
            study.add_trial(frozen)
            study.get_trials(deepcopy=False)[-1].number = other.number
        return _walked(study, trial)[0]


def _study(name: Named, study_seed: int, num_steps: int) -> optuna.Study:
    import optuna

    least = max(1, num_steps // FIRST_SHARE)
    pruner: optuna.pruners.BasePruner
    if name == "asha":
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=least, reduction_factor=REDUCTION)
    elif name == "hyperband":
        pruner = optuna.pruners.HyperbandPruner(min_resource=least, max_resource=num_steps, reduction_factor=REDUCTION)
    else:
        pruner = optuna.pruners.MedianPruner(n_startup_trials=1)
    # The name is what hyperband draws brackets by, with the trial's number; nothing is sampled here.
    return optuna.create_study(
        study_name=f"search {study_seed}", pruner=pruner, sampler=optuna.samplers.RandomSampler(seed=0)
    )


def _walked(study: optuna.Study, trial: Report) -> tuple[bool, set[str]]:
    """What the pruner says of a trial at its last step; and the marks by which it knows what it has judged."""
    asked, gives_up = study.ask(), False
    study.get_trials(deepcopy=False)[-1].number = trial.number
    for step, value in trial.values_nats.items():
        asked.report(value, step)
        gives_up = asked.should_prune()
    return gives_up, set(study.get_trials(deepcopy=False)[-1].system_attrs)
