"""A base shape and its relatives, runs of them, and what several tests of the parametrizations hold
them against.
"""

import dataclasses
import math

import mup
import numpy as np
import pytest
import torch
from mup_reference import mup_model
from scipy import stats

from proxies.core.hyperparameters import Hparams
from proxies.core.rules import named
from proxies.core.schedule import Schedule
from proxies.core.shape import Shape
from proxies.core.spec import Numerics, RunSpec
from proxies.model.decoder import Decoder, Multipliers
from proxies.model.loss import token_loss
from proxies.model.optimizer import torch_optimizer
from proxies.parametrization.parametrization import (
    forward_numbers,
    initial_tensor,
    kind_of,
    parameter_table,
)

BASE = Shape(
    num_layers=2, width=16, num_heads=2, num_kv_heads=1, ffn_width=48, vocab_size=23, seq_len=12
)
HPARAMS = Hparams(learning_rate=0.01, weight_decay=0.1, beta1=0.85, eps=1e-9, output_multiplier=3.0)
FAMILIES = {
    "llama": BASE,
    "llama with QK-norm": dataclasses.replace(BASE, qk_norm=True),
    "gpt2": dataclasses.replace(BASE, family="gpt2"),
    "gpt2 with QK-norm": dataclasses.replace(BASE, family="gpt2", qk_norm=True),
}


def grown(base, *, heads=1, head_dim=1, ffn=1):
    """The base with more heads, wider heads, and an FFN that grows by a factor of its own on
    top.
    """
    return dataclasses.replace(
        base,
        width=base.width * heads * head_dim,
        num_heads=base.num_heads * heads,
        num_kv_heads=base.num_kv_heads * heads,
        ffn_width=base.ffn_width * heads * head_dim * ffn,
    )


def spec_of(
    shape,
    base=BASE,
    parametrization="mup",
    hparams=HPARAMS,
    *,
    batch_ratio=1,
    duration_ratio=1,
    **changes,
):
    """A run of so many times the base run's batch and tokens."""
    rules = (
        named(parametrization, **changes) if isinstance(parametrization, str) else parametrization
    )
    batch = 4 * shape.seq_len * batch_ratio
    timed = {
        "base_batch_tokens": 4 * shape.seq_len,
        "base_num_tokens": 36 * batch // duration_ratio,
    }
    return RunSpec(
        optimizer="adamw",
        shape=shape,
        base_shape=base,
        parametrization=rules,
        hparams=hparams,
        batch_tokens=batch,
        data_id="none",
        schedule=Schedule(kind="constant", num_steps=36),
        numerics=Numerics(),
        seed=0,
        **(timed if rules.needs_tokens else {}),
    )


def table(*args, **options):
    """The parameter table by name."""
    return {numbers.name: numbers for numbers in parameter_table(spec_of(*args, **options))}


class Model:
    """A decoder in float64 with its numbers and an AdamW of one group per parameter."""

    def __init__(self, shape, rows, forward, seed=0):
        self.decoder, self.rows = Decoder(shape).double(), rows
        self.multipliers = Multipliers(**dataclasses.asdict(forward))
        parameters = dict(self.decoder.named_parameters())
        with torch.no_grad():
            for numbers in rows:
                parameters[numbers.name].copy_(self.initial(numbers, seed))
        self.optimizer = torch_optimizer(
            "adamw", [(numbers, [parameters[numbers.name]]) for numbers in rows]
        )

    @staticmethod
    def initial(numbers, seed):
        """In float64, so that std scales exactly."""
        if not numbers.init_std:
            return initial_tensor(numbers, seed).double()
        return (
            initial_tensor(dataclasses.replace(numbers, init_std=1.0), seed).double()
            * numbers.init_std
        )

    @classmethod
    def of(cls, spec, seed=0):
        return cls(spec.shape, parameter_table(spec), forward_numbers(spec), seed)

    def logits(self, ids_BT):
        return self.decoder(ids_BT, self.multipliers)

    def step(self, ids_BT, clip_norm=None):
        """One update on the next-token loss; returns the gradient's norm."""
        self.optimizer.zero_grad()
        token_loss(self.logits(ids_BT), ids_BT.roll(-1, -1)).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), clip_norm or math.inf)
        self.optimizer.step()
        return norm.item()


def token_ids(shape, seed=0, num_sequences=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(shape.vocab_size, (num_sequences, shape.seq_len), generator=generator)


def is_mups(shape, base):
    """Rates, decays, stds and multipliers against mup's own, tensor by tensor, on a model that mup
    itself set up.
    """
    delta = grown(base, heads=2, head_dim=2 if shape.head_dim != base.head_dim else 1)
    model = mup_model(shape, base, output_mult=HPARAMS.output_multiplier, delta_shape=delta)
    named_parameters = dict(model.named_parameters())
    mine, everything, at_base = (
        table(shape, base),
        table(shape, base, decayed="all"),
        table(base, base),
    )
    decayed = [p for n, p in named_parameters.items() if kind_of(n) in ("hidden", "readout")]
    kept = [p for n, p in named_parameters.items() if kind_of(n) not in ("hidden", "readout")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}]
    for rows, given in (
        (mine, groups),
        (everything, [{"params": list(model.parameters()), "weight_decay": 0.1}]),
    ):
        theirs = mup.MuAdamW(
            given, lr=HPARAMS.learning_rate, eps=HPARAMS.eps, betas=(HPARAMS.beta1, HPARAMS.beta2)
        )
        group_of = {id(p): group for group in theirs.param_groups for p in group["params"]}
        for name, parameter in named_parameters.items():
            row, group = rows[name], group_of[id(parameter)]
            wanted = pytest.approx(
                [group["lr"], group["weight_decay"], group["eps"], *group["betas"]], rel=1e-14
            )
            assert [
                row.settings[name]
                for name in ("learning_rate", "weight_decay", "eps", "beta1", "beta2")
            ] == wanted, name
    for name, parameter in named_parameters.items():
        assert mine[name].width_multiplier == parameter.infshape.width_mult(), name
        std = at_base[name].init_std
        assert mine[name].init_std == pytest.approx(
            mups_std(parameter, std) if std else 0, rel=1e-5
        ), name
    forward = forward_numbers(spec_of(shape, base))
    assert forward.output == pytest.approx(
        model.lm_head.output_mult / model.lm_head.width_mult(), rel=1e-14
    )
    assert forward.attention == pytest.approx(math.sqrt(base.head_dim) / shape.head_dim, rel=1e-14)
    assert forward.residual == forward.embedding == 1


def mups_std(parameter, base_std):
    """The std that mup's own initializer draws with, given the base's."""
    torch.manual_seed(1)
    unit = torch.empty_like(parameter).normal_()
    torch.manual_seed(1)
    return (mup.init.normal_(parameter, std=base_std) / unit).mean().item()


def parting(first, second, ids, num_steps=20, clip_norm=None):
    """The largest difference of two models' logits over some steps, relative to their size."""
    largest = 0.0
    for step in range(num_steps + 1):
        with torch.no_grad():
            one, other = first.logits(ids), second.logits(ids)
        largest = max(largest, ((one - other).abs().max() / one.abs().max()).item())
        if step < num_steps:
            first.step(ids, clip_norm)
            second.step(ids, clip_norm)
    return largest


def completedp_is_completep(shape, base):
    """Complete(d)P at the base batch and tokens is CompleteP with the readout's multiplier
    absorbed.
    """
    multiplied, direct = (
        spec_of(shape, base, name, **options)
        for name, options in (("completep", {"eps": "completedp"}), ("completedp", {}))
    )
    multiplier = shape.width / base.width
    for mine, wanted in zip(parameter_table(multiplied), parameter_table(direct), strict=True):
        # Weights 1 / m as large take the same path at a rate 1 / m as large, and eps and decay m
        # times as large.
        factor = multiplier if wanted.kind == "readout" else 1.0
        for field in ("init_std", "learning_rate", "weight_decay", "eps"):
            ours, theirs = (
                {"init_std": row.init_std, **row.settings}[field] for row in (mine, wanted)
            )
            there = theirs * (factor if field in ("init_std", "learning_rate") else 1 / factor)
            assert ours == pytest.approx(there, rel=1e-14), (mine.name, field)
    assert parting(Model.of(multiplied), Model.of(direct), token_ids(shape)) < 1e-10


RATE = Hparams(learning_rate=0.002, eps=1e-30)
"""A small step of which only the gradient's direction counts."""


def changes(spec, seed):
    """How far one AdamW step moves each branch's output, the stream and the logits: root mean
    squares.
    """
    model, ids = Model.of(spec, seed), token_ids(spec.shape, seed, 4)
    found = {}

    def keep(name):
        def hook(module, inputs, output):
            found[name] = output
            if name == "norm":
                found["stream"] = inputs[0]
            if name == "lm_head":
                found["readout's input"] = inputs[0]

        return hook

    branches = [
        n for n, _ in model.decoder.named_modules() if n.endswith((".attention", ".feed_forward"))
    ]
    for name in (*branches, "norm", "lm_head"):
        model.decoder.get_submodule(name).register_forward_hook(keep(name))
    with torch.no_grad():
        model.logits(ids)
        before, readout = dict(found), model.decoder.lm_head.weight.clone()
    model.step(ids)
    with torch.no_grad():
        model.logits(ids)
        # A change of the readout's input meets its random start, and fades with the root of the
        # width in every right parametrization: of the readout its own update counts.
        own = found["readout's input"] @ (model.decoder.lm_head.weight - readout).mT
    moved = {
        name: found[name] - before[name] for name in (*branches, "stream", "norm", "lm_head")
    } | {"readout": own}
    return {name: x.square().mean().sqrt().item() for name, x in moved.items()}


def slopes(shapes, base, parametrization, size, num_seeds=3, level=0.9):
    """Of log2 change against log2 size, by name: mean over seeds, and half its interval."""
    specs = [spec_of(shape, base, parametrization, RATE) for shape in shapes]
    found = [[changes(spec, seed) for spec in specs] for seed in range(num_seeds)]
    octaves = np.log2([size(shape) for shape in shapes])
    half = stats.t.ppf(0.5 + level / 2, num_seeds - 1) / math.sqrt(num_seeds)
    slopes_by_name = {}
    for name in set.intersection(*(set(of_shape) for of_shape in found[0])):
        fitted = [
            np.polyfit(octaves, np.log2([of[name] for of in of_seed]), 1)[0] for of_seed in found
        ]
        slopes_by_name[name] = (float(np.mean(fitted)), float(np.std(fitted, ddof=1) * half))
    return slopes_by_name


WIDE = Shape(
    num_layers=2, width=32, num_heads=4, num_kv_heads=4, ffn_width=64, vocab_size=32, seq_len=8
)
DEEP = WIDE.at_depth(1)


def by_width(parametrization, family="llama"):
    """Slopes per doubling of width, from 32 to 256."""
    base = dataclasses.replace(WIDE, family=family)
    return slopes(
        [base.at_width(w) for w in (32, 64, 128, 256)], base, parametrization, lambda s: s.width
    )


def by_depth(parametrization):
    """Slopes per doubling of depth, from 4 to 16 at a base of one layer, where branches are small
    already.
    """
    return slopes(
        [DEEP.at_depth(n) for n in (4, 8, 16)], DEEP, parametrization, lambda s: s.num_layers
    )


def moves_by_the_same_at_every_width(parametrization, family="llama"):
    """Every branch, and the readout by itself."""
    for name, (slope, half) in by_width(parametrization, family).items():
        if name not in ("lm_head", "norm"):
            assert abs(slope) + half < 0.35, (name, slope, half)


def moves_by_the_same_at_every_depth(parametrization):
    """The stream, and the logits; at alpha = 1 each block inside too."""
    found = by_depth(parametrization)
    inside = (
        ("layers.0.attention", "layers.0.feed_forward") if parametrization.depth_alpha == 1 else ()
    )
    for name in ("stream", "lm_head", *inside):
        assert abs(found[name][0]) + found[name][1] < 0.3, (name, found[name])
    for name in ("layers.0.attention", "layers.0.feed_forward"):
        assert found[name][0] == pytest.approx(parametrization.depth_alpha - 1, abs=0.25)
