"""Published facts that numbers are checked and defaulted from: accelerators, models, prices, shares of the peak.

Peaks are dense BF16 (no sparsity), of the makers' data sheets as torchtitan's `tools/utils.py` lists them where it
does. Models are of their papers or published configs. What a fact is no more than one source's word for, says so.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from types import MappingProxyType

from proxies.core.errors import InputError
from proxies.core.shape import Shape


class UnknownNameError(InputError):
    """No accelerator or model of the reference table has this name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One accelerator."""

    peak_flops: float
    """A second, dense BF16."""
    memory_gb: float
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A number from the outside, with the range that others reported."""

    value: float
    low: float
    high: float
    source: str


@dataclass(frozen=True, slots=True)
class Model:
    """One published model."""

    shape: Shape
    params: float
    """Total, as published."""
    tokens: float | None
    """Trained on; None where not published."""
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

PRICES_USD: MappingProxyType[str, Published] = MappingProxyType(
    {
        "H100": Published(
            value=3.90, low=2.00, high=3.90, source="default: on demand, mid-2025; reserved down to 2.00 and below"
        ),
        "H800": Published(value=2.00, low=2.00, high=2.00, source="default: DeepSeek-V3, arXiv 2412.19437, as rented"),
    }
)


def _llama(layers: int, width: int, heads: int, kv_heads: int, ffn: int, vocab: int, seq_len: int) -> Shape:
    return Shape(
        num_layers=layers, width=width, num_heads=heads, num_kv_heads=kv_heads, ffn_width=ffn, vocab_size=vocab,
        seq_len=seq_len,
    )  # fmt: skip


def _gpt2(layers: int, width: int, heads: int, vocab: int, seq_len: int) -> Shape:
    return Shape(
        num_layers=layers, width=width, num_heads=heads, num_kv_heads=heads, ffn_width=4 * width, vocab_size=vocab,
        seq_len=seq_len, family="gpt2", tied=True,
    )  # fmt: skip


_L2, _L3 = "arXiv 2307.09288 and its published configs", "arXiv 2407.21783 and its published configs"
MODELS: MappingProxyType[str, Model] = MappingProxyType(
    {
        "gpt-2": Model(_gpt2(12, 768, 12, 50_257, 1024), 124.44e6, None, None, "published weights"),
        "gpt-2-xl": Model(_gpt2(48, 1600, 25, 50_257, 1024), 1.5576e9, None, None, "published weights"),
        "gpt-3-175b": Model(
            _gpt2(96, 12_288, 96, 50_257, 2048), 175e9, 300e9, 3.14e23, "arXiv 2005.14165, table D.1 (6ND)"
        ),
        "opt-175b": Model(
            _gpt2(96, 12_288, 96, 50_272, 2048), 175e9, 180e9, None,
            "arXiv 2205.01068 (its 4.30e23 counts 300B tokens and recomputed activations: convention recompute)",
        ),
        "chinchilla-70b": Model(
            _gpt2(80, 8192, 64, 32_000, 2048), 70e9, 1.4e12, 5.76e23,
            "arXiv 2203.15556 (its relative positions are not counted here)",
        ),
        "llama-2-7b": Model(_llama(32, 4096, 32, 32, 11_008, 32_000, 4096), 6.738e9, 2e12, None, _L2),
        "llama-2-13b": Model(_llama(40, 5120, 40, 40, 13_824, 32_000, 4096), 13.016e9, 2e12, None, _L2),
        "llama-2-70b": Model(_llama(80, 8192, 64, 8, 28_672, 32_000, 4096), 68.977e9, 2e12, None, _L2),
        "llama-3-8b": Model(_llama(32, 4096, 32, 8, 14_336, 128_256, 8192), 8.03e9, 15e12, None, _L3),
        "llama-3-70b": Model(_llama(80, 8192, 64, 8, 28_672, 128_256, 8192), 70.554e9, 15e12, None, _L3),
        "llama-3.1-405b": Model(
            _llama(126, 16_384, 128, 8, 53_248, 128_256, 8192), 405.85e9, 15.6e12, 3.8e25, f"{_L3} (6ND)"
        ),
    }
)  # fmt: skip


def gpu(name: str) -> tuple[str, Gpu]:
    """The accelerator of this name, whatever its case, dashes and spaces, and the name the table gives it.

    Raises:
        UnknownNameError: with the names there are.
    """
    found = _find(name, tuple(GPUS), "GPU")
    return found, GPUS[found]


def model(name: str) -> tuple[str, Model]:
    """The model of this name, and the name the table gives it.

    Raises:
        UnknownNameError: with the names there are.
    """
    found = _find(name, tuple(MODELS), "model")
    return found, MODELS[found]


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _find(name: str, names: tuple[str, ...], what: str) -> str:
    plain = {_plain(known): known for known in names}
    if _plain(name) in plain:
        return plain[_plain(name)]
    near = difflib.get_close_matches(_plain(name), plain, n=1)
    hint = f" (did you mean {plain[near[0]]}?)" if near else ""
    raise UnknownNameError(f"{what} {name!r} is not in the table{hint}: known names are {', '.join(names)}")
