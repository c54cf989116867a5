"""Cases for tests of users' models: factories of good models, and of models with a mistake.

Every `build_` function is a factory: a function from a shape to a model, which a plan can name.
Shapes of tensors are named by B sequences, T tokens, D channels, and V entries of the vocabulary.
"""

import math
import random

import torch
from torch import nn
from torch.nn import functional

from forerun._proxies.core.hyperparameters import Hparams
from forerun._proxies.core.programs import Factory
from forerun._proxies.core.rules import get_parametrization
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.shape import Shape
from forerun._proxies.core.spec import Numerics, RunSpec
from forerun._proxies.external.construction import get_neutral_multipliers
from forerun._proxies.model.decoder import Decoder, Multipliers
from forerun._proxies.parametrization.parametrization import get_kind

SMALL = Shape(
    num_layers=2, width=32, num_heads=4, num_kv_heads=2, ffn_width=64, vocab_size=96, seq_len=12
)
"""Base shape of the models. Some mistakes below show only above its width."""
NUM_EXPERTS = 4


def make_factory_spec(
    shape=SMALL,
    base_shape=SMALL,
    parametrization="mup",
    *,
    factory=None,
    seed=0,
    dtype="float32",
    **hparams,
):
    """Return the spec of a run of a factory's model; `hparams` are fields of `Hparams`."""
    return RunSpec(
        optimizer="adamw",
        shape=shape,
        base_shape=base_shape,
        parametrization=get_parametrization(parametrization)
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


class WrappedDecoder(nn.Module):
    """forerun's decoder as a user's model, with initial stds of 1 / sqrt(fan-in)."""

    def __init__(self, shape, forward):
        super().__init__()
        self.decoder, self.forward_numbers = Decoder(shape), forward
        for name, parameter in self.decoder.named_parameters():
            matrix_std = parameter.shape[-1] ** -0.5
            stds = {"hidden": matrix_std, "readout": matrix_std, "embedding": 0.02}
            std = stds.get(get_kind(name), 0.0)
            # Biases become zero, gains become one.
            if name.endswith("bias") or std:
                nn.init.normal_(parameter, std=std)
            else:
                nn.init.ones_(parameter)

    def forward(self, ids):
        """Return the logits [B, T, V]."""
        multipliers = Multipliers(
            attention=self.forward_numbers.attention, residual=self.forward_numbers.residual
        )
        return self.decoder(ids, multipliers).unflatten(0, ids.shape)


def build_decoder(shape, forward):
    """Build forerun's decoder with the forward multipliers that forerun passes."""
    return WrappedDecoder(shape, forward)


def build_decoder_without_multipliers(shape):
    """Build forerun's decoder with neutral forward multipliers."""
    return WrappedDecoder(shape, get_neutral_multipliers(shape))


class Mixer(nn.Module):
    """A minimal causal model: each block is a running mean over tokens and one hidden matrix."""

    def __init__(self, shape, width=None, num_layers=None):
        super().__init__()
        width = width or shape.width
        self.embed = nn.Embedding(shape.vocab_size, width)
        self.blocks = nn.ModuleList(
            nn.Linear(width, width) for _ in range(num_layers or shape.num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, shape.vocab_size, bias=False)

    def mix_tokens(self, x):
        """Add to each token of x [B, T, D] the mean over it and all earlier tokens."""
        counts = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + x.cumsum(1) / counts

    def run_body(self, x):
        """Apply the blocks and the norm to x [B, T, D]."""
        for block in self.blocks:
            x = x + functional.gelu(block(self.mix_tokens(x)))
        return self.norm(x)

    def forward(self, ids):
        """Return the logits [B, T, V]."""
        return self.head(self.run_body(self.embed(ids)))


class ExpertStack(nn.Module):
    """Causal convolutions over tokens, then experts that are stacked in one parameter per product.

    There is no router: every expert processes every token.
    """

    def __init__(self, shape, ffn_width):
        super().__init__()
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, shape.width, ffn_width) * shape.width**-0.5)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, ffn_width, shape.width) * ffn_width**-0.5)
        self.shift = nn.Parameter(torch.zeros(NUM_EXPERTS, ffn_width))
        self.taps = nn.Conv1d(shape.width, shape.width, 3, padding=2)
        self.depthwise_taps = nn.Conv1d(shape.width, shape.width, 3, padding=2, groups=shape.width)

    def forward(self, x):
        """Map x [B, T, D] to the same shape."""
        # A padding of 2 on both sides; without the last outputs, no token sees a later one.
        num_tokens = x.shape[1]
        x = self.depthwise_taps(self.taps(x.mT)[..., :num_tokens])[..., :num_tokens].mT
        hidden = functional.gelu(torch.einsum("btd,edf->betf", x, self.up) + self.shift[:, None])
        return torch.einsum("betf,efd->btd", hidden, self.down)


def build_experts(shape, ffn_width=None):
    """Build a model whose feed-forward blocks are stacks of experts."""
    model = Mixer(shape)
    model.blocks = nn.ModuleList(
        ExpertStack(shape, ffn_width or 2 * shape.width) for _ in range(shape.num_layers)
    )
    return model


def build_experts_with_odd_ffn(shape):
    """Build experts whose FFN width is not proportional to the width."""
    return build_experts(shape, 16 + shape.width)


def build_mixer(shape):
    """Build a model without a mistake."""
    return Mixer(shape)


def build_ignoring_width(shape):
    """Build the same model at every width."""
    return Mixer(shape, width=48)


def build_ignoring_depth(shape):
    """Build the same number of blocks at every depth."""
    return Mixer(shape, num_layers=2)


def build_with_extra_when_wide(shape):
    """Build a model that has one more parameter when it is wide."""
    model = Mixer(shape)
    if shape.width > 64:
        model.extra = nn.Parameter(torch.ones(shape.width))
    return model


class NoisyMixer(Mixer):
    """A mixer with noise in its forward pass, as dropout outside of `nn.Dropout` gives."""

    def mix_tokens(self, x):
        """Add noise to the mixed tokens."""
        return super().mix_tokens(x) + 0.1 * torch.randn_like(x)


def build_noisy(shape):
    """Build a model whose logits differ at every call."""
    return NoisyMixer(shape)


class UnmaskedMixer(Mixer):
    """A mixer without a causal mask."""

    def mix_tokens(self, x):
        """Add to each token the mean over all tokens, which include later ones."""
        return x + x.mean(1, keepdim=True)


def build_without_mask(shape):
    """Build a model whose logits depend on later tokens."""
    return UnmaskedMixer(shape)


def build_unseeded(shape):
    """Build a model with an initial value that torch's seed does not control."""
    model = Mixer(shape)
    nn.init.constant_(model.head.weight, random.SystemRandom().random())
    return model


class TiedMixer(Mixer):
    """A mixer whose readout is a product with the embedding's weight instead of a module."""

    def forward(self, ids):
        """Return the logits [B, T, V]."""
        return self.run_body(self.embed(ids)) @ self.embed.weight.T


def build_tied_by_hand(shape):
    """Build a model without a readout module."""
    model = TiedMixer(shape)
    del model.head
    return model


def build_with_frozen_head(shape):
    """Build a model with a parameter that is not trained."""
    model = Mixer(shape)
    model.head.weight.requires_grad_(False)
    return model


def build_with_unused_layer(shape):
    """Build a model with parameters that the logits do not depend on."""
    model = Mixer(shape)
    model.spare = nn.Linear(shape.width, shape.width)
    return model


def fail_to_build_when_wide(shape):
    """Raise an error at widths above 32."""
    if shape.width > 32:
        raise KeyError(f"no recipe for width {shape.width}")
    return Mixer(shape)


class FixedFfn(nn.Module):
    """A feed-forward block with an inner width that does not grow with the model."""

    def __init__(self, shape, inner=40):
        super().__init__()
        self.up = nn.Linear(shape.width, inner, bias=False)
        self.down = nn.Linear(inner, shape.width, bias=False)

    def forward(self, x):
        """Map x [B, T, D] to the same shape."""
        return self.down(functional.gelu(self.up(x)))


def build_with_late_ffn_growth(shape):
    """Build a model whose inner width is 40 up to width 64 and 80 above it.

    forerun finds the dimensions that grow by comparing two narrow models, which look alike here.
    """
    model = Mixer(shape)
    model.blocks = nn.ModuleList(
        FixedFfn(shape, 40 if shape.width <= 64 else 80) for _ in range(shape.num_layers)
    )
    return model


class GainsBlock(nn.Module):
    """A block with one matrix and with vectors and a scalar of every kind."""

    def __init__(self, shape):
        super().__init__()
        self.proj = nn.Linear(shape.width, shape.width)
        self.scale = nn.Parameter(torch.full((shape.width,), 0.5))
        self.shift = nn.Parameter(torch.zeros(shape.width))
        self.temperature = nn.Parameter(torch.ones(()))
        self.head_gain = nn.Parameter(torch.ones(shape.head_dim))

    def forward(self, x):
        """Map x [B, T, D] to the same shape."""
        heads = (self.proj(x) * self.scale + self.shift).unflatten(-1, (-1, self.head_gain.numel()))
        return (heads * self.head_gain).flatten(-2) * self.temperature


def build_with_gains(shape):
    """Build a model with vectors and scalars of every kind."""
    model = Mixer(shape)
    model.blocks = nn.ModuleList(GainsBlock(shape) for _ in range(shape.num_layers))
    return model


def build_with_depth_scaled_init(shape):
    """Build a model with the initial std of GPT-2, which scales with 1 / sqrt(2 layers)."""
    model = Mixer(shape)
    for block in model.blocks:
        nn.init.normal_(block.weight, std=0.02 / math.sqrt(2 * shape.num_layers))
    return model
