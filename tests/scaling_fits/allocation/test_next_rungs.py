"""The runs advised narrow the interval: as the algebra says, and when they are made."""

import dataclasses
import math

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, SIZES, TOKENS, ladder

from proxies.core.checks import SpecError
from scaling_fits.allocation.next_rungs import Candidates, candidates_below, conditioned, expected_shrink, next_rungs
from scaling_fits.forecast.uncertainty import fit_runs
from scaling_fits.laws import law
from scaling_fits.laws.law import CannotTellError
from scaling_fits.laws.table import from_columns

NOISE = 0.005
TARGET = (1e7, 8e6)  # 100 times the ladder's largest
TRUTH = np.array([math.log(1.2), math.log(40.0), math.log(60.0), 0.34, 0.37, 1.0])  # CHINCHILLA's
MOST = 0.05 * 6 * TARGET[0] * TARGET[1]


def planted(rng):
    table = ladder(CHINCHILLA)
    return from_columns(table.params, table.tokens, table.loss * np.exp(rng.normal(0, NOISE, table.num_runs)))


@pytest.fixture(scope="module")
def fitted():
    return fit_runs(planted(np.random.default_rng(0)), bootstrap=100)


def test_conditioning_is_the_normal_conditional():
    rng = np.random.default_rng(0)
    root = rng.normal(size=(3, 3))
    covariance, noise = root @ root.T, 0.7
    joint = covariance + np.diag([0, 0, noise**2])
    precision = np.linalg.inv(joint[np.ix_([0, 1, 2], [0, 1, 2])])
    wanted = np.linalg.inv(precision[:2, :2])  # of the first two given a noisy look at the third
    np.testing.assert_allclose(conditioned(covariance, 2, noise)[:2, :2], wanted)


@pytest.mark.slow
def test_the_advice_keeps_to_the_money_and_its_own_promise(fitted):
    candidates = candidates_below(fitted, MOST)
    advised = next_rungs(fitted, *TARGET, candidates, most_flops=MOST)
    assert 1 <= len(advised) <= 3
    assert sum(run.flops for run in advised) <= MOST
    assert all(0.02 <= run.interval_shrink < 1 for run in advised)
    assert advised[0].interval_shrink == max(run.interval_shrink for run in advised)
    runs = Candidates(params=np.array([r.params for r in advised]), tokens=np.array([r.tokens for r in advised]))
    together = 1 - math.prod(1 - run.interval_shrink for run in advised)
    assert expected_shrink(fitted, *TARGET, runs) == pytest.approx(together, rel=1e-9)
    assert together > 0.1


def test_no_other_choice_is_expected_to_narrow_more_for_its_flops(fitted):
    candidates = candidates_below(fitted, MOST)
    first = next_rungs(fitted, *TARGET, candidates, num_runs=1)[0]
    shrinks = np.array([
        expected_shrink(fitted, *TARGET, Candidates(params=n[None], tokens=d[None]))
        for n, d in zip(candidates.params, candidates.tokens, strict=True)
    ])  # fmt: skip
    material = shrinks >= 0.5 * shrinks.max()
    per_flop = -np.log1p(-shrinks[material]) / (candidates.flops[material] / MOST)
    assert -math.log1p(-first.interval_shrink) / (first.flops / MOST) == pytest.approx(per_flop.max())


def test_three_runs_are_worth_no_less_than_one_of_their_flops(fitted):
    candidates = candidates_below(fitted, MOST)
    for most in (0.2 * MOST, 0.5 * MOST, MOST):
        advised = next_rungs(fitted, *TARGET, candidates, most_flops=most)
        spent = sum(run.flops for run in advised)
        assert spent <= most * (1 + 1e-9)
        fits = candidates.flops <= spent * (1 + 1e-9)
        alone = max(
            expected_shrink(fitted, *TARGET, Candidates(params=n[None], tokens=d[None]))
            for n, d in zip(candidates.params[fits], candidates.tokens[fits], strict=True)
        )
        assert 1 - math.prod(1 - run.interval_shrink for run in advised) >= alone - 0.02


def test_candidates_span_the_ladders_ratios_and_what_may_be_spent(fitted):
    """Their corners: few tokens on the largest size and many on the smallest, at the cheapest and the dearest."""
    found = candidates_below(fitted, MOST)
    ratio = found.tokens / found.params
    ends = [(min(TOKENS) / max(SIZES), max(TOKENS) / min(SIZES)), (found.flops.min(), MOST)]
    corners = [np.isclose(ratio, r) & np.isclose(found.flops, c) for r in ends[0] for c in ends[1]]
    assert [int(corner.sum()) for corner in corners] == [1] * 4
    assert ratio.min() == pytest.approx(ends[0][0]) and ratio.max() == pytest.approx(ends[0][1])
    assert 0.1 < found.flops.min() / fitted.span.six_nd[1] < 0.9, "not far below the largest, which says what is known"
    assert found.flops.max() == pytest.approx(MOST)


def test_the_noise_of_a_run_is_what_forecasts_take_for_it(fitted):
    """A law's residuals may be misfit; the fit's draws of the noise say how much one more run tells."""
    one = Candidates(params=np.array([1e6]), tokens=np.array([2e6]))

    def told(**changes):
        return expected_shrink(dataclasses.replace(fitted, **changes), *TARGET, one)

    worse = tuple(dataclasses.replace(fit, residual_sd=20 * fit.residual_sd) for fit in fitted.members)
    assert told(members=worse) == told() > 0.02
    draws = fitted.cloud.noise_draws
    assert 0.5 * NOISE < np.median(draws) < 2 * NOISE, "the planted noise, of losses near 2"
    factors = [told(cloud=dataclasses.replace(fitted.cloud, noise_draws=factor * draws)) for factor in (0.1, 1.0, 10.0)]
    assert factors[0] > factors[1] > 4 * factors[2]


def test_nothing_to_say(fitted):
    assert candidates_below(fitted, fitted.span.six_nd[1] / 10) is None
    bare = fit_runs(ladder(CHINCHILLA), "chinchilla", bootstrap=0)
    candidates = candidates_below(bare, MOST)
    assert next_rungs(bare, *TARGET, candidates) == ()
    assert next_rungs(fitted, *TARGET, candidates, most_flops=1.0) == ()
    one_size = fit_runs(ladder(CHINCHILLA, sizes=np.array([1e5])), bootstrap=4)
    with pytest.raises(CannotTellError):
        next_rungs(one_size, *TARGET, candidates)
    with pytest.raises(SpecError, match="finite"):
        Candidates(params=np.array([math.nan]), tokens=np.array([1.0]))


def _sensitivity(n, d):
    """How each run's log loss moves with the planted law's parameters."""
    steps = 1e-5 * np.eye(6)[:5]
    return np.stack(
        [np.subtract(*law.log_loss(np.stack([TRUTH + step, TRUTH - step]), n, d)) / 2e-5 for step in steps], axis=1
    )


def _log_sd(n, d):
    """Log sd of the target's log loss that runs of the planted law and noise leave: the Cramer-Rao bound."""
    runs, target = _sensitivity(n, d), _sensitivity(np.array([TARGET[0]]), np.array([TARGET[1]]))[0]
    return math.log(NOISE) + 0.5 * math.log(target @ np.linalg.solve(runs.T @ runs, target))


def _at_random(candidates, flops, rng):
    chosen = []
    for index in rng.permutation(len(candidates.params)):
        if candidates.flops[index] <= flops and len(chosen) < 3:
            flops -= candidates.flops[index]
            chosen.append((candidates.params[index], candidates.tokens[index]))
    return chosen


@pytest.mark.slow
def test_runs_as_advised_narrow_more_for_their_flops_than_others():
    """Advice from noisy ladders, judged by the planted truth: log sd of the target gained, and for its FLOPs.

    Against random candidates of no more runs and FLOPs, and one run, as large as the money allows.
    """
    gained = {"advised": [], "random": [], "largest": []}
    for seed in range(5):
        rng = np.random.default_rng(seed)
        table = planted(rng)
        fitted = fit_runs(table, "chinchilla", bootstrap=60, seed=seed)
        candidates = candidates_below(fitted, MOST)
        advised = next_rungs(fitted, *TARGET, candidates, most_flops=MOST)
        ratio = TOKENS[1] / np.sqrt(SIZES[0] * SIZES[-1])
        spent = sum(run.flops for run in advised)
        choices = {
            "advised": [[(run.params, run.tokens) for run in advised]],
            "random": [_at_random(candidates, spent, rng) for _ in range(20)],
            "largest": [[(math.sqrt(MOST / 6 / ratio), math.sqrt(MOST / 6 * ratio))]],
        }
        for name, designs in choices.items():
            for design in designs:
                n, d = np.array(design).T
                after = _log_sd(np.r_[table.params, n], np.r_[table.tokens, d])
                gained[name].append((_log_sd(table.params, table.tokens) - after, 6 * float(n @ d) / MOST))
    mean = {name: np.mean(values, axis=0) for name, values in gained.items()}
    per_flop = {name: gain / spent for name, (gain, spent) in mean.items()}
    assert mean["advised"][0] > 0.5  # to 0.6 of the width
    assert mean["advised"][0] > 1.3 * mean["random"][0]
    assert per_flop["advised"] > 1.15 * per_flop["random"]
    assert per_flop["advised"] > 1.15 * per_flop["largest"]
