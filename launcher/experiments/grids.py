"""Grids of runs for each test of transfer, and what its verdict asks for in addition. No torch.

All run at the point that the search settled on. How the warmup is carried over duration is decided first, since runs of
other durations follow it. Every list of runs is a pure function of the plan and of results, so a resumed study asks for
exactly the runs an uninterrupted one would.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.experiments.arms import (
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
from launcher.experiments.warmup import CARRY_SHARE, Carry, Carrying, Rule, carrying, followed, power_of
from launcher.plan.study import Study
from proxies.core.hyperparameters import HYPERPARAMETERS, SHARE_OF_STEPS
from proxies.core.spec import RunResult, RunSpec
from sweeps.search.space import Params
from transfer.question import Axis, Hyperparameter, Question, from_log2, to_log2

if TYPE_CHECKING:
    from transfer.verdict.verdict import Judged, Verdict

FIRST_SIZES = 2
"""With the whole grid around the search's best; larger ones need less, around what these predict."""
ROUNDING_OCTAVES = 0.25
"""Of that prediction: the last bits of a fit must not change which runs are asked for."""
MOST_OF_STEPS = 0.95
DIGITS = 6
"""Of a value that an offset gives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What a test's runs have in common."""

    study: Study
    results: Mapping[str, RunResult]
    best: Params
    """What the search settled on."""
    target: Sizes
    rounds: int
    """How often a verdict may ask for more."""
    warmup: Rule = "share"
    """How the warmup is carried over duration."""


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
    from transfer.verdict.verdict import MIN_DRAWS, examine

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
    """Another hyperparameter over an axis, around the value that the search settled on."""
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
        verdict = _judge_arm(setting, name, axis, arm)
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
    return HYPERPARAMETERS[name].from_log2(log2_value, DIGITS)


def _judge_arm(setting: Setting, name: Hyperparameter, axis: Axis, arm: Arm) -> Verdict:
    """The verdict that says which runs are still wanted."""
    from transfer.verdict.verdict import judge  # numpy and scipy are not for `--help`

    if name != "learning_rate":
        own = to_log2(name, base_value(setting.study, name, setting.best))
        return judge(arm.points(setting.results), question_of(setting, name, axis, own))
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
        power=None if rate and measured(study, axis) else _power(setting, name, axis),
        built_in=built_in(study, name, axis),
        margin_nats=study.plan.transfer.margin_nats,
        level=study.plan.transfer.level,
        untrained_nats=math.log(study.manifest.vocab_size),
    )


def _power(setting: Setting, name: Hyperparameter, axis: Axis) -> float:
    """By which a rule that is not measured moves a value to the target."""
    if name != Carry.HYPERPARAMETER or axis != "duration":
        return 0.0
    return power_of(setting.study, setting.warmup, setting.best, setting.target.duration)


def _fits(study: Study, name: Hyperparameter, axis: Axis, size: int, log2_value: float) -> bool:
    """Whether there can be such a run."""
    value = from_log2(name, log2_value)
    one = HYPERPARAMETERS[name]
    if one.unit == SHARE_OF_STEPS and value > MOST_OF_STEPS:
        return False
    if one.scale == "log2_complement" and not 0 < value < 1:
        return False
    return axis != "batch" or size % (study.plan.model.seq_len * study.plan.batch_stages) == 0


def _arm(
    setting: Setting, name: Hyperparameter, axis: Axis, cells: Mapping[tuple[int, float], int], *, control: bool = False
) -> Arm:  # fmt: skip
    study, base = setting.study, base_sizes(setting.study).along(axis)
    specs: list[tuple[RunSpec, float]] = []
    for (size, log2_value), num_seeds in sorted(cells.items()):
        if not _fits(study, name, axis, size, log2_value):
            continue
        value = 2.0**log2_value if name == "learning_rate" else value_at(study, name, setting.best, log2_value)
        rules = study.control if control and size != base else None
        point = {**point_at(setting, size if axis == "duration" else None), name: value}
        runs = [run_at(study, axis, size, point, seed, rules) for seed in range(num_seeds)]
        # Two warmups may round to the same number of steps: one run is one point.
        known = {spec.id for spec, _ in specs}
        specs += [(run, log2_value) for run in runs if run.id not in known]
    return Arm(axis=axis, specs=tuple(specs))


def point_at(setting: Setting, num_tokens: int | None) -> Params:
    """The point of runs on so many tokens, None: as many as the base's."""
    if num_tokens is None:
        return setting.best
    return followed(setting.study, setting.warmup, setting.best, num_tokens)


def first_runs(study: Study, point: Params, target: Sizes) -> dict[str, list[RunSpec]]:
    """By test, the runs that its first verdict asks for, before anything has ended."""
    setting, found = Setting(study=study, results={}, best=point, target=target, rounds=0), {}
    for name, axis in wanted_tests(study):
        test = learning_rate_test(setting, axis) if name == "learning_rate" else other_test(setting, name, axis)
        found[test.name] = test.specs + (_later(study, axis, point) if name == "learning_rate" else [])
    return found


def _later(study: Study, axis: Axis, point: Params) -> list[RunSpec]:
    """Sizes whose grid waits for the smaller ones' optima: narrower, about where these put it."""
    transfer, base = study.plan.transfer, base_sizes(study).along(axis)
    sizes, count = axis_sizes(study, axis), transfer.num_seeds if axis == "width" else transfer.axis_num_seeds
    return [
        run_at(study, axis, size, {**point, "learning_rate": point["learning_rate"] * 2.0**offset}, seed)
        for size in sizes
        if size not in {base, *sizes[:FIRST_SIZES]}
        for offset in transfer.narrow_offsets_octaves
        for seed in range(count)
    ]


def warmup_runs(study: Study, point: Params, target: Sizes, results: Mapping[str, RunResult]) -> Carrying:
    """The comparison of a warmup's share with its number of tokens, within its part of what all tests take."""
    if study.plan.command is not None and not study.plan.command.reaches("warmup_steps"):
        return Carrying(specs=(), num_tokens=None, carry=Carry(rule="share"))
    tests = {spec.id: spec.flops for specs in first_runs(study, point, target).values() for spec in specs}
    return carrying(
        study, point, axis_sizes(study, "duration"), CARRY_SHARE * sum(tests.values()),
        lambda size, there, seed: run_at(study, "duration", size, there, seed), results,
    )  # fmt: skip


def judged(setting: Setting, test: TransferTest, transferred: float | None) -> Judged:
    """The verdict on a test's runs, with what it was drawn from."""
    from transfer.verdict.verdict import examine

    control = test.control.points(setting.results) if test.control else ()
    question = question_of(setting, test.hyperparameter, test.axis, transferred)
    return examine(test.arm.points(setting.results), question, control_points=control)
