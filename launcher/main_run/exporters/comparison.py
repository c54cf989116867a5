"""Comparison of a trainer's run with the frozen decision, parameter by parameter and step by step.

A trainer's run is a `TrainerView`: the numbers with which the trainer would train. The `prove.py`
of an export prints it. The comparison is the same for every trainer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from forerun._launcher.main_run.frozen.frozen import Decision, assign_groups
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.numbers import ForwardNumbers, GroupSettings
from forerun._proxies.core.schedule import Schedule, compute_lr_multiplier
from forerun._proxies.core.shape import list_parameter_shapes

TOLERANCE = 1e-9
"""Relative tolerance of a number; for a learning rate, relative to the peak. Trainers multiply in
another order than forerun, which rounds differently. A wrong rule differs by more."""
MAX_STEPS = 4096
"""Number of steps up to which a run's learning rates are compared at every step. A longer run is
compared at about as many steps, and at every step around a bend of its schedule."""
_STEPS_AROUND_BENDS = 64
"""Number of steps before a bend of the schedule, and after it, that are all compared."""
PREDICTED_MARK = " (noted in its fidelity report)"
"""End of the message about a difference that the export itself predicts."""
_EXPECTED_MARK = ", frozen as "
"""Text in a message between the trainer's value and the expected one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings(GroupSettings):
    """The settings that the trainer's optimizer has for one parameter."""

    num_elements: int
    """Number of elements of the whole parameter, not of a rank's shard."""
    rates: int
    """Index of the row of `TrainerView.rates` that has the parameter's learning rates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerView:
    """The numbers of a run as a trainer understood it, read from the output of `prove.py`."""

    trainer: str
    version: str
    """Installed version of the trainer."""
    num_steps: int
    batch_tokens: int
    clip_norm: float | None
    """Maximum norm of the whole gradient; None if it is not clipped."""
    forward: ForwardNumbers
    """Multipliers of the model that the trainer built; every layer has the same."""
    steps: tuple[int, ...]
    """Updates, counted from 0, whose learning rates were read."""
    rates: tuple[tuple[float, ...], ...]
    """Learning rate at each of those updates, one row per optimizer group."""
    parameters: dict[str, OptimizerSettings]
    """Settings by the trainer's own names; a matrix that two layers share is there once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunNumbers:
    """Optimizer settings and learning rates that a trainer's view is compared with."""

    numbers: Mapping[str, GroupSettings]
    """Optimizer and settings of each parameter, by forerun's names."""
    shares: tuple[float, ...]
    """Learning rate divided by its peak, at each of `choose_proof_steps`."""


def choose_proof_steps(schedule: Schedule) -> tuple[int, ...]:
    """Return the updates, counted from 0, at which learning rates are compared (`MAX_STEPS`)."""
    num_steps = schedule.num_steps
    if num_steps <= MAX_STEPS:
        return tuple(range(num_steps))
    steps = {round(i * (num_steps - 1) / (MAX_STEPS - 1)) for i in range(MAX_STEPS)}
    for bend in (0, schedule.warmup_steps, num_steps - schedule.decay_steps, num_steps):
        first, end = bend - _STEPS_AROUND_BENDS, bend + _STEPS_AROUND_BENDS
        steps.update(range(max(0, first), min(num_steps, end)))
    return tuple(sorted(steps))


def build_frozen_run(decision: Decision) -> RunNumbers:
    """Return the optimizer settings and learning rates that the decision froze.

    Raises:
        FrozenError: The groups do not fit the shape's parameters.
    """
    schedule = decision.learning_rate.schedule
    return RunNumbers(
        numbers=assign_groups(decision.groups, list(list_parameter_shapes(decision.shape))),
        shares=tuple(
            compute_lr_multiplier(schedule, step) for step in choose_proof_steps(schedule)
        ),
    )


def compare(
    decision: Decision, view: TrainerView, names: Mapping[str, str], run: RunNumbers | None = None
) -> list[str]:
    """Return a sentence for each difference between a trainer's run and the frozen one.

    Args:
        decision: The decision.
        view: The trainer's run.
        names: Trainer's name of each parameter by forerun's name. Several parameters may have the
            same name in the trainer: it fuses them into one matrix.
        run: Settings to compare with; None for the settings of the decision.

    Raises:
        FrozenError: The groups do not fit the shape's parameters.
    """
    run = run or build_frozen_run(decision)
    schedule = decision.learning_rate.schedule
    run_wide = {
        "num_steps": (view.num_steps, schedule.num_steps),
        "batch_tokens": (view.batch_tokens, decision.batch_tokens),
        "clip_norm": (view.clip_norm, decision.clip_norm),
    }
    differences = [
        f"{field} is {value}{_EXPECTED_MARK}{frozen_value}"
        for field, (value, frozen_value) in run_wide.items()
        if value != frozen_value
    ]
    differences += _compare_numbers(
        dataclasses.asdict(view.forward), dataclasses.asdict(decision.forward), "forward."
    )
    differences += _compare_parameters(decision, view, names)
    frozen = [(names[name], numbers) for name, numbers in run.numbers.items() if name in names]
    for name, numbers in frozen:
        if name in view.parameters:
            differences += _compare_settings(name, view.parameters[name], numbers)
    return [
        *differences,
        *_compare_rates(view, choose_proof_steps(schedule), dict(frozen), run.shares),
    ]


def compare_with_prediction(
    decision: Decision, view: TrainerView, names: Mapping[str, str], predicted: RunNumbers
) -> list[str]:
    """Return the differences of `compare`; those that the export predicts end in `PREDICTED_MARK`.

    A prediction that does not come true is a difference too.

    Raises:
        FrozenError: The groups do not fit the shape's parameters.
    """
    # Both comparisons describe the trainer's value alike, up to the value that was expected. Two
    # messages with the same text before that value are about the same difference.
    from_frozen, from_predicted = (
        {text.partition(_EXPECTED_MARK)[0]: text for text in compare(decision, view, names, run)}
        for run in (None, predicted)
    )
    return [
        *(
            text if key in from_predicted else text + PREDICTED_MARK
            for key, text in from_frozen.items()
        ),
        *(
            text.replace(_EXPECTED_MARK, ", predicted as ")
            for key, text in from_predicted.items()
            if key not in from_frozen
        ),
    ]


def _compare_parameters(
    decision: Decision, view: TrainerView, names: Mapping[str, str]
) -> list[str]:
    """Compare names and sizes of the trainer's parameters with those of the frozen shape."""
    sizes: dict[str, int] = {}
    differences = []
    for name, shape in list_parameter_shapes(decision.shape).items():
        if name in names:
            sizes[names[name]] = sizes.get(names[name], 0) + math.prod(shape)
        else:
            differences.append(f"{name} has no name in {view.trainer}")
    differences += [f"the optimizer lacks {name}" for name in sizes if name not in view.parameters]
    for name, actual in view.parameters.items():
        if name not in sizes:
            differences.append(f"the optimizer trains {name}, which is not frozen")
        elif actual.num_elements != sizes[name]:
            elements = format_counted(actual.num_elements, "element")
            differences.append(f"{name} has {elements}, frozen with {sizes[name]}")
    return differences


def _compare_settings(name: str, actual: GroupSettings, frozen: GroupSettings) -> list[str]:
    """Compare the optimizer of a parameter, and its settings, with the frozen ones."""
    if actual.optimizer != frozen.optimizer or actual.settings.keys() != frozen.settings.keys():
        present, expected = (
            f"{group.optimizer} with {', '.join(sorted(group.settings))}"
            for group in (actual, frozen)
        )
        return [f"{name}: optimizer is {present}{_EXPECTED_MARK}{expected}"]
    return _compare_numbers(actual.settings, frozen.settings, f"{name}: ")


def _compare_numbers(
    actual: Mapping[str, float], frozen: Mapping[str, float], prefix: str
) -> list[str]:
    """Return a message for each number that differs by more than rounding."""
    return [
        f"{prefix}{field} is {actual[field]!r}{_EXPECTED_MARK}{number!r}"
        for field, number in frozen.items()
        if not math.isclose(actual[field], number, rel_tol=TOLERANCE)
    ]


def _compare_rates(
    view: TrainerView,
    steps: Sequence[int],
    frozen: Mapping[str, GroupSettings],
    shares: Sequence[float],
) -> Iterator[str]:
    """Yield, for each parameter, the first step at which its learning rate differs.

    The message also has the number of other steps at which the rate differs.

    Args:
        view: The trainer's run.
        steps: Steps at which the trainer must report the rates.
        frozen: Optimizer and settings of each parameter, by the trainer's names.
        shares: Learning rate divided by its peak, at each step.
    """
    if view.steps != tuple(steps) or any(len(row) != len(steps) for row in view.rates):
        yield (
            f"rates are given at {format_counted(len(view.steps), 'step')}: must be the "
            f"{format_counted(len(steps), 'step')} that the export lists"
        )
        return
    for name, actual in view.parameters.items():
        if name not in frozen:
            continue
        if not 0 <= actual.rates < len(view.rates):
            yield f"{name}: there is no row {actual.rates} of learning rates"
            continue
        peak = frozen[name].learning_rate
        wrong = [
            f"{name}: the rate at step {step} is {rate!r}{_EXPECTED_MARK}{peak * share!r}"
            for step, rate, share in zip(steps, view.rates[actual.rates], shares, strict=True)
            if not math.isclose(rate, peak * share, rel_tol=TOLERANCE, abs_tol=TOLERANCE * peak)
        ]
        if len(wrong) > 1:
            num_steps = format_counted(len(shares), "step")
            yield f"{wrong[0]}, and at {len(wrong) - 1} more of {num_steps}"
        elif wrong:
            yield wrong[0]
