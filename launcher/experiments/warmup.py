"""How a warmup set at the base is carried over duration: as a share of the steps, or as a number of tokens. No torch.

Published trainers state warmups in tokens or steps, the same for runs of any length (GPT-3, arXiv 2005.14165: 375M
tokens; Llama, 2302.13971: 2000 steps). So that is the convention, and a share is kept only where runs of a longer
duration say clearly that it is better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from launcher.experiments.conventions import (
    LOWER_RATE,
    SCOUTS,
    Finding,
    because,
    contest,
    num_runs,
)
from launcher.plan.study import Study, base_duration
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.hyperparameters import HYPERPARAMETERS, WARMUP, warmup_of, with_warmup
from proxies.core.spec import RunResult, RunSpec
from sweeps.search.space import Params

if TYPE_CHECKING:
    from collections.abc import Callable

    RunAt = Callable[[int, Params, int], RunSpec]
    """A run of the base's settings but for its tokens, at a point, with a seed."""

Rule = Literal["share", "tokens"]
_CONVENTION = HYPERPARAMETERS[WARMUP].convention
CONVENTIONAL_WARMUP = _CONVENTION.value if _CONVENTION else 0.0
CARRY_SHARE = 0.1
"""Of the other transfer tests' FLOPs, the most that this comparison may take: it settles one hyperparameter of many."""
DIGITS = 6
"""Of a share of the steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Carry:
    """The rule that is used, and what it rests on."""

    HYPERPARAMETER: ClassVar[str] = WARMUP
    """The one that a rule over duration is chosen for."""

    rule: Rule
    num_tokens: int | None = None
    """Of the runs that compared both; None: none did."""
    finding: Finding | None = None
    """The convention is a number of tokens; None: not compared."""

    def body(self, margin_nats: float) -> dict[str, Json]:
        """As JSON, with the margin that it was compared with."""
        found = canon.to_json(self)
        assert isinstance(found, dict)
        return {**found, "margin_nats": margin_nats}

    def words(self, margin_nats: float) -> str:
        """The rule and what it rests on."""
        if self.rule == "share" and self.finding is None:
            return "the same share of the steps"
        kept = "the same number of tokens, and in long runs the conventional share at least"
        if self.finding is None:
            return f"{kept}: not determined, conventional (GPT-3, Llama): no runs over duration compare it with a share"
        told = f"beside the same share, at {self.num_tokens:,} tokens, {because(self.finding, margin_nats)}"
        return f"{kept if self.rule == 'tokens' else 'the same share of the steps; as a number of tokens'}: {told}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Carrying:
    """The comparison's runs, as far as outcomes tell; `carry` is None before all have ended."""

    specs: tuple[RunSpec, ...]
    num_tokens: int | None
    carry: Carry | None


def carried_warmup(study: Study, rule: Rule, fraction: float, num_tokens: float) -> float:
    """A warmup set at the base as a share of the steps of a run on so many tokens.

    As a number of tokens it is never a larger share than at the base, nor, in long runs, a smaller one than the
    conventional share.
    """
    base = base_duration(study)
    if rule == "share" or num_tokens <= base:
        return fraction
    return float(f"{max(fraction * base / num_tokens, min(fraction, CONVENTIONAL_WARMUP)):.{DIGITS}g}")


def followed(study: Study, rule: Rule, point: Params, num_tokens: float) -> Params:
    """A point set at the base with its warmup as a run on so many tokens has it."""
    return with_warmup(point, carried_warmup(study, rule, warmup_of(point), num_tokens))


def power_of(study: Study, rule: Rule, point: Params, num_tokens: int) -> float:
    """The power of duration by which the rule moves a point's warmup to a run on so many tokens."""
    own, base = warmup_of(point), base_duration(study)
    if num_tokens == base or not own:
        return 0.0
    return math.log(carried_warmup(study, rule, own, num_tokens) / own) / math.log(num_tokens / base)


def comparison_log2(spec: RunSpec) -> float:
    """Octaves of the warmup that a run of the comparison has."""
    return HYPERPARAMETERS[WARMUP].to_log2(spec.schedule.warmup_steps / spec.schedule.num_steps)


def carrying(
    study: Study, point: Params, durations: tuple[int, ...], budget_flops: float, run_at: RunAt,
    results: Mapping[str, RunResult],
) -> Carrying:  # fmt: skip
    """Compare a share with a number of tokens at the longest duration that the budget allows.

    The number of tokens is run at the point's learning rate and at half of it, since a shorter warmup bears less.

    Args:
        study: what is asked; without `search.tie_seeds` nothing is compared, and a warmup is a share.
        point: set at the base.
        durations: tokens of the plan's durations.
        budget_flops: of all runs together.
        run_at: makes them.
        results: so far, by id.
    """
    if not study.plan.search.tie_seeds:
        return Carrying(specs=(), num_tokens=None, carry=Carry(rule="share"))
    untested = Carrying(specs=(), num_tokens=None, carry=Carry(rule="tokens"))
    design = _design(study, point, durations, budget_flops, run_at)
    if design is None:
        return untested
    num_tokens, num_seeds = design
    shorter = followed(study, "tokens", point, num_tokens)

    def tokens(octaves: float, seed: int) -> RunSpec:
        return run_at(num_tokens, {**shorter, "learning_rate": point["learning_rate"] * 2.0**octaves}, seed)

    transfer = study.plan.transfer
    found = contest(
        lambda seed: run_at(num_tokens, point, seed), tokens, (0.0, LOWER_RATE), num_seeds, results,
        margin_nats=transfer.margin_nats, level=transfer.level,
    )  # fmt: skip
    carry = None
    if found.finding is not None:
        rule: Rule = "tokens" if found.finding.conventional else "share"
        carry = Carry(rule=rule, num_tokens=num_tokens, finding=found.finding)
    return Carrying(specs=found.specs, num_tokens=num_tokens, carry=carry)


def _design(
    study: Study, point: Params, durations: tuple[int, ...], budget_flops: float, run_at: RunAt
) -> tuple[int, int] | None:
    """Tokens and seeds of the comparison: as near to the target as the budget allows, then as many seeds; or None."""
    for num_tokens in sorted(durations, reverse=True):
        run = run_at(num_tokens, point, 0)
        if run_at(num_tokens, followed(study, "tokens", point, num_tokens), 0).id == run.id:
            continue
        for num_seeds in range(study.plan.search.tie_seeds, SCOUTS - 1, -1):
            if run.flops * num_runs(2, num_seeds) <= budget_flops:
                return num_tokens, num_seeds
    return None
