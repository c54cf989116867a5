"""The sizes of a study along the axes of transfer, the tests over them, and the runs at them.

The base (`get_base_sizes`) is where hyperparameters are searched. `list_tests` returns the transfer
tests of a plan, `list_axis_sizes` the sizes that a test compares, and `build_run_at` a run at one
of them. Two functions are about values: `get_base_value` returns a hyperparameter's value at the
base, and `transfer_rate` carries a learning rate from the base to other sizes. This module does not
import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from forerun._launcher.study.plan.study import Study, count_base_tokens, scale_rate
from forerun._proxies.core.hyperparameters import LEARNING_RATE, get_hyperparameter
from forerun._proxies.core.rules import Parametrization
from forerun._proxies.core.spec import RunSpec
from forerun._sweeps.search.space import Params
from forerun._transfer.question import Axis, Hyperparameter

SIZE_AXES: tuple[Axis, ...] = ("width", "depth", "batch", "duration")
"""Axes over which a study tests the transfer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The sizes of a model and its training. Each field is named after its axis."""

    width: int
    """Model width, d_model."""
    depth: int
    """Number of layers."""
    batch: int
    """Tokens per step."""
    duration: int
    """Training tokens."""

    @classmethod
    def from_spec(cls, spec: RunSpec) -> Sizes:
        """Return the sizes of a run."""
        return cls(
            width=spec.shape.width,
            depth=spec.shape.num_layers,
            batch=spec.batch_tokens,
            duration=spec.num_tokens,
        )

    def get_size(self, axis: Axis) -> int:
        """Return the size on an axis."""
        size: int = getattr(self, axis)
        return size


def get_base_sizes(study: Study) -> Sizes:
    """Return the sizes at which hyperparameters are searched."""
    proxy = study.plan.proxy
    return Sizes(
        width=proxy.base_width,
        depth=study.plan.model.num_layers,
        batch=proxy.batch_tokens,
        duration=count_base_tokens(study),
    )


def transfer_rate(rate: float, powers: Mapping[Axis, float], base: Sizes, target: Sizes) -> float:
    """Scale a learning rate from the base to other sizes, by the measured exponents.

    The main run and every rung of the ladder use this rule. The parametrization scales the result
    once more, by its own exponents.

    Args:
        rate: Learning rate at the base.
        powers: Measured exponents by axis: the rate grows as size^exponent.
        base: Sizes of the base.
        target: Sizes of the run that gets the rate.
    """
    for axis, power in powers.items():
        rate = scale_rate(rate, target.get_size(axis) / base.get_size(axis), power)
    return rate


def get_base_value(study: Study, name: Hyperparameter, point: Params) -> float:
    """Return a hyperparameter's value at the base: from `point` if the search sets it, else from
    the plan.
    """
    if name in point:
        return point[name]
    if name in study.plan.search.user_axes:
        return study.plan.search.user_axes[name].get_value(name, None).value
    value: float = getattr(study.build_hparams(point), name)
    return value


# ---- The tests of a plan ----


def list_axis_sizes(study: Study, axis: Axis) -> tuple[int, ...]:
    """Return the sizes at which the plan asks for the learning-rate curve, ascending. The result is
    empty if the axis is not tested, or if the user's own command takes no such size.
    """
    plan, transfer = study.plan, study.plan.transfer
    placeholders = {"depth": "num_layers", "batch": "batch_tokens", "duration": "num_steps"}
    if plan.command is not None and not plan.command.can_receive(placeholders.get(axis, axis)):
        return ()
    sizes: dict[Axis, Iterable[int]] = {
        "width": transfer.widths,
        "depth": plan.tested_depths,
        "batch": (round(ratio * plan.proxy.batch_tokens) for ratio in transfer.batches),
        "duration": map(plan.count_tokens, _list_num_steps(study)),
    }
    return tuple(sorted(sizes[axis]))


def _list_num_steps(study: Study) -> list[int]:
    """Return the plan's durations in steps."""
    num_steps = study.plan.proxy.num_steps
    return [max(1, round(ratio * num_steps)) for ratio in study.plan.transfer.durations]


def count_steps(study: Study, num_tokens: int) -> int:
    """Return the number of steps in which a run with the base's batch trains on `num_tokens`."""
    plan = study.plan
    # The plan gives its durations in steps. Prefer these: tokens are rounded.
    for num_steps in _list_num_steps(study):
        if plan.count_tokens(num_steps) == num_tokens:
            return num_steps
    return plan.count_steps(num_tokens / plan.proxy.batch_tokens)


def list_tests(study: Study) -> tuple[tuple[Hyperparameter, Axis], ...]:
    """Return the tests (a hyperparameter and an axis) that the plan asks for and its trainer can
    run.

    Reports show the tests in this order: the learning rate over width is the first, and its other
    tests follow.
    """
    command = study.plan.command
    tests: dict[Hyperparameter, tuple[Axis, ...]] = {
        LEARNING_RATE: ("width", "duration", "batch", "depth")
    }
    tests |= {
        name: axes
        for name, axes in study.plan.transfer.hyperparameters.items()
        if command is None or command.can_receive(get_hyperparameter(name).placeholder_name)
    }
    return tuple(
        (name, axis)
        for name, axes in tests.items()
        for axis in axes
        if list_axis_sizes(study, axis)
    )


def build_run_at(
    study: Study,
    axis: Axis,
    size: int,
    point: Params,
    seed: int,
    parametrization: Parametrization | None = None,
) -> RunSpec:
    """Return a run with the base's settings except for one axis."""
    plan, base = study.plan, get_base_sizes(study)
    shape, batch, num_steps = study.base_shape, base.batch, plan.proxy.num_steps
    if axis == "width":
        shape = study.build_shape(size)
    elif axis == "depth":
        shape = study.base_shape.at_depth(size)
    elif size == base.get_size(axis):
        pass  # with a batch warmup, `count_steps` may not return the base's own number of steps
    elif axis == "batch":
        # The total tokens stay the same. Dividing and multiplying by `base.batch` cancels except
        # for rounding. It must stay: otherwise a step count could change, and with it the ids of
        # runs in older ledgers.
        batch, num_steps = size, plan.count_steps(base.duration / base.batch * base.batch / size)
    else:
        num_steps = count_steps(study, size)
    return study.build_run(
        shape=shape,
        point=point,
        seed=seed,
        num_steps=num_steps,
        batch_tokens=batch,
        parametrization=parametrization,
    )
