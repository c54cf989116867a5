import dataclasses

import pytest
from parametrization_cases import BASE, FAMILIES, HPARAMS, Model, grown, parting, spec_of, token_ids

from proxies.core.checks import SpecError
from proxies.core.numbers import ForwardNumbers
from proxies.parametrization import absorb
from proxies.parametrization.absorb import absorbed
from proxies.parametrization.parametrization import forward_numbers, parameter_table

BUSY = dataclasses.replace(HPARAMS, embedding_multiplier=2.0, eps=1e-4)
"""An eps large enough to show if it is not moved."""


def both(family, name="completep", decayed="all"):
    """A run's model as it is, and with all multipliers absorbed."""
    base = FAMILIES[family]
    spec = spec_of(grown(base, heads=2).at_depth(4), base, name, BUSY, decayed=decayed)
    table, forward = parameter_table(spec), forward_numbers(spec)
    return spec, Model(spec.shape, table, forward), Model(spec.shape, *absorbed(table, forward))


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "mup"), ("llama with QK-norm", "completep"), ("gpt2", "umup"), ("gpt2 with QK-norm", "completedp")],
)
def test_the_function_is_the_same_at_every_step(family, name):
    spec, plain, moved = both(family, name)
    assert (plain.multipliers.embedding, plain.multipliers.output) == (2, 3 if name == "completedp" else 1.5)
    assert moved.multipliers.embedding == moved.multipliers.residual == moved.multipliers.output == 1
    assert moved.multipliers.attention == plain.multipliers.attention
    assert parting(plain, moved, token_ids(spec.shape)) < 1e-10


def test_with_clipping_active_they_part():
    spec, plain, moved = both("llama")
    ids = token_ids(spec.shape)
    norms = plain.step(ids, 1e9), moved.step(ids, 1e9)
    assert norms[0] / norms[1] != pytest.approx(1, rel=0.1)
    _, plain, moved = both("llama")
    assert parting(plain, moved, ids, clip_norm=0.3 * min(norms)) > 1e-3


@pytest.mark.parametrize("number", ["init_std", "learning_rate", "weight_decay", "eps"])
def test_a_number_left_behind_is_noticed(monkeypatch, number):
    real = absorb._times
    monkeypatch.setattr(
        absorb, "_times", lambda p, factor: dataclasses.replace(real(p, factor), **{number: getattr(p, number)})
    )
    spec, plain, moved = both("gpt2")
    assert parting(plain, moved, token_ids(spec.shape)) > 1e-6


def test_only_the_parts_asked_for_move():
    spec = spec_of(grown(BASE, heads=2).at_depth(4), BASE, "completep", BUSY)
    table, forward = parameter_table(spec), forward_numbers(spec)
    assert (forward.embedding, forward.residual, forward.output) == (2, 0.5, 1.5)
    rows, left = absorbed(table, forward, ("output",))
    assert left == dataclasses.replace(forward, output=1.0)
    changed = {row.name for row, old in zip(rows, table, strict=True) if row != old}
    assert changed == {"lm_head.weight"}
    assert absorbed(table, forward, ()) == (table, forward)
    everything, _ = absorbed(table, forward)
    changed = {row.name for row, old in zip(everything, table, strict=True) if row != old}
    branches = {f"layers.{i}.{name}.weight" for i in range(4) for name in ("attention.wo", "feed_forward.w2")}
    assert changed == {"tok_embeddings.weight", "lm_head.weight"} | branches


def test_a_shared_matrix_cannot_take_a_multiplier():
    tied = dataclasses.replace(BASE, tied=True)
    spec = spec_of(grown(tied, heads=2).at_depth(4), tied, "completep", BUSY)
    table, forward = parameter_table(spec), forward_numbers(spec)
    with pytest.raises(SpecError) as caught:
        absorbed(table, forward)
    assert caught.value.problems == [
        "embedding = 2 cannot be absorbed: embedding and readout are one matrix",
        "output = 1.5 cannot be absorbed: embedding and readout are one matrix",
    ]
    rows, left = absorbed(table, forward, ("residual",))
    assert left == dataclasses.replace(forward, residual=1.0)
    assert len(rows) == len(table)


def test_another_models_parameters_cannot_take_the_residuals():
    row = dataclasses.replace(parameter_table(spec_of(BASE))[-1], name="h.0.mlp.c_proj.weight", kind="hidden")
    readout = dataclasses.replace(row, name="wte", kind="readout")
    forward = ForwardNumbers(embedding=1.0, attention=1.0, residual=0.5, output=1.0)
    with pytest.raises(SpecError, match=r"residual = 0.5 cannot be absorbed: no parameter of this model can take it"):
        absorbed((row, readout), forward)
