"""Models of one's own, good ones and ones with a planted mistake each; every `build` is a
factory.
"""

import math
import random

import torch
from torch import nn
from torch.nn import functional

from proxies.core.hyperparameters import Hparams
from proxies.core.programs import Factory
from proxies.core.rules import named
from proxies.core.schedule import Schedule
from proxies.core.shape import Shape
from proxies.core.spec import Numerics, RunSpec
from proxies.external.construction import neutral
from proxies.model.decoder import Decoder, Multipliers
from proxies.parametrization.parametrization import kind_of

SMALL = Shape(
    num_layers=2, width=32, num_heads=4, num_kv_heads=2, ffn_width=64, vocab_size=96, seq_len=12
)


def factory_spec(
    shape=SMALL,
    base_shape=SMALL,
    parametrization="mup",
    *,
    factory=None,
    seed=0,
    dtype="float32",
    **hparams,
):
    """A run of a factory's model; the tables do not need to know which."""
    return RunSpec(
        optimizer="adamw",
        shape=shape,
        base_shape=base_shape,
        parametrization=named(parametrization)
        if isinstance(parametrization, str)
        else parametrization,
        hparams=Hparams(**{"learning_rate": 0.01, "weight_decay": 0.1, **hparams}),
        schedule=Schedule(kind="cosine", num_steps=8, warmup_steps=2),
        batch_tokens=4 * shape.seq_len,
        data_id="none",
        seed=seed,
        numerics=Numerics(dtype=dtype),
        base_batch_tokens=4 * shape.seq_len if parametrization == "completedp" else None,
        base_num_tokens=32 * shape.seq_len if parametrization == "completedp" else None,
        factory=factory or Factory(target="tests:build", source_sha256="0" * 64),
    )


class Wrapped(nn.Module):
    """Our own decoder as a model of somebody's: its matrices start by their fan-in, from torch's
    generator.
    """

    def __init__(self, shape, forward):
        super().__init__()
        self.decoder, self.forward_numbers = Decoder(shape), forward
        for name, parameter in self.decoder.named_parameters():
            fan_in = parameter.shape[-1] ** -0.5
            std = {"hidden": fan_in, "readout": fan_in, "embedding": 0.02}.get(kind_of(name), 0.0)
            if name.endswith("bias") or std:
                nn.init.normal_(parameter, std=std)
            else:
                nn.init.ones_(parameter)

    def forward(self, ids):
        """Logits [B, T, V]."""
        multipliers = Multipliers(
            attention=self.forward_numbers.attention, residual=self.forward_numbers.residual
        )
        return self.decoder(ids, multipliers).unflatten(0, ids.shape)


def ours(shape, forward):
    """Our decoder, told its forward multipliers."""
    return Wrapped(shape, forward)


def ours_alone(shape):
    """Our decoder, told nothing."""
    return Wrapped(shape, neutral(shape))


class Mixer(nn.Module):
    """The smallest causal model: a running mean over tokens, one hidden matrix a block."""

    def __init__(self, shape, width=None, num_layers=None, embedding=None):
        super().__init__()
        width = width or shape.width
        self.embed = embedding or nn.Embedding(shape.vocab_size, width)
        self.blocks = nn.ModuleList(
            nn.Linear(width, width) for _ in range(num_layers or shape.num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, shape.vocab_size, bias=False)

    def mixed(self, x):
        """[B, T, D] to the same, nothing from later tokens."""
        counts = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + x.cumsum(1) / counts

    def body(self, x):
        """[B, T, D] to the same."""
        for block in self.blocks:
            x = x + functional.gelu(block(self.mixed(x)))
        return self.norm(x)

    def forward(self, ids):
        """Logits [B, T, V]."""
        return self.head(self.body(self.embed(ids)))


class Expert(nn.Module):
    """Four experts in one parameter each way, all of them always on, and a causal convolution over
    time.
    """

    def __init__(self, shape, ffn_width):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, shape.width, ffn_width) * shape.width**-0.5)
        self.down = nn.Parameter(torch.randn(4, ffn_width, shape.width) * ffn_width**-0.5)
        self.shift = nn.Parameter(torch.zeros(4, ffn_width))
        self.taps = nn.Conv1d(shape.width, shape.width, 3, padding=2)
        self.own_taps = nn.Conv1d(shape.width, shape.width, 3, padding=2, groups=shape.width)

    def forward(self, x):
        """[B, T, D] to the same."""
        num_tokens = x.shape[1]
        x = self.own_taps(self.taps(x.mT)[..., :num_tokens])[..., :num_tokens].mT
        hidden = functional.gelu(torch.einsum("btd,edf->betf", x, self.up) + self.shift[:, None])
        return torch.einsum("betf,efd->btd", hidden, self.down)


def experts(shape, ffn_width=None):
    """A mixture of experts as grouped products."""
    model = Mixer(shape)
    model.blocks = nn.ModuleList(
        Expert(shape, ffn_width or 2 * shape.width) for _ in range(shape.num_layers)
    )
    return model


def odd_experts(shape):
    """Its feed-forward grows otherwise than its width."""
    return experts(shape, 16 + shape.width)


def mixer(shape):
    """Nothing wrong with it."""
    return Mixer(shape)


def ignores_width(shape):
    """The same model whatever the width."""
    return Mixer(shape, width=48)


def ignores_depth(shape):
    """The same blocks whatever the depth."""
    return Mixer(shape, num_layers=2)


def extra_when_wide(shape):
    """A parameter that only a wide model has."""
    model = Mixer(shape)
    if shape.width > 64:
        model.extra = nn.Parameter(torch.ones(shape.width))
    return model


class Noisy(Mixer):
    """Dropout that nothing shows."""

    def mixed(self, x):
        """Noise in every call."""
        return super().mixed(x) + 0.1 * torch.randn_like(x)


def noisy(shape):
    """Other logits at every call."""
    return Noisy(shape)


class AllAtOnce(Mixer):
    """Attention without a mask."""

    def mixed(self, x):
        """The mean over all tokens."""
        return x + x.mean(1, keepdim=True)


def looks_ahead(shape):
    """No causal mask."""
    return AllAtOnce(shape)


def unseeded(shape):
    """Draws from Python's generator, which nobody seeds."""
    model = Mixer(shape)
    nn.init.constant_(model.head.weight, random.SystemRandom().random())
    return model


class TiedByHand(Mixer):
    """The readout is a product with the embedding's weight, no module."""

    def forward(self, ids):
        """Logits [B, T, V]."""
        return self.body(self.embed(ids)) @ self.embed.weight.T


def tied_by_hand(shape):
    """No readout module."""
    model = TiedByHand(shape)
    del model.head
    return model


def frozen_head(shape):
    """A parameter that is not trained."""
    model = Mixer(shape)
    model.head.weight.requires_grad_(False)
    return model


def unused(shape):
    """A parameter that the logits do not depend on."""
    model = Mixer(shape)
    model.spare = nn.Linear(shape.width, shape.width)
    return model


def fails(shape):
    """Cannot be built at some widths."""
    if shape.width > 32:
        raise KeyError(f"no recipe for width {shape.width}")
    return Mixer(shape)


class FixedFfn(nn.Module):
    """A block whose inner width stays."""

    def __init__(self, shape, inner=40):
        super().__init__()
        self.up, self.down = (
            nn.Linear(shape.width, inner, bias=False),
            nn.Linear(inner, shape.width, bias=False),
        )

    def forward(self, x):
        """[B, T, D] to the same."""
        return self.down(functional.gelu(self.up(x)))


def varies_late(shape):
    """An inner width that grows only past the base and delta."""
    model = Mixer(shape)
    model.blocks = nn.ModuleList(
        FixedFfn(shape, 40 if shape.width <= 64 else 80) for _ in range(shape.num_layers)
    )
    return model


class Gains(nn.Module):
    """Vectors and scalars of every kind beside a matrix."""

    def __init__(self, shape):
        super().__init__()
        self.proj = nn.Linear(shape.width, shape.width)
        self.scale, self.shift = (
            nn.Parameter(torch.full((shape.width,), 0.5)),
            nn.Parameter(torch.zeros(shape.width)),
        )
        self.temper = nn.Parameter(torch.ones(()))
        self.head_gain = nn.Parameter(torch.ones(shape.head_dim))

    def forward(self, x):
        """[B, T, D] to the same."""
        heads = (self.proj(x) * self.scale + self.shift).unflatten(-1, (-1, self.head_gain.numel()))
        return (heads * self.head_gain).flatten(-2) * self.temper


def gains(shape):
    """Vectors and scalars of every kind."""
    model = Mixer(shape)
    model.blocks = nn.ModuleList(Gains(shape) for _ in range(shape.num_layers))
    return model


def shrinks_with_depth(shape):
    """GPT-2's own law: 1 / sqrt(2 layers)."""
    model = Mixer(shape)
    for block in model.blocks:
        nn.init.normal_(block.weight, std=0.02 / math.sqrt(2 * shape.num_layers))
    return model
