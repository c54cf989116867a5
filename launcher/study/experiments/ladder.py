"""The runs of the scaling ladder, and the runs that check some of its rungs at other learning
rates. This module does not import torch.

A rung is a run of one model size and one duration; scaling laws of the loss are fitted to all
rungs. It is a small main run: its learning rate follows the same rules (`sizes.transfer_rate`), and
its own schedule ends with it, so no rung is a longer run cut short. If the plan has decay branches,
rungs that differ only in duration share their stable phase (`forerun._proxies.core.branches`).

If the learning rates of larger rungs are farther from their optima, the loss falls too slowly with
size, and the fitted exponents are too small. Therefore some rungs are also run at other rates, and
`forerun._launcher.study.stages.ladder_checks` judges them. The fit uses a rung's own rate even if
another one has a lower loss, because the minimum of several noisy losses is biased low.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forerun._launcher.study.experiments.sizes import Sizes, get_base_sizes, transfer_rate
from forerun._launcher.study.experiments.warmup_rule import WarmupRuleName, set_proxy_warmup
from forerun._launcher.study.plan.study import Study
from forerun._proxies.core.spec import RunSpec
from forerun._sweeps.search.space import Params
from forerun._transfer.question import Axis

DIGITS = 6
"""Number of significant digits of a learning rate at an offset."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedRung:
    """A rung, with the runs that show whether its learning rate is right."""

    rung: RunSpec
    runs: tuple[tuple[float, tuple[RunSpec, ...]], ...]
    """Pairs of an offset from the rung's own rate in octaves, and the runs at that rate, one for
    each seed. The offsets ascend and include 0. The first seed is the rung's own.
    """

    @property
    def extra_runs(self) -> list[RunSpec]:
        """Runs of the check other than the rung itself."""
        return [spec for _, specs in self.runs for spec in specs if spec.id != self.rung.id]


def build_ladder(
    study: Study,
    point: Params,
    powers_at: Callable[[Sizes], Mapping[Axis, float]] = lambda sizes: {},
    warmup: WarmupRuleName = "share",
) -> list[RunSpec]:
    """Return the runs of the ladder: one for each width, depth, duration, and seed.

    Args:
        study: Study of the ladder.
        point: Hyperparameters, as set at the base.
        powers_at: Returns the measured exponents of the learning rate for a rung's sizes; by
            default there are none. Durations that share a stable phase also share one rate: that
            of the geometric mean of the shortest and the longest duration.
        warmup: Rule that carries the warmup over duration.
    """
    ladder, plan = study.plan.ladder, study.plan
    batch = plan.ladder_batch_tokens
    # Tokens of the shortest and of the longest duration
    ends = [plan.count_tokens(end(ladder.num_steps), batch) for end in (min, max)]
    runs = []
    for shape, num_steps in itertools.product(study.ladder_shapes, ladder.num_steps):
        tokens = plan.count_tokens(num_steps, batch)
        duration = round(math.sqrt(math.prod(ends))) if plan.proxy.decay_branches else tokens
        sizes = Sizes(width=shape.width, depth=shape.num_layers, batch=batch, duration=duration)
        rate = transfer_rate(point["learning_rate"], powers_at(sizes), get_base_sizes(study), sizes)
        rung = study.build_run(
            shape=shape,
            point=set_proxy_warmup(
                study, warmup, {**point, "learning_rate": rate}, tokens, num_steps
            ),
            seed=ladder.seed,
            num_steps=num_steps,
            batch_tokens=batch,
            part="ladder",
        )
        seeds = range(ladder.seed, ladder.seed + ladder.num_seeds)
        runs += [dataclasses.replace(rung, seed=seed) for seed in seeds]
    return runs


def build_stage_runs(study: Study, rungs: Sequence[RunSpec]) -> list[RunSpec]:
    """Return all runs of the ladder's stage, each once: the rungs, and the runs that check some of
    them.
    """
    needed = [
        *rungs,
        *(spec for checked in choose_checked_rungs(study, rungs) for spec in checked.extra_runs),
    ]
    return list({spec.id: spec for spec in needed}.values())


def choose_checked_rungs(study: Study, specs: Sequence[RunSpec]) -> tuple[CheckedRung, ...]:
    """Return the rungs to check, cheapest first.

    The checked rungs are spread evenly by rank of cost, from the cheapest rung up to the largest
    one that the budget for checks allows. An error of the learning rate that grows along the ladder
    bends the fit, and it shows best between the cheapest and the largest rung. The largest rung may
    cost a third of the ladder, so `ladder.check_share` limits the cost of the checked rungs.
    """
    ladder = study.plan.ladder
    if not ladder.check_offsets_octaves:
        return ()
    rungs = _choose_rungs(study, sorted(specs, key=lambda spec: spec.flops))
    seeds = range(ladder.seed, ladder.seed + ladder.check_num_seeds)
    rates = sorted((*ladder.check_offsets_octaves, 0.0))
    return tuple(
        CheckedRung(
            rung=rung,
            runs=tuple(
                (octaves, tuple(_run_at_rate(rung, octaves, seed) for seed in seeds))
                for octaves in rates
            ),
        )
        for rung in rungs
    )


def _choose_rungs(study: Study, ordered: Sequence[RunSpec]) -> list[RunSpec]:
    """Return the rungs to check, from all rungs in the order of their FLOPs.

    Only the rungs themselves count for the limit, not their runs at other rates or seeds. So a plan
    with more rates or seeds checks the same rungs.
    """
    ladder = study.plan.ladder
    rungs = [spec for spec in ordered if spec.seed == ladder.seed]
    limit = ladder.check_share * sum(spec.flops for spec in rungs)
    # Try as many rungs as the plan asks for, then fewer; with each number, from the largest rung
    # down to smaller ones, until the chosen rungs cost no more than the limit.
    for number in range(min(ladder.num_checked, len(rungs)), 0, -1):
        for top in range(len(rungs) - 1, number - 2, -1):
            gaps = max(1, number - 1)
            ranks = [top] if number == 1 else [round(top * i / gaps) for i in range(number)]
            chosen = [rungs[rank] for rank in ranks]
            if sum(spec.flops for spec in chosen) <= limit:
                return chosen
    return []


def _run_at_rate(rung: RunSpec, octaves: float, seed: int) -> RunSpec:
    """Return the rung at another learning rate, or with another seed."""
    rate = rung.hparams.learning_rate
    if octaves:
        rate = float(f"{rate * 2.0**octaves:.{DIGITS}g}")
    hparams = dataclasses.replace(rung.hparams, learning_rate=rate)
    return dataclasses.replace(rung, seed=seed, hparams=hparams)
