"""The rule that carries a warmup from the base to other durations: the same share of the steps, or
the same number of tokens.

The same number of tokens is the convention. It is used unless paired runs clearly show that it
loses (`conventions`). This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

from forerun._launcher.study.experiments.conventions import (
    LOWER_RATE_OCTAVES,
    NUM_SCOUT_SEEDS,
    ConventionFinding,
    compare_with_convention,
    count_contest_runs,
    describe_finding,
)
from forerun._launcher.study.plan.study import Study, count_base_tokens
from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.hyperparameters import (
    HYPERPARAMETERS,
    WARMUP,
    get_warmup,
    replace_warmup,
)
from forerun._proxies.core.notation import format_percent
from forerun._proxies.core.spec import RunResult, RunSpec
from forerun._sweeps.search.space import Params

RunAt = Callable[[int, Params, int], RunSpec]
"""Function of a number of training tokens, a point of hyperparameters, and a seed. It returns the
run with these, and with the base's settings otherwise.
"""
WarmupRuleName = Literal["share", "tokens"]
"""Quantity that stays the same over duration: the warmup's share of the steps, or its tokens."""
_CONVENTION = HYPERPARAMETERS[WARMUP].convention
CONVENTIONAL_WARMUP = _CONVENTION.value if _CONVENTION else 0.0
"""Conventional warmup, as a share of the steps."""
MAX_COMPARISON_SHARE = 0.1
"""Maximum FLOPs of the comparison of warmup rules, as a share of the FLOPs of the transfer tests.
The share is small because the comparison settles one hyperparameter of many.
"""
_OFFSETS = (0.0, LOWER_RATE_OCTAVES)
"""Offsets of the learning rate, in octaves, at which the convention is tried."""
DIGITS = 6
"""Number of significant digits of a warmup share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupRule:
    """The rule that carries a warmup over duration, with its evidence."""

    rule: WarmupRuleName
    num_tokens: int | None = None
    """Tokens of the runs that compared both rules; None if none did."""
    finding: ConventionFinding | None = None
    """Result of the comparison, in which the convention is a number of tokens; None if not
    compared.
    """

    def to_json(self, margin_nats: float) -> dict[str, Json]:
        """Return the rule as JSON, with the margin of the comparison."""
        return {**cast(dict[str, Json], canon.to_json(self)), "margin_nats": margin_nats}

    def describe(self, margin_nats: float) -> str:
        """Describe the rule and its evidence in words."""
        same_share = "The same share of the steps"
        same_tokens = (
            f"As many warmup tokens as at the base, at least {format_percent(CONVENTIONAL_WARMUP)} "
            "of the steps in long runs"
        )
        if self.finding is None and self.rule == "share":
            return same_share
        if self.finding is None:
            return f"{same_tokens} (conventional: GPT-3, Llama). Not tested for long runs"
        evidence = describe_finding(self.finding, margin_nats, "the same share of the steps")
        if self.rule == "tokens":
            return f"{same_tokens}. At {self.num_tokens:,} tokens this rule {evidence}"
        return (
            f"{same_share}. At {self.num_tokens:,} tokens a fixed number of warmup tokens "
            f"{evidence}"
        )


def transfer_warmup(
    study: Study, rule: WarmupRuleName, fraction: float, num_tokens: float
) -> float:
    """Return the warmup of a run on `num_tokens` tokens, as a share of its steps.

    With the rule `tokens`, the share falls with duration, but not below the conventional share
    unless the base's share is lower. Runs shorter than the base have the base's share.

    Args:
        study: Study of the run.
        rule: Rule that carries the warmup over duration.
        fraction: Warmup at the base, as a share of its steps.
        num_tokens: Training tokens of the run.
    """
    base = count_base_tokens(study)
    if rule == "share" or num_tokens <= base:
        return fraction
    share = max(fraction * base / num_tokens, min(fraction, CONVENTIONAL_WARMUP))
    return float(f"{share:.{DIGITS}g}")


def set_transferred_warmup(
    study: Study, rule: WarmupRuleName, point: Params, num_tokens: float
) -> Params:
    """Return a point set at the base with the warmup of a run on `num_tokens` tokens."""
    return replace_warmup(point, transfer_warmup(study, rule, get_warmup(point), num_tokens))


def set_proxy_warmup(
    study: Study, rule: WarmupRuleName, point: Params, num_tokens: int, num_steps: int
) -> Params:
    """Return a point set at the base with the warmup of a proxy. If durations share a stable phase,
    the warmup has as many steps as the base's.
    """
    if not study.plan.proxy.decay_branches:
        return set_transferred_warmup(study, rule, point, num_tokens)
    base = study.plan.build_schedule(study.plan.proxy.num_steps, get_warmup(point))
    return replace_warmup(point, min(1.0, base.warmup_steps / num_steps))


def compute_warmup_power(
    study: Study, rule: WarmupRuleName, point: Params, num_tokens: int
) -> float:
    """Return the exponent p with which the rule scales a point's warmup share: for a run on
    `num_tokens` tokens, the share is the base's times (num_tokens / base tokens)^p.
    """
    share, base = get_warmup(point), count_base_tokens(study)
    if num_tokens == base or not share:
        return 0.0
    transferred = transfer_warmup(study, rule, share, num_tokens)
    return math.log(transferred / share) / math.log(num_tokens / base)


def get_warmup_log2(spec: RunSpec) -> float:
    """Return log2 of the warmup share of a run of the comparison."""
    return HYPERPARAMETERS[WARMUP].to_log2(spec.schedule.warmup_steps / spec.schedule.num_steps)


def compare_warmup_rules(
    study: Study,
    point: Params,
    durations: tuple[int, ...],
    budget_flops: float,
    run_at: RunAt,
    results: Mapping[str, RunResult],
) -> tuple[tuple[RunSpec, ...], WarmupRule | None]:
    """Compare the two rules at the longest duration that the budget allows.

    The rule `tokens` is run at the point's learning rate and at a lower one, because a shorter
    warmup may need a lower rate.

    Args:
        study: Study of the runs. Without `search.tie_seeds` nothing is compared, and a warmup is a
            share.
        point: Point set at the base.
        durations: The plan's durations in tokens.
        budget_flops: Maximum FLOPs of all runs together.
        run_at: Returns the run with a number of tokens, a point, and a seed.
        results: Results so far, by run id.

    Returns:
        The runs, as far as outcomes tell, and the rule once all have ended.
    """
    if study.plan.proxy.decay_branches:
        return (), WarmupRule(rule="tokens")  # all durations share one warmup
    if not study.plan.search.tie_seeds:
        return (), WarmupRule(rule="share")
    # The longest duration that the budget allows, then as many seeds as it allows
    for num_tokens in sorted(durations, reverse=True):
        run = run_at(num_tokens, point, 0)
        shorter = set_transferred_warmup(study, "tokens", point, num_tokens)
        if run_at(num_tokens, shorter, 0).id == run.id:
            continue
        for num_seeds in range(study.plan.search.tie_seeds, NUM_SCOUT_SEEDS - 1, -1):
            if run.flops * count_contest_runs(len(_OFFSETS), num_seeds) <= budget_flops:
                return _compare_at(study, point, num_tokens, num_seeds, run_at, results)
    return (), WarmupRule(rule="tokens")


def _compare_at(
    study: Study,
    point: Params,
    num_tokens: int,
    num_seeds: int,
    run_at: RunAt,
    results: Mapping[str, RunResult],
) -> tuple[tuple[RunSpec, ...], WarmupRule | None]:
    shorter = set_transferred_warmup(study, "tokens", point, num_tokens)

    def run_with_tokens(octaves: float, seed: int) -> RunSpec:
        rate = point["learning_rate"] * 2.0**octaves
        return run_at(num_tokens, {**shorter, "learning_rate": rate}, seed)

    specs, finding = compare_with_convention(
        study,
        lambda seed: run_at(num_tokens, point, seed),
        run_with_tokens,
        _OFFSETS,
        num_seeds,
        results,
    )
    if finding is None:
        return specs, None
    rule: WarmupRuleName = "tokens" if finding.conventional else "share"
    return specs, WarmupRule(rule=rule, num_tokens=num_tokens, finding=finding)
