"""The plan: what a study asks. Every key has a default, its unit in its name and a sentence about it.

`launcher.plan_file` reads and writes it; both import pydantic and nothing heavier.
"""

from __future__ import annotations

import bisect
import json
import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from proxies import canon
from proxies.checks import SpecError
from proxies.flops import count_params
from proxies.spec import Numerics, Schedule, ScheduleKind, Shape

Positive = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Width = Annotated[int, Field(ge=1, le=2**17)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Range = tuple[Positive, Positive]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class DataSection(_Section):
    """What is trained on."""

    path: str = Field("corpus", description="Folder written by `forerun tokenize`, relative to this file.")


class ModelSection(_Section):
    """The family of shapes; only width scales."""

    num_layers: Count = Field(2, description="Transformer blocks, at every width.")
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)] = Field(16, description="Width of one head, at every width.")
    query_heads_per_kv_head: Count = Field(1, description="Grouped-query attention; 1 is plain attention.")
    ffn_ratio: Annotated[float, Field(gt=0, le=64)] = Field(
        2.0, description="Feed-forward width over model width (SwiGLU)."
    )
    seq_len: Count = Field(64, description="Tokens per sequence.")


class ProxySection(_Section):
    """How every proxy is trained, unless a later section varies it."""

    parametrization: Literal["mup", "sp"] = Field("mup", description="How numbers scale with width.")
    base_width: Width = Field(32, description="Where hyperparameters are searched; all else is relative to it.")
    batch_tokens: Count = Field(1024, description="Tokens per optimizer step, of proxies and main run alike.")
    num_steps: Count = Field(200, description="Optimizer steps of a proxy.")
    schedule: ScheduleKind = Field("cosine", description="The main run's schedule too: another one moves the optimum.")
    decay_fraction: Fraction = Field(0.2, description="Share of the steps that decay; used by wsd only.")
    final_fraction: Fraction = Field(0.0, description="Learning rate at the end, as a share of the peak.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="AdamW's, at the base width.")
    beta1: Fraction = Field(0.9, description="AdamW's.")
    beta2: Fraction = Field(0.95, description="AdamW's.")
    eps: Annotated[float, Field(gt=0, le=1)] = Field(1e-8, description="AdamW's.")
    dtype: Literal["float32", "float64"] = Field("float32", description="Arithmetic of the proxies.")
    num_slots: Annotated[int, Field(ge=1, le=4096)] = Field(
        4, description="Trials a bank trains side by side; part of every run's identity."
    )


class SearchSection(_Section):
    """Optuna's search at the base width."""

    num_trials: Count = Field(24, description="Trials in all.")
    learning_rate: Range = Field((2.0**-9, 2.0**-3), description="Lowest and highest peak learning rate.")
    warmup_fraction: tuple[Fraction, Fraction] = Field((0.02, 0.3), description="Warmup as a share of the steps.")
    clip_norm: Range = Field((0.25, 4.0), description="Largest gradient norm.")
    parallelism: Count = Field(8, description="P: suggestion k uses the outcomes of trials 0 ... k-P alone.")
    num_startup: Count = Field(12, description="Trials spread evenly before TPE begins.")
    seed: Seed = Field(0, description="Of the search, and of the trials' weights and data order.")


class TransferSection(_Section):
    """Whether the optimum stays put as width grows."""

    widths: Annotated[tuple[Width, ...], Field(min_length=2)] = Field(
        (32, 64, 128), description="Widths whose learning-rate valley is measured."
    )
    offsets_octaves: Annotated[tuple[float, ...], Field(min_length=4)] = Field(
        (-2.0, -1.0, 0.0, 1.0, 2.0), description="Rates tried, as powers of 2 around the search's best."
    )
    num_seeds: Count = Field(3, description="Seeds per rate.")
    max_extensions: Annotated[int, Field(ge=0)] = Field(
        2, description="How often runs that the verdict asks for are added: rates beyond an edge, seeds, widths."
    )
    control_widths: tuple[Width, ...] = Field((64,), description="Widths of the control arm, in standard form.")
    control_offsets_octaves: Annotated[tuple[float, ...], Field(min_length=4)] = Field(
        (-3.0, -2.0, -1.0, 0.0, 1.0), description="Its rates: its optimum is expected lower, by an octave a doubling."
    )
    control_num_seeds: Count = Field(3, description="Seeds per rate in the control arm.")
    margin_nats: Positive = Field(0.01, description="The loss a wrong transfer may cost.")
    level: Annotated[float, Field(gt=0.5, lt=1)] = Field(0.9, description="Of every interval.")
    check_widths: Annotated[tuple[Width, ...], Field(min_length=2)] = Field(
        (32, 64, 128, 256), description="Widths of the coordinate check."
    )
    check_num_steps: Count = Field(10, description="Optimizer steps of the coordinate check.")
    check_num_seeds: Annotated[int, Field(ge=2)] = Field(4, description="Seeds of the coordinate check.")
    check_learning_rate: Annotated[float, Field(gt=0, le=10)] = Field(
        2.0**-7, description="Constant rate of the coordinate check."
    )


class LadderSection(_Section):
    """The scaling ladder: every width at every duration."""

    widths: Annotated[tuple[Width, ...], Field(min_length=1)] = Field((32, 48, 64, 96, 128), description="Sizes.")
    num_steps: Annotated[tuple[Count, ...], Field(min_length=1)] = Field((150, 400, 1000), description="Durations.")
    num_slots: Annotated[int, Field(ge=1, le=4096)] = Field(
        1, description="Rungs a bank trains side by side; they end at different times, and empty slots cost theirs."
    )
    seed: Seed = Field(100, description="Of every rung.")
    form: Literal["auto", "chinchilla", "coupled"] = Field("auto", description="Law; auto pools forms by back-test.")
    bootstrap: Annotated[int, Field(ge=50)] = Field(400, description="Resamples behind every interval.")


class TargetSection(_Section):
    """What the main run may cost."""

    budget_flops: Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)] = Field(
        1e13, description="Training FLOPs of the main run, counted as 6 * N * D."
    )
    width_multiple: Count = Field(32, description="The chosen width is a multiple of this (and of the head dim).")


class ClusterSection(_Section):
    """Where proxies run."""

    backend: Literal["ray", "inline"] = Field("ray", description="ray: local workers; inline: this process.")
    num_workers: Annotated[int, Field(ge=0)] = Field(0, description="Ray workers, one thread each; 0: one per core.")
    max_attempts: Count = Field(3, description="Times a run is tried when its worker dies.")


class LaunchSection(_Section):
    """How the main run is run."""

    data_parallel_shard: Count = Field(2, description="Ranks that share the model (FSDP2).")
    data_parallel_replicate: Count = Field(1, description="Replicas of such groups (HSDP).")
    precision: Literal["float32", "bfloat16"] = Field("float32", description="Compute precision; master is float32.")
    checkpoint_every_steps: Count = Field(20, description="Cadence of checkpoints.")
    seed: Seed = Field(1000, description="Of weights and data order of the main run.")


class Plan(_Section):
    """A study's question. Everything measured and decided follows from it and the data."""

    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    proxy: ProxySection = ProxySection()
    search: SearchSection = SearchSection()
    transfer: TransferSection = TransferSection()
    ladder: LadderSection = LadderSection()
    target: TargetSection = TargetSection()
    cluster: ClusterSection = ClusterSection()
    launch: LaunchSection = LaunchSection()

    def shape(self, width: int, vocab_size: int) -> Shape:
        """The shape at a width. Raises SpecError where it does not add up."""
        num_heads, rest = divmod(width, self.model.head_dim)
        if rest:
            raise SpecError("Shape", [f"width = {width} is no multiple of head_dim = {self.model.head_dim}"])
        ffn_width = self.model.ffn_ratio * width
        if not ffn_width.is_integer():
            raise SpecError("Shape", [f"width = {width} times ffn_ratio = {self.model.ffn_ratio} is not whole"])
        if num_heads % self.model.query_heads_per_kv_head:
            raise SpecError(
                "Shape",
                [f"width = {width} has {num_heads} heads, not {self.model.query_heads_per_kv_head} for every kv head"],
            )
        return Shape(
            num_layers=self.model.num_layers,
            width=width,
            num_heads=num_heads,
            num_kv_heads=num_heads // self.model.query_heads_per_kv_head,
            ffn_width=int(ffn_width),
            vocab_size=vocab_size,
            seq_len=self.model.seq_len,
        )

    def schedule(self, num_steps: int, warmup_fraction: float) -> Schedule:
        """The schedule over `num_steps`, its fractions turned into steps."""
        decay = max(1, round(self.proxy.decay_fraction * num_steps)) if self.proxy.schedule == "wsd" else 0
        return Schedule(
            kind=self.proxy.schedule,
            num_steps=num_steps,
            warmup_steps=min(max(1, round(warmup_fraction * num_steps)), num_steps - decay),
            decay_steps=decay,
            final_fraction=self.proxy.final_fraction,
        )

    @property
    def numerics(self) -> Numerics:
        """How every proxy computes: one thread a worker, so that the number of workers changes nothing."""
        return Numerics(
            dtype=self.proxy.dtype,
            num_slots=self.proxy.num_slots,
            num_threads=1,
        )

    def question(self) -> dict[str, canon.Json]:
        """What may not change on resume: all that decides what finished runs mean, or which are asked for first."""
        plain: dict[str, canon.Json] = json.loads(
            self.model_dump_json(
                exclude={"cluster": True, "data": True, "launch": True, "transfer": {"max_extensions"}}
            )
        )
        return plain


def target_width_guess(plan: Plan, vocab_size: int) -> int:
    """The width a budget suggests before any fit, at 20 tokens per parameter (Chinchilla, arXiv 2203.15556)."""
    wanted = math.sqrt(plan.target.budget_flops / 120)
    base = plan.shape(plan.proxy.base_width, vocab_size)
    whole_ffn = base.width // math.gcd(base.width, base.ffn_width)
    heads = plan.model.head_dim * plan.model.query_heads_per_kv_head
    step = math.lcm(plan.target.width_multiple, heads, whole_ffn)

    def too_large(count: int) -> bool:
        return count_params(plan.shape(count * step, vocab_size)).total > wanted

    beyond = 1
    while not too_large(beyond):
        beyond *= 2
    return step * max(1, bisect.bisect_left(range(1, beyond), True, key=too_large))
