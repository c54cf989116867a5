"""Tests of the runs that a verdict suggests when it cannot tell whether a value transfers: which
runs are suggested, and whether they decide the verdict.
"""

import dataclasses
import statistics

import numpy as np
import pytest
from planted_experiment import (
    Experiment,
    judge_round,
    make_clip_experiment,
    make_rate_experiment,
    play_rounds,
)
from planted_losses import HARMFUL, HARMLESS

from forerun._transfer.basin.optimum import Optimum
from forerun._transfer.design.added_seeds import suggest_bounded_runs
from forerun._transfer.design.next_runs import (
    MAX_SPENT_FACTOR,
    Suggestion,
    list_larger_sizes,
    plan_round,
    suggest_mending_runs,
    suggest_repeats,
)
from forerun._transfer.design.rounds import Proposal, build_ensemble
from forerun._transfer.question import Point, Question
from forerun._transfer.verdict.verdict import _find_cached_optima, judge

WIDTH = Question(target_size=1024, base_size=32)
"""A question over width."""


def make_unusable_optimum():
    """Return the optimum of size 64 if it may lie outside the values that were run."""
    return Optimum(size=64, status="edge", num_runs=1, num_diverged=0)


def make_points(losses, seeds=1):
    """Return the runs of size 64 with these losses, at whole octaves from 2^-8 up."""
    return [
        Point(size=64, log2_value=-8.0 + i, loss_nats=loss, seed=seed)
        for i, loss in enumerate(losses)
        for seed in range(seeds)
    ]


def list_mending_values(losses):
    """Return log2 of the values at which runs are suggested to mend an optimum at the edge."""
    suggestions = suggest_mending_runs(
        make_unusable_optimum(), make_points(losses), WIDTH, noise_known=True
    )
    return [s.log2_value for s in suggestions]


@pytest.mark.parametrize(
    ("losses", "values"),
    [
        ([2.0, 2.1, 2.2, 2.3], [-9, -10]),
        ([2.3, 2.2, 2.1, 2.0], [-4, -3]),
        ([2.2, 2.1, 2.0, 2.01], [-4]),
        ([2.3, 2.2, 2.1, 2.0, None], [-4.5]),
    ],
)
def test_grid_is_extended_where_the_optimum_lies_at_its_edge_but_not_past_divergence(
    losses, values
):
    assert list_mending_values(losses) == values


def test_suggestion_states_its_relative_cost():
    points = make_points([2.2, 2.1, 2.0, 2.01], seeds=2)
    [suggestion] = suggest_mending_runs(make_unusable_optimum(), points, WIDTH, noise_known=True)
    assert str(suggestion).startswith("run width 64 at 2^-4 (2 seeds): ")
    assert suggestion.relative_cost == 8.0  # two runs of four times the base's FLOPs
    batch = dataclasses.replace(WIDTH, axis="batch", hyperparameter="clip_norm")
    assert suggest_repeats(make_points([2.0])[0], batch).relative_cost == 2.0
    assert str(suggest_repeats(make_points([2.0])[0], batch)).startswith(
        "run 64 tokens a step at clip_norm = 0.00391 (2 seeds): "
    )


def test_suggested_round_is_cheap_and_within_its_cost_limit():
    _, runs, question = make_rate_experiment(noise_nats=0.02, lost_nats=0.0, seed=0)
    outcome, suggestions = judge_round(runs, question)
    assert outcome == "cannot_tell"
    assert all(isinstance(s, Suggestion) for s in suggestions)
    assert suggestions and [s.relative_cost for s in suggestions] == sorted(
        s.relative_cost for s in suggestions
    )
    spent = sum((p.size / 32) ** 2 for p in runs)  # in runs of the base, whose width is 32
    assert sum(s.relative_cost for s in suggestions) <= MAX_SPENT_FACTOR * spent
    assert max(s.size for s in suggestions) < question.target_size


def test_larger_proxy_is_suggested_for_a_distant_target():
    """The target is four times the largest size that was run, and more runs of these sizes do not
    shorten that distance.
    """
    _, runs, question = make_rate_experiment(
        noise_nats=0.004, lost_nats=0.0, seed=0, sizes=(64, 128, 256), target=1024, num_seeds=3
    )
    fitted_optima, _ = _find_cached_optima(tuple(runs), question.level, draws=600, seed=0)
    suggestions, note = plan_round(
        runs, fitted_optima, dataclasses.replace(question, margin_nats=0.004)
    )
    larger_runs = [s for s in suggestions if s.size > 256]
    assert larger_runs and "a larger proxy" in larger_runs[0].reason
    assert "times what was spent" in note
    center = statistics.mean({s.log2_value for s in larger_runs})
    assert abs(center - fitted_optima.optima[-1].log2_value) < 1.0


SPARSE_LOSSES = {
    128: (3.846, 3.743, 3.695, 3.884, 4.143),
    512: (3.114, 2.993, 2.953, 3.221, 3.506),
    2048: (2.711, 2.553, 2.511, 2.563, 3.244),
}
"""Losses by width, at rates two octaves apart from 2^-10 on."""


def test_missing_rates_are_suggested_instead_of_hundreds_of_seeds():
    runs = [
        Point(size=size, log2_value=-10.0 + 2 * index, loss_nats=loss)
        for size, losses in SPARSE_LOSSES.items()
        for index, loss in enumerate(losses)
    ]
    verdict = judge(runs, Question(base_size=128, target_size=8192))
    assert verdict.outcome == "cannot_tell"
    assert sum(s.num_seeds for s in verdict.what_to_run) <= 3 * len(runs)
    # Odd octaves inside the grid lie between the rates that were run
    between = {s.size for s in verdict.what_to_run if s.log2_value % 2 and -10 < s.log2_value < -2}
    assert len(between) >= 2
    spent = sum((p.size / 128) ** 2 for p in runs)
    assert sum(s.relative_cost for s in verdict.what_to_run) <= MAX_SPENT_FACTOR * spent


def test_single_spiked_run_is_repeated_and_then_left_out():
    experiment, runs, question = make_rate_experiment(
        noise_nats=0.003, lost_nats=0.0, seed=1, target=256, offsets=(-3, -2, -1, 0, 1, 2)
    )
    plain = judge(runs, question, draws=400)
    best = plain.optima[-1].log2_value
    spiked = min(
        (p for p in runs if p.size == 128), key=lambda p: (abs(p.log2_value - best), p.seed)
    )
    lifted = dataclasses.replace(spiked, loss_nats=spiked.loss_nats + 0.3)
    spoiled = [lifted if p is spiked else p for p in runs]
    outcome, suggestions = judge_round(spoiled, question)
    assert outcome == "cannot_tell" and plain.outcome == "holds"
    assert [(s.size, s.log2_value) for s in suggestions] == [(128, spiked.log2_value)]
    after = judge(experiment.add_suggested_runs(spoiled, suggestions), question, draws=400)
    assert after.outcome == "holds" and any("it is left out" in reason for reason in after.reasons)


def test_seeds_of_a_clip_norm_are_suggested_at_its_value_and_at_the_ends_of_the_grid():
    """The transferred value is 1 (log2 0), and the grid reaches from 2^-2 to 2^2."""
    _, runs, question = make_clip_experiment(HARMLESS["flat"], noise_nats=0.01, seed=0)
    verdict = judge(runs, question, draws=400)
    suggestions = suggest_bounded_runs(runs, verdict.bounded, question)
    assert {s.log2_value for s in suggestions if s.size <= 128} <= {-2.0, -1.0, 0.0, 1.0, 2.0}
    assert {-2.0, 0.0, 2.0} <= {s.log2_value for s in suggestions}
    assert all(s.hyperparameter == "clip_norm" for s in suggestions)


OPEN_DESIGNS = [
    (lambda seed: make_rate_experiment(noise_nats=0.01, lost_nats=0.0, seed=seed), "holds"),
    (lambda seed: make_rate_experiment(noise_nats=0.01, lost_nats=0.03, seed=seed), "drifts"),
    (
        lambda seed: make_rate_experiment(
            noise_nats=0.02,
            lost_nats=0.0,
            seed=seed,
            axis="duration",
            sizes=(50, 100, 200, 400),
            target=3200,
            measured=True,
        ),
        "holds",
    ),
    (
        lambda seed: make_rate_experiment(
            noise_nats=0.02,
            lost_nats=0.03,
            seed=seed,
            axis="batch",
            sizes=(1024, 2048, 4096),
            target=16384,
        ),
        "drifts",
    ),
    (
        lambda seed: make_rate_experiment(
            noise_nats=0.005, lost_nats=0.0, seed=seed, off=2.5, target=512
        ),
        "holds",
    ),
    (
        lambda seed: make_rate_experiment(
            noise_nats=0.005, lost_nats=0.0, seed=seed, offsets=(-1, 0, 1), target=512
        ),
        "holds",
    ),
    (lambda seed: make_clip_experiment(HARMLESS["flat"], noise_nats=0.005, seed=seed), "holds"),
    (
        lambda seed: make_clip_experiment(
            HARMFUL["falling to the edge"], noise_nats=0.01, seed=seed
        ),
        "drifts",
    ),
]
"""Functions that make a planted experiment from a seed, each with the right outcome. The verdict on
the first runs of such an experiment may be `cannot_tell`."""


@pytest.mark.slow
def test_suggested_runs_decide_within_three_rounds():
    """Suggested runs decide at least 80 % of the experiments that the first runs leave open, and
    all of these rightly.
    """
    outcomes_by_experiment = [
        (right_outcome, play_rounds(*make_experiment(seed))[0])
        for make_experiment, right_outcome in OPEN_DESIGNS
        for seed in range(2)
    ]
    last_outcomes = [
        (right_outcome, outcomes[-1])
        for right_outcome, outcomes in outcomes_by_experiment
        if outcomes[0] == "cannot_tell"
    ]
    is_right = [right == last for right, last in last_outcomes if last != "cannot_tell"]
    assert len(last_outcomes) >= 8
    assert len(is_right) >= 0.8 * len(last_outcomes)
    assert all(is_right)


def run_steep_basin(experiment):
    """Return runs at rates two octaves apart, so far apart that the neighbors of the best rate lose
    over a nat.
    """
    return [
        experiment.run(size, x, seed)
        for size in (32, 64, 128)
        for x in (-10, -8, -6, -4, -2)
        for seed in range(2)
    ]


def test_rates_in_between_are_suggested_where_neighbors_lose_too_much():
    experiment = Experiment(
        loss=lambda x, doublings: 0.2 * (x + 6.3) ** 2 + 0.15 * (x + 6.3) ** 4,
        base=32,
        noise_nats=0.003,
        seed=0,
    )
    runs, question = run_steep_basin(experiment), Question(base_size=32, target_size=192)
    verdict = judge(runs, question, draws=400)
    assert {o.status for o in verdict.optima} == {"too_few"}
    assert {s.size for s in verdict.what_to_run} == {32, 64, 128}
    assert all(-8 < s.log2_value < -4 and s.log2_value != -6 for s in verdict.what_to_run)
    after = judge(experiment.add_suggested_runs(runs, verdict.what_to_run), question, draws=400)
    assert after.outcome == "holds"


@pytest.mark.parametrize("noise_nats", [0.01, 0.02])
def test_predicted_chance_that_a_new_size_is_usable_matches_its_fits(noise_nats):
    """The optimum of a new size is usable only if the runs of that size place it, without the line
    through the other sizes.
    """
    experiment, runs, question = make_rate_experiment(
        noise_nats=noise_nats, lost_nats=0.0, seed=0, num_seeds=4
    )
    fitted_optima, _ = _find_cached_optima(tuple(runs), question.level, draws=600, seed=0)
    ensemble = build_ensemble(runs, fitted_optima, question, [256])
    center = round(float(ensemble.optimum[:, -1].mean()))
    # For each design (grid of octaves, number of seeds) of the new size: the predicted and the
    # simulated share of usable fits
    shares = []
    for octaves, num_seeds in (((-1, 0, 1), 1), ((-1, 0, 1), 4), ((-2, -1, 0, 1, 2), 2)):
        values = tuple(float(center + x) for x in octaves)
        proposal = Proposal(
            size=256,
            values=values,
            num_seeds=num_seeds,
            cost=1.0,
            reason="",
            has_own_intercepts=True,
        )
        usable_fits = []
        for seed in range(12):
            new_runs = [
                dataclasses.replace(experiment, seed=seed).run(256, x, k)
                for x in values
                for k in range(num_seeds)
            ]
            usable_fits.append(
                _find_cached_optima((*runs, *new_runs), question.level, draws=300, seed=0)[0]
                .optima[-1]
                .status
                == "ok"
            )
        predicted = float(np.mean(ensemble._estimate_inside([proposal]) >= 0.95))
        shares.append((predicted, statistics.mean(usable_fits)))
    assert all(abs(predicted - usable) <= 0.25 for predicted, usable in shares)
    assert shares[0][0] < 0.5 and shares[2][0] > 0.9


def test_suggested_runs_are_distinct_and_have_valid_sizes():
    _, runs, question = make_rate_experiment(
        noise_nats=0.01, lost_nats=0.0, seed=3, sizes=(64, 128, 256), target=900, num_seeds=3
    )
    suggestions = judge(
        runs, dataclasses.replace(question, margin_nats=0.004), draws=400
    ).what_to_run
    assert suggestions and len({(s.size, s.log2_value) for s in suggestions}) == len(suggestions)
    assert all(s.size % 64 == 0 and s.size < 900 for s in suggestions)
    assert list_larger_sizes(96, dataclasses.replace(question, base_size=64)) == [192, 384, 768]
    assert list_larger_sizes(256, question) == [384, 512, 768]


def test_useless_mending_runs_are_replaced_and_repeats_are_kept():
    _, runs, question = make_rate_experiment(
        noise_nats=0.005, lost_nats=0.0, seed=0, off=2.5, target=256
    )
    fitted_optima, _ = _find_cached_optima(tuple(runs), question.level, draws=600, seed=0)
    assert any(optimum.status == "edge" for optimum in fitted_optima.optima)
    largest = [p for p in runs if p.size == 128]
    useless = dataclasses.replace(
        suggest_repeats(largest[0], question), log2_value=6.0, reason="far above all optima"
    )
    repeat = suggest_repeats(largest[-1], question)
    chosen, _ = plan_round(runs, fitted_optima, question, [useless], [repeat])
    assert any((s.size, s.log2_value) == (128, repeat.log2_value) and s.mends for s in chosen)
    assert all(s.log2_value < 6.0 for s in chosen)
    assert any(s.log2_value < min(p.log2_value for p in runs) and s.mends for s in chosen)
