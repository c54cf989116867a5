"""The joint verdict on the learning rate and another rate of the user's own code, from runs in
which both are off their optimum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.experiments.sweep_grids import RatePair, SharedSettings, TransferTest
from proxies.core.hyperparameters import LEARNING_RATE, hyperparameter_named

if TYPE_CHECKING:
    from transfer.regret.regret import Estimate
    from transfer.verdict.joint_verdict import JointVerdict
    from transfer.verdict.pair_verdict import PairVerdict
    from transfer.verdict.verdict import DetailedVerdict


def judged_pair(
    setting: SharedSettings,
    pair: RatePair,
    tests: tuple[tuple[TransferTest, DetailedVerdict], ...],
    together: JointVerdict,
) -> PairVerdict:
    """Judge a pair of rates whose runs have ended."""
    from transfer.verdict.pair_verdict import PairQuestion, judge_pair

    transfer, base = setting.study.plan.transfer, setting.study.plan.proxy.base_width
    by_seed: dict[int, dict[tuple[int, int], float | None]] = {}
    for seed, at, spec in pair.corners:
        by_seed.setdefault(seed, {})[at] = setting.results[spec.id].loss_nats
    own = [found.verdict for test, found in tests if test.hyperparameter == pair.other]
    over_width = [
        next(f.verdict for t, f in tests if (t.hyperparameter, t.axis) == (name, "width"))
        for name in (LEARNING_RATE, pair.other)
    ]
    first, second = (
        next((o for o in verdict.optima if o.size == base), None) for verdict in over_width
    )
    noises = [verdict.noise_nats for verdict in over_width if verdict.noise_nats is not None]
    costs = [verdict.regret_nats for verdict in own]
    return judge_pair(
        [*by_seed.values()],
        PairQuestion(
            hyperparameters=(LEARNING_RATE, pair.other),
            labels=(
                hyperparameter_named(LEARNING_RATE).label,
                hyperparameter_named(pair.other).label,
            ),
            regrets=(
                together.regret_nats,
                None if None in costs else _summed([c for c in costs if c is not None]),
            ),
            base=(first, second),
            noise_nats=max(noises, default=None),
            margin_nats=transfer.margin_nats,
            level=transfer.level,
        ),
    )


def _summed(costs: list[Estimate]) -> Estimate:
    """Return the regret of a value over all axes on which it is tested."""
    from transfer.regret.regret import Estimate

    return Estimate(
        value=sum(c.value for c in costs),
        low=max(c.low for c in costs),
        high=sum(c.high for c in costs),
    )
