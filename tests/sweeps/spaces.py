"""The space that tests search."""

from sweeps.space import search_space


def usual(learning_rate=(2**-12, 2**-2), warmup_fraction=(0.0, 0.3), clip_norm=(0.25, 4.0), **more):
    ranges = {"learning_rate": learning_rate, "warmup_fraction": warmup_fraction, "clip_norm": clip_norm}
    return search_space(ranges={**ranges, **more.pop("ranges", {})}, **more)


SPACE = usual()
