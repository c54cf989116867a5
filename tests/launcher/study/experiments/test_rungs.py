"""Tests of the rungs, that is, the runs of the ladder to which a scaling law is fitted: a rung is
the main run of its size, some rungs are checked at other learning rates, and each may be repeated
with other seeds.
"""

import dataclasses
from types import SimpleNamespace

import pytest
from tiny_study import write_plan_with

from forerun._launcher.study.experiments.ladder import (
    build_ladder,
    build_stage_runs,
    choose_checked_rungs,
)
from forerun._launcher.study.experiments.transfer_results import SearchResult, TransferResult
from forerun._launcher.study.experiments.warmup_rule import WarmupRule
from forerun._launcher.study.stages import main_run_choice
from forerun._launcher.study.stages.study_folder import read_study
from forerun._proxies.core.flops import compute_flops_per_token
from forerun._proxies.parametrization.parametrization import compute_parameter_table

BEST = {"learning_rate": 0.02, "warmup_fraction": 0.25, "clip_norm": 1.0}
POWERS = {"duration": -0.3, "batch": 0.4}


@pytest.fixture(scope="module")
def read_study_with(folder):
    """A function that returns the study of the tiny plan with the keys of `part` replaced."""
    return lambda part="": read_study(write_plan_with(folder, part), folder / "study")


def make_transfer_result(powers):
    """Return a transfer result with these measured exponents of the learning rate, by axis."""
    return TransferResult(
        search=SearchResult(points=(), best=BEST, best_trial=0, ties=(), replicated=None),
        tests=(),
        warmup=WarmupRule(rule="share"),
        log2_lr=-5.0,
        at_optimum=True,
        powers_at=lambda sizes: powers,
    )


def count_flops(spec):
    return float(compute_flops_per_token(spec.shape)) * spec.num_tokens


def build_main_run_at(study, result, rung):
    """Return the main run that a choice of this rung's size gives."""
    choice = main_run_choice.MainRunChoice(
        allocation=None,
        shape=rung.shape,
        num_steps=rung.schedule.num_steps,
        batch_tokens=rung.batch_tokens,
        prediction=SimpleNamespace(tokens=float(rung.num_tokens)),
    )
    return main_run_choice.build_main_run(study, result, choice)


@pytest.mark.parametrize(
    "part",
    [
        "[ladder]\nbatch_tokens = 256",
        '[proxy]\nparametrization = "sp"',
        '[ladder]\nbatch_tokens = 128\n[proxy]\nparametrization = "completedp"\nnum_steps = 16',
        "[proxy]\nbatch_warmup_fraction = 0.5\nbatch_warmup_stages = 2",
    ],
)
def test_rung_equals_the_main_run_of_its_size(read_study_with, part):
    """Rate, groups and schedule follow the same rules over width, duration and batch."""
    study, result = read_study_with(part), make_transfer_result(POWERS)
    for rung in main_run_choice.build_ladder_runs(study, result):
        main = build_main_run_at(study, result, rung)
        assert dataclasses.replace(main, seed=rung.seed, numerics=rung.numerics) == rung
        assert compute_parameter_table(main) == compute_parameter_table(rung)


def test_smallest_and_largest_rung_are_checked_one_octave_to_either_side(read_study_with):
    study = read_study_with("[ladder]\ncheck_share = 1.0")
    specs = main_run_choice.build_ladder_runs(study, make_transfer_result(POWERS))
    checks = choose_checked_rungs(study, specs)
    ends = [min(specs, key=count_flops).id, max(specs, key=count_flops).id]
    assert [check.rung.id for check in checks] == ends
    for check in checks:
        rung_rate = check.rung.hparams.learning_rate
        assert [octaves for octaves, _ in check.runs] == [-1.0, 0.0, 1.0]
        rates = [runs[0].hparams.learning_rate / rung_rate for _, runs in check.runs]
        assert rates == pytest.approx([0.5, 1.0, 2.0], rel=1e-5)
        assert check.runs[1][1] == (check.rung,), "the rung itself is not trained again"
        for spec in check.extra_runs:
            hparams = dataclasses.replace(spec.hparams, learning_rate=rung_rate)
            assert dataclasses.replace(spec, hparams=hparams) == check.rung
    stage = build_stage_runs(study, specs)
    # Two rungs are each trained at two more rates.
    assert len({spec.id for spec in stage}) == len(stage) == len(specs) + 4
    assert stage[: len(specs)] == specs


def test_check_share_limits_which_rungs_are_checked(read_study_with):
    specs = main_run_choice.build_ladder_runs(read_study_with(), make_transfer_result({}))
    total, checked_flops = sum(map(count_flops, specs)), []
    for share in (1.0, 0.3, 0.1, 0.03, 1e-6):  # the last one pays for no rung
        study = read_study_with(f"[ladder]\ncheck_share = {share}")
        checked = sum(count_flops(check.rung) for check in choose_checked_rungs(study, specs))
        assert checked <= share * total
        checked_flops.append(checked)
    assert checked_flops == sorted(checked_flops, reverse=True)
    assert len(set(checked_flops)) >= 4 and checked_flops[-1] == 0


def test_every_rung_is_repeated_with_other_seeds(read_study_with):
    """The rungs of one seed stay among them, and each repeat is a row of the fitted table."""
    single, repeated = (
        build_ladder(read_study_with(part), BEST) for part in ("", "[ladder]\nnum_seeds = 3")
    )
    assert repeated[::3] == single
    assert len({spec.id for spec in repeated}) == len(repeated) == 3 * len(single)
    assert [spec.seed for spec in repeated] == [100, 101, 102] * len(single)
    assert {dataclasses.replace(spec, seed=100) for spec in repeated} == set(single)
    losses = {
        spec.id: SimpleNamespace(loss_nats=2 + index / 100) for index, spec in enumerate(repeated)
    }
    table = main_run_choice.build_ladder_table(read_study_with(""), repeated, losses)
    assert table.loss.tolist() == [losses[spec.id].loss_nats for spec in repeated]
    for start in range(0, len(repeated), 3):
        rows = slice(start, start + 3)
        assert len(set(zip(table.params[rows], table.tokens[rows], strict=True))) == 1
    assert main_run_choice.build_fit_key(repeated) != main_run_choice.build_fit_key(single)


def test_finished_study_has_its_rung_checks_and_a_gate(study, ledger, findings):
    specs, results = list(findings.ladder), ledger.get_results()
    assert {spec.id for spec in build_stage_runs(study, specs)} <= results.keys()
    rungs = [check.rung.id for check in findings.checks.rungs]
    assert rungs == [check.rung.id for check in choose_checked_rungs(study, specs)]
    assert len(findings.checks.rungs) == 2
    assert [gate.name for gate in findings.gates][-1] == "ladder_tuned"
    assert all(check.words in findings.gates[-1].reason for check in findings.checks.rungs)
