"""The scaling ladder's runs, and those that check two of its rungs at other rates. No torch, no numpy.

A rung is a main run in small: its rate comes by the same rules (`launcher.experiments.arms.carried_rate`), and it has a
schedule of its own, which ends with it. So no rung is a longer run cut short.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.experiments.arms import Sizes, base_sizes, carried_rate
from launcher.experiments.warmup import Rule, followed
from launcher.plan.study import Study
from proxies.core.spec import RunSpec
from sweeps.search.space import Params
from transfer.question import Axis

DIGITS = 6
"""Of a rate that an offset gives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedRung:
    """A rung, with the runs that show whether its learning rate was the right one."""

    rung: RunSpec
    runs: tuple[tuple[float, tuple[RunSpec, ...]], ...]
    """By octaves from the rung's own rate, ascending, 0 among them: a run for every seed, the rung's own first."""

    @property
    def extra(self) -> list[RunSpec]:
        """What the check takes beyond the rung itself."""
        return [spec for _, specs in self.runs for spec in specs if spec.id != self.rung.id]


def ladder_runs(
    study: Study, point: Params, powers: Mapping[Axis, float] | None = None, warmup: Rule = "share"
) -> list[RunSpec]:
    """Every width at every duration and seed, at a point set at the base; its rate moves by these exponents, if any."""
    ladder, plan = study.plan.ladder, study.plan
    batch = ladder.batch_tokens or plan.proxy.batch_tokens
    runs = []
    for width in ladder.widths:
        for num_steps in ladder.num_steps:
            tokens = int(batch * plan.schedule(num_steps, 0.0).num_full_batches)
            there = Sizes(width=width, depth=plan.model.num_layers, batch=batch, duration=tokens)
            rate = carried_rate(point["learning_rate"], powers or {}, base_sizes(study), there)
            rung = study.run(
                shape=study.shape(width), point=followed(study, warmup, {**point, "learning_rate": rate}, tokens),
                seed=ladder.seed, num_steps=num_steps, batch_tokens=batch, part="ladder",
            )  # fmt: skip
            runs += [dataclasses.replace(rung, seed=ladder.seed + number) for number in range(ladder.num_seeds)]
    return runs


def stage_specs(study: Study, rungs: Sequence[RunSpec]) -> list[RunSpec]:
    """All that the ladder's stage runs, each once: the rungs, and what checks some of them."""
    wanted = [*rungs, *(spec for checked in checked_rungs(study, rungs) for spec in checked.extra)]
    return list({spec.id: spec for spec in wanted}.values())


def checked_rungs(study: Study, specs: Sequence[RunSpec]) -> tuple[CheckedRung, ...]:
    """The rungs to check, cheapest first: evenly by rank from the cheapest to as large a one as the plan pays for.

    They are the two ends of the ladder where it can be: a mistake that grows along the ladder, which is what bends a
    fit, is largest between these. The largest rung may be a third of the ladder, so `ladder.check_share` limits it.
    """
    ladder = study.plan.ladder
    if not ladder.check_offsets_octaves:
        return ()
    ordered = _ordered(study, specs)
    limit = ladder.check_share * sum(spec.flops for spec in ordered)
    # By their own cost, so that more rates or seeds are of the same rungs.
    for number in range(min(ladder.num_checked, len(ordered)), 0, -1):
        for top in range(len(ordered) - 1, number - 2, -1):
            rungs = _spread(ordered[: top + 1], number)
            if sum(spec.flops for spec in rungs) <= limit:
                return tuple(_checked(study, rung) for rung in rungs)
    return ()


def largest_share(study: Study, specs: Sequence[RunSpec]) -> float:
    """What `ladder.check_share` would have to be for the largest rung to be among the checked ones."""
    ordered = _ordered(study, specs)
    rungs = _spread(ordered, min(study.plan.ladder.num_checked, len(ordered)))
    return sum(spec.flops for spec in rungs) / sum(spec.flops for spec in ordered)


def _ordered(study: Study, specs: Sequence[RunSpec]) -> list[RunSpec]:
    """The first run of every rung, cheapest first."""
    return sorted((spec for spec in specs if spec.seed == study.plan.ladder.seed), key=lambda spec: spec.flops)


def _spread(ordered: Sequence[RunSpec], number: int) -> list[RunSpec]:
    """So many of them, evenly by rank, the first and the last among them; of one, the last."""
    top = len(ordered) - 1
    return [ordered[round(top * i / (number - 1))] for i in range(number)] if number > 1 else [ordered[top]]


def _checked(study: Study, rung: RunSpec) -> CheckedRung:
    ladder = study.plan.ladder
    return CheckedRung(
        rung=rung,
        runs=tuple(
            (octaves, tuple(_at(rung, octaves, ladder.seed + number) for number in range(ladder.check_num_seeds)))
            for octaves in sorted((*ladder.check_offsets_octaves, 0.0))
        ),
    )


def _at(rung: RunSpec, octaves: float, seed: int) -> RunSpec:
    """The rung at another rate, or with another seed."""
    own = rung.hparams.learning_rate
    rate = own if octaves == 0 else float(f"{own * 2.0**octaves:.{DIGITS}g}")
    return dataclasses.replace(rung, seed=seed, hparams=dataclasses.replace(rung.hparams, learning_rate=rate))
