"""A trainer's run compared with the decision: parameter by parameter, step by step. No trainer is
known here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.frozen.frozen import Decision, assign_groups
from proxies.core.notation import counted
from proxies.core.numbers import ForwardNumbers, GroupSettings
from proxies.core.schedule import Schedule, lr_multiplier
from proxies.core.shape import parameter_shapes

TOLERANCE = 1e-9
"""Relative to a number, or to the peak of a rate: trainers multiply in other orders. A wrong rule
differs by more."""
MAX_STEPS = 4096
"""A longer run is compared at about as many steps, all those around a bend among them."""
AROUND_BENDS = 64
TOLD = " (noted in its fidelity report)"
"""How a difference ends that the export foretells, number for number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings(GroupSettings):
    """What the trainer's optimizer holds for one of its parameters."""

    num_elements: int
    """The whole parameter's, not those of a rank's part."""
    rates: int
    """Its row in `TrainerView.rates`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerView:
    """A run as the trainer understood it."""

    trainer: str
    version: str
    """As installed."""
    num_steps: int
    batch_tokens: int
    clip_norm: float | None
    """Maximal norm of the whole gradient; None: it is not clipped."""
    forward: ForwardNumbers
    """As its built model holds them, every layer the same."""
    steps: tuple[int, ...]
    """Updates, counted from 0, at which the rates were read."""
    rates: tuple[tuple[float, ...], ...]
    """Learning rates that the trainer's scheduler set for those updates; one row per optimizer
    group."""
    parameters: dict[str, OptimizerSettings]
    """By the trainer's own names; a matrix shared by two layers once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunNumbers:
    """The numbers of a run, parameter by parameter and step by step."""

    numbers: Mapping[str, GroupSettings]
    """Optimizer and settings by our parameters' names."""
    shares: tuple[float, ...]
    """Learning rate over its peak, at `proof_steps`."""


def proof_steps(schedule: Schedule) -> tuple[int, ...]:
    """Updates at which a scheduler is read: all, or of a long run some thousand, those around its
    bends among them.
    """
    num_steps = schedule.num_steps
    if num_steps <= MAX_STEPS:
        return tuple(range(num_steps))
    bends = (0, schedule.warmup_steps, num_steps - schedule.decay_steps, num_steps)
    found = {round(i * (num_steps - 1) / (MAX_STEPS - 1)) for i in range(MAX_STEPS)}
    for bend in bends:
        found.update(range(max(0, bend - AROUND_BENDS), min(num_steps, bend + AROUND_BENDS)))
    return tuple(sorted(found))


def frozen_run(decision: Decision) -> RunNumbers:
    """The run that is frozen.

    Raises:
        FrozenError: the groups do not fit the shape's parameters.
    """
    schedule = decision.learning_rate.schedule
    assigned = assign_groups(decision.groups, list(parameter_shapes(decision.shape)))
    return RunNumbers(
        numbers=assigned,
        shares=tuple(lr_multiplier(schedule, step) for step in proof_steps(schedule)),
    )


def compare(
    decision: Decision, view: TrainerView, names: Mapping[str, str], run: RunNumbers | None = None
) -> list[str]:
    """Where a trainer's run is not the frozen one (or `run`, in its numbers); empty if nowhere.

    `names` gives each of our parameters' name in the trainer; several may share one (a fused
    matrix, if they are trained with the same numbers).

    Raises:
        FrozenError: the groups do not fit the shape's parameters.
    """
    run = run or frozen_run(decision)
    told = {
        "num_steps": (view.num_steps, decision.learning_rate.schedule.num_steps),
        "batch_tokens": (view.batch_tokens, decision.batch_tokens),
        "clip_norm": (view.clip_norm, decision.clip_norm),
    }
    problems = [
        f"{field} is {theirs}, frozen as {ours}"
        for field, (theirs, ours) in told.items()
        if theirs != ours
    ]
    problems += _unequal(
        dataclasses.asdict(view.forward), dataclasses.asdict(decision.forward), "forward."
    )
    problems += _parameter_differences(decision, view, names)
    for name, numbers in run.numbers.items():
        if (held := view.parameters.get(names.get(name, ""))) is not None:
            problems += _setting_differences(names[name], held, numbers)
    peaks = {
        names[name]: numbers.learning_rate for name, numbers in run.numbers.items() if name in names
    }
    return problems + _rate_differences(
        view, proof_steps(decision.learning_rate.schedule), peaks, run.shares
    )


def marked(
    decision: Decision, view: TrainerView, names: Mapping[str, str], foretold: RunNumbers
) -> list[str]:
    """The differences of `compare`, those that are `foretold` ending in TOLD; and where that does
    not come true.

    Raises:
        FrozenError: the groups do not fit the shape's parameters.
    """
    found, untold = (
        {said.partition(", frozen as ")[0]: said for said in compare(decision, view, names, run)}
        for run in (None, foretold)
    )
    problems = [said if which in untold else said + TOLD for which, said in found.items()]
    return problems + [
        said.replace("frozen as", "predicted as")
        for which, said in untold.items()
        if which not in found
    ]


def _parameter_differences(
    decision: Decision, view: TrainerView, names: Mapping[str, str]
) -> list[str]:
    sizes: dict[str, int] = {}
    problems = []
    for name, size in parameter_shapes(decision.shape).items():
        if name in names:
            sizes[names[name]] = sizes.get(names[name], 0) + math.prod(size)
        else:
            problems.append(f"{name} has no name in {view.trainer}")
    problems += [f"the optimizer lacks {name}" for name in sizes if name not in view.parameters]
    problems += [
        f"the optimizer trains {name}, which is not frozen"
        for name in view.parameters
        if name not in sizes
    ]
    problems += [
        f"{name} has {counted(held.num_elements, 'element')}, frozen with {sizes[name]}"
        for name, held in view.parameters.items()
        if name in sizes and held.num_elements != sizes[name]
    ]
    return problems


def _setting_differences(name: str, held: GroupSettings, frozen: GroupSettings) -> list[str]:
    """Return how a parameter's optimizer, or one of its settings, differs from the frozen one."""
    if held.optimizer != frozen.optimizer or held.settings.keys() != frozen.settings.keys():
        theirs, ours = (
            f"{group.optimizer} with {', '.join(sorted(group.settings))}"
            for group in (held, frozen)
        )
        return [f"{name}: optimizer is {theirs}, frozen as {ours}"]
    return _unequal(held.settings, frozen.settings, f"{name}: ")


def _unequal(held: Mapping[str, float], numbers: Mapping[str, float], prefix: str) -> list[str]:
    """Return the numbers that differ by more than rounding."""
    return [
        f"{prefix}{field} is {held[field]!r}, frozen as {number!r}"
        for field, number in numbers.items()
        if not math.isclose(held[field], number, rel_tol=TOLERANCE)
    ]


def _rate_differences(
    view: TrainerView, steps: tuple[int, ...], peaks: Mapping[str, float], shares: tuple[float, ...]
) -> list[str]:
    """Name the first step of each parameter whose rate is another, and how many more there are."""
    if view.steps != steps or any(len(row) != len(steps) for row in view.rates):
        expected = counted(len(steps), "step")
        return [
            (
                f"rates are given at {counted(len(view.steps), 'step')}: must be the {expected} of "
                "the "
                "proof"
            )
        ]
    problems = []
    for name, held in view.parameters.items():
        if name not in peaks:
            continue
        if not 0 <= held.rates < len(view.rates):
            problems.append(f"{name}: there is no row {held.rates} of learning rates")
            continue
        peak = peaks[name]
        wrong = [
            (step, rate, peak * share)
            for step, rate, share in zip(view.steps, view.rates[held.rates], shares, strict=True)
            if not math.isclose(rate, peak * share, rel_tol=TOLERANCE, abs_tol=TOLERANCE * peak)
        ]
        if wrong:
            step, rate, frozen = wrong[0]
            more = (
                f", and at {len(wrong) - 1} more of {counted(len(shares), 'step')}"
                if len(wrong) > 1
                else ""
            )
            problems.append(
                f"{name}: the rate at step {step} is {rate!r}, frozen as {frozen!r}{more}"
            )
    return problems
