"""Growth against a quantity's own past: planted growth is named with its layer, the schedule's doing is not."""

import numpy as np
import pytest

from launcher.watch.early_warnings import gradient_growth, layer_growths, part_starts
from proxies.core.schedule import Schedule

COSINE = Schedule(kind="cosine", num_steps=1600, warmup_steps=40, final_fraction=0.1)
WSD = Schedule(kind="wsd", num_steps=1600, warmup_steps=40, decay_steps=800, final_fraction=0.1)
STEPS = np.arange(1.0, 1601)
LOGGED = np.arange(20.0, 1601, 20)


def norms(seed=0, start=None, octaves=0.0):
    """Falls, then rises a little, as healthy ones do; `octaves` doublings over the steps after `start`."""
    rng = np.random.default_rng(seed)
    healthy = 0.3 + 2 / (1 + STEPS / 30) + 1e-4 * STEPS
    grown = 1.0 if start is None else 2.0 ** (octaves * np.clip((STEPS - start) / 400, 0, None))
    return healthy * grown * np.exp(0.2 * rng.standard_normal(len(STEPS)))


@pytest.mark.parametrize("seed", range(10))
def test_a_healthy_gradient_norm_does_not_grow_out_of_line(seed):
    assert gradient_growth(STEPS, norms(seed), COSINE) is None


def test_a_gradient_norm_that_doubles_again_and_again_is_found():
    found = gradient_growth(STEPS, norms(start=800, octaves=1.5), COSINE)
    assert 950 < found.first_step < 1350 and found.layer is None
    assert found.now > 2 * found.before


def test_what_a_part_of_the_schedule_does_is_not_growth():
    grown = norms() * np.where(STEPS > 800, 3.0, 1.0)
    assert gradient_growth(STEPS, grown, COSINE) is not None
    assert gradient_growth(STEPS, grown, WSD) is None, "the decay begins there"
    assert part_starts(WSD) == [0, 40, 800] and part_starts(COSINE) == [0, 40]


def layers(seed=0, bad=None, column="weight_rms", exponent=0.0, start=800):
    rng = np.random.default_rng(seed)
    scatter = {"weight_rms": 0.01, "param_norm": 0.01, "grad_norm": 0.2, "update_ratio": 0.2}
    found = {}
    for number, name in enumerate(["embed", "blocks.0", "blocks.1", "blocks.2", "head"]):
        found[name] = {
            each: (0.02 * (1 + LOGGED / 100) ** (0.1 + 0.05 * number)) * np.exp(sd * rng.standard_normal(len(LOGGED)))
            for each, sd in scatter.items()
        }
    if bad:
        found[bad][column] = found[bad][column] * np.maximum(LOGGED / start, 1.0) ** exponent
    return found


@pytest.mark.parametrize("seed", range(10))
def test_healthy_layers_grow_at_their_own_pace(seed):
    assert layer_growths(LOGGED, layers(seed), COSINE) == []


@pytest.mark.parametrize(("column", "exponent"), [("weight_rms", 2.0), ("update_ratio", 4.0)])
def test_a_layer_out_of_line_is_named(column, exponent):
    (found,) = layer_growths(LOGGED, layers(bad="blocks.1", column=column, exponent=exponent), COSINE)
    assert (found.layer, found.column) == ("blocks.1", column)
    assert 850 < found.first_step < 1300 and found.now > 1.5 * found.before


def test_growth_of_all_layers_alike_is_no_layer_s_own():
    planted = layers()
    for columns in planted.values():
        columns["weight_rms"] = columns["weight_rms"] * np.maximum(LOGGED / 800, 1.0) ** 2
    assert layer_growths(LOGGED, planted, COSINE) == []


def test_a_layer_that_always_grew_fast_is_not_out_of_line():
    planted = layers()
    planted["head"]["param_norm"] = planted["head"]["param_norm"] * LOGGED**0.9
    assert layer_growths(LOGGED, planted, COSINE) == []


def test_few_lines_and_missing_layers_are_no_trouble():
    assert layer_growths(LOGGED[:5], {n: {c: v[:5] for c, v in cs.items()} for n, cs in layers().items()}, COSINE) == []
    planted = layers(bad="head", exponent=2.0)
    planted["embed"]["weight_rms"] = np.full(len(LOGGED), np.nan)
    planted["blocks.0"]["weight_rms"] = np.zeros(len(LOGGED))
    assert [growth.layer for growth in layer_growths(LOGGED, planted, COSINE)] == ["head"]
    assert layer_growths(np.empty(0), {}, COSINE) == []
    assert gradient_growth(np.empty(0), np.empty(0), COSINE) is None
