"""Where runs cannot tell searched values from conventional ones, convention wins, and every answer
says why.
"""

import dataclasses
import math

import pytest
from test_searching import StopError, driver, noise, study_of
from tiny_study import ended

from launcher.experiments.conventions import WARMUP_SHARE, contest
from launcher.experiments.sweep_grids import base_sizes, first_runs, warmup_runs
from launcher.experiments.transferred_values import asked, searched, target_guess, transferred
from launcher.plan.study import base_duration
from launcher.study.decide import ladder_specs
from launcher.study.search_runs import run_search
from launcher.study.stages import bank_key
from launcher.study.study_folder import open_ledger
from sweeps.search.source import StaticSource
from sweeps.store.ledger import Ledger

LONG = """
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


def planted(clip=0.0, warmup=0.0, spread=0.004):
    """A trainer's outcomes: nats lost an octave of clip above 0.35, and an octave of warmup steps
    below 84.
    """

    def tell(spec):
        octaves = math.log2(spec.hparams.learning_rate) + 5
        short = max(0.0, math.log2(84 / max(1, spec.schedule.warmup_steps)))
        loss = (
            2.0
            + 0.05 * octaves**2
            + clip * abs(math.log2(spec.hparams.clip_norm / 0.35))
            + warmup * short
        )
        return ended(spec, loss + spread / 0.01 * noise(spec))

    return tell


def search_of(folder, name, tell, part=LONG):
    study = study_of(folder, name, part)
    with open_ledger(study) as ledger:
        run_search(study, ledger, driver(ledger, 0, tell=tell), bank_key)
    return study, Ledger.read(study.study_dir)


def by_name(found):
    return {tie.hyperparameter: tie for tie in found.ties}


def test_where_runs_cannot_tell_convention_wins(folder):
    study, ledger = search_of(folder, "tie", planted())
    found = searched(study, ledger)
    ties = by_name(found)
    assert set(ties) == {"clip_norm", "warmup_fraction"}
    assert found.best["clip_norm"] == 1.0
    assert found.best["warmup_fraction"] == 0.1, "20 steps of 200, where 1 % would be 2"
    for tie in ties.values():
        assert (
            tie.finding.basis == "margin"
            and tie.finding.loses_nats[2] < study.plan.transfer.margin_nats
        )
        assert "GPT-3" in tie.source or "Pythia" in tie.source


def test_a_clear_advantage_is_kept_and_only_that(folder):
    study, ledger = search_of(folder, "warm", planted(warmup=0.05))
    found = searched(study, ledger)
    ties = by_name(found)
    assert found.best["clip_norm"] == 1.0 and ties["clip_norm"].finding.conventional
    assert ties["warmup_fraction"].finding.basis == "searched"
    assert found.best["warmup_fraction"] == ties["warmup_fraction"].searched > 0.2
    assert ties["warmup_fraction"].finding.loses_nats[1] > 0
    for tie, origin in ((ties["clip_norm"], "conventional"), (ties["warmup_fraction"], "searched")):
        value, low, high = tie.finding.loses_nats
        words = tie.words(study.plan.transfer.margin_nats)
        assert (
            words.startswith(f"{tie.value:.3g} used ({origin}). At the base, ")
            and tie.source in words
        )
        assert (
            f"{value:.4f} [{low:.4f}, {high:.4f}] nats to the searched {tie.searched:.3g}" in words
        )
    study, ledger = search_of(folder, "clip", planted(clip=0.05))
    ties = by_name(searched(study, ledger))
    assert [name for name, tie in ties.items() if not tie.finding.conventional] == ["clip_norm"]


@pytest.mark.parametrize("stop_after", [12, 20])
def test_an_interrupted_comparison_asks_for_the_same_runs(folder, stop_after):
    tell = planted(warmup=0.05)
    whole_study, whole = search_of(folder, "warm", tell)
    study = dataclasses.replace(whole_study, study_dir=folder / f"stopped-{stop_after}")
    with open_ledger(study) as ledger, pytest.raises(StopError):
        run_search(study, ledger, driver(ledger, 7, stop_after, tell=tell), bank_key)
    with open_ledger(study) as ledger:
        run_search(study, ledger, driver(ledger, stop_after, tell=tell), bank_key)
    again = Ledger.read(study.study_dir)
    assert sorted(again.results()) == sorted(whole.results())
    assert searched(study, again) == searched(whole_study, whole)


@pytest.mark.parametrize(
    ("worse", "basis"),
    [
        ((0.001, 0.003, 0.002, 0.0), "margin"),
        ((0.03, -0.02, 0.02, -0.01), "noise"),
        ((0.06, 0.0, 0.05, -0.01), "undetermined"),
        ((0.04, 0.05, 0.045, 0.05), "searched"),
        ((0.004, 0.0045, None, 0.004), "searched"),
    ],
)
def test_each_reason_has_its_runs(folder, worse, basis):
    study = study_of(folder, "reasons", LONG)

    def other(octaves, seed):
        return study.trial({**BEST, "clip_norm": 1.0}, seed + 1)

    results = {}
    for seed, loss in enumerate(worse):
        level, one, two = 2 + 0.1 * seed, study.trial(BEST, seed + 1), other(0.0, seed)
        results[one.id] = ended(one, level)
        results[two.id] = ended(two, None if loss is None else level + loss)
    _, found = contest(study, lambda seed: study.trial(BEST, seed + 1), other, (0.0,), 4, results)
    assert found.basis == basis and found.conventional == (basis != "searched")
    specs, waiting = contest(study, lambda seed: study.trial(BEST, seed + 1), other, (0.0,), 4, {})
    assert waiting is None and len(specs) == 8


def compared(study, tell):
    results, decided = {}, None
    while decided is None:
        specs, decided = warmup_runs(study, BEST, target_guess(study), results)
        results |= {spec.id: tell(spec) for spec in specs}
    return specs, decided


def test_the_runs_over_duration_decide_how_a_warmup_is_carried(folder):
    study = study_of(folder, "carried", LONG)
    specs, tied = compared(study, planted())
    assert tied.rule == "tokens" and tied.finding.basis in ("margin", "noise", "undetermined")
    steps = {(spec.schedule.num_steps, spec.schedule.warmup_steps) for spec in specs}
    assert steps == {(400, 168), (400, 84)}

    def by_share(spec):
        share = spec.schedule.warmup_steps / spec.schedule.num_steps
        found = planted(spread=0.0005)(spec)
        return dataclasses.replace(
            found, loss_nats=found.loss_nats + 0.1 * abs(math.log2(share / 0.42))
        )

    _, clear = compared(study, by_share)
    assert clear.rule == "share" and clear.finding.basis == "searched"
    point = {**BEST, "warmup_fraction": 0.42}
    tests = {
        spec.id: spec
        for specs in first_runs(study, point, target_guess(study)).values()
        for spec in specs
    }
    cost = sum(spec.flops for spec in specs)
    assert 0 < cost <= WARMUP_SHARE * sum(spec.flops for spec in tests.values())


def test_rates_over_duration_and_rungs_follow_the_warmups_rule(folder):
    tell = planted(warmup=0.05)
    study, _ = search_of(folder, "followed", tell)
    with open_ledger(study) as ledger:
        for _ in range(10):
            missing = [
                s
                for test in asked(study, ledger)
                for s in test.specs
                if s.id not in ledger.results()
            ]
            if not missing:
                break
            driver(ledger, 0, tell=tell)("transfer", StaticSource(missing, bank_key), missing)
        found = transferred(study, ledger)
        assert found.warmup.rule == "tokens"
        own = found.best["warmup_fraction"]
        rates = next(
            t for t in found.tests if t.hyperparameter == "learning_rate" and t.axis == "duration"
        )
        steps = {spec.schedule.num_steps: spec.schedule.warmup_steps for spec in rates.specs}
        assert steps == {200: round(200 * own), 400: round(200 * own)}
        rungs = {
            s.schedule.num_steps: s.schedule.warmup_steps / s.schedule.num_steps
            for s in ladder_specs(study, found)
        }
        assert rungs[16] == pytest.approx(own, abs=0.05), (
            "a run shorter than the base has its share"
        )
        far = dataclasses.replace(base_sizes(study), duration=35 * base_duration(study))
        assert found.point_at(study, far)["warmup_fraction"] == pytest.approx(
            max(own / 35, 0.01), rel=1e-4
        )
