"""The space that tests search, and a trial of a search that nothing was kept of."""

from sweeps.search.source import Search
from sweeps.search.space import search_space


def usual(learning_rate=(2**-12, 2**-2), warmup_fraction=(0.0, 0.3), clip_norm=(0.25, 4.0), **more):
    ranges = {
        "learning_rate": learning_rate,
        "warmup_fraction": warmup_fraction,
        "clip_norm": clip_norm,
    }
    return search_space(ranges={**ranges, **more.pop("ranges", {})}, **more)


SPACE = usual()


def suggest(space, study_seed, index, told, parallelism, *, earlier=(), **more):
    """The point of trial `index`, all worked out anew; points that `earlier` lacks too."""
    search = Search(space, study_seed, parallelism, **more)
    for point in earlier[:index]:
        search.add(point)
    while len(search.points) < index:
        search.add(search.suggest(told))
    return search.suggest(told)
