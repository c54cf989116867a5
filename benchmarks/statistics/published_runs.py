"""GPU-hours of published runs, each predicted from all other runs (docs/estimates.md).

    python benchmarks/statistics/published_runs.py

The script prints its results in a few seconds and writes no file. It uses every run that was found
with published accelerator-hours, tokens and size. Hours are as stated by the authors, whatever they
counted. Left out are OPT-175B (its tokens are given as 180B and as 300B), phi-1.5 (1,500 hours in
its paper, 6,144 on its card), GPT-3 (no published hours), Llama 3.2 (distilled), and MiniCPM,
SEA-LION and OpenELM (not all figures were checked).

The second table compares the line with and without the number of accelerators, on small and large
clusters, with one run left out, and with all runs of its developer left out. The last line printed
is the fit through all runs, which `launcher/main_run/estimates/utilization.py` contains.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from forerun._launcher.main_run.estimates.machine import Span
from forerun._launcher.main_run.estimates.reference_tables import look_up_gpu, look_up_model
from forerun._launcher.main_run.estimates.utilization import (
    CENTER_GPUS,
    CENTER_PARAMS,
    FAST_FLOPS,
    UtilizationLine,
)
from forerun._proxies.core.flops import compute_flops_per_token, compute_six_nd
from forerun._proxies.core.shape import Family, Shape

DEGREES = 4.0
"""Degrees of freedom of Student's t, the usual robust choice (Lange, Little, Taylor, JASA 84(408),
1989)."""
DEVELOPERS = {
    "mobilellm": "llama",
    "gpt": "pythia",
    "llmc": "nanogpt",
    "bloom": "smollm",
    "codeparrot": "smollm",
    "starcoderbase": "smollm",
}
"""First series of a developer, for each of its other series. A run's series is the first word of
its name."""
SMALL_GPUS = 100
"""Clusters with fewer accelerators are small."""
ROUNDS = 200
"""Rounds of reweighting. About fifty converge to 1e-9."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRun:
    """A training run whose authors published its hours, tokens and size."""

    name: str
    gpu: str
    num_gpus: int | None
    """Accelerators at once, the largest number if it changed; None if not published."""
    params: float
    """Parameters that are used for a token."""
    shape: Shape | None
    """Shape of the decoder; None if it is not dense or of an unknown family, with 6 N D FLOPs."""
    tokens: float
    gpu_hours: float
    source: str

    @property
    def flops(self) -> float:
        """Training FLOPs of the model, without the saving of causal attention."""
        if self.shape is None:
            return compute_six_nd(self.params, self.tokens)
        return float(compute_flops_per_token(self.shape, "full")) * self.tokens

    @property
    def utilization(self) -> float:
        """Share of the accelerators' peak over all hours of the run."""
        return self.flops / (self.gpu_hours * 3600.0 * look_up_gpu(self.gpu)[1].peak_flops)

    @property
    def developer(self) -> str:
        """Laboratory that trained the run. Runs of one laboratory are not independent data."""
        series = re.split(r"[-\d]", self.name, maxsplit=1)[0]
        return DEVELOPERS.get(series, series)

    @property
    def is_small(self) -> bool:
        """Whether the run is known to have used a small cluster."""
        return self.num_gpus is not None and self.num_gpus < SMALL_GPUS


def _make_shape(
    layers: int,
    width: int,
    heads: int,
    ffn: int,
    vocab: int,
    seq_len: int,
    *,
    kv_heads: int = 0,
    family: Family = "llama",
    tied: bool = False,
) -> Shape:
    """Return the shape of a decoder."""
    return Shape(
        num_layers=layers,
        width=width,
        num_heads=heads,
        num_kv_heads=kv_heads or heads,
        ffn_width=ffn,
        vocab_size=vocab,
        seq_len=seq_len,
        family=family,
        tied=tied,
    )


def _make_run(
    name: str,
    gpu_name: str,
    num_gpus: int | None,
    params: float,
    shape: Shape | None,
    tokens: float,
    hours: float,
    source: str,
) -> PublishedRun:
    """Return a published run."""
    return PublishedRun(
        name=name,
        gpu=gpu_name,
        num_gpus=num_gpus,
        params=params,
        shape=shape,
        tokens=tokens,
        gpu_hours=hours,
        source=source,
    )


def _make_pythia_run(
    name: str, num_gpus: int, params: float, layers: int, width: int, heads: int, hours: float
) -> PublishedRun:
    """Return a run of Pythia."""
    shape = _make_shape(layers, width, heads, 4 * width, 50_304, 2048, family="gpt2")
    source = (
        "arXiv 2304.01373, table 5: from logged step times; tokens: its README; GPU counts "
        "above 70M as recalled"
    )
    return _make_run(f"pythia-{name}", "A100", num_gpus, params, shape, 299.893e9, hours, source)


def _make_mobilellm_run(
    name: str,
    params: float,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    days: int,
) -> PublishedRun:
    """Return a run of MobileLLM."""
    shape = _make_shape(layers, width, heads, ffn, 32_000, 2048, kv_heads=kv_heads, tied=True)
    source = (
        "github.com/facebookresearch/MobileLLM, training cost: whole days on 32 A100 for 1T tokens"
    )
    return _make_run(f"mobilellm-{name}", "A100", 32, params, shape, 1e12, 32 * days * 24, source)


def _make_gpt2_run(
    name: str,
    gpu_name: str,
    params: float,
    layers: int,
    width: int,
    heads: int,
    tokens: float,
    hours: float,
    source: str,
    *,
    num_gpus: int = 8,
    vocab: int = 50_304,
) -> PublishedRun:
    """Return a run of a GPT-2 model."""
    shape = _make_shape(layers, width, heads, 4 * width, vocab, 1024, family="gpt2", tied=True)
    return _make_run(name, gpu_name, num_gpus, params, shape, tokens, num_gpus * hours, source)


_LLAMA, _LLAMA_2 = "arXiv 2302.13971, table 15", "arXiv 2307.09288, table 2"
_LLAMA_3, _LLAMA_31 = "Llama 3's model card", "Llama 3.1's model card, table of training time"
_LLAMA_3_8B, _LLAMA_3_70B, _LLAMA_3_405B = (
    look_up_model(f"llama-3{name}")[1].shape for name in ("-8b", "-70b", ".1-405b")
)

PUBLISHED_RUNS: tuple[PublishedRun, ...] = (
    _make_run(
        "smollm-135m",
        "H100",
        64,
        134.5e6,
        _make_shape(30, 576, 9, 1536, 49_152, 2048, kv_heads=3, tied=True),
        600e9,
        64 * 24,
        "its authors, huggingface.co/HuggingFaceTB/SmolLM-135M/discussions/13: 64 H100 for around "
        "1 day",
    ),
    _make_pythia_run("70m", 32, 70.4e6, 6, 512, 8, 510),
    _make_pythia_run("160m", 32, 162.3e6, 12, 768, 12, 1030),
    _make_pythia_run("410m", 32, 405.3e6, 24, 1024, 16, 2540),
    _make_pythia_run("1b", 64, 1.0118e9, 16, 2048, 8, 4830),
    _make_pythia_run("1.4b", 64, 1.4147e9, 24, 2048, 16, 7120),
    _make_pythia_run("2.8b", 64, 2.7752e9, 32, 2560, 32, 14_240),
    _make_pythia_run("6.9b", 128, 6.8572e9, 32, 4096, 32, 33_500),
    _make_pythia_run("12b", 256, 11.846e9, 36, 5120, 40, 72_300),
    _make_run(
        "starcoderbase-1b",
        "A100",
        128,
        1.137e9,
        _make_shape(24, 2048, 16, 8192, 49_152, 8192, kv_heads=1, family="gpt2", tied=True),
        1e12,
        128 * 11 * 24,
        "its model card: 128 A100 for 11 days",
    ),
    _make_run(
        "smollm3-3b",
        "H100",
        384,
        3.075e9,
        _make_shape(36, 2048, 16, 11_008, 128_256, 4096, kv_heads=4, tied=True),
        11.2e12,
        384 * 24 * 24,
        "huggingface.co/blog/smollm3: 384 H100 for 24 days",
    ),
    _make_run(
        "mpt-7b",
        "A100",
        440,
        6.65e9,
        _make_shape(32, 4096, 32, 16_384, 50_432, 2048, family="gpt2", tied=True),
        1e12,
        440 * 9.5 * 24,
        "databricks.com/blog/mpt-7b: 440 A100 for 9.5 days, restarts counted",
    ),
    _make_run(
        "lucie-7b",
        "H100",
        512,
        6.707e9,
        _make_shape(32, 4096, 32, 12_288, 65_024, 4096, kv_heads=8),
        3e12,
        550_000,
        "its model card: 512 H100 for about 550,000 GPU-hours; tokens as recalled",
    ),
    _make_run(
        "llama-7b",
        "A100",
        None,
        6.738e9,
        _make_shape(32, 4096, 32, 11_008, 32_000, 2048),
        1e12,
        82_432,
        _LLAMA,
    ),
    _make_run(
        "llama-13b",
        "A100",
        None,
        13.02e9,
        _make_shape(40, 5120, 40, 13_824, 32_000, 2048),
        1e12,
        135_168,
        _LLAMA,
    ),
    _make_run(
        "llama-33b",
        "A100",
        None,
        32.53e9,
        _make_shape(60, 6656, 52, 17_920, 32_000, 2048),
        1.4e12,
        530_432,
        _LLAMA,
    ),
    _make_run(
        "llama-65b",
        "A100",
        2048,
        65.29e9,
        _make_shape(80, 8192, 64, 22_016, 32_000, 2048),
        1.4e12,
        1_022_362,
        f"{_LLAMA}; 2,048 A100: section 2.4",
    ),
    _make_run(
        "llama-2-7b",
        "A100",
        None,
        6.738e9,
        look_up_model("llama-2-7b")[1].shape,
        2e12,
        184_320,
        _LLAMA_2,
    ),
    _make_run(
        "llama-2-13b",
        "A100",
        None,
        13.02e9,
        look_up_model("llama-2-13b")[1].shape,
        2e12,
        368_640,
        _LLAMA_2,
    ),
    _make_run(
        "llama-2-34b",
        "A100",
        None,
        33.74e9,
        _make_shape(48, 8192, 64, 22_016, 32_000, 4096, kv_heads=8),
        2e12,
        1_038_336,
        f"{_LLAMA_2}; shape of Code Llama 34B",
    ),
    _make_run(
        "llama-2-70b",
        "A100",
        None,
        68.98e9,
        look_up_model("llama-2-70b")[1].shape,
        2e12,
        1_720_320,
        _LLAMA_2,
    ),
    _make_run("llama-3-8b", "H100", None, 8.03e9, _LLAMA_3_8B, 15e12, 1.3e6, _LLAMA_3),
    _make_run("llama-3-70b", "H100", None, 70.55e9, _LLAMA_3_70B, 15e12, 6.4e6, _LLAMA_3),
    _make_run("llama-3.1-8b", "H100", None, 8.03e9, _LLAMA_3_8B, 15e12, 1.46e6, _LLAMA_31),
    _make_run("llama-3.1-70b", "H100", None, 70.55e9, _LLAMA_3_70B, 15e12, 7.0e6, _LLAMA_31),
    _make_run(
        "llama-3.1-405b",
        "H100",
        16_384,
        405.85e9,
        _LLAMA_3_405B,
        15.6e12,
        30.84e6,
        f"{_LLAMA_31}; up to 16,384 H100: arXiv 2407.21783, section 3.3",
    ),
    _make_run(
        "starcoderbase-15b",
        "A100",
        512,
        15.5e9,
        _make_shape(40, 6144, 48, 24_576, 49_152, 8192, kv_heads=1, family="gpt2", tied=True),
        1e12,
        320_256,
        "arXiv 2305.06161, section 5.7: 512 A100",
    ),
    _make_run(
        "deepseek-v3",
        "H800",
        2048,
        37e9,
        None,
        14.8e12,
        2.664e6,
        "arXiv 2412.19437: pretraining on 2,048 H800; products in FP8",
    ),
    _make_run(
        "bloomberggpt-50b",
        "A100",
        512,
        50.6e9,
        _make_shape(70, 7680, 40, 30_720, 131_072, 2048, family="gpt2", tied=True),
        569e9,
        512 * 53 * 24,
        "arXiv 2303.17564: 512 A100 for about 53 days",
    ),
    _make_run(
        "glm-130b",
        "A100",
        768,
        130e9,
        None,
        400e9,
        768 * 60 * 24,
        "arXiv 2210.02414: 768 A100, 60 days of access",
    ),
    _make_run(
        "bloom-176b",
        "A100",
        384,
        176.2e9,
        _make_shape(70, 14_336, 112, 57_344, 250_880, 2048, family="gpt2", tied=True),
        366e9,
        1_082_990,
        "arXiv 2211.05100, section 3.4.1: 48 nodes of 8 A100",
    ),
    _make_run(
        "falcon-180b",
        "A100",
        4096,
        179.5e9,
        None,
        3.5e12,
        7.0e6,
        "huggingface.co/blog/falcon-180b: about 7,000,000, up to 4,096 A100 at once",
    ),
    _make_run(
        "gopher-280b",
        "TPUv3",
        4096,
        280e9,
        None,
        300e9,
        4096 * 920,
        "arXiv 2112.11446: 920 hours on 4,096 chips",
    ),
    _make_run(
        "palm-540b",
        "TPUv4",
        6144,
        540.35e9,
        None,
        780e9,
        6144 * 1200 + 3072 * 336,
        "arXiv 2204.02311, appendix B: downtime and repeated steps counted; 6,144 chips, at times "
        "3,072",
    ),
    _make_run(
        "tinyllama-1.1b",
        "A100",
        16,
        1.1e9,
        _make_shape(22, 2048, 32, 5632, 32_000, 2048, kv_heads=4),
        3e12,
        34_560,
        "github.com/jzhang38/TinyLlama: 16 A100, 3,456 GPU-hours for 300B tokens, from throughput",
    ),
    _make_run(
        "phi-1",
        "A100",
        8,
        1.418e9,
        _make_shape(24, 2048, 32, 8192, 51_200, 2048, family="gpt2"),
        51e9,
        770,
        "arXiv 2306.11644, figure 2.1 and section 2.3: phi-1-base, 8 A100",
    ),
    _make_run(
        "phi-2",
        "A100",
        96,
        2.78e9,
        _make_shape(32, 2560, 32, 10_240, 51_200, 2048, family="gpt2"),
        1.4e12,
        96 * 14 * 24,
        "its model card: 96 A100 for 14 days",
    ),
    _make_gpt2_run(
        "nanogpt-124m",
        "A100",
        124e6,
        12,
        768,
        12,
        600_000 * 491_520,
        4 * 24,
        "github.com/karpathy/nanoGPT: 8 A100 for about 4 days",
    ),
    _make_gpt2_run(
        "llmc-124m",
        "A100",
        124e6,
        12,
        768,
        12,
        10e9,
        1.5,
        "github.com/karpathy/llm.c/discussions/481: 90 minutes",
    ),
    _make_gpt2_run(
        "llmc-350m",
        "A100",
        355e6,
        24,
        1024,
        16,
        30e9,
        14,
        "its author on the same run's page: 14 hours on 8 A100",
    ),
    _make_gpt2_run(
        "llmc-774m",
        "A100",
        774e6,
        36,
        1280,
        20,
        150e9,
        6 * 24,
        "github.com/karpathy/llm.c/discussions/580: 8 A100 for about 6 days",
    ),
    _make_gpt2_run(
        "llmc-1558m",
        "H100",
        1558e6,
        48,
        1600,
        25,
        32_000 * 2**20,
        24,
        "github.com/karpathy/llm.c/discussions/677: 8 H100 for 24 hours",
    ),
    _make_gpt2_run(
        "codeparrot-110m",
        "A100",
        111e6,
        12,
        768,
        12,
        150_000 * 192 * 1024,
        24,
        "huggingface.co/blog/codeparrot: 16 A100 for 1 day; tokens: its model card",
        num_gpus=16,
        vocab=32_768,
    ),
    _make_gpt2_run(
        "codeparrot-1.5b",
        "A100",
        1.53e9,
        48,
        1600,
        25,
        50_000 * 512 * 1024,
        7 * 24,
        "huggingface.co/blog/codeparrot: 16 A100 for 1 week; tokens: its model card",
        num_gpus=16,
        vocab=32_768,
    ),
    _make_mobilellm_run("125m", 124.6e6, 30, 576, 9, 3, 1536, 3),
    _make_mobilellm_run("350m", 345.3e6, 32, 960, 15, 5, 2560, 6),
    _make_mobilellm_run("600m", 603e6, 40, 1152, 18, 6, 3072, 8),
    _make_mobilellm_run("1b", 1.005e9, 54, 1280, 20, 5, 3584, 12),
    _make_mobilellm_run("1.5b", 1.51e9, 54, 1600, 25, 5, 4352, 18),
    _make_run(
        "falcon-rw-1b",
        "A100",
        32,
        1.312e9,
        _make_shape(24, 2048, 32, 8192, 50_304, 2048, family="gpt2", tied=True),
        350e9,
        32 * 6 * 24,
        "its model card: 32 A100 for about six days",
    ),
    _make_run(
        "gpt-neox-20b",
        "A100",
        96,
        20.55e9,
        _make_shape(44, 6144, 64, 24_576, 50_432, 2048, family="gpt2"),
        150_000 * 1538 * 2048,
        96 * 1830,
        "arXiv 2204.06745: 96 A100 for 1,830 hours",
    ),
    _make_run(
        "mpt-1b",
        "A100",
        440,
        1.31e9,
        _make_shape(24, 2048, 16, 8192, 50_304, 2048, family="gpt2", tied=True),
        200e9,
        440 * 12,
        "its model card: 440 A100 for about half a day",
    ),
    _make_run(
        "stablelm-3b",
        "A100",
        256,
        2.795e9,
        _make_shape(32, 2560, 32, 6912, 50_304, 4096),
        4e12,
        256 * 30 * 24,
        "model card of StableLM-3B-4E1T: 256 A100 for about 30 days",
    ),
    _make_run(
        "stablelm-2-1.6b",
        "A100",
        512,
        1.644e9,
        _make_shape(24, 2048, 32, 5632, 100_352, 4096),
        2e12,
        92_000,
        "arXiv 2402.17834: about 92,000; 512 A100 as recalled",
    ),
    _make_run(
        "falcon-7b",
        "A100",
        384,
        6.93e9,
        _make_shape(32, 4544, 71, 18_176, 65_024, 2048, kv_heads=1, family="gpt2", tied=True),
        1.5e12,
        384 * 14 * 24,
        "its model card: 384 A100 for about two weeks",
    ),
    _make_run(
        "falcon-40b",
        "A100",
        384,
        41.8e9,
        _make_shape(60, 8192, 128, 32_768, 65_024, 2048, kv_heads=8, family="gpt2", tied=True),
        1e12,
        384 * 61 * 24,
        "its model card: 384 A100 for two months",
    ),
)
"""All runs, in the order in which they were added."""


def fit_line(runs: Sequence[PublishedRun], *, by_gpus: bool = True) -> UtilizationLine:
    """Fit the line by iterated reweighting, which maximizes the likelihood under Student's t.

    Array names carry their axes: R runs, P parameters of the line.

    Args:
        runs: Published runs. One whose number of accelerators is not published enters with the
            number that is usual for its FLOPs.
        by_gpus: Whether the number of accelerators is a covariate.
    """
    peaks = [look_up_gpu(run.gpu)[1].peak_flops for run in runs]
    counts = [estimate_num_gpus(run, runs) for run in runs]
    rows = [
        [
            1.0,
            peak >= FAST_FLOPS,
            math.log(run.params / CENTER_PARAMS),
            math.log(count / CENTER_GPUS),
        ]
        for run, peak, count in zip(runs, peaks, counts, strict=True)
    ]
    x_RP = np.array(rows)[:, : 4 if by_gpus else 3]
    y_R = np.log([run.utilization for run in runs])
    weights_R, theta_P, variance = np.ones(len(runs)), np.zeros(x_RP.shape[1]), 1.0
    for _ in range(ROUNDS):
        root_R = np.sqrt(weights_R)
        theta_P = np.linalg.lstsq(x_RP * root_R[:, None], y_R * root_R, rcond=None)[0]
        squares_R = (y_R - x_RP @ theta_P) ** 2
        variance = float(np.mean(weights_R * squares_R))
        weights_R = (DEGREES + 1) / (DEGREES + squares_R / variance)
    middle, fast, slope, *gpus_slope = map(float, theta_P)
    return UtilizationLine(
        middle=middle,
        fast=fast,
        slope=slope,
        gpus_slope=gpus_slope[0] if gpus_slope else 0.0,
        scale=math.sqrt(variance),
        num_runs=len(runs),
    )


def estimate_num_gpus(run: PublishedRun, runs: Sequence[PublishedRun]) -> float:
    """Return the published number of accelerators, or the usual one for the run's FLOPs.

    The usual number is a power law of the FLOPs, fitted to the runs whose number is published.
    """
    if run.num_gpus is not None:
        return run.num_gpus
    points = [(math.log(known.flops), math.log(known.num_gpus)) for known in runs if known.num_gpus]
    slope, intercept = np.polyfit(*np.array(points).T, 1)
    return math.exp(intercept + slope * math.log(run.flops))


def predict_without(
    excluded: Sequence[PublishedRun], run: PublishedRun, *, by_gpus: bool = True
) -> Span:
    """Predict the utilization of a run from all runs that are not excluded."""
    kept = [candidate for candidate in PUBLISHED_RUNS if candidate not in excluded]
    line = fit_line(kept, by_gpus=by_gpus)
    return line.estimate_share(
        run.params, look_up_gpu(run.gpu)[1].peak_flops, estimate_num_gpus(run, kept)
    )


def format_row(run: PublishedRun, share: Span) -> str:
    """Format a run and its predicted hours as a row of the table."""
    hours = [
        _format_figure(run.gpu_hours * run.utilization / end)
        for end in (share.value, share.high, share.low)
    ]
    return (
        f"| {run.name} | {run.num_gpus or '?'} {run.gpu} | {_format_figure(run.gpu_hours)} | "
        f"{hours[0]} [{hours[1]}, {hours[2]}] | {'yes' if is_inside(run, share) else '**no**'} |"
    )


def is_inside(run: PublishedRun, share: Span) -> bool:
    """Return whether the published hours lie in the predicted interval."""
    return share.low <= run.utilization <= share.high


def summarize(runs: Sequence[PublishedRun], shares: Mapping[str, Span]) -> str:
    """Format how well shares predict runs: count inside, median ratio of hours, median width."""
    count = sum(is_inside(run, shares[run.name]) for run in runs)
    ratio = median(shares[run.name].value / run.utilization for run in runs)
    width = median(shares[run.name].high / shares[run.name].low for run in runs)
    return f"{count} of {len(runs)} | {ratio:.2f} | {width:.1f}"


def _format_figure(value: float) -> str:
    """Format a number with three digits."""
    digits = 2 - math.floor(math.log10(value))
    return f"{round(value, digits):,.0f}"


def main() -> None:
    """Print the table of runs, the table of summaries, and the line through all runs."""
    print(
        "| run | on | hours published | predicted by the others [90 %] | inside "
        "|\n|---|---|---|---|---|"
    )
    print("\n".join(format_row(run, predict_without((run,), run)) for run in PUBLISHED_RUNS))
    print(
        "\n| left out | GPUs in the line | cluster | inside | median published / predicted | high "
        "/ low |"
    )
    print("|---|---|---|---|---|---|")
    groups = {"the run": lambda run: run.name, "its developer": lambda run: run.developer}
    for label, key in groups.items():
        for by_gpus in (False, True):
            shares = {
                run.name: predict_without(
                    [member for member in PUBLISHED_RUNS if key(member) == key(run)],
                    run,
                    by_gpus=by_gpus,
                )
                for run in PUBLISHED_RUNS
            }
            for size, is_small in (("small", True), ("large or unknown", False)):
                runs = [run for run in PUBLISHED_RUNS if run.is_small is is_small]
                print(
                    f"| {label} | {'yes' if by_gpus else 'no'} | {size} | "
                    f"{summarize(runs, shares)} |"
                )
    print(
        f"\n{len({run.developer for run in PUBLISHED_RUNS})} developers; small: fewer than "
        f"{SMALL_GPUS} GPUs"
    )
    print(fit_line(PUBLISHED_RUNS))


if __name__ == "__main__":
    main()
