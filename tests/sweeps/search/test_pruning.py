"""Tests of the rule by which a search prunes trials (stops them early), on planted curves: which
trials it must prune, which it must keep, and which data it must not use.

Trials are judged at rungs, that is, at a few steps of their training.
"""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pytest
from spaces import SPACE

from forerun._sweeps.search import loss_forecasts, pruning
from forerun._sweeps.search.pruning import (
    EarlierTrial,
    compute_sampler_loss,
    judge_trial,
    list_rungs,
)

NUM_STEPS, STARTUP = 200, 12


def make_trial(point, final, early, status="finished"):
    """Return a trial whose loss stays `early` nats above its final loss until the learning rate
    decays in the last fifth of the steps. The noise of the batches is common to all trials.
    """
    noise = np.random.default_rng(7).normal(0, 0.05, NUM_STEPS)
    curve = final + early * np.minimum(1, (NUM_STEPS - np.arange(NUM_STEPS)) / (NUM_STEPS / 5))
    curve = curve + 2 * np.exp(-np.arange(NUM_STEPS) / 10) + noise
    return EarlierTrial(
        point=point, status=status, losses_nats=tuple(map(float, curve)), loss_nats=float(final)
    )


def make_point(octave, warmup=0.1):
    """Return a point with learning rate 2^octave."""
    return {"learning_rate": 2.0**octave, "warmup_fraction": warmup, "clip_norm": 1.0}


def draw_trials(num, seed=0):
    """Draw trials whose best learning rate is 2^-5. Up to the decay, high rates are behind."""
    rng = np.random.default_rng(seed)
    octaves = rng.uniform(-11, -3, num)
    warmups = rng.uniform(0, 0.3, num)
    return [
        make_late_trial(make_point(octave, warmup))
        for octave, warmup in zip(octaves, warmups, strict=True)
    ]


def make_late_trial(point):
    """Return a trial whose loss up to the decay is the higher, the higher its learning rate."""
    octave = math.log2(point["learning_rate"])
    final = 2 + 0.02 * (octave + 5) ** 2 + 0.1 * (point["warmup_fraction"] - 0.2) ** 2
    return make_trial(
        point, final, early=0.2 * 2 ** ((octave + 5) / 2) + 0.3 * point["warmup_fraction"]
    )


def judge(trial, earlier_trials, step=None, **changes):
    """Return the reason for which the rule prunes a trial at a step, or an empty string."""
    step = step or list_rungs(NUM_STEPS)[-1]
    arguments = {
        "space": SPACE,
        "point": trial.point,
        "num_steps": NUM_STEPS,
        "losses_nats": trial.losses_nats[:step],
        "earlier_trials": earlier_trials,
        "num_startup": STARTUP,
    }
    return judge_trial(**{**arguments, **changes})


def compute_sampled_loss(trial, earlier_trials, step):
    """Return the loss that the sampler is given for a trial that was pruned at a step."""
    return compute_sampler_loss(SPACE, trial.point, trial.losses_nats[:step], earlier_trials)


def shift_losses(trial, nats):
    """Return the same trial with losses that are `nats` higher at every step."""
    losses = tuple(loss + nats for loss in trial.losses_nats)
    return EarlierTrial(
        point=trial.point, status=trial.status, losses_nats=losses, loss_nats=trial.loss_nats + nats
    )


def cut_trial(trial, step, status="pruned"):
    """Return the trial as it was at a step, without a final loss."""
    return EarlierTrial(
        point=trial.point, status=status, losses_nats=trial.losses_nats[:step], loss_nats=None
    )


def test_trial_far_behind_is_pruned_and_the_leader_is_not():
    earlier_trials = draw_trials(30)
    best = min(earlier_trials, key=lambda trial: trial.loss_nats)
    assert judge(shift_losses(best, 2.0), earlier_trials)
    # It leads at every step.
    assert judge(shift_losses(best, -2.0), earlier_trials) == ""


def make_late_winner():
    """Return the best trial: at the optimum with a long warmup, and behind most trials until the
    decay.
    """
    return make_late_trial(make_point(-5, warmup=0.2))


@pytest.mark.parametrize("seed", range(5))
def test_late_winner_is_kept_at_every_rung(seed):
    earlier_trials = draw_trials(30, seed)
    assert make_late_winner().loss_nats < min(trial.loss_nats for trial in earlier_trials)
    assert [judge(make_late_winner(), earlier_trials, step) for step in list_rungs(NUM_STEPS)] == [
        "",
        "",
        "",
    ]


def test_rule_that_ignores_the_decay_prunes_the_late_winner():
    """Check with a mutant that takes the loss at a step for the final loss."""
    earlier_trials = draw_trials(30)

    def forecast_without_decay(space, point, losses_nats, earlier_trials):
        drops = [
            pruning.smooth_loss(trial.losses_nats, 50) - trial.loss_nats for trial in earlier_trials
        ]
        forecast = pruning.smooth_loss(losses_nats, 50) - min(drops)
        return loss_forecasts.Forecast(loss_nats=forecast, error_nats=0.02, degrees_of_freedom=20)

    with mock.patch.object(pruning, "_forecast_end", forecast_without_decay):
        assert judge(make_late_winner(), earlier_trials, 50)
    # Without the mutant, a late trial that ends better than all others is kept.
    late_trial = make_late_trial(make_point(-4, warmup=0.3))
    worse_trials = [trial for trial in earlier_trials if trial.loss_nats > late_trial.loss_nats]
    assert judge(late_trial, worse_trials, 100) == ""


def test_rule_uses_curves_only_up_to_the_step():
    """The rule reads neither the judged trial nor the earlier trials beyond the step."""
    earlier_trials = draw_trials(30)
    trial = make_late_trial(make_point(-6.2))
    for step in list_rungs(NUM_STEPS):
        with_changed_ends = [
            EarlierTrial(
                point=earlier.point,
                status=earlier.status,
                losses_nats=(*earlier.losses_nats[:step], *[9.9] * (NUM_STEPS - step)),
                loss_nats=earlier.loss_nats,
            )
            for earlier in earlier_trials
        ]
        assert judge(trial, earlier_trials, step) == judge(trial, with_changed_ends, step)


def test_nothing_is_pruned_before_enough_trials_finished():
    bad_trial = shift_losses(make_late_trial(make_point(-11)), 3.0)
    earlier_trials = draw_trials(30)
    few = earlier_trials[: STARTUP - 1]
    unfinished = [cut_trial(trial, 100) for trial in earlier_trials] + [
        cut_trial(trial, 20, "diverged") for trial in earlier_trials
    ]
    assert judge(bad_trial, []) == judge(bad_trial, few) == judge(bad_trial, few + unfinished) == ""
    assert judge(bad_trial, unfinished, num_startup=0) == ""
    assert judge(bad_trial, earlier_trials[:STARTUP]) != ""


def test_pruned_and_diverged_trials_do_not_change_a_decision():
    earlier_trials = draw_trials(40)
    judged_trial = make_late_trial(make_point(-9.5))
    pruned = [cut_trial(shift_losses(trial, 5.0), 100) for trial in draw_trials(20, seed=9)]
    diverged = [
        cut_trial(shift_losses(trial, -5.0), 150, "diverged") for trial in draw_trials(20, seed=8)
    ]
    reason = judge(judged_trial, earlier_trials, 100)
    assert (
        reason
        and judge(judged_trial, earlier_trials[:20] + pruned + diverged + earlier_trials[20:], 100)
        == reason
    )
    assert compute_sampled_loss(
        judged_trial, earlier_trials + pruned + diverged, 100
    ) == compute_sampled_loss(judged_trial, earlier_trials, 100)


def test_trial_within_the_margin_of_the_best_is_kept():
    """Within the margin, another seed may reverse the order. Without a margin the trial would be
    pruned.
    """
    earlier_trials = draw_trials(40)
    best = min(trial.loss_nats for trial in earlier_trials)
    near_forecast = loss_forecasts.Forecast(
        loss_nats=best + 0.003, error_nats=0.001, degrees_of_freedom=30
    )
    with mock.patch.object(pruning, "_forecast_end", lambda *args: near_forecast):
        assert judge(make_late_winner(), earlier_trials, 100) == ""
        with mock.patch.object(pruning, "MARGIN_SHARE", 0.0):
            assert "within 0 of the best" in judge(make_late_winner(), earlier_trials, 100)
