"""The choice of a main run's shape: integers for a number of parameters.

A study's template fixes depth, head dim, vocabulary, and all ratios, so only the width is chosen,
as muP requires. Without a template, width and depth are chosen. The width is a multiple of the
matrix tile of a GPU (128, or 16 at small widths) and of head dim * tensor-parallel degree. The
feed-forward width is a multiple of the tile on every rank, and the vocabulary one of 128 * degree,
as in Megatron-LM. Heads and key-value heads always split over the degree. The nearest such shape in
log parameters is chosen. The distance also counts unusual widths per layer, unusual numbers of
query heads per key-value head, and heads that do not split over the GPUs of a node
(`_compute_distance`).
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from forerun._proxies.core import canon
from forerun._proxies.core.checks import Checks
from forerun._proxies.core.errors import InputError
from forerun._proxies.core.flops import compute_flops_per_token, count_params
from forerun._proxies.core.shape import Shape

_VOCABS = (256, 4096, 32_000, 50_257, 128_256)  # Bytes, a small tokenizer, Llama 2, GPT-2, Llama 3
_TABLES = 0.25  # Maximum share of all parameters in the tables, for a vocabulary that is not given
_HEAD_DIMS = ((2048, 128), (512, 64), (0, 32))  # Minimum width and head dim
_PUBLISHED_LAYERS = (
    (1.24e8, 12),  # GPT-2
    (1.1e9, 22),  # TinyLlama (arXiv 2401.02385)
    (6.74e9, 32),  # Llama 2 (arXiv 2307.09288); Llama 3 8B (2407.21783) has as many
    (1.30e10, 40),  # Llama 2
    (3.25e10, 60),  # Llama (arXiv 2302.13971)
    (6.90e10, 80),  # Llama 2, Llama 3
    (1.75e11, 96),  # GPT-3 (arXiv 2005.14165)
    (4.06e11, 126),  # Llama 3.1
)
"""Parameters and layers of published decoders. Depth grows with width: between these entries,
layers follow a power law."""
_FFN = 3.5  # Llama 3 8B and 70B (14336 / 4096)
_GROUP = 4  # Query heads per key-value head: Llama 3 8B (32 / 8)
_LARGE = 1024  # Width from which matrices are split in tiles of 128, and heads over GPUs
# Layers up to which depths from a quarter to four times are tried; above, within a factor of 1.5
_DEEP = 64
_MAX_GROUP = 16
_EVEN_HEADS = 8  # GPUs of a node: this many heads split over every tensor-parallel degree inside it
# Steps tried on each side of the size: among this many, one has heads that split by 8
_NUM_WIDTHS = _EVEN_HEADS
_PER_TWO = 0.1
"""Cost in log parameters of a factor of two that the heads lack. At 1e9 parameters, all three cost
0.14 % of the loss about the optimum of Chinchilla's law (arXiv 2203.15556), half of what
`flat_range` counts as equal."""
_PER_ASPECT, _PER_GROUP = 0.2, 0.1
"""Cost in log parameters of a deviation in the log of the width per layer and of the query heads
per key-value head, which hardly affect the loss (arXiv 2001.08361, section 3.1)."""
MAX_PARAMS = 1e16


class ShapeError(InputError):
    """No shape of this family satisfies the request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WidthCount:
    """The number of parameters of a user's model at one depth, as a polynomial of its width."""

    constant: float
    linear: float
    square: float

    def __post_init__(self) -> None:
        checks = Checks(self)
        for name in ("constant", "linear", "square"):
            checks.require_number(name)
        grows = self.square >= 0 and self.linear >= 0 and self.square + self.linear > 0
        checks.require(
            grows, "the number of parameters must grow with the width, at most with its square"
        )
        checks.raise_problems()

    @classmethod
    def fit(cls, counts: Mapping[int, float]) -> WidthCount:
        """Fit the polynomial through the counts at three widths. Raises SpecError if none fits."""
        (a, at_a), (b, at_b), (c, at_c) = sorted(counts.items())
        first, second = (at_b - at_a) / (b - a), (at_c - at_b) / (c - b)
        square = (second - first) / (c - a)
        linear = first - square * (a + b)
        # Rounding errors of sums of millions are not a term.
        square, linear = (0.0 if abs(x) < 1e-9 * abs(at_c) / c else x for x in (square, linear))
        return cls(constant=at_a - linear * a - square * a * a, linear=linear, square=square)

    def count_params(self, width: int) -> int:
        """Return the number of parameters at a width; at least 1."""
        return max(1, round(self.constant + self.linear * width + self.square * width * width))

    def find_width(self, params: float) -> float:
        """Return the width with this many parameters; at least 1."""
        excess = params - self.constant
        if excess <= 0:
            return 1.0
        if not self.square:
            return max(1.0, excess / self.linear)
        return max(
            1.0, 2 * excess / (self.linear + math.sqrt(self.linear**2 + 4 * self.square * excess))
        )


def compute_layers(width: int, width_per_layer: float) -> int:
    """Return the number of layers of a width by an aspect rule; at least 1."""
    return max(1, math.floor(width / width_per_layer + 0.5))


def interpolate_count(counts: Mapping[int, WidthCount], depth: int) -> WidthCount | None:
    """Return the count of a depth: as counted, or on the line through two depths; None if
    unknown.
    """
    if depth in counts or len(counts) < 2:
        return counts.get(depth)
    min_depth = min(counts)
    step = compute_count_per_layer(counts)
    return WidthCount(
        **{
            name: getattr(counts[min_depth], name) + (depth - min_depth) * getattr(step, name)
            for name in _TERMS
        }
    )


def compute_count_per_layer(counts: Mapping[int, WidthCount]) -> WidthCount:
    """Return the parameters of one more layer, from the smallest and the largest counted depth."""
    min_depth, max_depth = min(counts), max(counts)
    return WidthCount(
        **{
            name: (getattr(counts[max_depth], name) - getattr(counts[min_depth], name))
            / (max_depth - min_depth)
            for name in _TERMS
        }
    )


_TERMS = tuple(term.name for term in dataclasses.fields(WidthCount))


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """The parts of the main run's shape that a study fixes: all but width and maybe depth."""

    shape: Shape
    """Shape with the fixed depth, head dim, vocabulary, context, and ratios of key-value heads and
    feed-forward width."""
    width_multiple: int = 1
    tensor_parallel: int = 1
    count: WidthCount | None = field(default=None, metadata=canon.UNLESS_DEFAULT)
    """Count of the parameters; None to count by the family of the shape."""
    width_per_layer: float | None = field(default=None, metadata=canon.UNLESS_DEFAULT)
    """Width per layer by which the depth follows the width; None if the depth is the shape's."""
    per_layer: WidthCount | None = field(default=None, metadata=canon.UNLESS_DEFAULT)
    """Parameters that one more layer adds to `count`."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.require_whole("width_multiple", "tensor_parallel")
        if self.width_per_layer is not None:
            checks.require_number("width_per_layer", above=0)
        checks.raise_problems()

    def count_params(self, shape: Shape) -> int:
        """Return the number of parameters of a shape of this template."""
        if self.count is None:
            return count_params(shape).total
        more = 0 if self.per_layer is None else self.per_layer.count_params(shape.width)
        num_added = shape.num_layers - self.shape.num_layers
        return self.count.count_params(shape.width) + num_added * more


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeRequest:
    """The requirements of a shape. None stands for the template's value, or without a template for
    a default that is reported.
    """

    params: float
    """Total number of parameters, including embeddings."""
    template: Template | None = None
    """Template to keep exactly; only `tensor_parallel` may replace its own value."""
    tensor_parallel: int | None = None
    vocab_size: int | None = None
    seq_len: int = 4096

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.require_number("params", least=1.0, most=MAX_PARAMS)
        limits = {"tensor_parallel": 1024, "seq_len": 10**8, "vocab_size": 10**8}
        for name, most in limits.items():
            value, least = getattr(self, name), 2 if name == "vocab_size" else 1
            fine = value is None or (type(value) is int and least <= value <= most)
            checks.require(
                fine, f"{name} = {value!r}: must be a whole number from {least} to {most}"
            )
        checks.raise_problems()

    @property
    def degree(self) -> int:
        """Number of ranks that the heads must split over."""
        return self.tensor_parallel or (
            1 if self.template is None else self.template.tensor_parallel
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeOption:
    """A shape with its exact counts."""

    shape: Shape
    params: int
    flops_per_token: int
    """Training FLOPs per token. Attention is counted at the full sequence length."""
    params_ratio: float
    """Ratio of `params` to the requested number of parameters."""

    @property
    def flops_ratio(self) -> float:
        """Exact FLOPs per token over 6 N."""
        return self.flops_per_token / (6.0 * self.params)

    @property
    def aspect_ratio(self) -> float:
        """Width per layer."""
        return self.shape.width / self.shape.num_layers


class ShapeChoice(NamedTuple):
    """The best shape of a request, with the assumptions made for it."""

    option: ShapeOption
    assumed: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    """A request in which all is fixed but the width and, without a template, the depth."""

    head_dim: int
    group: int | None
    """Query heads per key-value head; None for the divisor of each width's heads that is nearest to
    `_GROUP`."""
    ffn_ratio: float
    vocab_size: int
    width_step: int
    ffn_step: int
    template: Template | None
    aspect: float
    """Usual width per layer at the size."""


def compute_published_layers(params: float) -> float:
    """Return the number of layers of published decoders of this size, interpolated between them.

    Outside their sizes, layers and width grow at the same rate.

    Args:
        params: Total parameters.
    """
    sizes = [math.log(size) for size, _ in _PUBLISHED_LAYERS]
    layers = [math.log(count) for _, count in _PUBLISHED_LAYERS]
    at = math.log(params)
    if not sizes[0] <= at <= sizes[-1]:
        end = 0 if at < sizes[0] else -1
        return math.exp(layers[end] + (at - sizes[end]) / 3)
    right = next(index for index, size in enumerate(sizes) if index and at <= size)
    share = (at - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
    return math.exp(layers[right - 1] + share * (layers[right] - layers[right - 1]))


def compute_published_aspect(params: float) -> float:
    """Return the width per layer of `12 * layers * width**2` parameters in
    `compute_published_layers`.
    """
    layers = compute_published_layers(params)
    return math.sqrt(params / (12 * layers)) / layers


def choose_shape(request: ShapeRequest) -> ShapeChoice:
    """Choose the best shape of a request.

    Raises:
        ShapeError: No width gives integer ratios and heads; or, without a template, even the
            smallest shape has more than twice the parameters.
    """
    fixed = request.template
    frame, assumed = (
        _build_template_frame(request, fixed) if fixed else _build_default_frame(request)
    )
    if fixed is not None and fixed.width_per_layer is not None:
        options = _list_options_by_aspect(request, frame, fixed, fixed.width_per_layer)
    else:
        options = [
            option
            for depth in _list_depths(request, frame)
            for option in _list_nearest_options(request, frame, depth)
        ]
    if not options:
        raise ShapeError(
            f"no width divides into heads, tensor-parallel degree {request.degree} and tiles: "
            "choose another degree"
        )
    best = min(options, key=lambda option: _compute_distance(option, frame))
    if frame.group is None:
        assumed = (
            *assumed,
            f"{best.shape.num_heads // best.shape.num_kv_heads} query heads per key-value head",
        )
    if best.params_ratio > 2 and fixed is None:
        min_params = min(option.params for option in options)
        raise ShapeError(
            f"params = {request.params:.4g}: the smallest shape of vocabulary {frame.vocab_size}, "
            f"head dim {frame.head_dim} and tensor-parallel degree {request.degree} has "
            f"{min_params}: ask for a smaller vocabulary or degree"
        )
    return ShapeChoice(option=best, assumed=assumed)


def _build_template_frame(request: ShapeRequest, fixed: Template) -> tuple[_Frame, tuple[str, ...]]:
    shape, group = fixed.shape, fixed.shape.num_heads // fixed.shape.num_kv_heads
    # Multiples of this width have a whole feed-forward width
    ffn = shape.width // math.gcd(shape.width, shape.ffn_width)
    frame = _Frame(
        head_dim=shape.head_dim,
        group=group,
        ffn_ratio=shape.ffn_width / shape.width,
        vocab_size=shape.vocab_size,
        width_step=math.lcm(shape.head_dim * group * request.degree, ffn, fixed.width_multiple),
        ffn_step=request.degree,
        template=fixed,
        aspect=compute_published_aspect(request.params),
    )
    depth = (
        f"depth {shape.num_layers}"
        if fixed.width_per_layer is None
        else f"{fixed.width_per_layer:g} widths a layer"
    )
    return frame, (f"{depth}, head dim, vocabulary and ratios of the study's template",)


def _build_default_frame(request: ShapeRequest) -> tuple[_Frame, tuple[str, ...]]:
    degree, aspect = request.degree, compute_published_aspect(request.params)
    width = aspect * compute_published_layers(request.params)
    vocab = request.vocab_size or _choose_vocab(request, width)
    padded = _round_up(vocab, 128 * degree)
    head_dim = next(size for least, size in _HEAD_DIMS if width >= least)
    tile = 128 if width >= _LARGE else 16
    assumed = []
    if request.vocab_size is None:
        assumed.append(
            f"vocabulary {vocab}: the largest common one whose tables take at most a quarter"
        )
    if padded != vocab:
        assumed.append(f"vocabulary padded to {padded}, a multiple of {128 * degree}")
    assumed += [
        f"head dim {head_dim}",
        f"feed-forward width {_FFN:g} times the width",
        f"width per layer near {aspect:.0f}, as published models of this size have it",
    ]
    frame = _Frame(
        head_dim=head_dim,
        group=None,
        ffn_ratio=_FFN,
        vocab_size=padded,
        width_step=math.lcm(tile, head_dim * degree),
        ffn_step=math.lcm(2 * tile, tile * degree),
        template=None,
        aspect=aspect,
    )
    return frame, tuple(assumed)


def _choose_vocab(request: ShapeRequest, width: float) -> int:
    affordable = [
        v
        for v in _VOCABS
        if 2 * _round_up(v, 128 * request.degree) * width <= _TABLES * request.params
    ]
    return max(affordable, default=_VOCABS[0])


def _round_up(value: float, step: int) -> int:
    return step * max(1, math.ceil(value / step))


def _list_depths(request: ShapeRequest, frame: _Frame) -> range:
    if frame.template is not None:
        return range(frame.template.shape.num_layers, frame.template.shape.num_layers + 1)
    middle = compute_published_layers(request.params)
    reach = 4.0 if middle <= _DEEP else 1.5
    return range(max(1, int(middle / reach)), max(2, math.ceil(middle * reach)) + 1)


def _list_nearest_options(request: ShapeRequest, frame: _Frame, depth: int) -> list[ShapeOption]:
    """Return shapes of several widths near the size at this depth, because the heads of the nearest
    width may not split.
    """
    fixed = None if frame.template is None else frame.template.shape
    # Parameters are about square * width**2 + table * width
    matrices, tables, positions = 3, 2, 0
    if fixed is not None:
        matrices, positions = (2, fixed.seq_len) if fixed.family == "gpt2" else (3, 0)
        tables = 1 if fixed.tied else 2
    square = depth * (2 + 2 / (frame.group or _GROUP) + matrices * frame.ffn_ratio)
    table = tables * frame.vocab_size + positions
    width = 2 * request.params / (table + math.sqrt(table**2 + 4 * square * request.params))
    if frame.template is not None and frame.template.count is not None:
        width = frame.template.count.find_width(request.params)
    middle = round(width / frame.width_step)
    counts = range(max(1, middle - _NUM_WIDTHS), max(1, middle + _NUM_WIDTHS) + 1)
    shapes = [_build_shape(request, frame, depth, count) for count in counts]
    return [_to_option(request, frame, shape) for shape in shapes if shape is not None]


def _to_option(request: ShapeRequest, frame: _Frame, shape: Shape) -> ShapeOption:
    template = frame.template
    params = count_params(shape).total if template is None else template.count_params(shape)
    # The FLOPs of a user's model, whose parameters are counted, are only known as 6 N
    is_user_model = template is not None and template.count is not None
    return ShapeOption(
        shape=shape,
        params=params,
        flops_per_token=6 * params if is_user_model else compute_flops_per_token(shape),
        params_ratio=params / request.params,
    )


def _list_options_by_aspect(
    request: ShapeRequest, frame: _Frame, fixed: Template, width_per_layer: float
) -> list[ShapeOption]:
    """Return shapes of several widths near the size, each with the depth of its width."""

    def at(count: int) -> Shape:
        width = count * frame.width_step
        return fixed.shape.at_width(width).at_depth(compute_layers(width, width_per_layer))

    # The narrowest width with enough parameters, by bisection: parameters grow with the width
    upper = 1
    while fixed.count_params(at(upper)) < request.params:
        upper *= 2
    counts = range(1, upper + 1)
    middle = 1 + bisect.bisect_left(counts, request.params, key=lambda n: fixed.count_params(at(n)))
    shapes = map(at, range(max(1, middle - _NUM_WIDTHS), middle + _NUM_WIDTHS + 1))
    return [_to_option(request, frame, s) for s in shapes if s.ffn_width % frame.ffn_step == 0]


def _build_shape(request: ShapeRequest, frame: _Frame, depth: int, count: int) -> Shape | None:
    """Build the shape `count` steps wide; return None if it does not split over the degree."""
    width = count * frame.width_step
    if frame.template is not None:
        shape = frame.template.shape.at_width(width)
        return shape if shape.ffn_width % frame.ffn_step == 0 else None
    heads = width // frame.head_dim
    group_sizes = [
        group for group in range(1, _MAX_GROUP + 1) if heads % (group * request.degree) == 0
    ]
    if not group_sizes:
        return None
    group = min(group_sizes, key=lambda size: (abs(math.log(size / _GROUP)), size))
    return Shape(
        num_layers=depth,
        width=width,
        num_heads=heads,
        num_kv_heads=heads // group,
        ffn_width=frame.ffn_step * max(1, round(frame.ffn_ratio * width / frame.ffn_step)),
        vocab_size=frame.vocab_size,
        seq_len=request.seq_len,
    )


def _compute_distance(option: ShapeOption, frame: _Frame) -> tuple[float, int, int]:
    """Return a sort key: the distance in log parameters; among equals, the shallower and narrower
    shape.
    """
    shape = option.shape
    group = shape.num_heads / shape.num_kv_heads / (frame.group or _GROUP)
    distance = abs(math.log(option.params_ratio)) + _PER_TWO * _count_missing_twos(shape)
    distance += _PER_ASPECT * abs(math.log(option.aspect_ratio / frame.aspect)) + _PER_GROUP * abs(
        math.log(group)
    )
    return distance, shape.num_layers, shape.width


def _count_missing_twos(shape: Shape) -> int:
    """Count the factors of two that the heads lack to split over a node; 0 below `_LARGE`."""
    if shape.width < _LARGE:
        return 0
    return (_EVEN_HEADS // math.gcd(_EVEN_HEADS, shape.num_heads)).bit_length() - 1
