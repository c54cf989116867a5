"""From a wanted number of parameters to whole numbers that tensor parallelism and tiles can split.

Width is a multiple of the tile and of (head dim * tensor-parallel degree), heads and key-value heads of the degree,
the feed-forward width of the tile on every rank, the vocabulary of 128 * degree (as Megatron-LM pads it). Among
those, shapes are ranked by how near they come in parameters and in aspect (width per layer).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from proxies.checks import Checks
from proxies.flops import count_params, flops_per_token
from proxies.shape import Family, Shape
from scaling_fits.allocation.shapes import ShapeError

_VOCABS = (256, 4096, 32_000, 50_257, 128_256)  # bytes, a small tokenizer, Llama 2, GPT-2, Llama 3
_TABLES = 0.25  # of all parameters, at most, for a vocabulary nobody asked for
_HEAD_DIMS = ((2048, 128), (512, 64), (0, 32))  # from this width on
_ASPECT = 128.0  # Llama 3 8B (4096 / 32), 405B (16384 / 126) and GPT-3 (12288 / 96) have it
_FFN = {"llama": 3.5, "gpt2": 4.0}  # Llama 3 8B and 70B (14336 / 4096); GPT-2 and 3
_GROUP = 4  # query heads per key-value head: Llama 3 8B (32 / 8)
_LARGE = 1024  # width from which matrices are split in tiles of 128
_DEEP = 64  # layers up to which depths of 4 times as few and as many are tried; above, of 1.5 times
_MOST_GROUP = 16
_WIDTHS = 2  # steps tried on each side of the wanted width
_NEAR_PARAMS, _NEAR_ASPECT, _NEAR_GROUP = 0.03, 0.3, 0.3  # log distances that count the same: of parameters, of the
# aspect, which the loss hardly feels, and of the query heads per key-value head from the usual 4
_MOST_PARAMS = 1e16


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a shape has to keep to; None is filled with a default that `IntegerShapes.assumed` says."""

    params: float
    """Total, embeddings included."""
    tensor_parallel: int = 1
    vocab_size: int | None = None
    seq_len: int = 4096
    head_dim: int | None = None
    query_heads_per_kv_head: int | None = None
    ffn_ratio: float | None = None
    aspect_ratio: float | None = None
    """Width per layer."""
    family: Family = "llama"
    tied: bool = False

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.number("params", least=1.0, most=_MOST_PARAMS)
        for name, most in (("tensor_parallel", 1024), ("seq_len", 10**8), ("vocab_size", 10**8), ("head_dim", 4096),
                           ("query_heads_per_kv_head", 1024)):  # fmt: skip
            value = getattr(self, name)
            if value is not None:
                least = 2 if name in ("vocab_size", "head_dim") else 1
                fine = type(value) is int and least <= value <= most
                checks.that(fine, f"{name} = {value!r}: a whole number from {least} to {most} is wanted")
        for name, least_number, most_number in (("ffn_ratio", 0.1, 32.0), ("aspect_ratio", 1.0, 100_000.0)):
            if getattr(self, name) is not None:
                checks.number(name, least=least_number, most=most_number)
        if type(self.head_dim) is int and self.family == "llama":
            checks.that(self.head_dim % 2 == 0, f"head_dim = {self.head_dim} is odd: rotary positions turn pairs")
        checks.one_of("family", ("llama", "gpt2"))
        checks.done()


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeOption:
    """A shape, counted exactly."""

    shape: Shape
    params: int
    flops_per_token: int
    """Training, causal convention: attention counted at the full sequence length."""
    params_ratio: float
    """Parameters it has over parameters wanted."""

    @property
    def flops_ratio(self) -> float:
        """Exact FLOPs per token over 6 N."""
        return self.flops_per_token / (6.0 * self.params)

    @property
    def aspect_ratio(self) -> float:
        """Width per layer."""
        return self.shape.width / self.shape.num_layers


@dataclass(frozen=True, kw_only=True, slots=True)
class IntegerShapes:
    """Shapes near a wish, the nearest first, and what was assumed where it said nothing."""

    options: tuple[ShapeOption, ...]
    assumed: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Template:
    """A wish with nothing left open."""

    head_dim: int
    group: int | None
    """None: of each width's divisors, the one nearest to `_GROUP`."""
    ffn_ratio: float
    aspect: float
    vocab_size: int
    width_step: int
    ffn_step: int


def integer_shapes(wanted: Wanted, num_options: int = 4) -> IntegerShapes:
    """The shapes nearest to a wish: the best depth of each width.

    Raises:
        ShapeError: not even the smallest shape has as few parameters, or none keeps the wanted group of heads.
    """
    template, assumed = _filled(wanted)
    middle = _ideal_width(wanted.params, template.aspect) / template.aspect
    reach = 4.0 if middle <= _DEEP else 1.5
    depths = range(max(1, int(middle / reach)), max(2, math.ceil(middle * reach)) + 1)
    found = [option for depth in depths for option in _nearest(wanted, template, depth)]
    if not found:
        raise ShapeError(f"no width keeps heads, degree {wanted.tensor_parallel} and tiles whole")
    found.sort(key=lambda option: _distance(option, template))
    best = found[0]
    if wanted.query_heads_per_kv_head is None:
        assumed = *assumed, _group_text(best)
    if best.params_ratio > 2:
        least = min(option.params for option in found)
        raise ShapeError(
            f"params = {wanted.params:.4g}: the smallest shape of vocabulary {template.vocab_size}, head dim "
            f"{template.head_dim} and tensor-parallel degree {wanted.tensor_parallel} has {least}: "
            "ask for a smaller vocabulary, head dim or degree"
        )
    of_width: dict[int, ShapeOption] = {}
    for option in found:
        of_width.setdefault(option.shape.width, option)
    return IntegerShapes(options=tuple(of_width.values())[:num_options], assumed=assumed)


def _filled(wanted: Wanted) -> tuple[_Template, tuple[str, ...]]:
    aspect = wanted.aspect_ratio or _ASPECT
    width = _ideal_width(wanted.params, aspect)
    degree = wanted.tensor_parallel
    vocab = wanted.vocab_size or _default_vocab(wanted, width)
    padded = _up(vocab, 128 * degree)
    head_dim = wanted.head_dim or next(size for least, size in _HEAD_DIMS if width >= least)
    ffn_ratio = wanted.ffn_ratio or _FFN[wanted.family]
    tile = 128 if width >= _LARGE else 16
    said = {
        f"vocabulary {vocab}: the largest common one whose tables take a quarter or less": wanted.vocab_size is None,
        f"vocabulary padded to {padded}, a multiple of {128 * degree}": padded != vocab,
        f"head dim {head_dim}": wanted.head_dim is None,
        f"feed-forward width {ffn_ratio:g} times the width": wanted.ffn_ratio is None,
        f"width per layer near {aspect:g}": wanted.aspect_ratio is None,
    }
    template = _Template(
        head_dim=head_dim,
        group=wanted.query_heads_per_kv_head,
        ffn_ratio=ffn_ratio,
        aspect=aspect,
        vocab_size=padded,
        width_step=math.lcm(tile, head_dim * degree * (wanted.query_heads_per_kv_head or 1)),
        ffn_step=math.lcm(2 * tile, tile * degree),
    )
    return template, tuple(text for text, assumed in said.items() if assumed)


def _ideal_width(params: float, aspect: float) -> float:
    """Of 12 * layers * width^2 parameters at this width per layer."""
    return float((params * aspect / 12) ** (1 / 3))


def _default_vocab(wanted: Wanted, width: float) -> int:
    tables = 1 if wanted.tied else 2
    fine = [v for v in _VOCABS if tables * _up(v, 128 * wanted.tensor_parallel) * width <= _TABLES * wanted.params]
    return max(fine, default=_VOCABS[0])


def _up(value: float, step: int) -> int:
    return step * max(1, math.ceil(value / step))


def _nearest(wanted: Wanted, template: _Template, depth: int) -> list[ShapeOption]:
    """Shapes of a few widths about the wanted size at this depth, as far as they hold whole heads.

    About, because parameters do not grow evenly with width: a width whose heads cannot be grouped has more.
    """
    matrices = 3 if wanted.family == "llama" else 2
    square = depth * (2 + 2 / (template.group or _GROUP) + matrices * template.ffn_ratio)
    table = (1 if wanted.tied else 2) * template.vocab_size
    width = 2 * wanted.params / (table + math.sqrt(table**2 + 4 * square * wanted.params))
    middle = round(width / template.width_step)
    options = []
    for count in range(max(1, middle - _WIDTHS), max(1, middle + _WIDTHS) + 1):
        shape = _shape(wanted, template, depth, count)
        if shape is not None:
            params = count_params(shape).total
            options.append(
                ShapeOption(
                    shape=shape,
                    params=params,
                    flops_per_token=flops_per_token(shape),
                    params_ratio=params / wanted.params,
                )
            )
    return options


def _shape(wanted: Wanted, template: _Template, depth: int, count: int) -> Shape | None:
    """The shape `count` steps wide; None where no group of heads splits over the tensor-parallel degree."""
    width = count * template.width_step
    heads = width // template.head_dim
    groups = [template.group] if template.group else list(range(1, _MOST_GROUP + 1))
    whole = [group for group in groups if heads % (group * wanted.tensor_parallel) == 0]
    if not whole:
        return None
    group = min(whole, key=lambda size: (abs(math.log(size / _GROUP)), size))
    return Shape(
        num_layers=depth,
        width=width,
        num_heads=heads,
        num_kv_heads=heads // group,
        ffn_width=template.ffn_step * max(1, round(template.ffn_ratio * width / template.ffn_step)),
        vocab_size=template.vocab_size,
        seq_len=wanted.seq_len,
        family=wanted.family,
        tied=wanted.tied,
    )


def _group_text(option: ShapeOption) -> str:
    heads, kv_heads = option.shape.num_heads, option.shape.num_kv_heads
    said = f"{heads // kv_heads} query heads per key-value head"
    if heads != _GROUP * kv_heads:
        said += f", not the usual {_GROUP}: {heads} heads in groups of {_GROUP} do not split over the degree"
    return said


def _distance(option: ShapeOption, template: _Template) -> tuple[float, int]:
    away = abs(math.log(option.params_ratio)) / _NEAR_PARAMS
    aspect = abs(math.log(option.aspect_ratio / template.aspect)) / _NEAR_ASPECT
    group = option.shape.num_heads / option.shape.num_kv_heads / (template.group or _GROUP)
    return away + aspect + abs(math.log(group)) / _NEAR_GROUP, option.shape.num_layers
