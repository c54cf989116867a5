"""Runs that share a stable phase: which do, where each leaves it, and what it costs beyond it.
Standard library only.

With `wsd` the rate is constant between warmup and decay, so runs that differ only in their duration
are one run until the shorter one decays. The longer one can go on from the shorter one's state at
that step, its *branch step*: it is then, on one machine, bit by bit the run that it would have been
from step 0 (arXiv 2405.18392 and 2404.06395 train ladders so). That shared phase is the *trunk*.
Nothing here is part of a run's identity beyond its spec: trunk and branch step follow from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from proxies.core import canon
from proxies.core.flops import flops_per_token
from proxies.core.schedule import Schedule
from proxies.core.spec import Run, RunSpec

TRUNK, TRUNK_STEPS = "trunk", "trunk_steps"
"""In a result's environment: the trunk that the run went on from, and at which step."""


def trunk_id(spec: RunSpec) -> str:
    """Content id of what a run computes until its decay; empty where its duration matters from the
    first step on.

    That is so with other schedules, where rates or decay follow the duration, where the batch warms
    up over a share of it, and where the user's own command trains, whose state nobody else has.
    """
    schedule = spec.schedule
    by_duration = (
        spec.parametrization.needs_tokens
        or spec.hparams.needs_tokens
        or schedule.batch_warmup_steps
    )
    if schedule.kind != "wsd" or by_duration or spec.command is not None:
        return ""
    warmup_steps = schedule.warmup_steps
    stable = Schedule(kind="constant", num_steps=max(1, warmup_steps), warmup_steps=warmup_steps)
    return canon.content_id(["trunk", dataclasses.replace(spec, schedule=stable)])


def branch_step(spec: RunSpec) -> int:
    """Optimizer steps done when a run leaves its trunk and decays."""
    return spec.schedule.num_steps - spec.schedule.decay_steps


def trunk_order(spec: RunSpec) -> tuple[int, str]:
    """Runs of one trunk in the order in which they leave it."""
    return branch_step(spec), spec.id


def own_flops(specs: Iterable[RunSpec]) -> list[int]:
    """Training FLOPs of each run beyond what it goes on from, if the shorter ones of its trunk
    among these come first.

    A run that stands in the list several times costs the same each time.
    """
    runs = list(specs)
    members: dict[str, dict[str, RunSpec]] = {}
    for run in runs:
        members.setdefault(trunk_id(run) or run.id, {})[run.id] = run
    found: dict[str, int] = {}
    for each in members.values():
        shared_steps = 0
        for run in sorted(each.values(), key=trunk_order):
            found[run.id] = flops_between(run, shared_steps, run.schedule.num_steps)
            shared_steps = branch_step(run)
    return [found[run.id] for run in runs]


def flops_between(spec: RunSpec, start_steps: int, num_steps: int) -> int:
    """Training FLOPs of a run's steps from one to another, causal convention
    (`proxies.core.flops`).
    """
    return flops_per_token(spec.shape) * (spec.tokens_by(num_steps) - spec.tokens_by(start_steps))


def trained_flops(run: Run) -> int:
    """FLOPs of a run's schedule beyond what it went on from; of one that ended early, those that it
    was to take.
    """
    return flops_between(
        run.spec, int(run.result.environment.get(TRUNK_STEPS, 0)), run.spec.schedule.num_steps
    )
