import math
import random
import statistics
import subprocess
import sys
import textwrap

import pytest
from spaces import SPACE, suggest, usual

from sweeps.search import samplers
from sweeps.search.source import Search

# half an octave above the optimum: what a learning rate range really looks like
CLIFF_LOG2_LR = -5.5


def toy_loss(point):
    """Best 2.0 at learning rate 2^-6; diverges past the cliff."""
    log2_lr = math.log2(point["learning_rate"])
    if log2_lr > CLIFF_LOG2_LR:
        return None
    valley = 0.02 * (log2_lr + 6) ** 2 + 0.1 * (point["warmup_fraction"] - 0.1) ** 2
    return 2.0 + valley + 0.005 * math.log2(point["clip_norm"]) ** 2


def search(seed, num_trials=40, parallelism=4, tell=toy_loss):
    points, told = [], {}
    for index in range(num_trials):
        points.append(suggest(SPACE, seed, index, told, parallelism, earlier=points))
        told[index] = tell(points[-1])
    return points, told


def test_an_older_study_goes_on_as_it_would_have():
    """What version 0.1 suggested: in the design to the bit, later as the pinned Optuna does."""
    points, _ = search(0, 26)
    rates, clips = ([point[name] for point in points] for name in ("learning_rate", "clip_norm"))
    assert (rates[0], rates[9]) == (0.00865401838487965, 0.11447560594597407)
    assert (clips[0], points[9]["warmup_fraction"]) == (0.39455346319312334, 0.16275798109080222)
    later = [0.026813639654690812, 1.6620218633544899, 0.006607781758130771, 0.4871823198944656]
    assert [rates[10], clips[10], rates[25], clips[25]] == pytest.approx(later, rel=1e-9)


def test_outcomes_of_trials_in_flight_are_not_looked_at():
    points, told = search(0, 30, 4)
    for wrong in (None, 0.0, 99.0):
        later = told | dict.fromkeys(range(27, 30), wrong)
        assert suggest(SPACE, 0, 30, later, 4, earlier=points) == suggest(
            SPACE, 0, 30, told, 4, earlier=points
        )


def test_divergence_does_not_blind_the_search():
    """Told as a failure, divergence wasted 29.5 of 40 trials on such a toy; half is our bar."""
    runs = [search(seed)[1].values() for seed in range(12)]
    wasted = [sum(loss is None for loss in losses) for losses in runs]
    regrets = [min(loss for loss in losses if loss is not None) - 2.0 for losses in runs]
    assert statistics.mean(wasted) < 20
    assert max(wasted) < 24
    assert statistics.median(regrets) < 0.01


def test_finite_penalty_is_what_does_it():
    """The mutation check: where divergence is told as a good loss, the search runs over the
    cliff.
    """
    points, _ = search(0, tell=lambda point: toy_loss(point) or 0.0)
    assert sum(toy_loss(point) is None for point in points) > 24


SWITCHED = usual(
    ranges={"weight_decay": (0.01, 0.3), "beta2": (0.9, 0.99)},
    can_be_off=("clip_norm", "weight_decay"),
)
CHOSEN = usual(choices={"beta2": (0.9, 0.95, 0.99)})
EVERY = [
    ("tpe", SPACE),
    ("tpe", SWITCHED),
    ("gp", SWITCHED),
    ("random", CHOSEN),
]


def test_known_trials_are_seen_beyond_the_last_p():
    """After a growth every trial before it has ended: the sampler knows them all."""
    points, told = search(0, 30, 8)
    plain = suggest(SPACE, 0, 30, told, 8, earlier=points)
    assert suggest(SPACE, 0, 30, told, 8, earlier=points, num_known=23) == plain, (
        "23 = 30 - 8 + 1 are seen anyway"
    )
    assert suggest(SPACE, 0, 30, told, 8, earlier=points, num_known=30) != plain
    with pytest.raises(ValueError, match=r"needs the outcomes of trials \[29\]"):
        suggest(SPACE, 0, 30, {i: told[i] for i in range(29)}, 8, earlier=points, num_known=30)


def kept(
    sampler,
    space,
    num_trials,
    parallelism=3,
    known=(),
    num_known=0,
    on_ask=lambda search, told: None,
):
    """A search as the driver carries it out, one `Search` from its first trial on."""
    search = Search(space, 1, parallelism, sampler=sampler, num_startup=6, num_known=num_known)
    told = {}
    for index in range(num_trials):
        if index >= len(known):
            on_ask(search, told)
        search.add(known[index] if index < len(known) else search.suggest(told))
        told[index] = toy_loss(
            {**search.points[-1], "clip_norm": search.points[-1]["clip_norm"] or 4.0}
        )
    return list(search.points), told


@pytest.mark.parametrize(("sampler", "space"), EVERY)
def test_what_is_kept_between_suggestions_changes_nothing(sampler, space, monkeypatch):
    """To the bit, from any trial on, divergences among them, also beyond what a sampler is shown.

    So is what came in since, the order in which it is told, and what the world's own dice have
    shown.
    """
    monkeypatch.setattr("sweeps.search.past_trials.NUM_BEST", 3)
    monkeypatch.setattr(samplers, "MOST_SHOWN", 9)
    monkeypatch.setattr(samplers, "MOST_FITTED", 5)
    number = 10 if sampler == "gp" else 44
    points, told = kept(sampler, space, number)
    assert None in told.values() or sampler == "gp"
    for point in points:
        assert list(point) == list(space.names)
        for axis in space.axes:
            assert axis.range[0] <= point[axis.name] <= axis.range[1] or (
                axis.can_be_off and not point[axis.name]
            )
    random.seed(number)
    told = dict(reversed(told.items()))
    for index in [number - 1] if sampler == "gp" else range(0, number, 3):
        again = suggest(
            space, 1, index, told, 3, sampler=sampler, num_startup=6, earlier=points[:index]
        )
        assert again == points[index]


def test_a_new_sampler_is_an_entry_and_no_more():
    """A plan takes its name, its sentence is in the plan that `init` writes and in the schema, and
    a search asks it.
    """
    script = """
        import sys
        from sweeps.search import samplers, source, space

        class Middle:
            def __init__(self, past):
                self.past = past

            def ask(self):
                return self.past.space.at([0.5] * self.past.space.num_coordinates)

        samplers.SAMPLERS["middle"] = samplers.Sampler(name="middle", begin=Middle, line="always the middle")
        from launcher.plan.search import SearchSection
        from launcher.plan.writing import commented_plan, plan_schema

        assert SearchSection(sampler="middle").sampler == "middle"
        assert "middle: always the middle" in commented_plan({}, every=True) and "middle" in str(plan_schema())
        searched = space.search_space(ranges={"learning_rate": (0.25, 1.0)})
        assert source.Search(searched, 0, 1, sampler="middle").suggest({}) == {"learning_rate": 0.5}
        assert not {"numpy", "optuna", "torch"} & set(sys.modules), "names and needs are read without them"
    """  # noqa: E501
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


def test_points_kept_as_numbers_are_the_points():
    given = [
        {"learning_rate": 2.0**-i, "warmup_fraction": 0.1, "clip_norm": 0.0} for i in range(1, 5)
    ]
    points = Search(SPACE, 1, 3).points
    for point in given:
        points.append(dict(reversed(point.items())))
    assert (
        list(points) == given
        and points[-1] == given[-1]
        and points[1:3] == given[1:3]
        and len(points) == 4
    )
    with pytest.raises(IndexError):
        points[4]
