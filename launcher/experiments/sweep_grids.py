"""The runs of each transfer test: grids of values at every size along one axis, and the further
runs that a verdict asks for. No torch.

A test is a hyperparameter over an axis. Its runs form one condition, or two with a control; they
differ from the base in one axis, and use the point that the search settled on. The rule that
carries the warmup over duration is decided first, because runs of other durations follow it. Every
list of runs is a pure function of the plan and of results, so a resumed study asks for exactly the
runs that an uninterrupted one would.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.experiments.conventions import (
    WARMUP_SHARE,
    Rule,
    WarmupRule,
    as_proxy,
    compare_warmup_rules,
    power_of,
)
from launcher.plan.study import Study, base_duration, moved
from proxies.core.hyperparameters import LEARNING_RATE, SHARE_OF_STEPS, hyperparameter_named
from proxies.core.rules import Parametrization, scaling
from proxies.core.spec import RunResult, RunSpec
from sweeps.search.space import Params
from transfer.question import CORNERS, Axis, Hyperparameter, Point, Question, from_log2, to_log2

if TYPE_CHECKING:
    from transfer.verdict.verdict import DetailedVerdict, Verdict

FIRST_SIZES = 2
"""Number of sizes that get the whole grid around the search's best; larger sizes need less, around
the prediction from these.
"""
ROUNDING_OCTAVES = 0.25
"""Step in octaves to which that prediction is rounded, because the last bits of a fit must not
change which runs are asked for.
"""
MOST_OF_STEPS = 0.95
"""Maximum value of a hyperparameter that is a share of the steps."""
DIGITS = 6
"""Number of significant digits of a value at an offset."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """Runs along one axis, with the value that each gives the verdict."""

    axis: Axis
    specs: tuple[tuple[RunSpec, float], ...]
    """Runs, each with the exact log2 of its value at the base."""

    def points(self, results: Mapping[str, RunResult]) -> list[Point]:
        """Return a point for every run that has a result; diverged runs count, failed ones do
        not.
        """
        return [
            Point(
                size=self.size(spec),
                log2_value=log2_value,
                loss_nats=result.loss_nats,
                seed=spec.seed,
            )
            for spec, log2_value in self.specs
            if (result := results.get(spec.id)) is not None and result.status != "failed"
        ]

    def size(self, spec: RunSpec) -> int:
        """Return the size of a run on the axis."""
        return Sizes.of(spec).along(self.axis)

    def done(self, results: Mapping[str, RunResult]) -> bool:
        """Return whether every run has a result."""
        return all(spec.id in results for spec, _ in self.specs)


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferTest:
    """One hyperparameter over one axis, as far as results tell which runs it needs."""

    hyperparameter: Hyperparameter
    axis: Axis
    condition: Condition
    control: Condition | None = None

    @property
    def name(self) -> str:
        """Name of the test for people, such as `clip norm over width`."""
        return f"{hyperparameter_named(self.hyperparameter).label} over {self.axis}"

    @property
    def specs(self) -> list[RunSpec]:
        """All runs, including those of the control condition."""
        return [
            spec
            for condition in (self.condition, self.control)
            if condition
            for spec, _ in condition.specs
        ]

    def done(self, results: Mapping[str, RunResult]) -> bool:
        """Return whether every run has a result."""
        return all(spec.id in results for spec in self.specs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The sizes of a model and its training, in the units of the axes."""

    width: int
    depth: int
    batch: int
    duration: int

    @classmethod
    def of(cls, spec: RunSpec) -> Sizes:
        """Return the sizes of a run."""
        return cls(
            width=spec.shape.width,
            depth=spec.shape.num_layers,
            batch=spec.batch_tokens,
            duration=spec.num_tokens,
        )

    def along(self, axis: Axis) -> int:
        """Return the size on an axis."""
        found: int = getattr(self, axis)
        return found


def base_sizes(study: Study) -> Sizes:
    """Return the sizes at which hyperparameters are searched."""
    proxy, tokens = study.plan.proxy, base_duration(study)
    return Sizes(
        width=proxy.base_width,
        depth=study.plan.model.num_layers,
        batch=proxy.batch_tokens,
        duration=tokens,
    )


def transferred_rate(rate: float, powers: Mapping[Axis, float], base: Sizes, there: Sizes) -> float:
    """Return a learning rate set at the base, scaled by the measured rules. The parametrization's
    own scaling is applied in addition.

    This one rule is used for the main run and for every rung of the ladder.
    """
    for axis, power in powers.items():
        rate = moved(rate, there.along(axis) / base.along(axis), power)
    return rate


def axis_sizes(study: Study, axis: Axis) -> tuple[int, ...]:
    """Return the sizes at which the plan asks for the learning-rate curve, ascending; empty if the
    axis is not tested.
    """
    plan, transfer = study.plan, study.plan.transfer
    if plan.command is not None and not plan.command.reaches(_TOLD[axis]):
        return ()
    found: dict[Axis, Iterable[int]] = {
        "width": transfer.widths,
        "depth": plan.tested_depths,
        "batch": (round(ratio * plan.proxy.batch_tokens) for ratio in transfer.batches),
        "duration": map(plan.num_tokens, _counts(study)),
    }
    return tuple(sorted(found[axis]))


_TOLD: dict[Axis, str] = {
    "width": "width",
    "depth": "num_layers",
    "batch": "batch_tokens",
    "duration": "num_steps",
}


def wanted_tests(study: Study) -> tuple[tuple[Hyperparameter, Axis], ...]:
    """Return the tests that the plan asks for and its trainer can run: those of the learning rate
    first, and among them the one over width.
    """
    axes: tuple[Axis, ...] = ("width", "duration", "batch", "depth")
    needed: list[tuple[Hyperparameter, Axis]] = [
        ("learning_rate", axis) for axis in axes if axis_sizes(study, axis)
    ]
    command = study.plan.command
    for name, over in study.plan.transfer.hyperparameters.items():
        if command is None or command.reaches(hyperparameter_named(name).told_as):
            needed += [(name, axis) for axis in over if axis_sizes(study, axis)]
    return tuple(needed)


def run_at(
    study: Study,
    axis: Axis,
    size: int,
    point: Params,
    seed: int,
    parametrization: Parametrization | None = None,
) -> RunSpec:
    """Return a run with the base's settings except for one axis."""
    plan, base = study.plan, base_sizes(study)
    batches = base.duration / base.batch
    shape, batch, num_steps = study.base_shape, base.batch, plan.proxy.num_steps
    if axis == "width":
        shape = study.shape(size)
    elif axis == "depth":
        shape = study.base_shape.at_depth(size)
    elif size == base.along(axis):
        pass  # with a batch warmup, `steps_for` may not return the base's own number of steps
    elif axis == "batch":
        batch, num_steps = size, plan.steps_for(batches * base.batch / size)
    else:
        num_steps = _steps(study, size)
    return study.run(
        shape=shape,
        point=point,
        seed=seed,
        num_steps=num_steps,
        batch_tokens=batch,
        parametrization=parametrization,
    )


def _steps(study: Study, tokens: int) -> int:
    """Return the number of steps of a duration: the plan's own number for one of the plan's
    durations.
    """
    plan = study.plan
    own = [count for count in _counts(study) if plan.num_tokens(count) == tokens]
    return own[0] if own else plan.steps_for(tokens / plan.proxy.batch_tokens)


def _counts(study: Study) -> list[int]:
    """Return the numbers of steps of the plan's durations."""
    return [
        max(1, round(ratio * study.plan.proxy.num_steps)) for ratio in study.plan.transfer.durations
    ]


def base_value(study: Study, name: Hyperparameter, point: Params) -> float:
    """Return a hyperparameter's value at the base, as the search or the plan sets it."""
    if name in point:
        return point[name]
    if name in study.plan.search.own:
        return study.plan.search.own[name].value(name, None).value
    value: float = getattr(study.hparams(point), name)
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedSettings:
    """The settings that all runs of a study's tests share."""

    study: Study
    results: Mapping[str, RunResult]
    best: Params
    """Point that the search settled on."""
    target: Sizes
    rounds: int
    """Number of rounds in which a verdict may ask for more runs."""
    warmup: Rule = "share"
    """Rule that carries the warmup over duration."""
    foreseen: bool = False
    """Whether to ask for larger sizes' grids without the smaller ones' optima, as if these were at
    the base's optimum.
    """


def transfer_test(setting: SharedSettings, name: Hyperparameter, axis: Axis) -> TransferTest:
    """Return the test of a hyperparameter over an axis; the learning rate over width has a control
    condition.
    """
    rate = name == "learning_rate"
    condition = _rates(setting, axis) if rate else _values(setting, name, axis)
    control = _control(setting) if rate and axis == "width" and setting.study.has_control else None
    return TransferTest(hyperparameter=name, axis=axis, condition=condition, control=control)


def _rates(setting: SharedSettings, axis: Axis) -> Condition:
    study, base = setting.study, base_sizes(setting.study).along(axis)
    transfer = study.plan.transfer
    centre = float(round(math.log2(setting.best["learning_rate"])))
    cells: dict[tuple[int, float], int] = {}
    sizes = axis_sizes(study, axis)
    # With decay branches, runs of one rate share their stable phase.
    branches = study.plan.proxy.decay_branches and axis == "duration"
    full = {base, *(sizes if branches else sizes[:FIRST_SIZES])}
    num_seeds = transfer.num_seeds if axis == "width" else transfer.axis_num_seeds

    def grid(size: int, around: float, offsets: tuple[float, ...]) -> None:
        # At the base these runs are also those over width, so more seeds cost nothing.
        count = transfer.num_seeds if size == base else num_seeds
        cells.update({(size, around + offset): count for offset in offsets})

    for size in sizes:
        if size in full:
            grid(size, centre, transfer.offsets_octaves)
    for size in sizes:
        if size in full:
            continue
        predicted: float | None = centre
        if not setting.foreseen:
            known = _condition(setting, "learning_rate", axis, cells)
            if not known.done(setting.results):
                return known
            predicted = _predicted(setting, known, axis, base, size)
        if predicted is None:
            grid(size, centre, transfer.offsets_octaves)
        else:
            grid(size, predicted, transfer.narrow_offsets_octaves)
    return _extended(setting, "learning_rate", axis, cells)


def _predicted(
    setting: SharedSettings, known: Condition, axis: Axis, base: int, size: int
) -> float | None:
    """Return the optimum that the smaller sizes predict for this size, rounded to a quarter octave;
    None if they predict none.
    """
    from transfer.verdict.verdict import MIN_DRAWS, examine

    question = Question(axis=axis, base_size=base, target_size=size, power=None)
    found = examine(known.points(setting.results), question, draws=MIN_DRAWS)
    if found.at_target is None:
        return None
    return round(float(found.at_target.line.at_target[0]) / ROUNDING_OCTAVES) * ROUNDING_OCTAVES


def _control(setting: SharedSettings) -> Condition:
    """Return the control over width, in the standard parametrization. At the base both
    parametrizations are the same function and share runs.
    """
    study, base = setting.study, setting.study.plan.proxy.base_width
    transfer = study.plan.transfer
    centre = float(round(math.log2(setting.best["learning_rate"])))
    cells = {}
    for width in dict.fromkeys((base, *transfer.control_widths)):
        own = width != base
        for offset in transfer.control_offsets_octaves if own else transfer.offsets_octaves:
            cells[width, centre + offset] = (
                transfer.control_num_seeds if own else transfer.num_seeds
            )
    return _extended(setting, "learning_rate", "width", cells, control=True)


def _values(setting: SharedSettings, name: Hyperparameter, axis: Axis) -> Condition:
    """Return the condition of another hyperparameter over an axis, around the value that the search
    settled on.
    """
    study, transfer = setting.study, setting.study.plan.transfer
    sizes = study.plan.hyperparameter_widths if axis == "width" else axis_sizes(study, axis)
    here = to_log2(name, base_value(study, name, setting.best))
    cells = {
        (size, here + offset): transfer.axis_num_seeds
        for size in sizes
        for offset in transfer.hyperparameter_offsets_octaves
    }
    return _extended(setting, name, axis, cells)


def _extended(
    setting: SharedSettings,
    name: Hyperparameter,
    axis: Axis,
    cells: dict[tuple[int, float], int],
    *,
    control: bool = False,
) -> Condition:
    """Return the grid with the runs that its verdict asks for, for as many rounds as allowed.
    Rounds beyond the plan's may also add runs that sharpen a verdict.
    """
    plain = setting.study.plan.transfer.max_extensions
    for number in range(setting.rounds):
        condition = _condition(setting, name, axis, cells, control=control)
        if not condition.done(setting.results) or not condition.points(setting.results):
            break
        verdict = _judged_so_far(setting, name, axis, condition)
        # The control's optima must be bracketed to be shown; its verdict may stay open.
        enough = control and all(optimum.status != "edge" for optimum in verdict.optima)
        asked = [
            (s.size, s.log2_value, s.num_seeds)
            for s in verdict.what_to_run
            if (s.mends or number >= plain)
            and _fits(setting.study, name, axis, s.size, s.log2_value)
        ]
        if enough or not asked:
            break
        for size, log2_value, more in asked:
            cells[size, log2_value] = cells.get((size, log2_value), 0) + more
    return _condition(setting, name, axis, cells, control=control)


def _judged_so_far(
    setting: SharedSettings, name: Hyperparameter, axis: Axis, condition: Condition
) -> Verdict:
    """Return the verdict that tells which runs are still needed."""
    from transfer.verdict.verdict import judge  # numpy and scipy are not for `--help`

    if name != "learning_rate":
        own = to_log2(name, base_value(setting.study, name, setting.best))
        return judge(condition.points(setting.results), question_of(setting, name, axis, own))
    # The regrets over all axes add up and must stay below the margin together, so each axis gets an
    # equal share of the margin.
    num_axes = sum(tested == name for tested, _ in wanted_tests(setting.study))
    question, points = question_of(setting, name, axis, None), condition.points(setting.results)
    found = judge(
        points, dataclasses.replace(question, margin_nats=question.margin_nats / num_axes)
    )
    return judge(points, question) if found.outcome == "drifts" else found


def question_of(
    setting: SharedSettings, name: Hyperparameter, axis: Axis, transferred: float | None
) -> Question:
    """Return the question that a test's runs must answer."""
    study, base = setting.study, base_sizes(setting.study)
    own = study.plan.search.own
    powers, power = (
        own[name].powers if name in own else scaling(study.plan.parametrization, name),
        0.0,
    )
    if name == WarmupRule.HYPERPARAMETER and axis == "duration":
        power = power_of(study, setting.warmup, setting.best, setting.target.duration)
    measured = name == "learning_rate" and axis in study.plan.transfer.measured_rules
    return Question(
        axis=axis,
        hyperparameter=name,
        base_size=base.along(axis),
        target_size=setting.target.along(axis),
        transferred_log2=transferred,
        power=None if measured else power,
        built_in={"batch": powers.batch, "duration": powers.duration}.get(axis, 0.0),
        margin_nats=study.plan.transfer.margin_nats,
        level=study.plan.transfer.level,
        untrained_nats=math.log(study.manifest.vocab_size),
    )


def _fits(study: Study, name: Hyperparameter, axis: Axis, size: int, log2_value: float) -> bool:
    """Return whether a run with this value is possible."""
    value = from_log2(name, log2_value)
    one = hyperparameter_named(name)
    if one.unit == SHARE_OF_STEPS and value > MOST_OF_STEPS:
        return False
    if one.scale == "log2_complement" and not 0 < value < 1:
        return False
    return axis != "batch" or size % (study.plan.model.seq_len * study.plan.batch_stages) == 0


def _condition(
    setting: SharedSettings,
    name: Hyperparameter,
    axis: Axis,
    cells: Mapping[tuple[int, float], int],
    *,
    control: bool = False,
) -> Condition:
    study, base = setting.study, base_sizes(setting.study).along(axis)
    own, specs = base_value(study, name, setting.best), list[tuple[RunSpec, float]]()
    known = set[str]()
    for (size, log2_value), num_seeds in sorted(cells.items()):
        if not _fits(study, name, axis, size, log2_value):
            continue
        value = own  # the base's own value stays exact; others are rounded
        if name == "learning_rate":
            value = 2.0**log2_value
        elif log2_value != to_log2(name, own):
            value = hyperparameter_named(name).from_log2(log2_value, DIGITS)
        rules = study.control if control and size != base else None
        start = setting.best
        if axis == "duration":
            start = as_proxy(study, setting.warmup, start, size, _steps(study, size))
        point = {**start, name: value}
        runs = [run_at(study, axis, size, point, seed, rules) for seed in range(num_seeds)]
        # Two warmups may round to the same number of steps: one run is one point.
        specs += [(run, log2_value) for run in runs if run.id not in known]
        known.update(run.id for run in runs)
    return Condition(axis=axis, specs=tuple(specs))


@dataclass(frozen=True, kw_only=True, slots=True)
class RatePair:
    """The learning rate together with a value of the plan's own axes that is tested over width."""

    other: str
    corners: tuple[tuple[int, tuple[int, int], RunSpec], ...]
    """Seed, offsets in octaves, and run at the base, for each corner of the square."""

    @property
    def name(self) -> str:
        """Name of the pair for people."""
        return f"learning rate with {hyperparameter_named(self.other).label}"

    @property
    def specs(self) -> list[RunSpec]:
        """All runs of the pair."""
        return [spec for _, _, spec in self.corners]

    def done(self, results: Mapping[str, RunResult]) -> bool:
        """Return whether every run has a result."""
        return all(spec.id in results for spec in self.specs)


def rate_pairs(setting: SharedSettings) -> tuple[RatePair, ...]:
    """Return the pairs of a plan: empty if it has no own axes, or tests none of them over width."""
    study, best = setting.study, setting.best
    tested = dict.fromkeys(name for name, axis in wanted_tests(study) if axis == "width")
    if LEARNING_RATE not in tested:
        return ()
    base, found = study.plan.proxy.base_width, []
    for name in tested:
        if name not in study.plan.search.own or base_value(study, name, best) <= 0:
            continue
        rate, value = best[LEARNING_RATE], to_log2(name, base_value(study, name, best))
        corners = []
        for seed in range(study.plan.transfer.axis_num_seeds):
            for up, other_up in CORNERS:
                off = hyperparameter_named(name).from_log2(value + other_up, DIGITS)
                point = {**best, LEARNING_RATE: float(f"{rate * 2.0**up:.{DIGITS}g}"), name: off}
                corners.append((seed, (up, other_up), run_at(study, "width", base, point, seed)))
        found.append(RatePair(other=name, corners=tuple(corners)))
    return tuple(found)


def first_runs(study: Study, point: Params, target: Sizes) -> dict[str, list[RunSpec]]:
    """Return the runs that each test's first verdict needs, before any run has ended, by name of
    the test.
    """
    setting = SharedSettings(
        study=study, results={}, best=point, target=target, rounds=0, foreseen=True
    )
    tests = [transfer_test(setting, name, axis) for name, axis in wanted_tests(study)]
    found = {test.name: test.specs for test in tests}
    return found | {pair.name: pair.specs for pair in rate_pairs(setting)}


def warmup_runs(
    study: Study, point: Params, target: Sizes, results: Mapping[str, RunResult]
) -> tuple[tuple[RunSpec, ...], WarmupRule | None]:
    """Compare a warmup's share with its number of tokens, within `WARMUP_SHARE` of the FLOPs of all
    tests. Return the runs, and the rule once all have ended.
    """
    if study.plan.command is not None and not study.plan.command.reaches("warmup_steps"):
        return (), WarmupRule(rule="share")
    tests = {
        spec.id: spec.flops for specs in first_runs(study, point, target).values() for spec in specs
    }
    return compare_warmup_rules(
        study,
        point,
        axis_sizes(study, "duration"),
        WARMUP_SHARE * sum(tests.values()),
        lambda size, there, seed: run_at(study, "duration", size, there, seed),
        results,
    )


def judged(
    setting: SharedSettings, test: TransferTest, transferred: float | None
) -> DetailedVerdict:
    """Return the verdict on a test's runs, with the estimates behind it."""
    from transfer.verdict.verdict import examine

    control = test.control.points(setting.results) if test.control else ()
    question = question_of(setting, test.hyperparameter, test.axis, transferred)
    return examine(test.condition.points(setting.results), question, control_points=control)
