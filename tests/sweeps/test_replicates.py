import numpy as np
import pytest

from sweeps.search.replicates import compare, replicates


def world(rng, means, seed_noise, run_noise, most=60):
    """Losses of every candidate at every seed."""
    of_seed = rng.normal(0, seed_noise, most)
    return {
        (c, k): mean + of_seed[k] + rng.normal(0, run_noise)
        for c, mean in enumerate(means)
        for k in range(most)
    }


def spend(losses, number, num_runs, round_size=4):
    """The repeats as they would be asked for, all outcomes coming in."""
    known, counts = {}, None
    for _ in range(100):
        counts = replicates(number, num_runs, round_size, known)
        asked = {(c, k) for c, count in enumerate(counts) for k in range(count)}
        if asked <= known.keys():
            return counts
        known |= {one: losses[one] for one in asked}
    raise AssertionError("it never ends")


def test_every_candidate_twice_first_and_never_more_than_paid_for():
    assert replicates(4, 12, 4, {}) == [2, 2, 2, 2]
    assert replicates(4, 6, 4, {}) == [2, 2, 1, 1]
    losses = world(np.random.default_rng(0), [2.0, 2.01, 2.02], 0.01, 0.01)
    for paid in (6, 7, 13, 30):
        assert sum(spend(losses, 3, paid)) == paid


def test_ocba_chooses_right_more_often_than_equal_shares():
    rng, right = np.random.default_rng(2), {"ocba": 0, "equal": 0}
    means = [2.0, 2.006, 2.02, 2.03, 2.04, 2.05]
    for _ in range(150):
        losses = world(rng, means, 0.0, 0.012)
        for name, counts in (("ocba", spend(losses, 6, 36)), ("equal", [6] * 6)):
            right[name] += compare(counts, losses).standings[0].candidate == 0
    assert right["ocba"] > right["equal"] + 5


def test_common_random_numbers_are_used_where_they_hold():
    rng = np.random.default_rng(4)
    paired = compare([4, 4], world(rng, [2.0, 2.01], 0.05, 0.002))
    assert paired.paired and paired.lead_nats == pytest.approx(0.01, abs=0.004)
    assert paired.lead_standard_error_nats < 0.004, "the seeds' 0.05 are taken out"
    alone = [compare([4, 4], world(rng, [2.0, 2.01], 0.0, 0.02)).paired for _ in range(40)]
    assert sum(alone) < 12


@pytest.mark.parametrize(("seed_noise", "run_noise"), [(0.0, 0.01), (0.03, 0.005)])
def test_standard_errors_are_true(seed_noise, run_noise):
    """The lead's error, over many worlds, is what its standard error says; also with unequal
    numbers of repeats.
    """
    rng, scores = np.random.default_rng(5), []
    for _ in range(300):
        found = compare([6, 9, 4], world(rng, [2.0, 2.5, 3.0], seed_noise, run_noise))
        assert [one.candidate for one in found.standings] == [0, 1, 2]
        scores.append((found.lead_nats - 0.5) / found.lead_standard_error_nats)
    assert np.std(scores) == pytest.approx(1.0, abs=0.15) and abs(np.mean(scores)) < 0.15


def test_a_candidate_that_diverged_comes_last():
    losses = {(0, 0): 1.0, (0, 1): None, (1, 0): 2.0, (1, 1): 2.1, (2, 0): None, (2, 1): None}
    found = compare([2, 2, 2], losses)
    assert [(one.candidate, one.num_diverged) for one in found.standings] == [
        (1, 0),
        (0, 1),
        (2, 2),
    ]
    assert found.lead_nats is None and found.standings[1].mean_nats is None
    assert replicates(3, 12, 4, losses) == [2, 2, 2], "there is nothing left to choose between"
