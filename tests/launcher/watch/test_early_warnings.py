"""Growth against a quantity's own past: planted growth is found, the schedule's doing is not."""

import numpy as np
import pytest

from launcher.watch.loss_alerts import find_gradient_growth, list_part_starts
from proxies.core.schedule import Schedule

COSINE = Schedule(kind="cosine", num_steps=1600, warmup_steps=40, final_fraction=0.1)
WSD = Schedule(kind="wsd", num_steps=1600, warmup_steps=40, decay_steps=800, final_fraction=0.1)
STEPS = np.arange(1.0, 1601)


def norms(seed=0, start=None, octaves=0.0):
    """Falls, then rises a little, as healthy ones do; `octaves` doublings over the steps after
    `start`.
    """
    rng = np.random.default_rng(seed)
    healthy = 0.3 + 2 / (1 + STEPS / 30) + 1e-4 * STEPS
    grown = 1.0 if start is None else 2.0 ** (octaves * np.clip((STEPS - start) / 400, 0, None))
    return healthy * grown * np.exp(0.2 * rng.standard_normal(len(STEPS)))


@pytest.mark.parametrize("seed", range(4))
def test_a_healthy_gradient_norm_does_not_grow_out_of_line(seed):
    assert find_gradient_growth(STEPS, norms(seed), COSINE) is None


def test_a_gradient_norm_that_doubles_again_and_again_is_found():
    found = find_gradient_growth(STEPS, norms(start=800, octaves=1.5), COSINE)
    assert 950 < found.first_step < 1350
    assert found.evidence["now"] > 2 * found.evidence["before"]


def test_what_a_part_of_the_schedule_does_is_not_growth():
    grown = norms() * np.where(STEPS > 800, 3.0, 1.0)
    assert find_gradient_growth(STEPS, grown, COSINE) is not None
    assert find_gradient_growth(STEPS, grown, WSD) is None, "the decay begins there"
    assert list_part_starts(WSD) == [0, 40, 800] and list_part_starts(COSINE) == [0, 40]
    assert find_gradient_growth(np.empty(0), np.empty(0), COSINE) is None
