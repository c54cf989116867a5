"""Classic mistakes of parametrizations, planted into the tables our models are built from; small
models to check.
"""

import dataclasses
from pathlib import Path

from proxy_cases import TINY, run_spec, with_settings
from torch import nn
from torch.nn import functional

from proxies.coordinates.activations import read_run
from proxies.coordinates.coordinates import check_coordinates
from proxies.core.rules import named
from proxies.core.schedule import Schedule
from proxies.external.factory import build_model, load
from proxies.training import trainable_model

WIDTHS = (16, 32, 64, 128)
BASE = dataclasses.replace(TINY, num_kv_heads=2)


def runs_of(
    store,
    *,
    widths=WIDTHS,
    depths=(),
    num_seeds=3,
    num_steps=4,
    bases=(),
    grow_head=False,
    **changes,
):
    """A check's runs by width (or depth); `bases`: a base shape for each width."""
    if depths:
        shapes = [BASE.at_depth(depth) for depth in depths]
    elif grow_head:
        shapes = [dataclasses.replace(BASE, width=width, ffn_width=2 * width) for width in widths]
    else:
        shapes = [BASE.at_width(width) for width in widths]
    chosen = changes.pop("parametrization", "mup")
    chosen = named(chosen) if isinstance(chosen, str) else chosen
    tokens = (
        {"base_batch_tokens": 64, "base_num_tokens": 64 * num_steps} if chosen.needs_tokens else {}
    )
    return [
        [
            run_spec(
                store.manifest.data_id,
                shape=shape,
                base_shape=bases[index] if bases else shapes[0],
                seed=seed,
                schedule=Schedule(kind="constant", num_steps=num_steps + 1),
                parametrization=chosen,
                num_slots=1,
                **{"learning_rate": 0.01, "clip_norm": None, **tokens, **changes},
            )
            for seed in range(num_seeds)
        ]
        for index, shape in enumerate(shapes)
    ]


def check(store, *, level=0.9, build=None, **changes):
    axis = "depth" if changes.get("depths") else "width"
    return checked(runs_of(store, **changes), store, axis=axis, level=level, build=build)


def checked(runs, store, *, build=None, **options):
    """The check, its runs read one after another in this process."""
    return check_coordinates(
        runs, lambda probes: [read_run(probe, store, build) for probe in probes], **options
    )


def flagged(found):
    return {
        layer.layer: layer.outcome
        for layer in found.layers
        if layer.outcome in ("blows_up", "vanishes")
    }


def planted_table(monkeypatch, kind, **changes):
    """Change the numbers of one kind: each of `changes` takes the row and the width ratio."""
    real = trainable_model.parameter_table

    def planted(spec):
        return tuple(
            changed(row, spec.ratios.width) if row.kind == kind else row for row in real(spec)
        )

    def changed(row, ratio):
        for name, change in changes.items():
            value = change(row, ratio)
            row = (
                with_settings(row, **{name: value})
                if name in row.settings
                else dataclasses.replace(row, **{name: value})
            )
        return row

    monkeypatch.setattr(trainable_model, "parameter_table", planted)


def planted_output(monkeypatch):
    """The readout without its 1 / m_N."""
    real = trainable_model.forward_numbers
    monkeypatch.setattr(
        trainable_model, "forward_numbers", lambda spec: dataclasses.replace(real(spec), output=1.0)
    )


class PlainBlock(nn.Module):
    """A block as users write them: gives a tuple, takes keywords, scales attention the usual
    way.
    """

    def __init__(self, shape):
        super().__init__()
        self.heads = shape.num_heads
        self.norm = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, *, x):
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(-2)), None


class Plain(nn.Module):
    """Embedding, blocks, norm, readout: none of our own modules."""

    def __init__(self, shape):
        super().__init__()
        self.embed = nn.Embedding(shape.vocab_size, shape.width)
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.num_layers))
        self.last = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)

    def forward(self, ids_BT):
        x = self.embed(ids_BT)
        for block in self.blocks:
            x, _ = block(x=x)
        return self.head(self.last(x))


def plain(shape):
    """The factory of it."""
    return Plain(shape)


def plain_factory():
    """As a plan names it, and what builds the model of a run."""
    folder = Path(__file__).parent
    return load("planted:plain", folder)[1], lambda spec: build_model(spec, folder)
