"""Tests of the detection of single runs that a gradient spike has lifted above their loss basin."""

from forerun._transfer.basin.spikes import find_outvoted
from forerun._transfer.question import Point


def test_run_is_outvoted_only_by_repeats_that_agree():
    def make_repeats(*losses):
        """Return runs of one size and value with different seeds."""
        return [
            Point(size=64, log2_value=-6.0, loss_nats=loss, seed=i) for i, loss in enumerate(losses)
        ]

    assert find_outvoted(make_repeats(3.0, 3.01, 3.3)).point.loss_nats == 3.3
    assert find_outvoted(make_repeats(3.0, 3.15, 3.3)) is None
    assert find_outvoted(make_repeats(3.0, 3.3)) is None
    assert find_outvoted(make_repeats(3.0, 3.3, 3.3)) is None
