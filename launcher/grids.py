"""Grids of runs for each test of transfer, and what its verdict asks for in addition. No torch.

The other hyperparameters come first, around the search's best trial: one trial's luck is not what a main run should
hang on, so a value that repeated runs find clearly better at the base takes its place. The learning rate's tests run at
these. Every list of runs is a pure function of the plan and of results, so a resumed study asks for exactly the runs an
uninterrupted one would.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.arms import (
    Arm,
    Sizes,
    TransferTest,
    axis_sizes,
    base_sizes,
    base_value,
    built_in,
    measured,
    run_at,
    wanted_tests,
)
from launcher.study import Study
from proxies.spec import RunResult, RunSpec
from sweeps.space import Params
from transfer.question import Axis, Hyperparameter, Question, from_log2, to_log2

if TYPE_CHECKING:
    from transfer.verdict import Judged, Verdict

FIRST_SIZES = 2
"""With the whole grid around the search's best; larger ones need less, around what these predict."""
ROUNDING_OCTAVES = 0.25
"""Of that prediction: the last bits of a fit must not change which runs are asked for."""
MOST_WARMUP_FRACTION = 0.95
DIGITS = 6
"""Of a value that an offset gives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What a test's runs have in common."""

    study: Study
    results: Mapping[str, RunResult]
    best: Params
    """Of the search."""
    point: Params
    """The same, with values that repeated runs found better: at which the learning rate's tests run."""
    target: Sizes
    rounds: int
    """How often a verdict may ask for more."""


def learning_rate_test(setting: Setting, axis: Axis) -> TransferTest:
    """The learning rate over an axis; over width with its control arm."""
    study = setting.study
    control = _control(setting) if axis == "width" and study.has_control else None
    return TransferTest(hyperparameter="learning_rate", axis=axis, arm=_rates(setting, axis), control=control)


def _rates(setting: Setting, axis: Axis) -> Arm:
    study, base = setting.study, base_sizes(setting.study).along(axis)
    transfer = study.plan.transfer
    centre = float(round(math.log2(setting.best["learning_rate"])))
    cells: dict[tuple[int, float], int] = {}
    sizes = axis_sizes(study, axis)
    full = {base, *sizes[:FIRST_SIZES]}
    num_seeds = transfer.num_seeds if axis == "width" else transfer.axis_num_seeds

    def grid(size: int, around: float, offsets: tuple[float, ...]) -> None:
        # At the base these are the runs over width: more seeds cost nothing.
        count = transfer.num_seeds if size == base else num_seeds
        cells.update({(size, around + offset): count for offset in offsets})

    for size in sizes:
        if size in full:
            grid(size, centre, transfer.offsets_octaves)
    for size in sizes:
        if size in full:
            continue
        known = _arm(setting, "learning_rate", axis, cells)
        if not known.done(setting.results):
            return known
        predicted = _predicted(setting, known, axis, base, size)
        if predicted is None:
            grid(size, centre, transfer.offsets_octaves)
        else:
            grid(size, predicted, transfer.narrow_offsets_octaves)
    return _extended(setting, "learning_rate", axis, cells)


def _predicted(setting: Setting, known: Arm, axis: Axis, base: int, size: int) -> float | None:
    """Where the smaller sizes' optima put this one's, to a quarter octave; None if they do not say."""
    from transfer.verdict import MIN_DRAWS, examine

    question = Question(axis=axis, base_size=base, target_size=size, power=None)
    found = examine(known.points(setting.results), question, draws=MIN_DRAWS)
    if found.at_target is None:
        return None
    return round(float(found.at_target.line.at_target[0]) / ROUNDING_OCTAVES) * ROUNDING_OCTAVES


def _control(setting: Setting) -> Arm:
    """The control arm over width, in standard form: at the base both are the same function, and share its runs."""
    study, base = setting.study, setting.study.plan.proxy.base_width
    transfer = study.plan.transfer
    centre = float(round(math.log2(setting.best["learning_rate"])))
    cells = {}
    for width in dict.fromkeys((base, *transfer.control_widths)):
        own = width != base
        for offset in transfer.control_offsets_octaves if own else transfer.offsets_octaves:
            cells[width, centre + offset] = transfer.control_num_seeds if own else transfer.num_seeds
    return _extended(setting, "learning_rate", "width", cells, control=True)


def other_test(setting: Setting, name: Hyperparameter, axis: Axis) -> TransferTest:
    """Another hyperparameter over an axis, around the search's best trial."""
    study, transfer = setting.study, setting.study.plan.transfer
    sizes = axis_sizes(study, axis)
    if axis == "width":
        sizes = study.plan.hyperparameter_widths
    here = to_log2(name, base_value(study, name, setting.best))
    cells = {
        (size, here + offset): transfer.axis_num_seeds
        for size in sizes
        for offset in transfer.hyperparameter_offsets_octaves
    }
    return TransferTest(hyperparameter=name, axis=axis, arm=_extended(setting, name, axis, cells))


def refined(setting: Setting, name: Hyperparameter, axis: Axis, arm: Arm) -> float:
    """The value to launch with, log2: the search's, unless its runs at the base say that another is clearly better."""
    from transfer.verdict import judge

    study = setting.study
    own = to_log2(name, base_value(study, name, setting.best))
    question = question_of(setting, name, axis, own)
    at_base = dataclasses.replace(question, target_size=question.base_size)
    points = arm.points(setting.results)
    verdict = judge(points, at_base) if points else None
    if verdict is None or verdict.regret_nats is None:
        return own
    if verdict.regret_nats.low <= 0:
        return own
    if verdict.bounded is not None:
        return verdict.bounded.best_log2
    optimum = next((o.log2_value for o in verdict.optima if o.size == question.base_size), None)
    return own if optimum is None else optimum


def _extended(
    setting: Setting, name: Hyperparameter, axis: Axis, cells: dict[tuple[int, float], int], *, control: bool = False
) -> Arm:  # fmt: skip
    """The grid with what its verdict asks for, as often as it may: beyond the plan's rounds, which mend what no verdict
    can be made from, for runs that sharpen it too.
    """
    plain = setting.study.plan.transfer.max_extensions
    for number in range(setting.rounds):
        arm = _arm(setting, name, axis, cells, control=control)
        if not arm.done(setting.results) or not arm.points(setting.results):
            break
        verdict = _judge_arm(setting, name, axis, arm, spent=number >= plain)
        # The control arm must be bracketed to be shown; it need not be decided.
        enough = control and all(optimum.status != "edge" for optimum in verdict.optima)
        asked = [
            (s.size, s.log2_value, s.num_seeds)
            for s in verdict.what_to_run
            if (s.mends or number >= plain) and _fits(setting.study, name, axis, s.size, s.log2_value)
        ]
        if enough or not asked:
            break
        for size, log2_value, more in asked:
            cells[size, log2_value] = cells.get((size, log2_value), 0) + more
    return _arm(setting, name, axis, cells, control=control)


def value_at(study: Study, name: Hyperparameter, start: Params, log2_value: float) -> float:
    """A value by its octaves, as it is run: the point's own exactly, others to some digits."""
    own = base_value(study, name, start)
    if log2_value == to_log2(name, own):
        return own
    if name in ("beta1", "beta2"):
        return 1 - float(f"{2.0**log2_value:.{DIGITS}g}")
    return float(f"{from_log2(name, log2_value):.{DIGITS}g}")


def _judge_arm(setting: Setting, name: Hyperparameter, axis: Axis, arm: Arm, *, spent: bool) -> Verdict:
    """The verdict that says which runs are still wanted."""
    from transfer.verdict import judge  # numpy and scipy are not for `--help`

    if name != "learning_rate":
        # The plan's rounds find the value to launch with; what is spent later is about that value.
        own = to_log2(name, base_value(setting.study, name, setting.point))
        value = own if spent else refined(setting, name, axis, arm)
        return judge(arm.points(setting.results), question_of(setting, name, axis, value))
    # What the axes cost adds up, and must be under the margin together: each may have its share, and no more.
    num_axes = sum(tested == name for tested, _ in wanted_tests(setting.study))
    question, points = question_of(setting, name, axis, None), arm.points(setting.results)
    found = judge(points, dataclasses.replace(question, margin_nats=question.margin_nats / num_axes))
    return judge(points, question) if found.outcome == "drifts" else found


def question_of(setting: Setting, name: Hyperparameter, axis: Axis, transferred: float | None) -> Question:
    """What is asked of a test's runs."""
    study, base = setting.study, base_sizes(setting.study)
    rate = name == "learning_rate"
    return Question(
        axis=axis,
        hyperparameter=name,
        base_size=base.along(axis),
        target_size=setting.target.along(axis),
        transferred_log2=transferred,
        power=None if rate and measured(study, axis) else 0.0,
        built_in=built_in(study, name, axis),
        margin_nats=study.plan.transfer.margin_nats,
        level=study.plan.transfer.level,
    )


def _fits(study: Study, name: Hyperparameter, axis: Axis, size: int, log2_value: float) -> bool:
    """Whether there can be such a run."""
    value = from_log2(name, log2_value)
    if name == "warmup_fraction" and value > MOST_WARMUP_FRACTION:
        return False
    if name in ("beta1", "beta2") and not 0 < value < 1:
        return False
    return axis != "batch" or size % (study.plan.model.seq_len * study.plan.batch_stages) == 0


def _arm(
    setting: Setting, name: Hyperparameter, axis: Axis, cells: Mapping[tuple[int, float], int], *, control: bool = False
) -> Arm:  # fmt: skip
    study, base = setting.study, base_sizes(setting.study).along(axis)
    start = setting.point if name == "learning_rate" else setting.best
    specs: list[tuple[RunSpec, float]] = []
    for (size, log2_value), num_seeds in sorted(cells.items()):
        if not _fits(study, name, axis, size, log2_value):
            continue
        value = 2.0**log2_value if name == "learning_rate" else value_at(study, name, start, log2_value)
        rules = study.control if control and size != base else None
        runs = [run_at(study, axis, size, {**start, name: value}, seed, rules) for seed in range(num_seeds)]
        # Two warmups may round to the same number of steps: one run is one point.
        known = {spec.id for spec, _ in specs}
        specs += [(run, log2_value) for run in runs if run.id not in known]
    return Arm(axis=axis, specs=tuple(specs))


def judged(setting: Setting, test: TransferTest, transferred: float | None) -> Judged:
    """The verdict on a test's runs, with what it was drawn from."""
    from transfer.verdict import examine

    control = test.control.points(setting.results) if test.control else ()
    question = question_of(setting, test.hyperparameter, test.axis, transferred)
    return examine(test.arm.points(setting.results), question, control_points=control)
