"""Tests of the trials that a search suggests: which outcomes a sampler may see, and that no
suggestion depends on state that was kept from earlier suggestions.
"""

import math
import random
import statistics
import subprocess
import sys
import textwrap

import pytest
from spaces import SPACE, make_space, suggest

from forerun._sweeps.search import samplers
from forerun._sweeps.search.source import Search

CLIFF_LOG2_LR = -5.5
"""Base-2 logarithm of the learning rate above which a trial diverges: half an octave above the
optimum, about as close as in real training."""


def compute_loss(point):
    """Return the loss of a trial, which has its minimum of 2.0 at learning rate 2^-6.

    Return None above the cliff, where a trial diverges.
    """
    log2_lr = math.log2(point["learning_rate"])
    if log2_lr > CLIFF_LOG2_LR:
        return None
    basin = 0.02 * (log2_lr + 6) ** 2 + 0.1 * (point["warmup_fraction"] - 0.1) ** 2
    return 2.0 + basin + 0.005 * math.log2(point["clip_norm"]) ** 2


def run_search(seed, num_trials=40, parallelism=4, compute_trial_loss=compute_loss):
    points, losses = [], {}
    for index in range(num_trials):
        points.append(suggest(SPACE, seed, index, losses, parallelism, earlier=points))
        losses[index] = compute_trial_loss(points[-1])
    return points, losses


def test_older_study_gets_the_same_suggestions():
    """Version 0.1 suggested these points.

    The points of the quasi-random design are bitwise the same. The later ones come from Optuna, in
    the version that `constraints.txt` pins.
    """
    points, _ = run_search(0, 26)
    rates, clips = ([point[name] for point in points] for name in ("learning_rate", "clip_norm"))
    assert (rates[0], rates[9]) == (0.00865401838487965, 0.11447560594597407)
    assert (clips[0], points[9]["warmup_fraction"]) == (0.39455346319312334, 0.16275798109080222)
    later = [0.026813639654690812, 1.6620218633544899, 0.006607781758130771, 0.4871823198944656]
    assert [rates[10], clips[10], rates[25], clips[25]] == pytest.approx(later, rel=1e-9)


def test_outcomes_of_trials_in_flight_are_not_used():
    points, losses = run_search(0, 30, 4)
    for wrong in (None, 0.0, 99.0):
        later = losses | dict.fromkeys(range(27, 30), wrong)
        assert suggest(SPACE, 0, 30, later, 4, earlier=points) == suggest(
            SPACE, 0, 30, losses, 4, earlier=points
        )


def test_search_avoids_divergence_and_finds_the_optimum():
    """The limit is that half of the trials diverge on average.

    A sampler that ignores diverged trials, instead of penalizing them, lets 29.5 of 40 diverge.
    """
    runs = [run_search(seed)[1].values() for seed in range(12)]
    num_diverged = [sum(loss is None for loss in losses) for losses in runs]
    regrets = [min(loss for loss in losses if loss is not None) - 2.0 for losses in runs]
    assert statistics.mean(num_diverged) < 20
    assert max(num_diverged) < 24
    assert statistics.median(regrets) < 0.01


def test_search_runs_into_divergence_without_a_penalty():
    """Check that the test above can fail: here divergence counts as a good loss."""
    points, _ = run_search(0, compute_trial_loss=lambda point: compute_loss(point) or 0.0)
    assert sum(compute_loss(point) is None for point in points) > 24


SWITCHED = make_space(
    ranges={"weight_decay": (0.01, 0.3), "beta2": (0.9, 0.99)},
    can_be_off=("clip_norm", "weight_decay"),
)
CHOSEN = make_space(choices={"beta2": (0.9, 0.95, 0.99)})
SAMPLERS_AND_SPACES = [
    ("tpe", SPACE),
    ("tpe", SWITCHED),
    ("gp", SWITCHED),
    ("random", CHOSEN),
]


def test_known_trials_are_used_although_the_parallelism_would_exclude_them():
    """After a range has grown, every earlier trial has ended, and the sampler may use all of
    them.
    """
    points, losses = run_search(0, 30, 8)
    point_without_known = suggest(SPACE, 0, 30, losses, 8, earlier=points)
    assert suggest(SPACE, 0, 30, losses, 8, earlier=points, num_known=23) == point_without_known, (
        "30 - 8 + 1 = 23 trials are used anyway"
    )
    assert suggest(SPACE, 0, 30, losses, 8, earlier=points, num_known=30) != point_without_known
    with pytest.raises(ValueError, match=r"needs the outcomes of trials \[29\]"):
        suggest(SPACE, 0, 30, {i: losses[i] for i in range(29)}, 8, earlier=points, num_known=30)


def run_kept_search(sampler, space, num_trials):
    """Run a search as the driver does, with one `Search` that keeps its state; return its points
    and losses.
    """
    search = Search(space, 1, 3, sampler=sampler, num_startup=6)
    losses = {}
    for index in range(num_trials):
        point = search.suggest(losses)
        search.add_point(point)
        # `compute_loss` needs a clip norm: no clipping counts as 4
        losses[index] = compute_loss({**point, "clip_norm": point["clip_norm"] or 4.0})
    return list(search.points), losses


@pytest.mark.parametrize(("sampler", "space"), SAMPLERS_AND_SPACES)
def test_suggestions_do_not_depend_on_kept_state(sampler, space, monkeypatch):
    """A `Search` that was made anew suggests bitwise the same point as one that kept its state.

    This holds at any trial, with diverged trials, and with more trials than a sampler is shown.
    Neither the order of the outcomes nor the state of Python's random numbers matters.
    """
    monkeypatch.setattr("forerun._sweeps.search.past_trials.NUM_BEST_TRIALS", 3)
    monkeypatch.setattr(samplers, "MAX_TRIALS_SHOWN", 9)
    monkeypatch.setattr(samplers, "MAX_TRIALS_FITTED", 5)
    # A fit of the GP is slow; 8 trials are more than the 5 that it is shown.
    num_trials = 8 if sampler == "gp" else 44
    points, losses = run_kept_search(sampler, space, num_trials)
    assert None in losses.values() or sampler == "gp"
    for point in points:
        assert list(point) == list(space.names)
        for axis in space.axes:
            assert axis.range[0] <= point[axis.name] <= axis.range[1] or (
                axis.can_be_off and not point[axis.name]
            )
    random.seed(num_trials)
    losses = dict(reversed(losses.items()))
    for index in [num_trials - 1] if sampler == "gp" else range(0, num_trials, 3):
        suggested = suggest(
            space, 1, index, losses, 3, sampler=sampler, num_startup=6, earlier=points[:index]
        )
        assert suggested == points[index]


def test_new_sampler_needs_only_an_entry_in_the_table_of_samplers():
    """A plan accepts the sampler's name, the written plan and the schema contain its line, and a
    search uses it.
    """
    script = """
        import sys
        from forerun._sweeps.search import samplers, source, space

        class Middle:
            def __init__(self, past):
                self.past = past

            def ask(self):
                return self.past.space.make_point([0.5] * self.past.space.num_coordinates)

        samplers.SAMPLERS["middle"] = samplers.Sampler(
            name="middle", begin=Middle, line="always the middle"
        )
        from forerun._launcher.study.plan.search import SearchSection
        from forerun._launcher.study.plan.writing import build_plan_schema, format_plan

        assert SearchSection(sampler="middle").sampler == "middle"
        assert "middle: always the middle" in format_plan({}, every=True)
        assert "middle" in str(build_plan_schema())
        searched = space.build_search_space(ranges={"learning_rate": (0.25, 1.0)})
        assert source.Search(searched, 0, 1, sampler="middle").suggest({}) == {"learning_rate": 0.5}
        heavy = {"numpy", "optuna", "torch"}
        assert not heavy & set(sys.modules), "names and needs are read without them"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


def test_stored_points_equal_the_given_ones():
    given = [
        {"learning_rate": 2.0**-i, "warmup_fraction": 0.1, "clip_norm": 0.0} for i in range(1, 5)
    ]
    points = Search(SPACE, 1, 3).points
    for point in given:
        points.append(dict(reversed(point.items())))
    assert list(points) == given
    assert points[-1] == given[-1]

    assert len(points) == 4
    with pytest.raises(IndexError):
        points[4]
