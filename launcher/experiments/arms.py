"""What the verdicts on transfer vary: axes with their sizes, and runs that differ from the base in one. No torch.

A transfer test is a hyperparameter over an axis; its runs lie in one arm, or in two where there is a control.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.plan.study import Study, base_duration, moved
from proxies.core.hyperparameters import HYPERPARAMETERS
from proxies.core.rules import Parametrization, scaling
from proxies.core.spec import RunResult, RunSpec
from sweeps.search.space import Params
from transfer.question import Axis, Hyperparameter, Point


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """Runs along one axis, each with the point it gives the verdict."""

    axis: Axis
    specs: tuple[tuple[RunSpec, float], ...]
    """With the log2 of its value at the base, exact."""

    def points(self, results: Mapping[str, RunResult]) -> list[Point]:
        """A point for every run that has an outcome; diverged ones count, failed ones do not."""
        return [
            Point(size=self.size(spec), log2_value=log2_value, loss_nats=result.loss_nats, seed=spec.seed)
            for spec, log2_value in self.specs
            if (result := results.get(spec.id)) is not None and result.status != "failed"
        ]

    def size(self, spec: RunSpec) -> int:
        """Where a run lies on the arm's axis."""
        return size_of(spec, self.axis)

    def done(self, results: Mapping[str, RunResult]) -> bool:
        """Whether every run has an outcome."""
        return all(spec.id in results for spec, _ in self.specs)


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferTest:
    """One hyperparameter over one axis, as far as results tell which runs it needs."""

    hyperparameter: Hyperparameter
    axis: Axis
    arm: Arm
    control: Arm | None = None

    @property
    def name(self) -> str:
        """As one says it: `clip norm over width`."""
        return f"{self.hyperparameter.replace('_', ' ')} over {self.axis}"

    @property
    def specs(self) -> list[RunSpec]:
        """Every run, those of the control arm included."""
        return [spec for arm in (self.arm, self.control) if arm for spec, _ in arm.specs]

    def done(self, results: Mapping[str, RunResult]) -> bool:
        """Whether every run has an outcome."""
        return all(spec.id in results for spec in self.specs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """A model and its training by what grows, in the units of the axes."""

    width: int
    depth: int
    batch: int
    duration: int

    def along(self, axis: Axis) -> int:
        """The size on an axis."""
        found: int = getattr(self, axis)
        return found


def base_sizes(study: Study) -> Sizes:
    """Where hyperparameters are searched."""
    proxy, tokens = study.plan.proxy, base_duration(study)
    return Sizes(width=proxy.base_width, depth=study.plan.model.num_layers, batch=proxy.batch_tokens, duration=tokens)


def carried_rate(rate: float, powers: Mapping[Axis, float], base: Sizes, there: Sizes) -> float:
    """A learning rate set at the base, by the measured rules; what the parametrization does comes on top of it.

    The one rule for the main run and for every rung of the ladder.
    """
    for axis, power in powers.items():
        rate = moved(rate, there.along(axis) / base.along(axis), power)
    return rate


def size_of(spec: RunSpec, axis: Axis) -> int:
    """Where a run lies on an axis."""
    sizes: dict[Axis, int] = {
        "width": spec.shape.width,
        "depth": spec.shape.num_layers,
        "batch": spec.batch_tokens,
        "duration": spec.num_tokens,
    }
    return sizes[axis]


def axis_sizes(study: Study, axis: Axis) -> tuple[int, ...]:
    """Sizes at which the plan wants the learning rate's valley, ascending; none: not tested."""
    transfer, base, plan = study.plan.transfer, base_sizes(study), study.plan
    command = plan.command
    if command is not None and not command.reaches(_TOLD[axis]):
        return ()
    if axis == "width":
        found: tuple[int, ...] = transfer.widths
    elif axis == "depth":
        found = transfer.depths
    elif axis == "batch":
        found = tuple(round(ratio * base.batch) for ratio in transfer.batches)
    else:
        found = tuple(int(base.batch * plan.schedule(count, 0.0).num_full_batches) for count in _counts(study))
    return tuple(sorted(found))


_TOLD: dict[Axis, str] = {
    "width": "width", "depth": "num_layers", "batch": "batch_tokens", "duration": "num_steps",
}  # fmt: skip


def wanted_tests(study: Study) -> tuple[tuple[Hyperparameter, Axis], ...]:
    """What the plan wants tested, and its trainer can be told: the learning rate's first, over width first of all."""
    axes: tuple[Axis, ...] = ("width", "duration", "batch", "depth")
    wanted: list[tuple[Hyperparameter, Axis]] = [("learning_rate", axis) for axis in axes if axis_sizes(study, axis)]
    command = study.plan.command
    for name, over in study.plan.transfer.hyperparameters.items():
        if command is None or command.reaches(HYPERPARAMETERS[name].told_as):
            wanted += [(name, axis) for axis in over if axis_sizes(study, axis)]
    return tuple(wanted)


def run_at(
    study: Study, axis: Axis, size: int, point: Params, seed: int, parametrization: Parametrization | None = None
) -> RunSpec:
    """A run of the base's settings but for one axis."""
    plan, base = study.plan, base_sizes(study)
    batches = base.duration / base.batch
    shape, batch, num_steps = study.base_shape, base.batch, plan.proxy.num_steps
    if axis == "width":
        shape = study.shape(size)
    elif axis == "depth":
        shape = study.base_shape.at_depth(size)
    elif size == base.along(axis):
        pass  # where the batch warms up, `steps_for` need not come back to the base's own steps
    elif axis == "batch":
        batch, num_steps = size, plan.steps_for(batches * base.batch / size)
    else:
        num_steps = _steps(study, size)
    return study.run(
        shape=shape, point=point, seed=seed, num_steps=num_steps, batch_tokens=batch, parametrization=parametrization
    )


def _steps(study: Study, tokens: int) -> int:
    """Steps of a duration: the plan's own where it is one of the plan's."""
    plan, batch = study.plan, study.plan.proxy.batch_tokens
    for count in _counts(study):
        if int(batch * plan.schedule(count, 0.0).num_full_batches) == tokens:
            return count
    return plan.steps_for(tokens / batch)


def _counts(study: Study) -> list[int]:
    """Steps of the plan's durations."""
    return [max(1, round(ratio * study.plan.proxy.num_steps)) for ratio in study.plan.transfer.durations]


def built_in(study: Study, name: Hyperparameter, axis: Axis) -> float:
    """The power by which the plan's parametrization moves a value, of every kind of parameter, along an axis."""
    powers = scaling(study.plan.parametrization, name)
    return {"batch": powers.batch, "duration": powers.duration}.get(axis, 0.0)


def measured(study: Study, axis: Axis) -> bool:
    """Whether the exponent of the learning rate over an axis is measured and used."""
    return axis in study.plan.transfer.measured_rules


def base_value(study: Study, name: Hyperparameter, point: Params) -> float:
    """A hyperparameter as the plan or the search sets it."""
    if name in point:
        return point[name]
    value: float = getattr(study.hparams(point), name)
    return value
