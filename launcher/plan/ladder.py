"""What single keys of a plan cannot show about its ladder: what is wrong, and what would bias the fit."""

from __future__ import annotations

from launcher.plan.plan import Plan
from proxies.core.hyperparameters import HYPERPARAMETERS, SHARE_OF_STEPS
from proxies.core.spec import MAX_SEED

MIN_RUNGS = 6
MOST_CHECK_OCTAVES = 4.0
"""From a rung's own rate: beyond, a parabola says nothing about its optimum."""
FAR = 2.0
"""Times a measured range, or another duration, within which no warning is worth its line."""


def ladder_problems(plan: Plan) -> list[str]:
    """Everything about `[ladder]` that does not hold together."""
    ladder, whole = plan.ladder, plan.model.seq_len * plan.batch_stages
    num_rungs = len(ladder.widths) * len(ladder.num_steps)
    problems = []
    if len(ladder.widths) < 2 or len(ladder.num_steps) < 2 or num_rungs < MIN_RUNGS:
        problems.append(
            f"ladder: {len(ladder.widths)} widths, {len(ladder.num_steps)} durations, {num_rungs} rungs: "
            f"a law has five parameters, so at least 2 of each and {MIN_RUNGS} rungs are wanted"
        )
    if ladder.batch_tokens % whole:
        problems.append(f"ladder.batch_tokens = {ladder.batch_tokens}: no multiple of {whole} tokens")
    num_seeds = max(ladder.num_seeds, ladder.check_num_seeds)
    if ladder.seed + num_seeds - 1 > MAX_SEED:
        problems.append(f"ladder.seed = {ladder.seed}: with {num_seeds} seeds at most {MAX_SEED + 1 - num_seeds}")
    offsets = ladder.check_offsets_octaves
    far = any(abs(octaves) > MOST_CHECK_OCTAVES for octaves in offsets)
    if offsets and (far or 0 in offsets or not min(offsets) < 0 < max(offsets)):
        problems.append(
            f"ladder.check_offsets_octaves = {list(offsets)}: rates below and above the rung's own, which is at 0, by "
            f"at most {MOST_CHECK_OCTAVES:g} octaves, or none at all"
        )
    return problems


def ladder_warnings(plan: Plan) -> list[str]:
    """What would make rungs differ from the main run in more than size; the plan is sound all the same."""
    return _decay_warnings(plan) + _duration_warnings(plan) + _batch_warnings(plan)


def _decay_warnings(plan: Plan) -> list[str]:
    """Every rung has a schedule of its own: what keeps it from being the main run's in small."""
    proxy, shortest = plan.proxy, min(plan.ladder.num_steps)
    warnings = []
    if proxy.schedule == "constant":
        warnings.append(
            'proxy.schedule = "constant": no rung decays, so the law is of runs at their full rate, and holds for a '
            "main run that does not decay either"
        )
    shares = {
        f"search.{name} = {list(ends)}": ends[0]
        for name, ends in plan.search.ranges.items()
        if HYPERPARAMETERS[name].unit == SHARE_OF_STEPS
    }
    if proxy.schedule == "wsd":
        shares[f"proxy.decay_fraction = {proxy.decay_fraction}"] = proxy.decay_fraction
    warnings += [
        f"{name}: less than a step of the shortest rung's {shortest}, which gets one: a larger share than others"
        for name, share in shares.items()
        if 0 < share * shortest < 0.5
    ]
    if proxy.batch_warmup_fraction and round(proxy.batch_warmup_fraction * shortest) < plan.batch_stages - 1:
        warnings.append(
            f"proxy.batch_warmup_stages = {plan.batch_stages}: of the shortest rung's {shortest} steps they take more "
            f"than the share of {proxy.batch_warmup_fraction}"
        )
    return warnings


def _duration_warnings(plan: Plan) -> list[str]:
    """Whether a rule carries the rate to every rung's duration, and was measured there."""
    transfer, ladder, base = plan.transfer, plan.ladder, plan.proxy.num_steps
    shortest, longest = min(ladder.num_steps), max(ladder.num_steps)
    told = plan.command is None or plan.command.reaches("num_steps")
    said = f"ladder.num_steps = {list(ladder.num_steps)}"
    if transfer.durations and "duration" in transfer.measured_rules and told:
        low, high = min(transfer.durations) * base, max(transfer.durations) * base
        beyond = shortest * FAR < low or longest > FAR * high
        why = (
            f"{said}: the rule of the rate over duration is measured from {low:g} to {high:g} steps, and carried beyond"
        )
        return [why] if beyond else []
    if longest <= FAR * shortest or plan.parametrization.rate_duration_power:
        return []
    why = f"{said}: one learning rate for all, since no rule over duration is measured (transfer.durations, "
    return [f"{why}transfer.measured_rules): long or short rungs may be mis-tuned"]


def _batch_warnings(plan: Plan) -> list[str]:
    """Whether the rungs' batch is the main run's, and a rule carries the rate to it."""
    batch = plan.ladder.batch_tokens or plan.proxy.batch_tokens
    warnings = []
    if batch != plan.target_batch_tokens:
        warnings.append(
            f"target.batch_tokens = {plan.target_batch_tokens}: the ladder's batches have {batch} tokens, and the "
            "forecast is for those (ladder.batch_tokens)"
        )
    measured = plan.transfer.batches and "batch" in plan.transfer.measured_rules
    if batch != plan.proxy.batch_tokens and not (measured or plan.parametrization.rate_batch_power):
        warnings.append(
            f"ladder.batch_tokens = {batch}: the rate is that of {plan.proxy.batch_tokens} tokens, since no rule over "
            "batch is measured (transfer.batches, transfer.measured_rules): rungs may be mis-tuned"
        )
    return warnings
