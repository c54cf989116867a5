import dataclasses

import pytest
from proxy_cases import TINY, run_spec

from proxies import bank, canon
from proxies.coordinates import MISTAKE, TOLERANCE, CoordinateCheck, check_coordinates
from proxies.spec import Schedule

WIDTHS = (16, 32, 64, 128)
LAYERS = ["tok_embeddings", "layers.0.attention", "layers.0.feed_forward", "norm", "lm_head"]


def runs_of(store, *, widths=WIDTHS, num_seeds=4, num_steps=5, own_base=False, **changes):
    base = dataclasses.replace(TINY, num_kv_heads=2)
    shapes = [base.at_width(width) for width in widths]
    return [
        [
            run_spec(
                store.manifest.data_id,
                shape=shape,
                base_shape=shape if own_base else shapes[0],
                seed=seed,
                schedule=Schedule(kind="constant", num_steps=num_steps),
                **{"learning_rate": 0.02, **changes},
            )
            for seed in range(num_seeds)
        ]
        for shape in shapes
    ]


def check(store, level=0.9, **changes):
    return check_coordinates(runs_of(store, **changes), store, level=level)


def flagged(found):
    return {layer.layer: layer.outcome for layer in found.layers if layer.outcome in ("blows_up", "vanishes")}


def cause(found, name):
    return next(layer.cause for layer in found.layers if layer.layer == name)


def test_mup_passes(store):
    found = check(store)
    assert (found.outcome, found.not_finite_width, flagged(found)) == ("passes", None, {})
    assert [layer.layer for layer in found.layers] == LAYERS
    assert (found.parametrization, found.widths, found.num_steps, found.num_seeds) == ("mup", WIDTHS, 4, 4)
    for layer in found.layers:
        low, high = layer.interval
        assert low < layer.slope < high and max(-low, high) < MISTAKE
        assert len(layer.change) == len(WIDTHS) and min(layer.change) > 0 and layer.cause == ""
    assert canon.decode(CoordinateCheck, canon.parse(canon.canonical(found))) == found


@pytest.mark.parametrize(("learning_rate", "num_steps"), [(0.002, 3), (0.005, 5), (0.01, 5)])
def test_a_short_or_slow_check_is_no_false_alarm(store, learning_rate, num_steps):
    """The whole change of the logits would be found to vanish here (slope -0.3): the random readout's part fades."""
    found = check(store, learning_rate=learning_rate, num_steps=num_steps, widths=(16, 64, 256))
    assert flagged(found) == {}
    assert abs(next(layer.slope for layer in found.layers if layer.layer == "lm_head")) < 0.2


def test_the_standard_parametrization_blows_up(store):
    found = check(store, parametrization="sp")
    assert found.outcome == "blows_up"
    assert set(flagged(found)) == {"layers.0.attention", "layers.0.feed_forward", "lm_head"}
    assert next(layer.slope for layer in found.layers if layer.layer == "layers.0.feed_forward") > MISTAKE


def test_each_model_its_own_base_is_the_standard_one(store):
    """The silent mistake: every width calls itself the base. Bit by bit it is `sp`, and is flagged as such."""
    silent, standard = check(store, own_base=True), check(store, parametrization="sp")
    assert silent.outcome == "blows_up"
    assert silent.layers == standard.layers


def test_a_readout_left_unscaled_is_named(store, monkeypatch):
    real = bank.forward_numbers
    monkeypatch.setattr(bank, "forward_numbers", lambda *args: dataclasses.replace(real(*args), output=1.0))
    found = check(store)
    assert flagged(found) == {"lm_head": "blows_up"}
    assert cause(found, "lm_head") == "the readout's output multiplier does not shrink with width"


def scaled_table(monkeypatch, kind, factor):
    """Plant a table in which the rates of one kind are multiplied by `factor(width multiplier)`."""
    real = bank.parameter_table

    def planted(*args):
        return tuple(
            dataclasses.replace(row, learning_rate=row.learning_rate * factor(row.width_multiplier))
            if row.kind == kind
            else row
            for row in real(*args)
        )

    monkeypatch.setattr(bank, "parameter_table", planted)


def test_hidden_rates_left_unscaled_are_named(store, monkeypatch):
    scaled_table(monkeypatch, "hidden", lambda multiplier: multiplier)
    found = check(store)
    assert {"layers.0.attention", "layers.0.feed_forward"} <= set(flagged(found))
    assert "tok_embeddings" not in flagged(found)
    assert cause(found, "layers.0.attention") == "hidden matrices' learning rate does not shrink with width"


def test_an_embedding_whose_rate_shrinks_is_named(store, monkeypatch):
    scaled_table(monkeypatch, "embedding", lambda multiplier: 1 / multiplier)
    found = check(store)
    assert flagged(found)["tok_embeddings"] == "vanishes"
    assert cause(found, "tok_embeddings") == "the embedding's learning rate shrinks with width"
    scaled_table(monkeypatch, "embedding", lambda multiplier: multiplier**2)
    found = check(store)
    assert flagged(found)["tok_embeddings"] == "blows_up"


def test_a_layer_that_does_not_move_is_not_passed(store, monkeypatch):
    """No change at all has a slope of zero and no spread: it must not look like the best of layers."""
    scaled_table(monkeypatch, "embedding", lambda multiplier: 0.0)
    found = check(store)
    (embedding,) = [layer for layer in found.layers if layer.layer == "tok_embeddings"]
    assert (embedding.outcome, embedding.change) == ("cannot_tell", pytest.approx((0.0,) * 4))
    assert found.outcome == "cannot_tell"


def test_a_width_that_leaves_the_finite_numbers_is_a_blow_up(store):
    runs = runs_of(store, num_seeds=2)
    wild = dataclasses.replace(runs[-1][0].hparams, learning_rate=1e38)
    runs[-1] = [dataclasses.replace(run, hparams=wild) for run in runs[-1]]
    told = []
    found = check_coordinates(runs, store, progress=told.append)
    assert (found.outcome, found.not_finite_width) == ("blows_up", 128)
    assert told == [16, 32, 64]
    assert [len(layer.change) for layer in found.layers] == [3] * len(LAYERS)
    first = check_coordinates(runs[2:], store)
    assert (first.outcome, first.not_finite_width, first.layers) == ("blows_up", 128, ())


def test_few_seeds_widen_the_interval(store):
    few, more = check(store, num_seeds=2), check(store, num_seeds=4)
    spans = [[layer.interval[1] - layer.interval[0] for layer in found.layers] for found in (few, more)]
    assert sum(spans[0]) > sum(spans[1])
    loose = check(store, num_seeds=2, level=0.99)
    assert all(
        a.interval[0] < b.interval[0] and a.slope == b.slope for a, b in zip(loose.layers, few.layers, strict=True)
    )
    assert TOLERANCE < MISTAKE


def test_a_loss_that_is_merely_large_is_measured(store):
    """`diverged` is a ruling about training; here a large loss is what is being looked for."""
    found = check(store, parametrization="sp", learning_rate=5.0, num_steps=8)
    assert found.not_finite_width is None and len(found.layers) == len(LAYERS)


@pytest.mark.parametrize(
    "pick, message",
    [
        (lambda runs: [], r"widths = \(\)"),
        (lambda runs: runs[:1], r"widths = \(16,\)"),
        (lambda runs: runs[::-1], "increasing"),
        (lambda runs: [runs[0], runs[0]], "increasing"),
        (lambda runs: [row[:1] for row in runs], r"\[1\] seeds"),
        (lambda runs: [[], []], r"\[0\] seeds"),
        (lambda runs: [runs[0], runs[1][:2]], r"\[2, 4\] seeds"),
    ],
)
def test_arguments_that_cannot_be_judged_are_refused(store, pick, message):
    with pytest.raises(ValueError, match=message):
        check_coordinates(pick(runs_of(store)), store)


def test_a_schedule_without_a_step_to_take_is_refused(store):
    with pytest.raises(ValueError, match="num_steps = 1: at least 2"):
        check(store, num_steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("learning_rate", [0.01, 0.02, 0.05])
def test_mup_passes_and_sp_does_not_over_a_wide_range(store, learning_rate):
    widths = (32, 64, 128, 256)
    assert check(store, widths=widths, learning_rate=learning_rate, num_steps=9).outcome == "passes"
    standard = check(store, widths=widths, learning_rate=learning_rate, num_steps=9, parametrization="sp")
    assert standard.outcome == "blows_up"
