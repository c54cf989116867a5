"""Published accelerators and models, which serve as defaults and as checks.

Peaks are for dense BF16 without sparsity. They are from the makers' data sheets, and equal those in
torchtitan's `tools/utils.py` if it has the accelerator. Models are from their papers or published
configs.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from types import MappingProxyType

from forerun._proxies.core.errors import InputError
from forerun._proxies.core.shape import Shape


class UnknownNameError(InputError):
    """No accelerator or model of the reference table has this name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One type of accelerator."""

    peak_flops: float
    """Peak FLOPs per second, dense BF16."""
    memory_gb: float
    source: str


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """One published model."""

    shape: Shape
    params: float
    """Total number of parameters, as published."""
    tokens: float | None
    """Number of training tokens; None if not published."""
    flops_published: float | None
    """Training FLOPs, as the source counts them."""
    source: str


_TITAN = "maker's data sheet; torchtitan get_peak_flops"
_SHEET = "maker's data sheet"
GPUS: MappingProxyType[str, Gpu] = MappingProxyType(
    {
        "A100": Gpu(peak_flops=312e12, memory_gb=80, source=_TITAN),
        "H100": Gpu(peak_flops=989e12, memory_gb=80, source=f"{_TITAN}; SXM"),
        "H800": Gpu(peak_flops=989e12, memory_gb=80, source=_SHEET),
        "H200": Gpu(peak_flops=989e12, memory_gb=141, source=_TITAN),
        "B200": Gpu(peak_flops=2250e12, memory_gb=180, source=_TITAN),
        "GB200": Gpu(peak_flops=2500e12, memory_gb=186, source=_TITAN),
        "MI300X": Gpu(peak_flops=1300e12, memory_gb=192, source=_TITAN),
        "L40S": Gpu(peak_flops=362e12, memory_gb=48, source=_SHEET),
        "RTX4090": Gpu(peak_flops=165e12, memory_gb=24, source=_SHEET),
        "TPUv3": Gpu(peak_flops=123e12, memory_gb=32, source="arXiv 2104.10350, table 4"),
        "TPUv4": Gpu(peak_flops=275e12, memory_gb=32, source="arXiv 2204.02311"),
        "TPUv5p": Gpu(peak_flops=459e12, memory_gb=95, source=_TITAN),
    }
)


def _make_llama_shape(
    layers: int, width: int, heads: int, kv_heads: int, ffn: int, vocab: int, seq_len: int
) -> Shape:
    return Shape(
        num_layers=layers,
        width=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_width=ffn,
        vocab_size=vocab,
        seq_len=seq_len,
    )


def _make_gpt2_shape(layers: int, width: int, heads: int, vocab: int, seq_len: int) -> Shape:
    shape = _make_llama_shape(layers, width, heads, heads, 4 * width, vocab, seq_len)
    return replace(shape, family="gpt2", tied=True)


_L2, _L3 = (
    "arXiv 2307.09288 and its published configs",
    "arXiv 2407.21783 and its published configs",
)
MODELS: MappingProxyType[str, PublishedModel] = MappingProxyType(
    {
        "gpt-2": PublishedModel(
            _make_gpt2_shape(12, 768, 12, 50_257, 1024), 124.44e6, None, None, "published weights"
        ),
        "gpt-2-xl": PublishedModel(
            _make_gpt2_shape(48, 1600, 25, 50_257, 1024), 1.5576e9, None, None, "published weights"
        ),
        "gpt-3-175b": PublishedModel(
            _make_gpt2_shape(96, 12_288, 96, 50_257, 2048),
            175e9,
            300e9,
            3.14e23,
            "arXiv 2005.14165, table D.1 (6ND)",
        ),
        "opt-175b": PublishedModel(
            _make_gpt2_shape(96, 12_288, 96, 50_272, 2048),
            175e9,
            180e9,
            None,
            "arXiv 2205.01068 (its 4.30e23 counts 300B tokens and recomputed activations: "
            "convention recompute)",
        ),
        "chinchilla-70b": PublishedModel(
            _make_gpt2_shape(80, 8192, 64, 32_000, 2048),
            70e9,
            1.4e12,
            5.76e23,
            "arXiv 2203.15556 (its relative positions are not counted here)",
        ),
        "llama-2-7b": PublishedModel(
            _make_llama_shape(32, 4096, 32, 32, 11_008, 32_000, 4096), 6.738e9, 2e12, None, _L2
        ),
        "llama-2-13b": PublishedModel(
            _make_llama_shape(40, 5120, 40, 40, 13_824, 32_000, 4096), 13.016e9, 2e12, None, _L2
        ),
        "llama-2-70b": PublishedModel(
            _make_llama_shape(80, 8192, 64, 8, 28_672, 32_000, 4096), 68.977e9, 2e12, None, _L2
        ),
        "llama-3-8b": PublishedModel(
            _make_llama_shape(32, 4096, 32, 8, 14_336, 128_256, 8192), 8.03e9, 15e12, None, _L3
        ),
        "llama-3-70b": PublishedModel(
            _make_llama_shape(80, 8192, 64, 8, 28_672, 128_256, 8192), 70.554e9, 15e12, None, _L3
        ),
        "llama-3.1-405b": PublishedModel(
            _make_llama_shape(126, 16_384, 128, 8, 53_248, 128_256, 8192),
            405.85e9,
            15.6e12,
            3.8e25,
            f"{_L3} (6ND)",
        ),
    }
)


def look_up_gpu(name: str) -> tuple[str, Gpu]:
    """Look up an accelerator. Case, dashes, and spaces of the name do not matter.

    Returns:
        The name in the table, and the accelerator.

    Raises:
        UnknownNameError: The table has no such name; the message lists the names it has.
    """
    known_name = _find_name(name, tuple(GPUS), "GPU")
    return known_name, GPUS[known_name]


def look_up_model(name: str) -> tuple[str, PublishedModel]:
    """Look up a published model. Case, dashes, and spaces of the name do not matter.

    Returns:
        The name in the table, and the model.

    Raises:
        UnknownNameError: The table has no such name; the message lists the names it has.
    """
    known_name = _find_name(name, tuple(MODELS), "model")
    return known_name, MODELS[known_name]


def _normalize_name(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _find_name(name: str, names: tuple[str, ...], kind: str) -> str:
    names_by_key = {_normalize_name(known): known for known in names}
    if _normalize_name(name) in names_by_key:
        return names_by_key[_normalize_name(name)]
    near = difflib.get_close_matches(_normalize_name(name), names_by_key, n=1)
    hint = f" (did you mean {names_by_key[near[0]]}?)" if near else ""
    raise UnknownNameError(
        f"{kind} {name!r} is not in the table{hint}: known names are {', '.join(names)}"
    )
