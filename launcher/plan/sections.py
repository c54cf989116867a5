"""The sections of a plan: every key with its default, its unit in its name, and a sentence about
it. Imports pydantic and nothing heavier.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from launcher.base.policy import Recomputed
from launcher.plan.calibration_records import MOST_SLOTS
from launcher.plan.keys import (
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
    must,
    with_rules,
    with_values,
)
from proxies.core.hyperparameters import HYPERPARAMETERS, SET_BY
from proxies.core.optimizers import RECIPES, RecipeName
from proxies.core.programs import LossUnit, MetricsFormat
from proxies.core.rules import Name
from proxies.core.schedule import DecayShape, ScheduleKind
from proxies.core.shape import Family
from proxies.core.spec import Dtype, MatmulPrecision, Precision
from scaling_fits.laws.forms import FormChoice


def _slots(value: object) -> object:
    if value == "auto" or (type(value) is int and 1 <= value <= MOST_SLOTS):
        return value
    raise PydanticCustomError("slots", f"must be 'auto' or a whole number from 1 to {MOST_SLOTS}")


def _auto_or_bool(value: object) -> object:
    if value == "auto" or isinstance(value, bool):
        return value
    raise PydanticCustomError("auto_or_bool", "must be 'auto', true or false")


DEFAULT_OPTIMIZER = "adamw"
"""Recipe of a plan that names none."""

Slots = Annotated[
    Literal["auto"] | Annotated[int, Field(ge=1, le=MOST_SLOTS)], BeforeValidator(_slots)
]
AutoOrBool = Annotated[Literal["auto"] | bool, BeforeValidator(_auto_or_bool)]


class DataSection(Section):
    """The training data."""

    path: str = Field(
        "corpus",
        description="Folder written by `forerun tokenize`, relative to this file; empty: a command "
        "brings its own.",
    )
    weights: dict[str, Annotated[float, Field(ge=0, le=1e9)]] = Field(
        {}, description="Shares of the corpus's sources, by name; empty: as tokenized."
    )
    external: str = Field(
        "",
        description="With proxy.command: a name for data of the trainer's own, part of every run's "
        "identity.",
    )
    vocab_size: Annotated[int, Field(ge=0, le=2**32)] = Field(
        0, description="Vocabulary size of that data; a corpus records its own."
    )


class ModelSection(Section):
    """The model's shape, all but its width."""

    family: Family = Field(
        "llama", description="llama: RMSNorm, SwiGLU, rotary; gpt2: LayerNorm, GELU, biases."
    )
    tied: bool = Field(False, description="Embedding and readout share one matrix.")
    qk_norm: bool = Field(False, description="RMSNorm over each head's queries and keys.")
    num_layers: Count = Field(2, description="Transformer blocks.")
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)] = Field(
        16, description="Width of one head, at every width."
    )
    query_heads_per_kv_head: Count = Field(
        1, description="Grouped-query attention; 1 is plain attention."
    )
    ffn_ratio: Annotated[float, Field(gt=0, le=64)] = Field(
        2.0, description="Feed-forward width divided by model width."
    )
    seq_len: Count = Field(64, description="Tokens per sequence.")


@with_rules
class RuleChoices(Section):
    """Choices on which the sources of parametrizations differ, set one by one."""


@with_values
class _Recipe(Section):
    """The model of a proxy, and the length of its training. Hyperparameters that the registry
    declares come last.
    """

    parametrization: Name = Field("mup", description="How numbers scale with width and depth.")
    rules: RuleChoices = Field(
        RuleChoices(),
        description='Replaces single choices of that source, as { choice = "answer" }: '
        "`forerun explain --parametrization NAME` lists them.",
    )
    optimizer: RecipeName = Field(
        DEFAULT_OPTIMIZER,
        description="Optimizer. "
        + "; ".join(f"{recipe.name}: {recipe.label}" for recipe in RECIPES.values())
        + ". A command brings its own.",
    )
    factory: str = Field(
        "", description="Own model: package.module:function, found beside this file or installed."
    )
    command: str = Field(
        "", description="Own trainer: its command line, with {lr}, {width}, {seed}, {run_dir} ..."
    )
    describe: str = Field(
        "",
        description="Command that prints how large the model of a {width} is, as JSON in its last "
        "line: "
        '{"params": 124439808}, with "flops_per_token" where that is not 6 times as much.',
    )
    dimensions: dict[str, str] = Field(
        {},
        description="What the dimensions of a factory's parameters are, by a pattern of their "
        "names: "
        '{ "*.experts.up" = "expert in out" }; wanted only where forerun asks for it.',
    )
    code_path: str = Field(
        ".", description="Folder of the factory's module, or where the command runs."
    )
    metrics_format: MetricsFormat = Field("jsonl", description="Format of the command's log.")
    metrics_path: str = Field(
        "{run_dir}/metrics.jsonl",
        description="Its log file, or the folder that holds runs or events.",
    )
    metrics_step_key: str = Field("step", description="Name of the step in its log.")
    metrics_train_loss_key: str = Field(
        "train_loss", description="Name of the training loss, nats per token."
    )
    metrics_validation_loss_key: str = Field(
        "val_loss", description="Name of the validation loss; the last value counts."
    )
    metrics_train_loss_unit: LossUnit = Field(
        "nats", description="Unit of the training loss, by token unless by byte."
    )
    metrics_validation_loss_unit: LossUnit = Field(
        "nats", description="The same of the validation loss."
    )
    metrics_bytes_per_token: Annotated[float, Field(ge=0, le=1e6)] = Field(
        0.0, description="Bytes of text per token; needed for a loss in bits per byte."
    )
    metrics_grad_norm_key: str = Field(
        "", description="Name of the gradient norm before clipping; empty: not logged."
    )
    timeout_seconds: Annotated[float, Field(gt=0, le=1e7)] = Field(
        3600.0, description="Time limit of one command."
    )
    base_width: Width = Field(
        32, description="Width at which hyperparameters are searched; rules scale from it."
    )
    batch_tokens: Count = Field(1024, description="Tokens per optimizer step.")
    batch_warmup_fraction: Fraction = Field(
        0.0, description="Share of the steps over which the batch grows."
    )
    batch_warmup_stages: Annotated[int, Field(ge=2, le=1024)] = Field(
        4, description="Equal stages of that growth; used where that share is not 0."
    )
    num_steps: Count = Field(200, description="Optimizer steps of a proxy.")
    schedule: ScheduleKind = Field(
        "cosine",
        description="Learning-rate schedule, the main run's too: another one moves the optimum.",
    )
    decay_fraction: Fraction = Field(
        0.2, description="Share of the steps with decay; used by wsd only."
    )
    decay_shape: DecayShape = Field(
        "linear",
        description="Of the decay of wsd: linear, or sqrt: 1 - sqrt of the share that is done.",
    )
    decay_branches: bool = Field(
        False,
        description="With wsd: proxies of several durations share one stable phase and decay from "
        "it; they then have "
        "the base's warmup in steps and one learning rate for all durations of a rung.",
    )
    final_fraction: Fraction = Field(
        0.0, description="Learning rate at the end, as a share of the peak."
    )


class ProxySection(_Recipe):
    """The training of every proxy, unless a later section varies it."""

    dtype: Dtype = Field(
        "float32",
        description="Compute precision; bfloat16 is over float32 weights, as in the main run.",
    )
    num_slots: Slots = Field(
        4,
        description="Trials that a worker trains side by side (a bank), part of a run's identity; "
        "auto: a calibration "
        "picks what is fastest, with threads, CUDA graphs and fused loss. Runs that no bank "
        "supports train alone.",
    )
    microbatch_tokens: Annotated[int, Field(ge=0)] = Field(
        0, description="Tokens per pass, with gradient accumulation; 0: the whole batch."
    )
    activation_checkpointing: bool = Field(
        False, description="Recompute activations: less memory, a third more time."
    )
    compiled: AutoOrBool = Field(
        False,
        description="torch.compile; auto: if the calibration finds that it saves time over the "
        "planned runs.",
    )
    matmul_precision: MatmulPrecision = Field(
        "highest",
        description="Precision of float32 products, in torch's words; high and medium may round to "
        "TF32 or bfloat16.",
    )

    @property
    def hyperparameters(self) -> dict[str, float]:
        """Values at the base of the hyperparameters that this section sets, by name."""
        return {one.name: getattr(self, one.name) for one in SET_BY["proxy"]}


INCREASING = must(lambda values: list(values) == sorted(set(values)), "must increase")
Measured = Literal["duration", "batch"]
TestAxis = Literal["width", "depth", "batch", "duration"]


class TransferSection(Section):
    """Tests whether the optimum stays put as width, duration, depth or batch grow."""

    widths: Annotated[tuple[Width, ...], Field(min_length=2), ONCE] = Field(
        (32, 64, 128), description="Widths at which the learning-rate curve is measured."
    )
    offsets_octaves: Annotated[tuple[Octaves, ...], Field(min_length=4), ONCE] = Field(
        (-2.0, -1.0, 0.0, 1.0, 2.0),
        description="Learning rates tried, in octaves (powers of 2) around the best.",
    )
    narrow_offsets_octaves: Annotated[tuple[Octaves, ...], Field(min_length=4), ONCE] = Field(
        (-1.5, -0.5, 0.5, 1.5),
        description="Learning rates tried from the third size on, in octaves around the smaller "
        "sizes' prediction.",
    )
    num_seeds: Annotated[int, Field(ge=1, le=1000)] = Field(
        3, description="Seeds per learning rate over width."
    )
    durations: Annotated[tuple[Positive, ...], ONCE] = Field(
        (1.0, 2.0, 4.0, 8.0),
        description="Durations tested, as multiples of proxy.num_steps; empty: none.",
    )
    depths: Annotated[tuple[Count, ...], ONCE] = Field(
        (), description="Depths tested, in layers; empty: none."
    )
    batches: Annotated[tuple[Positive, ...], ONCE] = Field(
        (),
        description="Batches tested, as multiples of proxy.batch_tokens at equal tokens; empty: "
        "none.",
    )
    axis_num_seeds: Annotated[int, Field(ge=1, le=1000)] = Field(
        2,
        description="Seeds per learning rate over durations, depths, batches; per value of other "
        "hyperparameters.",
    )
    measured_rules: tuple[Measured, ...] = Field(
        ("duration", "batch"),
        description="Axes on which the learning rate follows its measured exponent; on others, the "
        "plan's rule.",
    )
    hyperparameters: dict[Tested, Annotated[tuple[TestAxis, ...], ONCE]] = Field(
        {one.name: one.tested_over for one in HYPERPARAMETERS.values() if one.tested_over},  # type: ignore[misc]
        description="Other hyperparameters tested for transfer, and over which axes.",
    )
    hyperparameter_offsets_octaves: Annotated[tuple[Octaves, ...], Field(min_length=3), ONCE] = (
        Field(
            (-2.0, -1.0, 0.0, 1.0),
            description="Values tried of the other hyperparameters, in octaves around the search's "
            "best.",
        )
    )
    hyperparameter_widths: Widths = Field(
        (),
        description="Widths of other hyperparameters' tests; empty: the base's and the farthest of "
        "transfer.widths.",
    )
    max_extensions: Annotated[int, Field(ge=0)] = Field(
        2,
        description="Rounds of extra runs that a verdict needs, as beyond an edge; --spend adds "
        "runs that sharpen it.",
    )
    control_widths: Widths = Field(
        (64,), description="Widths of the standard-parametrization control."
    )
    control_offsets_octaves: Annotated[tuple[Octaves, ...], Field(min_length=4), ONCE] = Field(
        (-3.0, -2.0, -1.0, 0.0, 1.0),
        description="Learning rates of the standard-parametrization control, in octaves around the "
        "base width's best; "
        "mostly lower, since its optimum falls by about an octave per doubling of width.",
    )
    control_num_seeds: Annotated[int, Field(ge=1, le=1000)] = Field(
        3, description="Seeds per rate of the control."
    )
    margin_nats: Positive = Field(0.01, description="The most loss that a wrong transfer may cost.")
    level: Annotated[float, Field(gt=0.5, lt=1)] = Field(
        0.9, description="Confidence level of every interval."
    )
    check_widths: Annotated[tuple[Width, ...], Field(min_length=2), INCREASING] = Field(
        (32, 64, 128, 256),
        description="Widths of the coordinate check: activations must keep their size as width "
        "grows.",
    )
    check_num_steps: Count = Field(10, description="Optimizer steps of the coordinate check.")
    check_depths: Annotated[
        tuple[Count, ...],
        INCREASING,
        must(lambda depths: len(depths) != 1, "must be two or more, or empty"),
    ] = Field(
        (2, 4, 8),
        description="Depths of the coordinate check, if the parametrization has a depth rule.",
    )
    check_num_seeds: Annotated[int, Field(ge=2, le=1000)] = Field(
        4, description="Seeds of the coordinate check."
    )
    check_learning_rate: Annotated[float, Field(gt=0, le=10)] = Field(
        2.0**-7, description="Constant learning rate of the coordinate check."
    )


MOST_CHECK_OCTAVES = 4.0
"""Maximum offset from a rung's own rate in octaves; beyond it a parabola does not describe the
basin.
"""
_AROUND = (
    f"must hold rates below and above the rung's own (0), at most {MOST_CHECK_OCTAVES:g} "
    "octaves away, or be empty"
)


def _around_zero(offsets: tuple[float, ...]) -> bool:
    far = any(not 0 < abs(octaves) <= MOST_CHECK_OCTAVES for octaves in offsets)
    return not offsets or (not far and min(offsets) < 0 < max(offsets))


class LadderSection(Section):
    """The scaling ladder: every width at every duration."""

    widths: Annotated[tuple[Width, ...], Field(min_length=1), ONCE] = Field(
        (32, 48, 64, 96, 128), description="Model widths of the ladder."
    )
    depths: Annotated[tuple[Count, ...], ONCE] = Field(
        (),
        description="Depths of the ladder, in layers, each at every width; empty: model.num_layers.",  # noqa: E501
    )
    width_per_layer: Annotated[float, Field(ge=0, le=10**5, allow_inf_nan=False)] = Field(
        0.0,
        description="Depth grows with width: a rung, and the main run, has width / width_per_layer "
        "layers, rounded; "
        "0: not.",
    )
    num_steps: Annotated[tuple[Count, ...], Field(min_length=1), ONCE] = Field(
        (150, 400, 1000), description="Durations of the ladder's runs, in optimizer steps."
    )
    batch_tokens: Annotated[int, Field(ge=0, le=10**9)] = Field(
        0,
        description="Tokens per step; 0: as the proxies. The learning rate follows the rule over "
        "batch.",
    )
    num_slots: Slots = Field(
        1,
        description="Rungs that a bank trains side by side; they end at different times, and empty "
        "slots cost time; "
        "auto: as the calibration chooses.",
    )
    seed: Seed = Field(100, description="Seed of every rung; further seeds count up from it.")
    num_seeds: Annotated[int, Field(ge=1, le=100)] = Field(
        1, description="Runs per rung; each is a point of the fit."
    )
    form: FormChoice = Field(
        "auto",
        description="Scaling law; auto: those that the rungs and published studies leave possible.",
    )
    bootstrap: Annotated[int, Field(ge=50)] = Field(
        400, description="Bootstrap resamples for every interval."
    )
    check_offsets_octaves: Annotated[tuple[float, ...], ONCE, must(_around_zero, _AROUND)] = Field(
        (-1.0, 1.0),
        description="Other rates at which some rungs are checked, in octaves around their own; "
        "empty: none.",
    )
    num_checked: Count = Field(
        2,
        description="Rungs (runs of the ladder) checked at other rates, spread from the cheapest "
        "upwards.",
    )
    check_share: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = Field(
        0.125,
        description="Largest share of the ladder's FLOPs in rungs (its runs) that are checked: "
        "each runs again at "
        "other learning rates.",
    )
    check_num_seeds: Annotated[int, Field(ge=1, le=1000)] = Field(
        1, description="Seeds per rate of a checked rung."
    )


class TargetSection(Section):
    """The budget of the main run, and its differences from the proxies."""

    budget_flops: Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)] = Field(
        1e13, description="Training FLOPs of the main run, counted as 6 * N * D."
    )
    width_multiple: Count = Field(
        32, description="The chosen width is a multiple of this (and of the head dim)."
    )
    num_layers: Annotated[int, Field(ge=0, le=10**4)] = Field(
        0, description="Layers of the main run; 0: as the ladder scales depth, else as the proxies."
    )
    batch_tokens: Annotated[int, Field(ge=0, le=10**9)] = Field(
        0, description="Tokens per optimizer step of the main run; 0: as the proxies."
    )


class LaunchSection(Section):
    """The launch of the main run."""

    data_parallel_shard: Count = Field(2, description="Ranks that share the model (FSDP2).")
    data_parallel_replicate: Count = Field(1, description="Replicas of such groups (HSDP).")
    tensor: Count = Field(
        1, description="Tensor parallel degree. The embedded trainer runs 1; exports may have more."
    )
    pipeline: Count = Field(1, description="Pipeline stages; exports only, as `tensor`.")
    context: Count = Field(1, description="Ranks that share a sequence; exports only, as `tensor`.")
    microbatch_sequences: Annotated[int, Field(ge=0)] = Field(
        0, description="Sequences per pass of a rank; 0: its whole share at once."
    )
    activation_checkpointing: Recomputed = Field(
        "none",
        description="What the backward pass recomputes: all but products and attention, or whole "
        "blocks.",
    )
    precision: Precision = Field(
        "float32", description="Compute precision; master weights are float32."
    )
    compiled: bool = Field(
        False, description="torch.compile of each block: minutes to start, faster on a GPU."
    )
    checkpoint_every_steps: Count = Field(20, description="Steps between checkpoints.")
    validate_every_steps: Steps = Field(
        0, description="Steps between validation losses; 0: only at the end."
    )
    layers_every_steps: Steps = Field(
        0, description="Steps between logs of layers' norms and update ratios; 0: never."
    )
    replay_every_steps: Steps = Field(
        0,
        description="Steps between replays, computed twice and compared against silent data "
        "corruption; 0: never.",
    )
    spike_rollbacks: Annotated[int, Field(ge=0, le=100)] = Field(
        0,
        description="How often the trainer may go back before a spike and skip its data by itself; "
        "0: never.",
    )
    seed: Seed = Field(1000, description="Seed of the main run's weights and data order.")
    resume_arguments: str = Field(
        "",
        description="Arguments by which your own trainer goes on where it stopped, such as "
        "--resume {run_dir}/last.pt; "
        "empty: it cannot.",
    )
    gpu: str = Field(
        "",
        description="Accelerator of the main run, for `forerun estimate`: a name it knows; empty: "
        "H100.",
    )
    usd_per_gpu_hour: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = Field(
        0.0,
        description="Its price in dollars an hour, for `forerun estimate`; 0: the published one, "
        "if any.",
    )
