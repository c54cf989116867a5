"""Cases for tests of the coordinate check: small runs, planted mistakes, and a user's model."""

import dataclasses
from pathlib import Path

from proxy_cases import TINY, make_run_spec, replace_settings
from torch import nn
from torch.nn import functional

from forerun._proxies.coordinates.activations import measure_run
from forerun._proxies.coordinates.coordinate_check import check_coordinates
from forerun._proxies.core.rules import get_parametrization
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.external.factory import build_model, load_factory
from forerun._proxies.training import trainable_model

WIDTHS = (16, 32, 64, 128)
"""Widths of the models of a check over width; the first is the width of `BASE`."""
NUM_STEPS = 4
"""Steps that each run of a check trains."""
BASE = dataclasses.replace(TINY, num_kv_heads=2)
"""Shape from which the shapes of a check are derived. Tests replace it in this module."""


def make_runs(
    store,
    *,
    depths=(),
    num_seeds=3,
    bases=(),
    grow_head=False,
    **changes,
):
    """Return the specs of a check's runs: for each width or depth, a list with one spec per seed.

    Args:
        depths: Depths of the models; empty for models of the widths `WIDTHS`.
        bases: Base shape of each width; the first shape is the base of all if empty.
        grow_head: Whether a larger width has wider heads instead of more heads.
        changes: Other fields of each run's spec; they take precedence over the defaults here.
    """
    if depths:
        shapes = [BASE.at_depth(depth) for depth in depths]
    elif grow_head:
        shapes = [dataclasses.replace(BASE, width=width, ffn_width=2 * width) for width in WIDTHS]
    else:
        shapes = [BASE.at_width(width) for width in WIDTHS]
    rules = changes.pop("parametrization", "mup")
    rules = get_parametrization(rules) if isinstance(rules, str) else rules
    base_tokens = {}
    if rules.needs_tokens:
        base_tokens = {"base_batch_tokens": 64, "base_num_tokens": 64 * NUM_STEPS}
    return [
        [
            make_run_spec(
                store.manifest.data_id,
                shape=shape,
                base_shape=bases[index] if bases else shapes[0],
                seed=seed,
                # The check trains all but the last step of a schedule.
                schedule=Schedule(kind="constant", num_steps=NUM_STEPS + 1),
                parametrization=rules,
                num_slots=1,
                **{"learning_rate": 0.01, "clip_norm": None, **base_tokens, **changes},
            )
            for seed in range(num_seeds)
        ]
        for index, shape in enumerate(shapes)
    ]


def run_check(store, *, build=None, **changes):
    """Run the coordinate check on `make_runs(store, **changes)`.

    Args:
        build: Function of a spec that builds the user's model; None for forerun's own models.
    """
    axis = "depth" if changes.get("depths") else "width"
    return check_runs(make_runs(store, **changes), store, axis=axis, build=build)


def check_runs(runs, store, *, build=None, **options):
    """Run the coordinate check on these runs, one after another in this process."""
    return check_coordinates(
        runs, lambda probes: [measure_run(probe, store, build) for probe in probes], **options
    )


def list_flagged_layers(check):
    """Return the outcome of each layer that blows up or vanishes."""
    return {
        layer.layer: layer.outcome
        for layer in check.layers
        if layer.outcome in ("blows_up", "vanishes")
    }


def plant_in_table(monkeypatch, kind, **changes):
    """Change numbers of one kind of parameter in the table that models are built from.

    Args:
        changes: A function of (row, width ratio) for each number, which returns its new value.
    """
    real_compute = trainable_model.compute_parameter_table

    def change_row(row, ratio):
        for name, compute_value in changes.items():
            value = compute_value(row, ratio)
            if name in row.settings:
                row = replace_settings(row, **{name: value})
            else:
                row = dataclasses.replace(row, **{name: value})
        return row

    def compute_changed_table(spec):
        ratio = spec.ratios.width
        return tuple(
            change_row(row, ratio) if row.kind == kind else row for row in real_compute(spec)
        )

    monkeypatch.setattr(trainable_model, "compute_parameter_table", compute_changed_table)


def plant_unscaled_output(monkeypatch):
    """Leave the readout without its multiplier 1 / m_N, where m_N is the width ratio."""
    real_compute = trainable_model.compute_forward_numbers
    monkeypatch.setattr(
        trainable_model,
        "compute_forward_numbers",
        lambda spec: dataclasses.replace(real_compute(spec), output=1.0),
    )


class UserBlock(nn.Module):
    """A block as users write them: keyword inputs, a tuple as output, torch's attention scale."""

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


class UserModel(nn.Module):
    """A user's decoder: embedding, blocks, norm and readout, without a module of forerun."""

    def __init__(self, shape):
        super().__init__()
        self.embed = nn.Embedding(shape.vocab_size, shape.width)
        self.blocks = nn.ModuleList(UserBlock(shape) for _ in range(shape.num_layers))
        self.last = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)

    def forward(self, ids_BT):
        x = self.embed(ids_BT)
        for block in self.blocks:
            x, _ = block(x=x)
        return self.head(self.last(x))


def build_user_model(shape):
    """Build the user's model, as the factory that a plan names."""
    return UserModel(shape)


def build_user_model_with_branch_hooks(shape, forward):
    """Build the user's model with the branch multiplier applied in hooks on its last matrices.

    The example for Hugging Face's models applies it in the same way.
    """
    model = UserModel(shape)
    for block in model.blocks:
        block.out.register_forward_hook(lambda module, inputs, output: output * forward.residual)
    return model


def load_user_factory(name="build_user_model"):
    """Return a factory of this module and the function that builds the model of a run."""
    folder = Path(__file__).parent
    factory = load_factory(f"coordinate_cases:{name}", folder)[1]
    return factory, lambda spec: build_model(spec, folder)
