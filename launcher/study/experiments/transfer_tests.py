"""The runs of each transfer test (a grid of values at every size along one axis, and further runs
that a verdict asks for), and the verdict on them.

A test is a hyperparameter over an axis, with a grid of runs. The learning rate over width has a
second grid, the control, in the standard parametrization. The runs differ from the base in one
axis, and use the point that the search settled on. The rule that carries the warmup over duration
is decided first, because runs of other durations follow it. Every list of runs is a pure function
of the plan and of results, so a resumed study asks for exactly the runs that an uninterrupted one
would. This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forerun._launcher.study.experiments.sizes import (
    Sizes,
    build_run_at,
    count_steps,
    get_base_sizes,
    get_base_value,
    list_axis_sizes,
    list_tests,
)
from forerun._launcher.study.experiments.warmup_rule import (
    MAX_COMPARISON_SHARE,
    WarmupRule,
    WarmupRuleName,
    compare_warmup_rules,
    compute_warmup_power,
    set_proxy_warmup,
)
from forerun._launcher.study.plan.study import Study
from forerun._proxies.core.hyperparameters import (
    LEARNING_RATE,
    SHARE_OF_STEPS,
    WARMUP,
    get_hyperparameter,
)
from forerun._proxies.core.rules import get_scaling
from forerun._proxies.core.spec import RunResult, RunSpec
from forerun._sweeps.search.space import Params
from forerun._transfer.question import Axis, Hyperparameter, Point, Question, from_log2, to_log2

if TYPE_CHECKING:
    from forerun._transfer.verdict.verdict import Verdict

FIRST_SIZES = 2
"""Number of smallest sizes that get the whole grid around the search's best value. Larger sizes get
fewer values, around the optimum that is predicted from the smaller sizes.
"""
ROUNDING_OCTAVES = 0.25
"""Step in octaves to which that predicted optimum is rounded, because the last bits of a fit must
not change which runs are asked for.
"""
MAX_STEP_SHARE = 0.95
"""Maximum value of a hyperparameter that is a share of the steps. A longer warmup would leave
almost no steps at the full learning rate.
"""
DIGITS = 6
"""Number of significant digits of a value at an offset."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunGrid:
    """Runs along one axis, each with its value of the tested hyperparameter."""

    axis: Axis
    specs: tuple[tuple[RunSpec, float], ...]
    """Pairs of a run and the log2 of its value, as it is set at the base and before rounding."""

    def build_points(self, results: Mapping[str, RunResult]) -> list[Point]:
        """Return a point for every run that has a result; diverged runs count, failed ones do
        not.
        """
        return [
            Point(
                size=self.get_size(spec),
                log2_value=log2_value,
                loss_nats=result.loss_nats,
                seed=spec.seed,
            )
            for spec, log2_value in self.specs
            if (result := results.get(spec.id)) is not None and result.status != "failed"
        ]

    def get_size(self, spec: RunSpec) -> int:
        """Return the size of a run on the axis."""
        return Sizes.from_spec(spec).get_size(self.axis)

    def is_done(self, results: Mapping[str, RunResult]) -> bool:
        """Return whether every run has a result."""
        return all(spec.id in results for spec, _ in self.specs)


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferTest:
    """One hyperparameter over one axis, as far as results tell which runs it needs."""

    hyperparameter: Hyperparameter
    axis: Axis
    grid: RunGrid
    control: RunGrid | None = None

    @property
    def name(self) -> str:
        """Name of the test for people, such as `clip norm over width`."""
        return f"{get_hyperparameter(self.hyperparameter).label} over {self.axis}"

    @property
    def specs(self) -> list[RunSpec]:
        """All runs, including those of the control."""
        return [spec for grid in (self.grid, self.control) if grid for spec, _ in grid.specs]

    def is_done(self, results: Mapping[str, RunResult]) -> bool:
        """Return whether every run has a result."""
        return all(spec.id in results for spec in self.specs)


@dataclass(frozen=True, kw_only=True, slots=True)
class GridSettings:
    """The settings that all runs of a study's tests share."""

    study: Study
    results: Mapping[str, RunResult]
    best: Params
    """Point that the search settled on."""
    target: Sizes
    """Sizes of the main run."""
    rounds: int
    """Number of rounds in which a verdict may ask for more runs."""
    warmup: WarmupRuleName = "share"
    """Rule that carries the warmup over duration."""
    assumes_base_optimum: bool = False
    """Whether the grids of larger sizes are built before any result, as if every size had the
    optimum of the base.
    """


def build_transfer_test(settings: GridSettings, name: Hyperparameter, axis: Axis) -> TransferTest:
    """Return the test of a hyperparameter over an axis; the learning rate over width has a
    control.
    """
    control = None
    if name == LEARNING_RATE:
        grid = _grid_rates(settings, axis)
        if axis == "width" and settings.study.has_control:
            control = _grid_control_rates(settings)
    else:
        grid = _grid_values(settings, name, axis)
    return TransferTest(hyperparameter=name, axis=axis, grid=grid, control=control)


def build_first_runs(study: Study, point: Params, target: Sizes) -> dict[str, list[RunSpec]]:
    """Return the runs that each test needs for its first verdict, by name of the test. They are
    estimated before any run has ended.
    """
    settings = GridSettings(
        study=study, results={}, best=point, target=target, rounds=0, assumes_base_optimum=True
    )
    tests = [build_transfer_test(settings, name, axis) for name, axis in list_tests(study)]
    return {test.name: test.specs for test in tests}


def build_warmup_runs(
    study: Study, point: Params, target: Sizes, results: Mapping[str, RunResult]
) -> tuple[tuple[RunSpec, ...], WarmupRule | None]:
    """Compare the two rules that carry a warmup over duration: the same share of the steps, or the
    same number of tokens. The runs cost at most `MAX_COMPARISON_SHARE` of the FLOPs of all tests.

    Returns:
        The runs, and the better rule once all of them have ended.
    """
    if study.plan.command is not None and not study.plan.command.can_receive("warmup_steps"):
        return (), WarmupRule(rule="share")
    flops = {
        spec.id: spec.flops
        for specs in build_first_runs(study, point, target).values()
        for spec in specs
    }
    return compare_warmup_rules(
        study,
        point,
        list_axis_sizes(study, "duration"),
        MAX_COMPARISON_SHARE * sum(flops.values()),
        functools.partial(build_run_at, study, "duration"),
        results,
    )


# ---- Grids ----


class _GridBuilder:
    """A builder of the grid of one test: it collects the number of seeds of each value at each
    size, and turns them into runs.
    """

    def __init__(
        self, settings: GridSettings, name: Hyperparameter, axis: Axis, *, control: bool = False
    ) -> None:
        self._settings, self._name, self._axis, self._control = settings, name, axis, control
        # Number of seeds by size and log2 of the value at the base
        self._num_seeds: dict[tuple[int, float], int] = {}

    def add(self, size: int, center: float, offsets: Iterable[float], num_seeds: int) -> None:
        """Add values at a size, each with `num_seeds` seeds.

        Args:
            size: Size on the axis.
            center: Log2 of the value around which the grid lies.
            offsets: Offsets of the values from the center, in octaves.
            num_seeds: Number of seeds of each value.
        """
        self._num_seeds.update({(size, center + offset): num_seeds for offset in offsets})

    def build(self) -> RunGrid:
        """Return the runs of the grid, without those that are not possible."""
        settings, name, axis = self._settings, self._name, self._axis
        study, base = settings.study, get_base_sizes(settings.study).get_size(axis)
        exact = get_base_value(study, name, settings.best)
        specs: dict[str, tuple[RunSpec, float]] = {}
        for (size, log2_value), num_seeds in sorted(self._num_seeds.items()):
            if not _is_possible(study, name, axis, size, log2_value):
                continue
            value = exact  # the base's own value stays exact; others are rounded
            if name == LEARNING_RATE:
                value = 2.0**log2_value
            elif log2_value != to_log2(name, exact):
                value = get_hyperparameter(name).from_log2(log2_value, DIGITS)
            start = settings.best
            if axis == "duration":
                start = set_proxy_warmup(
                    study, settings.warmup, start, size, count_steps(study, size)
                )
            rules = study.control if self._control and size != base else None
            for seed in range(num_seeds):
                run = build_run_at(study, axis, size, {**start, name: value}, seed, rules)
                # Two warmups may round to the same number of steps: one run is one point.
                specs.setdefault(run.id, (run, log2_value))
        return RunGrid(axis=axis, specs=tuple(specs.values()))

    def extend(self) -> RunGrid:
        """Add the runs that the verdict asks for in the allowed rounds, and return all runs of the
        grid. Rounds beyond those of the plan may also add runs that only sharpen a verdict.
        """
        settings, name, axis = self._settings, self._name, self._axis
        for number in range(settings.rounds):
            grid = self.build()
            if not grid.is_done(settings.results) or not grid.build_points(settings.results):
                break
            verdict = _judge_so_far(settings, name, axis, grid)
            # The control's optima must be bracketed to be shown; its verdict may stay open.
            if self._control and all(optimum.status != "edge" for optimum in verdict.optima):
                break
            may_sharpen = number >= settings.study.plan.transfer.max_extensions
            before = dict(self._num_seeds)
            for asked in verdict.what_to_run:
                value = asked.size, asked.log2_value
                is_needed = asked.mends or may_sharpen
                if is_needed and _is_possible(settings.study, name, axis, *value):
                    self._num_seeds[value] = self._num_seeds.get(value, 0) + asked.num_seeds
            if self._num_seeds == before:
                break
        return self.build()


def _is_possible(
    study: Study, name: Hyperparameter, axis: Axis, size: int, log2_value: float
) -> bool:
    """Return whether a run with this value is possible."""
    value = from_log2(name, log2_value)
    hyperparameter = get_hyperparameter(name)
    if hyperparameter.unit == SHARE_OF_STEPS and value > MAX_STEP_SHARE:
        return False
    if hyperparameter.scale == "log2_complement" and not 0 < value < 1:
        return False
    # A batch must be whole sequences, in every stage of a batch warmup.
    return axis != "batch" or size % (study.plan.model.seq_len * study.plan.batch_stages) == 0


def _round_center(settings: GridSettings) -> float:
    """Return log2 of the search's best learning rate, rounded to a whole octave."""
    return float(round(math.log2(settings.best[LEARNING_RATE])))


def _grid_rates(settings: GridSettings, axis: Axis) -> RunGrid:
    """Return the learning rates over an axis: around the search's best at the first sizes, then
    around the prediction from smaller sizes.
    """
    study, base = settings.study, get_base_sizes(settings.study).get_size(axis)
    transfer, sizes = study.plan.transfer, list_axis_sizes(study, axis)
    center, grid = _round_center(settings), _GridBuilder(settings, LEARNING_RATE, axis)
    # With decay branches, the durations share a stable phase, and so they need the same rates.
    shares_phase = study.plan.proxy.decay_branches and axis == "duration"
    full_sizes = {base, *(sizes if shares_phase else sizes[:FIRST_SIZES])}
    # Sizes with the full grid come first, because the optima of the others are predicted from them.
    for size in sorted(sizes, key=lambda size: (size not in full_sizes, size)):
        # At the base, these runs are the same as those over width, so more seeds cost nothing.
        is_over_width = axis == "width" or size == base
        num_seeds = transfer.num_seeds if is_over_width else transfer.axis_num_seeds
        predicted: float | None = None
        if size not in full_sizes and settings.assumes_base_optimum:
            predicted = center
        elif size not in full_sizes:
            known = grid.build()
            if not known.is_done(settings.results):
                return known
            predicted = _predict_optimum(settings, known, axis, base, size)
        if predicted is None:
            grid.add(size, center, transfer.offsets_octaves, num_seeds)
        else:
            grid.add(size, predicted, transfer.narrow_offsets_octaves, num_seeds)
    return grid.extend()


def _predict_optimum(
    settings: GridSettings, known: RunGrid, axis: Axis, base: int, size: int
) -> float | None:
    """Return log2 of the optimum that the smaller sizes predict for this size, rounded to
    `ROUNDING_OCTAVES`; None if they predict none.
    """
    from forerun._transfer.verdict.verdict import MIN_DRAWS, judge

    question = Question(axis=axis, base_size=base, target_size=size, power=None)
    verdict = judge(known.build_points(settings.results), question, draws=MIN_DRAWS)
    if verdict.at_target is None:
        return None
    log2_optimum = float(verdict.at_target.line.at_target[0])
    return round(log2_optimum / ROUNDING_OCTAVES) * ROUNDING_OCTAVES


def _grid_control_rates(settings: GridSettings) -> RunGrid:
    """Return the control over width, in the standard parametrization. At the base both
    parametrizations are the same function and share runs.
    """
    base, transfer = settings.study.plan.proxy.base_width, settings.study.plan.transfer
    center = _round_center(settings)
    grid = _GridBuilder(settings, LEARNING_RATE, "width", control=True)
    grid.add(base, center, transfer.offsets_octaves, transfer.num_seeds)
    for width in transfer.control_widths:
        if width != base:
            grid.add(width, center, transfer.control_offsets_octaves, transfer.control_num_seeds)
    return grid.extend()


def _grid_values(settings: GridSettings, name: Hyperparameter, axis: Axis) -> RunGrid:
    """Return the grid of a hyperparameter other than the learning rate, around the value that the
    search settled on.
    """
    study, transfer = settings.study, settings.study.plan.transfer
    sizes = study.plan.hyperparameter_widths if axis == "width" else list_axis_sizes(study, axis)
    center = to_log2(name, get_base_value(study, name, settings.best))
    grid = _GridBuilder(settings, name, axis)
    for size in sizes:
        grid.add(size, center, transfer.hyperparameter_offsets_octaves, transfer.axis_num_seeds)
    return grid.extend()


# ---- Verdicts ----


def build_question(
    settings: GridSettings, name: Hyperparameter, axis: Axis, transferred: float | None
) -> Question:
    """Return the question that a test's runs must answer: whether the value set at the base still
    has a low enough regret at the target size.

    Args:
        settings: Settings of the test.
        name: Hyperparameter of the test.
        axis: Axis of the test.
        transferred: Log2 of the value set at the base; None for the optimum fitted there.
    """
    study, user_axes = settings.study, settings.study.plan.search.user_axes
    rules = study.plan.parametrization
    powers = user_axes[name].powers if name in user_axes else get_scaling(rules, name)
    power: float | None = 0.0
    if name == LEARNING_RATE and axis in study.plan.transfer.measured_rules:
        power = None
    elif name == WARMUP and axis == "duration":
        power = compute_warmup_power(
            study, settings.warmup, settings.best, settings.target.duration
        )
    return Question(
        axis=axis,
        hyperparameter=name,
        base_size=get_base_sizes(study).get_size(axis),
        target_size=settings.target.get_size(axis),
        transferred_log2=transferred,
        power=power,
        built_in={"batch": powers.batch, "duration": powers.duration}.get(axis, 0.0),
        margin_nats=study.plan.transfer.margin_nats,
        level=study.plan.transfer.level,
        untrained_nats=math.log(study.manifest.vocab_size),
    )


def _judge_so_far(
    settings: GridSettings, name: Hyperparameter, axis: Axis, grid: RunGrid
) -> Verdict:
    """Return the verdict that tells which runs are still needed."""
    from forerun._transfer.verdict.verdict import judge  # numpy and scipy are not for `--help`

    study, points = settings.study, grid.build_points(settings.results)
    if name != LEARNING_RATE:
        value = to_log2(name, get_base_value(study, name, settings.best))
        return judge(points, build_question(settings, name, axis, value))
    # The regrets over all axes add up and must stay below the margin together, so each axis gets an
    # equal share of the margin.
    num_axes = sum(tested == name for tested, _ in list_tests(study))
    question = build_question(settings, name, axis, None)
    margin_nats = question.margin_nats / num_axes
    verdict = judge(points, dataclasses.replace(question, margin_nats=margin_nats))
    return judge(points, question) if verdict.outcome == "drifts" else verdict


def judge_test(settings: GridSettings, test: TransferTest, transferred: float | None) -> Verdict:
    """Return the verdict on a test's runs, with the estimates behind it. `transferred` is log2 of
    the value set at the base; None for the optimum fitted there.
    """
    from forerun._transfer.verdict.verdict import judge

    control = test.control.build_points(settings.results) if test.control else ()
    question = build_question(settings, test.hyperparameter, test.axis, transferred)
    return judge(test.grid.build_points(settings.results), question, control_points=control)
