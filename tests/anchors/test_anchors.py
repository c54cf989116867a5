"""Tests of the negative anchors, known mistakes that break transfer: a guard catches each of them.

Guards are checks of forerun. The coordinate check measures how activations grow with width. The
verdict tells whether the best learning rate drifts with size. The proof of the live optimizer
compares the main run's optimizer with its frozen settings. The commands `verify` and `check` refuse
a second base shape. The same setup without the mistake must pass. `pytest tests/anchors -s` prints
the rows of docs/negative-anchors.md.
"""

import dataclasses
import json
import math
import random
import time
from types import SimpleNamespace

import mup
import numpy as np
import pytest
import torch
from anchors import ANCHORS, format_slope, format_verdict, plant_overwritten_rates, print_row
from coordinate_cases import BASE, WIDTHS
from main_run import make_spec, make_tiny_decision, write_corpus
from mup_reference import build_mup_model
from tiny_study import run_forerun, write_plan

from forerun._launcher.main_run.exporters.trainers import native
from forerun._launcher.main_run.frozen.frozen import TamperedError, build_groups
from forerun._launcher.main_run.frozen.launch_file import read_launch, write_launch
from forerun._launcher.main_run.trainer import model_builder
from forerun._launcher.study.experiments.coordinate_record import RecordedCheck
from forerun._launcher.study.stages.gates import judge_coordinates
from forerun._proxies.coordinates.verdict import TOLERANCE
from forerun._proxies.core import canon
from forerun._proxies.model.decoder import Decoder
from forerun._proxies.parametrization.parametrization import (
    compute_parameter_table,
    draw_initial_tensor,
)
from forerun._proxies.training import single_trial
from forerun._transfer.question import Point, Question
from forerun._transfer.verdict.optima_verdict import judge_optima
from forerun._transfer.verdict.verdict import judge

ISSUE_66_SWEEP = {
    96: (-9.0, 4.1184),
    192: (-10.0, 3.7074),
    384: (-11.0, 3.3776),
    768: (-11.0, 3.1009),
}
"""Published nanoGPT sweep (microsoft/mup#66): log2 of the best rate and its loss, by width."""
FALSE_ALARM_LOSSES = {60_000_000: 4.01, 125_000_000: 3.68, 250_000_000: 3.43, 500_000_000: 3.22}
"""Minimum loss in nats by number of parameters, close to those of a sweep with one seed that was
published as a failure of transfer. One spiked run had moved its best rate: a false alarm."""


def judge_gate(check):
    """Return the outcome of the coordinate gate for one check."""
    record = RecordedCheck.model_validate(canon.to_json(check))
    return judge_coordinates({"mup": record}, "mup").outcome


@pytest.fixture(scope="module")
def clean_checks_by_setting():
    """Checks without a mistake, filled by the tests. Anchors of equal setting share one check."""
    return {}


@pytest.mark.parametrize("anchor", ANCHORS, ids=lambda anchor: anchor.name)
def test_coordinate_check_fails_only_with_the_mistake(
    anchor, store, monkeypatch, clean_checks_by_setting
):
    began = time.perf_counter()
    check = anchor.run_check(store, monkeypatch, is_mistaken=True)
    seconds = time.perf_counter() - began
    key = (anchor.tied, str(anchor.setting))
    if key not in clean_checks_by_setting:
        clean_checks_by_setting[key] = anchor.run_check(store, monkeypatch, is_mistaken=False)
    clean_check = clean_checks_by_setting[key]
    mistaken, clean = anchor.read_slope(check), anchor.read_slope(clean_check)
    findings = (
        f"{anchor.layer} {anchor.statistic}: slope {format_slope(mistaken)}, without the mistake "
        f"{format_slope(clean)}"
    )
    print_row(
        anchor.name, f"coordinate check: {check.outcome.replace('_', ' ')}", findings, seconds
    )
    assert check.outcome == "blows_up" and judge_gate(check) == "failed"
    assert any(anchor.expected_mistake in mistake for mistake in check.mistakes)
    # The interval with the mistake lies above the interval without it.
    assert mistaken.low > clean.high + TOLERANCE
    assert (clean_check.outcome, clean_check.mistakes) == ("passes", ())
    assert judge_gate(clean_check) == "passed"


def test_mup_package_grows_the_std_of_tied_embeddings():
    """The anchor plants the growth that real models of the mup package show."""
    base = dataclasses.replace(BASE, tied=True)

    def fit_slope(measure_std):
        stds = [measure_std(width) for width in WIDTHS]
        return float(np.polyfit(np.log2(WIDTHS), np.log2(stds), 1)[0])

    def measure_mup_std(width):
        model = build_mup_model(base.at_width(width), base)
        assert (
            isinstance(model.lm_head, mup.MuReadout)
            and model.lm_head.weight is model.tok_embeddings.weight
        )
        return model.tok_embeddings.weight.std().item()

    def measure_forerun_std(width):
        spec = dataclasses.replace(make_spec("data"), shape=base.at_width(width), base_shape=base)
        return draw_initial_tensor(compute_parameter_table(spec)[0], seed=0).std().item()

    torch.manual_seed(0)
    mup_slope, forerun_slope = fit_slope(measure_mup_std), fit_slope(measure_forerun_std)
    print_row(
        "tied embeddings in mup 1.0.0 itself",
        "std at the start",
        f"slope {mup_slope:+.2f}, ours {forerun_slope:+.2f}",
    )
    assert mup_slope == pytest.approx(0.5, abs=0.02)
    assert forerun_slope == pytest.approx(0, abs=0.02)


# ---- A main run whose base shape is not that of its proxies ----


MAIN = make_spec("data")
"""A main run of width 32, whose rates are scaled from a base of width 16."""


def make_optimizer_decision(base_shape):
    """Return the part of a decision that sets the main run's optimizer, scaled from a base."""
    table = compute_parameter_table(dataclasses.replace(MAIN, base_shape=base_shape))
    return SimpleNamespace(groups=build_groups(table), optimizer=MAIN.optimizer)


FROZEN = make_optimizer_decision(MAIN.base_shape)


def build_live_optimizer(base_shape):
    """Return the main run's model and its optimizer with the groups of a base shape."""
    model = Decoder(MAIN.shape, device="meta")
    return model, model_builder.build_optimizer(model, make_optimizer_decision(base_shape))


def test_proof_names_rates_computed_for_another_base():
    model, optimizer = build_live_optimizer(MAIN.shape)
    problems = [
        problem
        for problem in model_builder.find_mismatches(model, optimizer, FROZEN)
        if "learning_rate" in problem
    ]
    findings = f"{len(problems)} of {len(list(model.parameters()))} rates: {problems[0]}"
    print_row("target on its own base", "proof of the live optimizer", findings)
    wq_problem = "layers.0.attention.wq.weight: learning_rate is 0.03125, frozen as 0.015625"
    assert problems[0] == wq_problem
    assert len(problems) == sum(row.kind == "hidden" for row in compute_parameter_table(MAIN))
    assert model_builder.find_mismatches(*build_live_optimizer(MAIN.base_shape), FROZEN) == []


def test_proof_names_rates_that_a_scheduler_overwrote(monkeypatch):
    """The embedded trainer runs this proof when it starts and at each resume."""
    model, optimizer = build_live_optimizer(MAIN.base_shape)
    single_trial.set_rates(optimizer, FROZEN.groups, 0.5)
    assert model_builder.find_mismatches(model, optimizer, FROZEN, lr_share=0.5) == []
    plant_overwritten_rates(monkeypatch)
    single_trial.set_rates(optimizer, FROZEN.groups, 0.5)
    problems = model_builder.find_mismatches(model, optimizer, FROZEN, lr_share=0.5)
    findings = f"{len(problems)} of {len(list(model.parameters()))} rates: {problems[0]}"
    print_row("scheduler overwrites group rates", "proof of the live optimizer", findings, 0)
    wq_problem = "layers.0.attention.wq.weight: learning_rate is 0.015625, frozen as 0.0078125"
    assert problems[0] == wq_problem


def test_launch_file_with_another_base_is_refused(tmp_path):
    write_corpus(tmp_path)
    decision = make_tiny_decision(tmp_path / "tokens")
    assert native.find_mismatches(decision) == []
    path = write_launch(tmp_path / "frozen", decision)
    assert read_launch(path) == decision
    # A launch file that someone edited does not match its own hash.
    body = json.loads(path.read_text())
    body["decision"]["base_shape"] = canon.to_json(decision.shape)
    path.write_text(json.dumps(body))
    with pytest.raises(TamperedError):
        read_launch(path)
    # A consistent launch file for the other base is refused too, because no study is its evidence.
    groups = build_groups(compute_parameter_table(dataclasses.replace(MAIN, base_shape=MAIN.shape)))
    rebased = dataclasses.replace(decision, base_shape=decision.shape, groups=groups)
    code, _, err = run_forerun("verify", write_launch(tmp_path / "frozen", rebased))
    print_row("launch file written for another base", "forerun verify", f"exit {code}")
    assert code == 5 and "evidence.json is missing" in err


def test_study_refuses_a_second_base(tmp_path):
    plan, study = write_plan(tmp_path), tmp_path / "study"
    # The tiny check may pass, fail or be unable to tell: only the study's record of it matters.
    assert run_forerun("check", plan, "--study", study)[0] in (0, 3, 4)
    code, _, err = run_forerun("check", plan, "--study", study, "--set", "proxy.base_width=16")
    print_row("proxies on another base in one study", "the ledger's first record", f"exit {code}")
    assert code == 2 and "proxy.base_width" in err


# ---- A published drift and a published false alarm ----


CURVATURE_NATS = 0.03
"""Regret of the planted loss basins at one octave from the optimum; it grows quadratically."""
NOISE_SD_NATS = 0.005
"""Standard deviation of the noise of each planted loss."""


def make_grid(minima, rates, *, optimum, drift, num_seeds, seed=0):
    """Return one point per size, seed and rate; the loss is a parabola in the log rate plus noise.

    Args:
        minima: Minimum loss in nats by size, in the order of `rates`.
        rates: Base-2 logarithms of the learning rates tried at each size.
        optimum: Base-2 logarithm of the best rate at the smallest size.
        drift: Octaves by which the best rate moves per doubling of size.
    """
    rng, smallest = random.Random(seed), min(minima)
    points = []
    for (size, min_loss), size_rates in zip(minima.items(), rates, strict=True):
        best = optimum + drift * math.log2(size / smallest)
        for run_seed in range(num_seeds):
            for rate in size_rates:
                loss = min_loss + CURVATURE_NATS * (rate - best) ** 2 + rng.gauss(0, NOISE_SD_NATS)
                points.append(
                    Point(size=size, log2_value=float(rate), loss_nats=loss, seed=run_seed)
                )
    return points


def test_published_optima_of_mup_issue_66_drift():
    question = Question(target_size=1536, base_size=96)
    verdict = judge_optima([(width, best) for width, (best, _) in ISSUE_66_SWEEP.items()], question)
    print_row("nanoGPT, mup issue 66: its optima", "verdict", format_verdict(verdict))
    assert verdict.outcome == "drifts" and verdict.drift.estimate == pytest.approx(-0.7)
    # Equal optima do not drift, and optima that alternate around one value hold.
    equal = judge_optima([(width, -9.0) for width in ISSUE_66_SWEEP], question)
    assert equal.outcome != "drifts" and equal.drift.estimate == pytest.approx(0)
    alternating = [(width, -9 + 0.02 * (-1) ** i) for i, width in enumerate(ISSUE_66_SWEEP)]
    assert judge_optima(alternating, question).outcome == "holds"


SPIKES_NATS = (0.05, 0.1, 0.2, 0.35, 0.5)
"""Sizes of the spikes that are added to the loss of a run."""
FIVE, FOUR, THREE = range(-10, -5), range(-10, -6), range(-9, -6)
"""Grids of five, four and three rates, as base-2 logarithms."""
PUBLISHED_GRIDS = (FIVE, THREE, FOUR, THREE)
"""Grid of rates at each size of `FALSE_ALARM_LOSSES`, as in the published sweep."""
FALSE_ALARM_QUESTION = Question(
    target_size=1_000_000_000, base_size=min(FALSE_ALARM_LOSSES), axis="params"
)


def generate_spiked_grids(points, spikes_nats=SPIKES_NATS):
    """Yield copies of a one-seed grid in which one run's loss is raised by a spike.

    There is a copy for each run and spike. The copies are in the order of `points`, and of
    `spikes_nats` for each run. Each copy comes with a flag: whether the rate of lowest loss at that
    size changed. A person who reads such a grid by eye would take the change for a drift.
    """

    def find_best_rate(runs, size):
        return min((p.loss_nats, p.log2_value) for p in runs if p.size == size)[1]

    for index, run in enumerate(points):
        for nats in spikes_nats:
            spiked_run = dataclasses.replace(run, loss_nats=run.loss_nats + nats)
            runs = [*points[:index], spiked_run, *points[index + 1 :]]
            yield runs, find_best_rate(runs, run.size) != find_best_rate(points, run.size)


@pytest.mark.parametrize(
    ("rates", "spikes_nats"),
    [
        pytest.param(PUBLISHED_GRIDS, SPIKES_NATS[::2], id="published grids, three spikes"),
        pytest.param(
            PUBLISHED_GRIDS, SPIKES_NATS, id="published grids, all spikes", marks=pytest.mark.slow
        ),
        pytest.param(
            (FIVE, FOUR, FOUR, FOUR),
            SPIKES_NATS,
            id="four rates above the base",
            marks=pytest.mark.slow,
        ),
        pytest.param((FIVE,) * 4, SPIKES_NATS, id="five rates everywhere", marks=pytest.mark.slow),
    ],
)
def test_one_spiked_run_never_makes_a_drift(rates, spikes_nats):
    began = time.perf_counter()
    points = make_grid(FALSE_ALARM_LOSSES, rates, optimum=-8, drift=0.0, num_seeds=1)
    outcomes, outcomes_where_best_moved = [], []
    for runs, is_best_moved in generate_spiked_grids(points, spikes_nats):
        outcome = judge(runs, FALSE_ALARM_QUESTION, draws=200).outcome
        outcomes.append(outcome)
        if is_best_moved:
            outcomes_where_best_moved.append(outcome)
    seconds = time.perf_counter() - began
    findings = ", ".join(
        f"{outcomes.count(outcome)} {outcome.replace('_', ' ')}"
        for outcome in ("drifts", "cannot_tell", "holds")
    )
    num_moved = len(outcomes_where_best_moved)
    num_cannot_tell = outcomes_where_best_moved.count("cannot_tell")
    print_row(
        f"one seed, one spike, rates {[len(size_rates) for size_rates in rates]}",
        "verdict",
        f"{findings}; best rate moved in {num_moved}: {num_cannot_tell} cannot tell",
        seconds,
    )
    assert "drifts" not in outcomes
    assert num_moved >= 10, "some spikes must be of the kind that alarms"
    if rates is PUBLISHED_GRIDS:
        assert set(outcomes_where_best_moved) == {"cannot_tell"}


def test_one_spiked_run_does_not_hide_a_true_drift():
    """A verdict that never says `drifts` would pass the test above, but not this one."""
    began = time.perf_counter()
    points = make_grid(
        FALSE_ALARM_LOSSES, [range(-13, -5)] * 4, optimum=-8, drift=-0.7, num_seeds=1
    )
    # One spike in two runs is enough: one run of the first size, and one of the third.
    grids = list(generate_spiked_grids(points, spikes_nats=(0.2,)))
    outcomes = [
        judge(runs, FALSE_ALARM_QUESTION, draws=200).outcome
        for runs, _ in (grids[0], grids[len(grids) // 2])
    ]
    seconds = time.perf_counter() - began
    findings = f"{outcomes.count('drifts')} of {len(outcomes)} drifts"
    print_row("a true drift of 0.7 octaves, one seed, one spike", "verdict", findings, seconds)
    assert outcomes.count("drifts") >= len(outcomes) / 2
