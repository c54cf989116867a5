"""GPU-hours of published runs, each predicted by all the others: docs/estimates.md has the count.

    python benchmarks/published_runs.py

Nothing is timed and nothing written. Taken in is every run found whose authors published accelerator-hours, tokens and
size; hours are as stated, with whatever its authors counted. Left out: OPT-175B, whose tokens are told as 180B and as
300B; GPT-3, whose hours nobody told; Llama 3.2, distilled. The last lines say how many lie inside their intervals, each
run left out, and each team with all of its runs; and the line through all, as
`launcher/estimates/utilization.py` has it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from launcher.base.reference import gpu, model
from launcher.estimates.machine import Span
from launcher.estimates.utilization import FAST, MIDDLE, UtilizationLine
from proxies.core.flops import flops_per_token, six_nd
from proxies.core.shape import Family, Shape

DEGREES = 4.0  # of Student's t: the usual robust choice (Lange, Little, Taylor, JASA 84(408), 1989)
ROUNDS = 200  # of reweighting, which has converged to 1e-9 by some fifty


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRun:
    """One run."""

    name: str
    gpu: str
    params: float
    """Used for a token."""
    shape: Shape | None
    """None where it is no dense decoder of our families: its FLOPs are 6 N D then."""
    tokens: float
    gpu_hours: float
    source: str

    @property
    def flops(self) -> float:
        """Of the model, the whole square of attention counted."""
        if self.shape is None:
            return six_nd(self.params, self.tokens)
        return float(flops_per_token(self.shape, "full")) * self.tokens

    @property
    def utilization(self) -> float:
        """Share of the peak over all its hours."""
        return self.flops / (self.gpu_hours * 3600.0 * gpu(self.gpu)[1].peak_flops)


def _shape(
    layers: int, width: int, heads: int, ffn: int, vocab: int, seq_len: int,
    *, kv_heads: int = 0, family: Family = "llama", tied: bool = False,
) -> Shape:  # fmt: skip
    return Shape(
        num_layers=layers, width=width, num_heads=heads, num_kv_heads=kv_heads or heads, ffn_width=ffn,
        vocab_size=vocab, seq_len=seq_len, family=family, tied=tied,
    )  # fmt: skip


def _pythia(name: str, params: float, layers: int, width: int, heads: int, hours: float) -> PublishedRun:
    shape = _shape(layers, width, heads, 4 * width, 50_304, 2048, family="gpt2")
    source = "arXiv 2304.01373, table 5: from logged step times; tokens: its README"
    return PublishedRun(
        name=f"pythia-{name}", gpu="A100", params=params, shape=shape, tokens=299.893e9, gpu_hours=hours, source=source
    )  # fmt: skip


def _of(name: str, gpu_name: str, params: float, shape: Shape | None, tokens: float, hours: float,
        source: str) -> PublishedRun:  # fmt: skip
    return PublishedRun(
        name=name, gpu=gpu_name, params=params, shape=shape, tokens=tokens, gpu_hours=hours, source=source
    )  # fmt: skip


_LLAMA, _LLAMA_2 = "arXiv 2302.13971, table 15", "arXiv 2307.09288, table 2"
_LLAMA_3, _LLAMA_31 = "Llama 3's model card", "Llama 3.1's model card, table of training time"
_EIGHT, _SEVENTY, _LARGEST = (model(f"llama-3{name}")[1].shape for name in ("-8b", "-70b", ".1-405b"))

PUBLISHED_RUNS: tuple[PublishedRun, ...] = (
    _of("smollm-135m", "H100", 134.5e6, _shape(30, 576, 9, 1536, 49_152, 2048, kv_heads=3, tied=True), 600e9, 64 * 24,
        "its authors, huggingface.co/HuggingFaceTB/SmolLM-135M/discussions/13: 64 H100 for around 1 day"),
    _pythia("70m", 70.4e6, 6, 512, 8, 510),
    _pythia("160m", 162.3e6, 12, 768, 12, 1030),
    _pythia("410m", 405.3e6, 24, 1024, 16, 2540),
    _pythia("1b", 1.0118e9, 16, 2048, 8, 4830),
    _pythia("1.4b", 1.4147e9, 24, 2048, 16, 7120),
    _pythia("2.8b", 2.7752e9, 32, 2560, 32, 14_240),
    _pythia("6.9b", 6.8572e9, 32, 4096, 32, 33_500),
    _pythia("12b", 11.846e9, 36, 5120, 40, 72_300),
    _of("starcoderbase-1b", "A100", 1.137e9,
        _shape(24, 2048, 16, 8192, 49_152, 8192, kv_heads=1, family="gpt2", tied=True), 1e12, 128 * 11 * 24,
        "its model card: 128 A100 for 11 days"),
    _of("smollm3-3b", "H100", 3.075e9, _shape(36, 2048, 16, 11_008, 128_256, 4096, kv_heads=4, tied=True), 11.2e12,
        384 * 24 * 24, "huggingface.co/blog/smollm3: 384 H100 for 24 days"),
    _of("mpt-7b", "A100", 6.65e9, _shape(32, 4096, 32, 16_384, 50_432, 2048, family="gpt2", tied=True), 1e12,
        440 * 9.5 * 24, "databricks.com/blog/mpt-7b: 440 A100 for 9.5 days, restarts counted"),
    _of("lucie-7b", "H100", 6.707e9, _shape(32, 4096, 32, 12_288, 65_024, 4096, kv_heads=8), 3e12, 550_000,
        "its model card: 512 H100 for about 550,000 GPU-hours; tokens as recalled"),
    _of("llama-7b", "A100", 6.738e9, _shape(32, 4096, 32, 11_008, 32_000, 2048), 1e12, 82_432, _LLAMA),
    _of("llama-13b", "A100", 13.02e9, _shape(40, 5120, 40, 13_824, 32_000, 2048), 1e12, 135_168, _LLAMA),
    _of("llama-33b", "A100", 32.53e9, _shape(60, 6656, 52, 17_920, 32_000, 2048), 1.4e12, 530_432, _LLAMA),
    _of("llama-65b", "A100", 65.29e9, _shape(80, 8192, 64, 22_016, 32_000, 2048), 1.4e12, 1_022_362, _LLAMA),
    _of("llama-2-7b", "A100", 6.738e9, model("llama-2-7b")[1].shape, 2e12, 184_320, _LLAMA_2),
    _of("llama-2-13b", "A100", 13.02e9, model("llama-2-13b")[1].shape, 2e12, 368_640, _LLAMA_2),
    _of("llama-2-34b", "A100", 33.74e9, _shape(48, 8192, 64, 22_016, 32_000, 4096, kv_heads=8), 2e12, 1_038_336,
        f"{_LLAMA_2}; shape of Code Llama 34B"),
    _of("llama-2-70b", "A100", 68.98e9, model("llama-2-70b")[1].shape, 2e12, 1_720_320, _LLAMA_2),
    _of("llama-3-8b", "H100", 8.03e9, _EIGHT, 15e12, 1.3e6, _LLAMA_3),
    _of("llama-3-70b", "H100", 70.55e9, _SEVENTY, 15e12, 6.4e6, _LLAMA_3),
    _of("llama-3.1-8b", "H100", 8.03e9, _EIGHT, 15e12, 1.46e6, _LLAMA_31),
    _of("llama-3.1-70b", "H100", 70.55e9, _SEVENTY, 15e12, 7.0e6, _LLAMA_31),
    _of("llama-3.1-405b", "H100", 405.85e9, _LARGEST, 15.6e12, 30.84e6, _LLAMA_31),
    _of("starcoderbase-15b", "A100", 15.5e9,
        _shape(40, 6144, 48, 24_576, 49_152, 8192, kv_heads=1, family="gpt2", tied=True), 1e12, 320_256,
        "arXiv 2305.06161, section 5.7"),
    _of("deepseek-v3", "H800", 37e9, None, 14.8e12, 2.664e6, "arXiv 2412.19437: pretraining; products in FP8"),
    _of("bloomberggpt-50b", "A100", 50.6e9, _shape(70, 7680, 40, 30_720, 131_072, 2048, family="gpt2", tied=True),
        569e9, 512 * 53 * 24, "arXiv 2303.17564: 512 A100 for about 53 days"),
    _of("glm-130b", "A100", 130e9, None, 400e9, 768 * 60 * 24, "arXiv 2210.02414: 768 A100, 60 days of access"),
    _of("bloom-176b", "A100", 176.2e9, _shape(70, 14_336, 112, 57_344, 250_880, 2048, family="gpt2", tied=True),
        366e9, 1_082_990, "arXiv 2211.05100, section 3.4.1"),
    _of("falcon-180b", "A100", 179.5e9, None, 3.5e12, 7.0e6, "huggingface.co/blog/falcon-180b: about 7,000,000"),
    _of("gopher-280b", "TPUv3", 280e9, None, 300e9, 4096 * 920, "arXiv 2112.11446: 920 hours on 4,096 chips"),
    _of("palm-540b", "TPUv4", 540.35e9, None, 780e9, 6144 * 1200 + 3072 * 336,
        "arXiv 2204.02311, appendix B: downtime and repeated steps counted"),
)  # fmt: skip
"""From each team the smallest first."""


def fitted(runs: Sequence[PublishedRun]) -> UtilizationLine:
    """By iterated reweighting, which is the likelihood's maximum under Student's t."""
    peaks = [gpu(run.gpu)[1].peak_flops for run in runs]
    x_RP = np.array([[1.0, peak >= FAST, math.log(run.params / MIDDLE)] for run, peak in zip(runs, peaks, strict=True)])
    y_R = np.log([run.utilization for run in runs])
    weights_R, theta_P, variance = np.ones(len(runs)), np.zeros(3), 1.0
    for _ in range(ROUNDS):
        root_R = np.sqrt(weights_R)
        theta_P = np.linalg.lstsq(x_RP * root_R[:, None], y_R * root_R, rcond=None)[0]
        squares_R = (y_R - x_RP @ theta_P) ** 2
        variance = float(np.mean(weights_R * squares_R))
        weights_R = (DEGREES + 1) / (DEGREES + squares_R / variance)
    middle, fast, slope = map(float, theta_P)
    return UtilizationLine(middle=middle, fast=fast, slope=slope, scale=math.sqrt(variance), num_runs=len(runs))


def left_out(those: Sequence[PublishedRun], run: PublishedRun) -> Span:
    """The share of a published run, by all but those."""
    others = [other for other in PUBLISHED_RUNS if other not in those]
    return fitted(others).share(run.params, gpu(run.gpu)[1].peak_flops)


def row(run: PublishedRun, share: Span) -> str:
    """A run as the table has it."""
    hours = [_figure(run.gpu_hours * run.utilization / end) for end in (share.value, share.high, share.low)]
    return (
        f"| {run.name} | {run.gpu} | {_figure(run.gpu_hours)} | {hours[0]} [{hours[1]}, {hours[2]}] | "
        f"{'yes' if inside(run, share) else '**no**'} |"
    )


def inside(run: PublishedRun, share: Span) -> bool:
    """Whether its hours lie in the interval."""
    return share.low <= run.utilization <= share.high


def team(run: PublishedRun) -> str:
    """Runs whose errors are alike: of one series."""
    return run.name.rpartition("-")[0].rstrip("-.123")


def _figure(value: float) -> str:
    digits = 2 - math.floor(math.log10(value))
    return f"{round(value, digits):,.0f}"


def main() -> None:
    """Print the table and what it comes to."""
    print("| run | on | hours published | predicted by the others [90 %] | inside |\n|---|---|---|---|---|")
    alone = {run.name: left_out((run,), run) for run in PUBLISHED_RUNS}
    print("\n".join(row(run, alone[run.name]) for run in PUBLISHED_RUNS))
    teams = {team(run): tuple(other for other in PUBLISHED_RUNS if team(other) == team(run)) for run in PUBLISHED_RUNS}
    apart = [inside(run, left_out(teams[team(run)], run)) for run in PUBLISHED_RUNS]
    held = sum(inside(run, alone[run.name]) for run in PUBLISHED_RUNS)
    print(
        f"{held} of {len(PUBLISHED_RUNS)} inside; with their whole series left out {sum(apart)}, of {len(teams)} series"
    )
    print(fitted(PUBLISHED_RUNS))


if __name__ == "__main__":
    main()
