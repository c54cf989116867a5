import math
import statistics

import cmaes
import pytest
from spaces import SPACE, suggest, usual

from sweeps.search.source import Search

BETAS = usual(warmup_fraction=(0.1, 0.1), ranges={"beta1": (0.8, 0.95)})


def loss_of(point):
    log2_lr = math.log2(point["learning_rate"])
    if log2_lr > -5.5:
        return None
    return 2.0 + 0.02 * (log2_lr + 6) ** 2 + 0.005 * math.log2(point["clip_norm"]) ** 2


def searched(space, num_trials, parallelism=4, loss=loss_of, known=(), num_known=0):
    search, told = Search(space, 1, parallelism, sampler="cmaes", num_known=num_known), {}
    for index in range(num_trials):
        point = known[index] if index < len(known) else search.suggest(told)
        search.add(point)
        told[index] = loss(point)
    return list(search.points), told


@pytest.mark.parametrize(("space", "parallelism"), [(SPACE, 1), (SPACE, 4), (BETAS, 13)])
def test_what_is_kept_is_what_a_resume_works_out(space, parallelism):
    points, told = searched(space, 70, parallelism)
    for index in (10, 11, 27, 40, 69):
        assert suggest(space, 1, index, told, parallelism, sampler="cmaes", earlier=points) == points[index]


def test_a_grown_search_goes_on_from_all_its_trials():
    narrow = usual(learning_rate=(2**-12, 2**-7))
    before, told = searched(narrow, 30)
    points, told = searched(SPACE, 60, known=before, num_known=30)
    assert points[30:] != searched(narrow, 60)[0][30:]
    for index in (30, 31, 45, 59):
        again = suggest(SPACE, 1, index, told, 4, sampler="cmaes", earlier=points, num_known=30)
        assert again == points[index]


def test_the_first_after_the_design_are_not_all_one_point():
    """Optuna's sampler, made anew for each, drew one point for all before the first of them had ended."""
    points, _ = searched(SPACE, 26, parallelism=8)
    assert len({tuple(point.values()) for point in points}) == 26


def test_it_begins_at_the_best_of_the_design():
    points, told = searched(SPACE, 30)
    best = min((loss, index) for index, loss in told.items() if index < 7 and loss is not None)[1]
    near = [abs(math.log2(point["learning_rate"] / points[best]["learning_rate"])) for point in points[10:14]]
    assert statistics.mean(near) < 2.5


def test_once_converged_it_begins_elsewhere_with_twice_the_trials(monkeypatch):
    sizes = []
    made = cmaes.CMA

    def noted(*args, **kwargs):
        sizes.append(kwargs["population_size"])
        return made(*args, **kwargs)

    monkeypatch.setattr(cmaes, "CMA", noted)
    points, told = searched(SPACE, 1200)
    assert sizes[:2] == [7, 14]
    assert all(math.isfinite(value) for point in points for value in point.values())
    assert min(loss for loss in told.values() if loss is not None) == pytest.approx(2.0, abs=1e-9)
    assert suggest(SPACE, 1, 1199, told, 4, sampler="cmaes", earlier=points) == points[1199]


def test_each_outcome_is_told_once(monkeypatch):
    """A search of n trials tells n at most, not n squared."""
    told = []
    plain = cmaes.CMA.tell
    monkeypatch.setattr(cmaes.CMA, "tell", lambda self, solutions: (told.extend(solutions), plain(self, solutions)))
    searched(SPACE, 200)
    assert 60 < len(told) <= 200


def test_it_survives_when_all_diverge():
    assert len(searched(SPACE, 40, loss=lambda point: None)[0]) == 40


@pytest.mark.parametrize("more", [{"can_be_off": ("clip_norm",)}, {"choices": {"clip_norm": (0.5, 1.0)}}])
def test_what_is_no_range_is_refused(more):
    with pytest.raises(ValueError, match="cmaes knows ranges alone: clip_norm"):
        suggest(usual(**more), 0, 12, dict.fromkeys(range(12), 2.0), 1, sampler="cmaes")
