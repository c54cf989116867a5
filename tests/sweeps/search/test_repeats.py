"""Tests of repeats of the best trials with other seeds: how many repeats each candidate gets by
optimal computing budget allocation (OCBA), and how candidates are compared.
"""

import numpy as np
import pytest

from forerun._sweeps.search.repeats import PAIRED_LEVEL, allocate_repeats, compare_candidates

NUM_SEEDS = 60
"""Number of repeats of each candidate for which losses are drawn; more than any test requests."""


def draw_losses(rng, means, seed_noise, run_noise):
    """Return a loss in nats for every (candidate, repeat); repeat k of each candidate has seed k.

    Args:
        rng: random numbers.
        means: mean loss of each candidate.
        seed_noise: standard deviation of the part that all candidates share at a seed.
        run_noise: standard deviation of the part that is different in each run.
    """
    seed_offsets = rng.normal(0, seed_noise, NUM_SEEDS)
    return {
        (c, k): mean + seed_offsets[k] + rng.normal(0, run_noise)
        for c, mean in enumerate(means)
        for k in range(NUM_SEEDS)
    }


def spend_repeats(losses, num_candidates, max_repeats):
    """Return the number of repeats of each candidate after all `max_repeats` were spent in rounds.

    `losses` has the loss of every (candidate, repeat) that may be requested.
    """
    outcomes = {}
    for _ in range(100):  # far more rounds than any test needs
        counts = allocate_repeats(num_candidates, max_repeats, 4, outcomes)
        requested = {(c, k) for c, count in enumerate(counts) for k in range(count)}
        if requested <= outcomes.keys():
            return counts
        outcomes |= {repeat: losses[repeat] for repeat in requested}
    raise AssertionError("the rounds do not end")


def test_every_candidate_is_repeated_before_the_budget_is_concentrated():
    assert allocate_repeats(4, 12, 4, {}) == [2, 2, 2, 2]
    assert allocate_repeats(4, 6, 4, {}) == [2, 2, 1, 1]
    losses = draw_losses(np.random.default_rng(0), [2.0, 2.01, 2.02], 0.01, 0.01)
    for max_repeats in (6, 7, 13, 30):
        assert sum(spend_repeats(losses, 3, max_repeats)) == max_repeats


def test_ocba_finds_the_best_candidate_more_often_than_equal_shares():
    """OCBA finds the best candidate in 142 of these 150 searches, equal shares in 128.

    With other random numbers, the difference varies by about 5.
    """
    rng = np.random.default_rng(2)
    num_right = {"ocba": 0, "equal": 0}
    means = [2.0, 2.006, 2.02, 2.03, 2.04, 2.05]
    for _ in range(150):
        losses = draw_losses(rng, means, 0.0, 0.012)
        for name, counts in (("ocba", spend_repeats(losses, 6, 36)), ("equal", [6] * 6)):
            num_right[name] += compare_candidates(counts, losses).standings[0].candidate == 0
    assert num_right["ocba"] > num_right["equal"] + 5


def test_seeds_are_paired_where_their_effect_is_common():
    rng = np.random.default_rng(4)
    paired = compare_candidates([4, 4], draw_losses(rng, [2.0, 2.01], 0.05, 0.002))
    assert paired.paired and paired.lead_nats == pytest.approx(0.01, abs=0.004)
    assert paired.lead_standard_error_nats < 0.004, (
        "the noise of 0.05 that the seeds share is removed"
    )


def test_seeds_without_an_effect_are_rarely_paired():
    """The F test is expected to err in the share `PAIRED_LEVEL` of the draws: 4 of 40, with a
    standard deviation of 1.9. The limit is four standard deviations more.
    """
    rng = np.random.default_rng(4)
    num_draws = 40
    num_paired = sum(
        compare_candidates([4, 4], draw_losses(rng, [2.0, 2.01], 0.0, 0.02)).paired
        for _ in range(num_draws)
    )
    expected, sd = num_draws * PAIRED_LEVEL, (num_draws * PAIRED_LEVEL * (1 - PAIRED_LEVEL)) ** 0.5
    assert num_paired < expected + 4 * sd


@pytest.mark.parametrize(("seed_noise", "run_noise"), [(0.0, 0.01), (0.03, 0.005)])
def test_standard_error_matches_the_error_of_the_lead(seed_noise, run_noise):
    """Over many draws, the error of the lead has the size of its standard error. The candidates
    have unequal numbers of repeats.
    """
    rng = np.random.default_rng(5)
    scores = []
    for _ in range(300):
        comparison = compare_candidates(
            [6, 9, 4], draw_losses(rng, [2.0, 2.5, 3.0], seed_noise, run_noise)
        )
        assert [standing.candidate for standing in comparison.standings] == [0, 1, 2]
        scores.append((comparison.lead_nats - 0.5) / comparison.lead_standard_error_nats)
    assert np.std(scores) == pytest.approx(1.0, abs=0.15) and abs(np.mean(scores)) < 0.15


def test_diverged_candidates_come_last():
    losses = {(0, 0): 1.0, (0, 1): None, (1, 0): 2.0, (1, 1): 2.1, (2, 0): None, (2, 1): None}
    comparison = compare_candidates([2, 2, 2], losses)
    assert [(standing.candidate, standing.num_diverged) for standing in comparison.standings] == [
        (1, 0),
        (0, 1),
        (2, 2),
    ]
    assert comparison.lead_nats is None and comparison.standings[1].mean_nats is None
    assert allocate_repeats(3, 12, 4, losses) == [2, 2, 2], (
        "only one candidate is left, so no more repeats are needed"
    )
