"""Tests of the comparisons between values that a search found and conventional ones. If runs cannot
separate the two, the conventional value is used; the reason is given in every case. The rule that
carries a warmup over duration is chosen in the same way.
"""

import dataclasses
import math

import pytest
from search_case import StopError, draw_noise, make_driver, make_study
from tiny_study import make_result

from forerun._launcher.study.experiments.conventions import compare_with_convention
from forerun._launcher.study.experiments.sizes import get_base_sizes
from forerun._launcher.study.experiments.transfer_results import (
    guess_target_sizes,
    list_tests_with_runs,
    load_search_result,
    load_transfer_result,
)
from forerun._launcher.study.experiments.transfer_tests import build_first_runs, build_warmup_runs
from forerun._launcher.study.experiments.warmup_rule import MAX_COMPARISON_SHARE
from forerun._launcher.study.plan.study import build_bank_key, count_base_tokens
from forerun._launcher.study.stages.main_run_choice import build_ladder_runs
from forerun._launcher.study.stages.search_runs import run_search
from forerun._launcher.study.stages.study_folder import open_ledger
from forerun._sweeps.search.source import StaticSource
from forerun._sweeps.store.ledger import Ledger

PLAN_PART = """
[proxy]
num_steps = 200
[search]
num_trials = 12
num_startup = 6
parallelism = 3
num_replicates = 6
tie_seeds = 4
[transfer]
durations = [1.0, 2.0]
num_seeds = 10
hyperparameters = { clip_norm = ["width"] }
max_extensions = 0
"""
BEST = {"learning_rate": 2.0**-5, "warmup_fraction": 0.42, "clip_norm": 0.546}
"""Point of a search's best trial. Its warmup has 84 of 200 steps."""
NOISE_RANGE = 0.01
"""Range of each of the two parts of `draw_noise`, in nats."""


def plant_outcomes(clip=0.0, warmup=0.0, spread=0.004):
    """Return a function that plants the result of a run.

    Args:
        clip: Nats by which the loss rises per octave of the clip norm's distance from 0.35.
        warmup: Nats by which the loss rises per octave of warmup steps below 84.
        spread: Range of each of the two parts of the noise (of seed and run), in nats.
    """

    def tell(spec):
        octaves = math.log2(spec.hparams.learning_rate) + 5
        warmup_octaves = max(0.0, math.log2(84 / max(1, spec.schedule.warmup_steps)))
        loss = (
            2.0
            + 0.05 * octaves**2
            + clip * abs(math.log2(spec.hparams.clip_norm / 0.35))
            + warmup * warmup_octaves
        )
        return make_result(spec, loss + spread / NOISE_RANGE * draw_noise(spec))

    return tell


def search(folder, name, tell):
    """Search in a new study; return it and its ledger."""
    study = make_study(folder, name, PLAN_PART)
    with open_ledger(study) as ledger:
        run_search(study, ledger, make_driver(ledger, 0, tell=tell))
    return study, Ledger.read(study.study_dir)


def get_ties_by_name(result):
    return {tie.hyperparameter: tie for tie in result.ties}


def test_undecided_values_become_the_conventional_ones(folder):
    study, ledger = search(folder, "tie", plant_outcomes())
    result = load_search_result(study, ledger)
    ties = get_ties_by_name(result)
    assert set(ties) == {"clip_norm", "warmup_fraction"}
    assert result.best["clip_norm"] == 1.0
    assert result.best["warmup_fraction"] == 0.1, "20 of 200 steps, the conventional minimum"
    for tie in ties.values():
        assert (
            tie.finding.basis == "margin"
            and tie.finding.loses_nats[2] < study.plan.transfer.margin_nats
        )
        assert "GPT-3" in tie.source or "Pythia" in tie.source


def test_only_clearly_better_values_are_kept(folder):
    study, ledger = search(folder, "warm", plant_outcomes(warmup=0.05))
    result = load_search_result(study, ledger)
    ties = get_ties_by_name(result)
    assert result.best["clip_norm"] == 1.0 and ties["clip_norm"].finding.conventional
    assert ties["warmup_fraction"].finding.basis == "searched"
    assert result.best["warmup_fraction"] == ties["warmup_fraction"].searched > 0.2
    assert ties["warmup_fraction"].finding.loses_nats[1] > 0
    for tie, origin in ((ties["clip_norm"], "conventional"), (ties["warmup_fraction"], "searched")):
        value, low, high = tie.finding.loses_nats
        words = tie.describe(study.plan.transfer.margin_nats)
        assert (
            words.startswith(f"{tie.value:.3g} used ({origin}). At the base, ")
            and tie.source in words
        )
        assert (
            f"{value:.4f} [{low:.4f}, {high:.4f}] nats to the searched {tie.searched:.3g}" in words
        )
    study, ledger = search(folder, "clip", plant_outcomes(clip=0.05))
    ties = get_ties_by_name(load_search_result(study, ledger))
    assert [name for name, tie in ties.items() if not tie.finding.conventional] == ["clip_norm"]


@pytest.mark.parametrize("stop_after", [12, 20])
def test_interrupted_comparison_asks_for_the_same_runs(folder, stop_after):
    tell = plant_outcomes(warmup=0.05)
    reference_study, reference = search(folder, "warm", tell)
    study = dataclasses.replace(reference_study, study_dir=folder / f"stopped-{stop_after}")
    with open_ledger(study) as ledger, pytest.raises(StopError):
        run_search(study, ledger, make_driver(ledger, 7, stop_after, tell=tell))
    with open_ledger(study) as ledger:
        run_search(study, ledger, make_driver(ledger, stop_after, tell=tell))
    resumed = Ledger.read(study.study_dir)
    assert sorted(resumed.get_results()) == sorted(reference.get_results())
    result = load_search_result(study, resumed)
    assert result == load_search_result(reference_study, reference)


@pytest.mark.parametrize(
    ("differences", "basis"),
    [
        ((0.001, 0.003, 0.002, 0.0), "margin"),
        ((0.03, -0.02, 0.02, -0.01), "noise"),
        ((0.06, 0.0, 0.05, -0.01), "undetermined"),
        ((0.04, 0.05, 0.045, 0.05), "searched"),
        ((0.004, 0.0045, None, 0.004), "searched"),
    ],
)
def test_decision_names_its_basis(folder, differences, basis):
    """Four pairs of runs; `differences` are the nats that the conventional value loses, None for a
    run that diverged.
    """
    study = make_study(folder, "reasons", PLAN_PART)

    def make_conventional(octaves, seed):
        return study.build_trial({**BEST, "clip_norm": 1.0}, seed + 1)

    def make_searched(seed):
        return study.build_trial(BEST, seed + 1)

    results = {}
    for seed, difference in enumerate(differences):
        level = 2 + 0.1 * seed
        searched, conventional = make_searched(seed), make_conventional(0.0, seed)
        loss = None if difference is None else level + difference
        results[searched.id] = make_result(searched, level)
        results[conventional.id] = make_result(conventional, loss)
    comparison = (study, make_searched, make_conventional, (0.0,), 4)
    _, finding = compare_with_convention(*comparison, results)
    assert finding.basis == basis and finding.conventional == (basis != "searched")
    specs, finding = compare_with_convention(*comparison, {})
    assert finding is None and len(specs) == 8


def decide_warmup_rule(study, tell):
    """Plant the results that the comparison asks for until it decides; return its runs and the
    decision.
    """
    results = {}
    for _ in range(4):  # the runs that choose a rate, those at this rate, the decision
        specs, decision = build_warmup_runs(study, BEST, guess_target_sizes(study), results)
        if decision is not None:
            return specs, decision
        results |= {spec.id: tell(spec) for spec in specs}
    raise AssertionError("the comparison asks for more and more runs")


def test_runs_over_duration_decide_how_the_warmup_scales(folder):
    study = make_study(folder, "carried", PLAN_PART)
    specs, undecided = decide_warmup_rule(study, plant_outcomes())
    assert undecided.rule == "tokens"
    assert undecided.finding.basis in ("margin", "noise", "undetermined")
    steps = {(spec.schedule.num_steps, spec.schedule.warmup_steps) for spec in specs}
    assert steps == {(400, 168), (400, 84)}

    def tell_by_share(spec):
        share = spec.schedule.warmup_steps / spec.schedule.num_steps
        result = plant_outcomes(spread=0.0005)(spec)
        loss = result.loss_nats + 0.1 * abs(math.log2(share / 0.42))
        return dataclasses.replace(result, loss_nats=loss)

    _, clear = decide_warmup_rule(study, tell_by_share)
    assert clear.rule == "share" and clear.finding.basis == "searched"
    point = {**BEST, "warmup_fraction": 0.42}
    tests = {
        spec.id: spec
        for specs in build_first_runs(study, point, guess_target_sizes(study)).values()
        for spec in specs
    }
    cost = sum(spec.flops for spec in specs)
    assert 0 < cost <= MAX_COMPARISON_SHARE * sum(spec.flops for spec in tests.values())


def test_transfer_runs_and_rungs_follow_the_warmup_rule(folder):
    tell = plant_outcomes(warmup=0.05)
    study, _ = search(folder, "followed", tell)
    with open_ledger(study) as ledger:
        # Transfer tests ask for runs in rounds, until none is missing. If one is missing after the
        # last round, `load_transfer_result` raises an error.
        for _ in range(10):
            missing = []
            for test in list_tests_with_runs(study, ledger):
                missing += [spec for spec in test.specs if spec.id not in ledger.get_results()]
            if not missing:
                break
            source = StaticSource(missing, build_bank_key)
            make_driver(ledger, 0, tell=tell)("transfer", source, missing)
        result = load_transfer_result(study, ledger)
        assert result.warmup.rule == "tokens"
        share = result.best["warmup_fraction"]
        over_duration = next(
            test
            for test in result.tests
            if (test.hyperparameter, test.axis) == ("learning_rate", "duration")
        )
        steps = {
            spec.schedule.num_steps: spec.schedule.warmup_steps for spec in over_duration.specs
        }
        assert steps == {200: round(200 * share), 400: round(200 * share)}
        rung_shares = {
            spec.schedule.num_steps: spec.schedule.warmup_steps / spec.schedule.num_steps
            for spec in build_ladder_runs(study, result)
        }
        # A run shorter than the base keeps the base's share.
        assert rung_shares[16] == pytest.approx(share, abs=0.05)
        far = dataclasses.replace(get_base_sizes(study), duration=35 * count_base_tokens(study))
        far_share = result.get_point(study, far)["warmup_fraction"]
        assert far_share == pytest.approx(max(share / 35, 0.01), rel=1e-4)
