"""Which runs each test of transfer asks for: a pure function of the plan and of what is known so
far.
"""

import dataclasses
import math

import pytest
from tiny_study import ended, plan_with

from launcher.experiments.sweep_grids import (
    SharedSettings,
    Sizes,
    axis_sizes,
    base_sizes,
    base_value,
    judged,
    run_at,
    transfer_test,
)
from launcher.study.study_folder import plan_study
from transfer.question import to_log2

BEST = {"learning_rate": 0.02, "warmup_fraction": 0.1, "clip_norm": 1.0}
TARGET = Sizes(width=64, depth=1, batch=64, duration=40 * 64 * 16)
EVERYTHING = """
[proxy]
num_steps = 40
weight_decay = 0.1
[transfer]
widths = [8, 16, 32, 64]
durations = [0.5, 1.0, 2.0]
depths = [1, 2, 4]
batches = [0.5, 1.0, 2.0]
axis_num_seeds = 2
hyperparameters = { clip_norm = ["width", "duration"], weight_decay = ["width"], beta2 = ["batch"] }
"""


@pytest.fixture(scope="module")
def study(folder):
    return plan_study(plan_with(folder, EVERYTHING), folder / "study")


def with_transfer(study, **changes):
    transfer = study.plan.transfer.model_copy(update=changes)
    return dataclasses.replace(study, plan=study.plan.model_copy(update={"transfer": transfer}))


def setting(study, results=(), rounds=0, **changes):
    best = {**BEST, **changes}
    return SharedSettings(
        study=study, results=dict(results), best=best, target=TARGET, rounds=rounds
    )


def valley(arm, optimum, drift=0.0):
    """Losses of a planted parabola whose optimum moves by `drift` octaves per doubling, a little
    noisy.
    """
    smallest = min(arm.size(spec) for spec, _ in arm.specs)
    return {
        spec.id: ended(
            spec,
            3.0
            + 0.05 * (x - optimum - drift * math.log2(arm.size(spec) / smallest)) ** 2
            + 0.001 * math.sin(7 * spec.seed + 3 * x + arm.size(spec)),
        )
        for spec, x in arm.specs
    }


def grown(study, axis, optimum, drift=0.0, rounds=0):
    """A test as it stands when nothing is left to ask, and its results."""
    results = {}
    while not (
        test := transfer_test(setting(study, results, rounds), "learning_rate", axis)
    ).condition.done(results):
        results |= valley(test.condition, optimum, drift)
    return test, results


def offsets(arm, size):
    return sorted({x for spec, x in arm.specs if arm.size(spec) == size})


@pytest.mark.parametrize("drift", [0.0, -0.5])
def test_larger_sizes_are_narrowed_around_what_smaller_ones_predict(study, drift):
    arm = grown(study, "width", -5.5, drift)[0].condition
    narrow = study.plan.transfer.narrow_offsets_octaves
    for size, doublings in ((32, 2), (64, 3)):
        found = offsets(arm, size)
        centre = found[0] - min(narrow)
        assert found == [centre + offset for offset in narrow]
        assert abs(centre - (-5.5 + drift * doublings)) <= 0.26 and centre % 0.25 == 0


def test_every_axis_varies_itself_and_nothing_else(study):
    base = base_sizes(study)
    point = {**BEST, "learning_rate": 0.01}
    assert base == Sizes(width=8, depth=1, batch=64, duration=40 * 64)
    assert axis_sizes(study, "duration") == (20 * 64, 40 * 64, 80 * 64)
    assert axis_sizes(study, "batch") == (32, 64, 128)
    for axis in ("width", "depth", "batch", "duration"):
        for size in axis_sizes(study, axis):
            spec = run_at(study, axis, size, point, 0)
            found = Sizes(
                width=spec.shape.width,
                depth=spec.shape.num_layers,
                batch=spec.batch_tokens,
                duration=spec.num_tokens,
            )
            assert found == dataclasses.replace(base, **{axis: size})
    assert (
        len(
            {
                run_at(study, axis, base.along(axis), point, 0).id
                for axis in ("width", "depth", "batch")
            }
        )
        == 1
    )


def test_the_control_arm_grows_to_bracket_its_optimum_and_no_further(study):
    narrow = with_transfer(study, margin_nats=1e-6, widths=(8, 16))
    for optimum, grows in ((-1.0, True), (-5.5, False)):
        first = transfer_test(setting(narrow), "learning_rate", "width")
        results = valley(first.condition, optimum) | valley(first.control, optimum)
        again = transfer_test(setting(narrow, results, rounds=1), "learning_rate", "width")
        assert (again.control != first.control) == grows


def test_other_hyperparameters_run_around_the_searchs_best_trial(study):
    for name, axis in (
        ("clip_norm", "width"),
        ("weight_decay", "width"),
        ("beta2", "batch"),
        ("clip_norm", "duration"),
    ):
        arm = transfer_test(setting(study), name, axis).condition
        assert {spec.hparams.learning_rate for spec, _ in arm.specs} == {BEST["learning_rate"]}
        own = base_value(study, name, BEST)
        assert {
            getattr(spec.hparams, name) for spec, x in arm.specs if x == to_log2(name, own)
        } == {own}
        for spec, x in arm.specs:
            assert to_log2(name, getattr(spec.hparams, name)) == pytest.approx(x, abs=1e-4)
    specs = transfer_test(setting(study), "clip_norm", "width").condition.specs
    assert {spec.shape.width for spec, _ in specs} == {8, 64}


def test_the_exponent_over_duration_is_measured_and_over_width_is_not(study):
    for axis, drift in (("duration", -0.4), ("width", -0.4)):
        test, results = grown(study, axis, -5.5, drift)
        verdict = judged(setting(study, results), test, None).verdict
        assert verdict.drift.value == pytest.approx(-0.4, abs=0.05)
        assert (verdict.question.power is None) == (axis == "duration")
        # Three durations do not tell a line from one that levels off
        # (benchmarks/statistics/bend.py).
        assert verdict.outcome == ("cannot_tell" if axis == "duration" else "drifts")
        assert (verdict.regret_nats.value < 0.01) == (axis == "duration")
    plain = with_transfer(study, measured_rules=())
    test, results = grown(plain, "duration", -5.5, -0.4)
    assert judged(setting(plain, results), test, None).verdict.outcome == "drifts"
