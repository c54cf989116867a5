"""Tests of the early warning for growing gradients: planted growth is found, and a change at the
start of a part of the schedule is not reported.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from planted_watch import make_columns

from forerun._launcher.main_run.watch.alerts import WatchedRun
from forerun._launcher.main_run.watch.loss_alerts import find_growing_gradients, list_part_starts
from forerun._proxies.core.schedule import Schedule

COSINE = Schedule(kind="cosine", num_steps=1600, warmup_steps=40, final_fraction=0.1)
WSD = Schedule(kind="wsd", num_steps=1600, warmup_steps=40, decay_steps=800, final_fraction=0.1)
STEPS = np.arange(1.0, 1601)


def find_growth(steps, grad_norm, schedule):
    """Return the finding of the alert; None if there is none."""
    decision = SimpleNamespace(learning_rate=SimpleNamespace(schedule=schedule))
    columns = make_columns(np.full(len(steps), 2.0), steps=steps, grad_norm=grad_norm)
    return next(find_growing_gradients(WatchedRun(decision=decision, columns=columns)), None)


def make_norms(seed=0, start=None, octaves=0.0):
    """Return norms that fall and then rise a little, as healthy ones do; after `start` they grow by
    `octaves` doublings in 400 steps.
    """
    rng = np.random.default_rng(seed)
    healthy = 0.3 + 2 / (1 + STEPS / 30) + 1e-4 * STEPS
    grown = 1.0 if start is None else 2.0 ** (octaves * np.clip((STEPS - start) / 400, 0, None))
    return healthy * grown * np.exp(0.2 * rng.standard_normal(len(STEPS)))


@pytest.mark.parametrize("seed", range(4))
def test_healthy_gradient_norm_raises_no_warning(seed):
    assert find_growth(STEPS, make_norms(seed), COSINE) is None


def test_growing_gradient_norm_is_found():
    growth = find_growth(STEPS, make_norms(start=800, octaves=1.5), COSINE)
    assert 950 < growth.first_step < 1350
    assert growth.evidence["now"] > 2 * growth.evidence["before"]


def test_growth_at_the_start_of_a_schedule_part_is_ignored():
    grown = make_norms() * np.where(STEPS > 800, 3.0, 1.0)
    assert find_growth(STEPS, grown, COSINE) is not None
    assert find_growth(STEPS, grown, WSD) is None, "the decay begins at step 800"
    assert list_part_starts(WSD) == [0, 40, 800] and list_part_starts(COSINE) == [0, 40]
    assert find_growth(np.empty(0), np.empty(0), COSINE) is None
