"""The sections of a plan: every key with its default, its unit in its name, and a sentence about
it. Imports pydantic and nothing heavier.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from forerun._launcher.main_run.frozen.run_policies import RecomputeMode
from forerun._launcher.study.plan.calibration_records import MAX_SLOTS
from forerun._launcher.study.plan.keys import (
    ONCE,
    Count,
    Fraction,
    Octaves,
    Positive,
    Section,
    Seed,
    Steps,
    Tested,
    Width,
    Widths,
    add_rule_keys,
    add_value_keys,
    require,
)
from forerun._proxies.core.hyperparameters import HYPERPARAMETERS, SET_BY
from forerun._proxies.core.optimizers import RECIPES, RecipeName
from forerun._proxies.core.programs import LossUnit, MetricsFormat
from forerun._proxies.core.rules import Name
from forerun._proxies.core.schedule import DecayShape, ScheduleKind
from forerun._proxies.core.shape import Family
from forerun._proxies.core.spec import Dtype, MainRunDtype, MatmulPrecision
from forerun._scaling_fits.laws.forms import FormChoice


def _check_slots(value: object) -> object:
    if value == "auto" or (type(value) is int and 1 <= value <= MAX_SLOTS):
        return value
    raise PydanticCustomError("slots", f"must be 'auto' or a whole number from 1 to {MAX_SLOTS}")


def _check_auto_or_bool(value: object) -> object:
    if value == "auto" or isinstance(value, bool):
        return value
    raise PydanticCustomError("auto_or_bool", "must be 'auto', true or false")


DEFAULT_OPTIMIZER = "adamw"
"""Recipe of a plan that names none."""

Slots = Annotated[
    Literal["auto"] | Annotated[int, Field(ge=1, le=MAX_SLOTS)], BeforeValidator(_check_slots)
]
AutoOrBool = Annotated[Literal["auto"] | bool, BeforeValidator(_check_auto_or_bool)]


class DataSection(Section):
    """The training data."""

    path: str = "corpus"
    """Folder written by `forerun tokenize`, relative to this file; empty: a command brings its own.
    """
    weights: dict[str, Annotated[float, Field(ge=0, le=1e9)]] = Field({})
    """Shares of the corpus's sources, by name; empty: as tokenized."""
    external: str = ""
    """Name for the data of your own trainer (proxy.command); part of every run's identity."""
    vocab_size: Annotated[int, Field(ge=0, le=2**32)] = 0
    """Vocabulary size of that data; a corpus records its own."""


class ModelSection(Section):
    """The shape of the model, except its width."""

    family: Family = "llama"
    """llama: RMSNorm, SwiGLU, rotary; gpt2: LayerNorm, GELU, biases."""
    tied: bool = False
    """Embedding and readout share one matrix."""
    qk_norm: bool = False
    """RMSNorm over each head's queries and keys."""
    num_layers: Count = 2
    """Transformer blocks."""
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)] = 16
    """Width of one head, at every width."""
    query_heads_per_kv_head: Count = 1
    """Grouped-query attention; 1 is plain attention."""
    ffn_ratio: Annotated[float, Field(gt=0, le=64)] = 2.0
    """Feed-forward width divided by model width."""
    seq_len: Count = 64
    """Tokens per sequence."""


@add_rule_keys
class RuleChoices(Section):
    """Choices on which the sources of parametrizations differ, set one by one."""


@add_value_keys
class _Recipe(Section):
    """The model of a proxy, and the length of its training. Hyperparameters that the registry
    declares come last.
    """

    parametrization: Name = "mup"
    """Rules by which numbers scale with width and depth."""
    rules: RuleChoices = RuleChoices()
    """Replaces single choices of that source, as { choice = "answer" }: `forerun explain
    --parametrization NAME` lists them."""
    optimizer: RecipeName = Field(
        DEFAULT_OPTIMIZER,
        description="Optimizer. "
        + "; ".join(f"{recipe.name}: {recipe.label}" for recipe in RECIPES.values())
        + ". A command brings its own.",
    )
    factory: str = ""
    """Your own model: package.module:function, in the folder of this file or installed."""
    command: str = ""
    """Your own trainer: its command line, with {lr}, {width}, {seed}, {run_dir} ..."""
    describe: str = ""
    """Command that prints the size of the model at a {width}, as JSON in its last line: {"params":
    124439808}, with "flops_per_token" if that is not 6 times as much."""
    dimensions: dict[str, str] = Field({})
    """Dimensions of a factory's parameters, by a pattern of their names: { "*.experts.up" =
    "expert in out" }; needed only if forerun asks for them."""
    code_path: str = "."
    """Folder of the factory's module, or where the command runs."""
    metrics_format: MetricsFormat = "jsonl"
    """Format of the command's log."""
    metrics_path: str = "{run_dir}/metrics.jsonl"
    """Log file of the command, or the folder of its W&B runs or TensorBoard events."""
    metrics_step_key: str = "step"
    """Name of the step in its log."""
    metrics_train_loss_key: str = "train_loss"
    """Name of the training loss, nats per token."""
    metrics_validation_loss_key: str = "val_loss"
    """Name of the validation loss; the last value counts."""
    metrics_train_loss_unit: LossUnit = "nats"
    """Unit of the training loss: per token, unless the unit is per byte."""
    metrics_validation_loss_unit: LossUnit = "nats"
    """Unit of the validation loss: per token, unless the unit is per byte."""
    metrics_bytes_per_token: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Bytes of text per token; needed for a loss in bits per byte."""
    metrics_grad_norm_key: str = ""
    """Name of the gradient norm before clipping; empty: not logged."""
    timeout_seconds: Annotated[float, Field(gt=0, le=1e7)] = 3600.0
    """Time limit of one command."""
    base_width: Width = 32
    """Width at which hyperparameters are searched; rules scale from it."""
    batch_tokens: Count = 1024
    """Tokens per optimizer step."""
    batch_warmup_fraction: Fraction = 0.0
    """Share of the steps over which the batch grows."""
    batch_warmup_stages: Annotated[int, Field(ge=2, le=1024)] = 4
    """Equal stages of that growth; used if batch_warmup_fraction is not 0."""
    num_steps: Count = 200
    """Optimizer steps of a proxy."""
    schedule: ScheduleKind = "cosine"
    """Learning-rate schedule, the main run's too: another one moves the optimum."""
    decay_fraction: Fraction = 0.2
    """Share of the steps with decay; used by wsd only."""
    decay_shape: DecayShape = "linear"
    """Shape of the decay of wsd: linear, or sqrt: 1 - sqrt of the share that is done."""
    decay_branches: bool = False
    """Proxies of several durations share one stable phase of wsd and decay from it. They have as
    many warmup steps as the base, and one learning rate for all durations of a shape."""
    final_fraction: Fraction = 0.0
    """Learning rate at the end, as a share of the peak."""


class ProxySection(_Recipe):
    """The training of every proxy, unless a later section varies it."""

    dtype: Dtype = "float32"
    """Compute precision; with bfloat16 the weights stay float32, as in the main run."""
    num_slots: Slots = 4
    """Trials that a worker trains side by side (a bank), part of a run's identity; auto: a
    calibration picks what is fastest, with threads, CUDA graphs and fused loss. Runs that no
    bank supports train alone."""
    microbatch_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens per pass, with gradient accumulation; 0: the whole batch."""
    activation_checkpointing: bool = False
    """Recompute activations: less memory, a third more time."""
    compiled: AutoOrBool = False
    """torch.compile; auto: if the calibration finds that it saves time over the planned runs."""
    matmul_precision: MatmulPrecision = "highest"
    """Precision of float32 products, in torch's words; high and medium may round to TF32 or
    bfloat16."""

    @property
    def hyperparameters(self) -> dict[str, float]:
        """Values at the base of the hyperparameters that this section sets, by name."""
        return {key.name: getattr(self, key.name) for key in SET_BY["proxy"]}


INCREASING = require(lambda values: list(values) == sorted(set(values)), "must increase")
Measured = Literal["duration", "batch"]
TestAxis = Literal["width", "depth", "batch", "duration"]


class TransferSection(Section):
    """Tests whether the optimum stays put as width, duration, depth or batch grow."""

    widths: Annotated[tuple[Width, ...], Field(min_length=2), ONCE] = (32, 64, 128)
    """Widths at which the learning-rate curve is measured."""
    offsets_octaves: Annotated[tuple[Octaves, ...], Field(min_length=4), ONCE] = (
        -2.0,
        -1.0,
        0.0,
        1.0,
        2.0,
    )
    """Learning rates tried, in octaves (powers of 2) around the best."""
    narrow_offsets_octaves: Annotated[tuple[Octaves, ...], Field(min_length=4), ONCE] = (
        -1.5,
        -0.5,
        0.5,
        1.5,
    )
    """Learning rates tried from the third size on, in octaves around the smaller sizes' prediction.
    """
    num_seeds: Annotated[int, Field(ge=1, le=1000)] = 3
    """Seeds per learning rate over width."""
    durations: Annotated[tuple[Positive, ...], ONCE] = (1.0, 2.0, 4.0, 8.0)
    """Durations tested, as multiples of proxy.num_steps; empty: none."""
    depths: Annotated[tuple[Count, ...], ONCE] = ()
    """Depths tested, in layers; empty: none."""
    batches: Annotated[tuple[Positive, ...], ONCE] = ()
    """Batches tested, as multiples of proxy.batch_tokens at equal tokens; empty: none."""
    axis_num_seeds: Annotated[int, Field(ge=1, le=1000)] = 2
    """Seeds per learning rate over durations, depths, batches; per value of other hyperparameters.
    """
    measured_rules: tuple[Measured, ...] = ("duration", "batch")
    """Axes on which the learning rate follows its measured exponent; on others, the plan's rule."""
    hyperparameters: dict[Tested, Annotated[tuple[TestAxis, ...], ONCE]] = Field(
        {key.name: key.tested_over for key in HYPERPARAMETERS.values() if key.tested_over}  # type: ignore[misc]
    )
    """Other hyperparameters tested for transfer, and over which axes."""
    hyperparameter_offsets_octaves: Annotated[tuple[Octaves, ...], Field(min_length=3), ONCE] = (
        -2.0,
        -1.0,
        0.0,
        1.0,
    )
    """Values tried of the other hyperparameters, in octaves around the search's best."""
    hyperparameter_widths: Widths = ()
    """Widths of other hyperparameters' tests; empty: the base's and the farthest of
    transfer.widths."""
    max_extensions: Annotated[int, Field(ge=0)] = 2
    """Rounds of extra runs that a verdict needs, such as runs beyond an end of the grid; --spend
    adds runs that sharpen a verdict."""
    control_widths: Widths = (64,)
    """Widths of the standard-parametrization control."""
    control_offsets_octaves: Annotated[tuple[Octaves, ...], Field(min_length=4), ONCE] = (
        -3.0,
        -2.0,
        -1.0,
        0.0,
        1.0,
    )
    """Learning rates of the standard-parametrization control, in octaves around the base width's
    best; mostly lower, since its optimum falls by about an octave per doubling of width."""
    control_num_seeds: Annotated[int, Field(ge=1, le=1000)] = 3
    """Seeds per rate of the control."""
    margin_nats: Positive = 0.01
    """Maximum loss that a wrong transfer may cost (the allowed regret)."""
    level: Annotated[float, Field(gt=0.5, lt=1)] = 0.9
    """Confidence level of every interval."""
    check_widths: Annotated[tuple[Width, ...], Field(min_length=2), INCREASING] = (32, 64, 128, 256)
    """Widths of the coordinate check: activations must keep their size as width grows."""
    check_num_steps: Count = 10
    """Optimizer steps of the coordinate check."""
    check_depths: Annotated[
        tuple[Count, ...],
        INCREASING,
        require(lambda depths: len(depths) != 1, "must be two or more, or empty"),
    ] = (2, 4, 8)
    """Depths of the coordinate check, if the parametrization has a depth rule."""
    check_num_seeds: Annotated[int, Field(ge=2, le=1000)] = 4
    """Seeds of the coordinate check."""
    check_learning_rate: Annotated[float, Field(gt=0, le=10)] = 2.0**-7
    """Constant learning rate of the coordinate check."""


MAX_CHECK_OCTAVES = 4.0
"""Maximum offset from a rung's own rate in octaves; beyond it a parabola does not describe the
basin.
"""
_AROUND_MESSAGE = (
    f"must hold rates below and above the rung's own (0), at most {MAX_CHECK_OCTAVES:g} "
    "octaves away, or be empty"
)


def _are_around_zero(offsets: tuple[float, ...]) -> bool:
    """Return whether offsets lie on both sides of zero and within the limit, or there are none."""
    far = any(not 0 < abs(octaves) <= MAX_CHECK_OCTAVES for octaves in offsets)
    return not offsets or (not far and min(offsets) < 0 < max(offsets))


class LadderSection(Section):
    """The scaling ladder: every width at every duration."""

    widths: Annotated[tuple[Width, ...], Field(min_length=1), ONCE] = (32, 48, 64, 96, 128)
    """Model widths of the ladder."""
    depths: Annotated[tuple[Count, ...], ONCE] = ()
    """Depths of the ladder, in layers, each at every width; empty: model.num_layers."""
    width_per_layer: Annotated[float, Field(ge=0, le=10**5, allow_inf_nan=False)] = 0.0
    """Width divided by number of layers of the rungs and of the main run, whose depth then grows
    with width; 0: depth does not grow."""
    num_steps: Annotated[tuple[Count, ...], Field(min_length=1), ONCE] = (150, 400, 1000)
    """Durations of the ladder's runs, in optimizer steps."""
    batch_tokens: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Tokens per step; 0: as the proxies. The learning rate follows the rule over batch."""
    num_slots: Slots = 1
    """Rungs that a bank trains side by side; they end at different times, and empty slots cost
    time; auto: as the calibration chooses."""
    seed: Seed = 100
    """Seed of every rung; further seeds count up from it."""
    num_seeds: Annotated[int, Field(ge=1, le=100)] = 1
    """Runs per rung; each is a point of the fit."""
    form: FormChoice = "auto"
    """Scaling law; auto: those that the rungs and published studies leave possible."""
    bootstrap: Annotated[int, Field(ge=50)] = 400
    """Bootstrap resamples for every interval."""
    check_offsets_octaves: Annotated[
        tuple[float, ...], ONCE, require(_are_around_zero, _AROUND_MESSAGE)
    ] = (-1.0, 1.0)
    """Other rates at which some rungs are checked, in octaves around their own; empty: none."""
    num_checked: Count = 2
    """Rungs (runs of the ladder) checked at other rates, spread from the cheapest upwards."""
    check_share: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 0.125
    """Maximum share of the ladder's FLOPs that the checked rungs may have; each of these runs is
    repeated at other learning rates."""
    check_num_seeds: Annotated[int, Field(ge=1, le=1000)] = 1
    """Seeds per rate of a checked rung."""


class TargetSection(Section):
    """The budget of the main run, and its differences from the proxies."""

    budget_flops: Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)] = 1e13
    """Training FLOPs of the main run, counted as 6 * N * D."""
    width_multiple: Count = 32
    """The chosen width is a multiple of this (and of the head dim)."""
    num_layers: Annotated[int, Field(ge=0, le=10**4)] = 0
    """Layers of the main run; 0: as the ladder scales depth, else as the proxies."""
    batch_tokens: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Tokens per optimizer step of the main run; 0: as the proxies."""


class LaunchSection(Section):
    """The launch of the main run."""

    data_parallel_shard: Count = 2
    """Ranks that share the model (FSDP2)."""
    data_parallel_replicate: Count = 1
    """Replicas of such groups (HSDP)."""
    tensor: Count = 1
    """Tensor parallel degree. The embedded trainer runs 1; exports may have more."""
    pipeline: Count = 1
    """Pipeline stages; in exports only, like `tensor`."""
    context: Count = 1
    """Ranks that share a sequence; in exports only, like `tensor`."""
    microbatch_sequences: Annotated[int, Field(ge=0)] = 0
    """Sequences per pass of a rank; 0: its whole share at once."""
    activation_checkpointing: RecomputeMode = "none"
    """Activations that the backward pass recomputes. selective: all but those of matrix products
    and attention; full: those of whole blocks."""
    precision: MainRunDtype = "float32"
    """Compute precision; master weights are float32."""
    compiled: bool = False
    """torch.compile of each block: minutes to start, faster on a GPU."""
    checkpoint_every_steps: Count = 20
    """Steps between checkpoints."""
    validate_every_steps: Steps = 0
    """Steps between validation losses; 0: only at the end."""
    layers_every_steps: Steps = 0
    """Steps between logs of layers' norms and update ratios; 0: never."""
    replay_every_steps: Steps = 0
    """Steps between replays, in which a step is computed twice and compared to detect silent data
    corruption; 0: never."""
    spike_rollbacks: Annotated[int, Field(ge=0, le=100)] = 0
    """Maximum number of times that the trainer by itself goes back to before a loss spike and skips
    its data; 0: never."""
    seed: Seed = 1000
    """Seed of the main run's weights and data order."""
    resume_arguments: str = ""
    """Arguments with which your own trainer resumes where it stopped, such as --resume
    {run_dir}/last.pt; empty: it cannot resume."""
    gpu: str = ""
    """Accelerator of the main run, by a name that `forerun estimate` knows; empty: H100."""
    usd_per_gpu_hour: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0
    """Price of a GPU in dollars an hour, for `forerun estimate`; 0: the published one, if any."""
