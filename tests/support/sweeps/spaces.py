"""The search space of the tests, and a function that suggests one trial without kept state."""

from forerun._sweeps.search.source import Search
from forerun._sweeps.search.space import build_search_space


def make_space(
    learning_rate=(2**-12, 2**-2), warmup_fraction=(0.0, 0.3), clip_norm=(0.25, 4.0), **options
):
    ranges = {
        "learning_rate": learning_rate,
        "warmup_fraction": warmup_fraction,
        "clip_norm": clip_norm,
    }
    return build_search_space(ranges={**ranges, **options.pop("ranges", {})}, **options)


SPACE = make_space()


def suggest(space, study_seed, index, losses, parallelism, *, earlier=(), **options):
    """Return the point of trial `index` from a new search; points that `earlier` lacks are
    suggested first.
    """
    search = Search(space, study_seed, parallelism, **options)
    for point in earlier[:index]:
        search.add_point(point)
    while len(search.points) < index:
        search.add_point(search.suggest(losses))
    return search.suggest(losses)
