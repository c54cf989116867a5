"""Parametrizations as plain numbers: per parameter an init std, a learning rate, a weight decay; and forward
multipliers. The only door to `mup`, whose infinite dimensions are the source of the width multipliers.

`sp`   standard: init std 1 / sqrt(fan_in), one learning rate for all, attention at 1 / sqrt(head_dim).
`mup`  as mup 1.0.0 does it (Tensor Programs V, arXiv 2203.03466, Table 8): against the base shape, a matrix with two
       infinite dimensions has its learning rate divided, and its weight decay multiplied, by its fan-in's width
       multiplier, and its std divided by the root of it; the readout keeps the base std and its input is divided
       by the multiplier; attention at sqrt(base head_dim) / head_dim. eps is left alone.

At the base shape both are the same function. What is handed on is these numbers, never `infshape`: FSDP2, deepcopy
and meta tensors drop it, and a wrong base is silent.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math

import mup
import torch
from torch import Tensor

from proxies.model import Multipliers, parameter_shapes
from proxies.numbers import ForwardNumbers, Kind, ParameterNumbers
from proxies.spec import Hparams, Parametrization, Shape

EMBEDDING_STD = 1.0


def width_multipliers(shape: Shape, base_shape: Shape) -> dict[str, tuple[float, int]]:
    """Per parameter mup's width multiplier against the base, and its number of infinite dimensions.

    Raises:
        SpecError: `base_shape` cannot be widened (heads or FFN would not stay whole).
        ValueError: the shapes differ in more than width.
    """
    if shape.num_layers != base_shape.num_layers or shape.head_dim != base_shape.head_dim:
        raise ValueError(
            f"shape ({shape.num_layers} layers, head dim {shape.head_dim}) and base shape ({base_shape.num_layers} "
            f"layers, head dim {base_shape.head_dim}) differ in more than width: mup has no rule for that"
        )
    # The delta tells mup which dimensions are infinite: it must differ from the base in every one of them.
    delta = base_shape.at_width(2 * base_shape.width)
    base_dims = mup.make_base_shapes(
        {name: torch.Size(size) for name, size in parameter_shapes(base_shape).items()},
        {name: torch.Size(size) for name, size in parameter_shapes(delta).items()},
    )
    infshapes = mup.shape.zip_infshapes(base_dims, parameter_shapes(shape))
    return {name: (float(inf.width_mult()), int(inf.ninf())) for name, inf in infshapes.items()}


def kind_of(name: str) -> Kind:
    """What a parameter is, by its name in `proxies.model.Decoder`."""
    if name.startswith("tok_embeddings"):
        return "embedding"
    if name.startswith("lm_head"):
        return "readout"
    return "norm" if "norm" in name else "hidden"


def parameter_table(
    parametrization: Parametrization, shape: Shape, base_shape: Shape, hparams: Hparams
) -> tuple[ParameterNumbers, ...]:
    """The numbers of every parameter of `shape`, in the module's own order.

    Raises:
        ValueError: tied matrices under `mup`: its std would grow as sqrt(width) (microsoft/mup issue 55).
    """
    if shape.tied and parametrization == "mup":
        raise ValueError("tied = true under mup: its embedding std grows as sqrt(width) (microsoft/mup#55); untie")
    multipliers = width_multipliers(shape, base_shape)
    base_sizes = parameter_shapes(base_shape)
    table = []
    for name, size in parameter_shapes(shape).items():
        multiplier, num_infinite = multipliers[name]
        kind = kind_of(name)
        scaled = parametrization == "mup" and num_infinite == 2
        table.append(
            ParameterNumbers(
                name=name,
                size=size,
                kind=kind,
                width_multiplier=multiplier,
                init_std=_init_std(parametrization, kind, size, base_sizes[name]),
                learning_rate=hparams.learning_rate / (multiplier if scaled else 1.0),
                weight_decay=_weight_decay(kind, hparams.weight_decay) * (multiplier if scaled else 1.0),
                eps=hparams.eps,
                beta1=hparams.beta1,
                beta2=hparams.beta2,
            )
        )
    return tuple(table)


def _init_std(parametrization: Parametrization, kind: Kind, size: tuple[int, ...], base_size: tuple[int, ...]) -> float:
    if kind == "norm":
        return 0.0
    if kind == "embedding":
        return EMBEDDING_STD
    fan_in = base_size[1] if parametrization == "mup" and kind == "readout" else size[1]
    return 1 / math.sqrt(fan_in)


def _weight_decay(kind: Kind, weight_decay: float) -> float:
    # Decaying gains and the embedding fights their scale rather than regularizes; the field leaves them out.
    return weight_decay if kind in ("hidden", "readout") else 0.0


def forward_numbers(
    parametrization: Parametrization, shape: Shape, base_shape: Shape, hparams: Hparams
) -> ForwardNumbers:
    """Forward multipliers of `shape` (mup's MuReadout for the output; its README for the attention)."""
    if parametrization == "sp":
        attention, output = 1 / math.sqrt(shape.head_dim), hparams.output_multiplier
    else:
        attention = math.sqrt(base_shape.head_dim) / shape.head_dim
        output = hparams.output_multiplier * base_shape.width / shape.width
    return ForwardNumbers(embedding=hparams.embedding_multiplier, attention=attention, output=output)


def name_seed(seed: int, name: str) -> int:
    """A generator seed for one parameter: the same whatever the order, the bank or the sharding."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big")


def initial_tensor(numbers: ParameterNumbers, seed: int) -> Tensor:
    """The parameter's initial value, float32 on the CPU: ones for gains, else normal(0, init_std)."""
    return drawn(numbers.name, numbers.size, numbers.kind, numbers.init_std, seed)


def drawn(name: str, size: tuple[int, ...], kind: Kind, init_std: float, seed: int) -> Tensor:
    """An initial value from the numbers it depends on, for those who have no whole `ParameterNumbers`."""
    if kind == "norm":
        return torch.ones(size)
    return torch.randn(size, generator=torch.Generator().manual_seed(name_seed(seed, name))) * init_std


def stack_forward_numbers(numbers: list[ForwardNumbers], dtype: torch.dtype) -> Multipliers:
    """One forward multiplier per trial, as tensors [K, 1, 1]."""
    columns = {
        field.name: torch.tensor([getattr(n, field.name) for n in numbers], dtype=dtype)[:, None, None]
        for field in dataclasses.fields(ForwardNumbers)
    }
    return Multipliers(**columns)
