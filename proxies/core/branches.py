"""Runs that share their training before the decay, and what each costs beyond the shared part.

With a `wsd` schedule the learning rate is constant between warmup and decay, so runs that differ
only in their duration are identical until the shorter one decays. The longer run can continue from
the state of the shorter run at that step, its *branch step*. On one machine it then equals, bit for
bit, the same run trained from step 0 (arXiv 2405.18392 and 2404.06395 train ladders like this). The
shared part is the *trunk*. Trunk and branch step follow from a run's spec alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from forerun._proxies.core import canon
from forerun._proxies.core.flops import compute_flops_per_token
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.spec import Run, RunSpec

TRUNK, TRUNK_STEPS = "trunk", "trunk_steps"
"""Keys in a result's environment: the id of the trunk that the run continued, and the number of
steps that the trunk had trained before."""


def compute_trunk_id(spec: RunSpec) -> str:
    """Return the content id of what a run computes before its decay; empty if it has no trunk.

    A run has no trunk if its duration matters from the first step on: the schedule is not `wsd`,
    learning rates or weight decay depend on the duration, or the batch warms up over a share of it.
    A run of the user's own command has no trunk either, because forerun does not have the command's
    state.
    """
    schedule = spec.schedule
    depends_on_duration = (
        spec.parametrization.needs_tokens
        or spec.hparams.needs_tokens
        or schedule.batch_warmup_steps
    )
    if schedule.kind != "wsd" or depends_on_duration or spec.command is not None:
        return ""
    warmup_steps = schedule.warmup_steps
    # Replace the schedule by one that is equal for all durations. Results record this id, so it may
    # never change: recorded runs would no longer find their trunks
    stable = Schedule(kind="constant", num_steps=max(1, warmup_steps), warmup_steps=warmup_steps)
    return canon.compute_content_id(["trunk", dataclasses.replace(spec, schedule=stable)])


def compute_branch_step(spec: RunSpec) -> int:
    """Return the number of steps after which a run leaves its trunk and decays."""
    return spec.schedule.num_steps - spec.schedule.decay_steps


def make_trunk_sort_key(spec: RunSpec) -> tuple[int, str]:
    """Return a sort key: the run that leaves its trunk first comes first."""
    return compute_branch_step(spec), spec.id


def compute_own_flops(specs: Iterable[RunSpec]) -> list[int]:
    """Return the training FLOPs of each run beyond the part that it continues.

    The shorter runs of a trunk are trained first. A run that is listed several times costs the same
    each time.
    """
    runs = list(specs)
    runs_by_trunk: dict[str, dict[str, RunSpec]] = {}
    for run in runs:
        runs_by_trunk.setdefault(compute_trunk_id(run) or run.id, {})[run.id] = run
    flops: dict[str, int] = {}
    for members in runs_by_trunk.values():
        shared_steps = 0  # steps that a shorter run of the trunk has trained already
        for run in sorted(members.values(), key=make_trunk_sort_key):
            flops[run.id] = compute_flops_between(run, shared_steps, run.schedule.num_steps)
            shared_steps = compute_branch_step(run)
    return [flops[run.id] for run in runs]


def compute_flops_between(spec: RunSpec, start_steps: int, num_steps: int) -> int:
    """Return the training FLOPs of a run between two steps, by the causal convention
    (`forerun._proxies.core.flops`).
    """
    return compute_flops_per_token(spec.shape) * (
        spec.count_tokens_by(num_steps) - spec.count_tokens_by(start_steps)
    )


def compute_trained_flops(run: Run) -> int:
    """Return the training FLOPs of a run's whole schedule, without those of the trunk that it
    continued. A run that ended early counts as if it had finished.
    """
    start_steps = int(run.result.environment.get(TRUNK_STEPS, 0))
    return compute_flops_between(run.spec, start_steps, run.spec.schedule.num_steps)
