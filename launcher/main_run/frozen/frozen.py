"""The decision of a frozen launch config, and how it groups the parameters of the model.

A `Decision` has everything that the main run computes with, and nothing that depends on when,
where, or how often something ran. Its digest is the sha256 of its canonical JSON. Everything else
about a frozen config is in attestations (`launch_file`): evidence, environment, parity, rehearsal.
An attestation names the digest and has a hash of its own. A hash reveals an accident or an edit,
but not a forger, who can compute it again.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, TypeVar, cast

from forerun._launcher.main_run.frozen.run_policies import (
    AbortPolicy,
    Checkpointing,
    Monitoring,
    RecomputeMode,
    SpikePolicy,
)
from forerun._proxies.core import canon
from forerun._proxies.core.checks import Checks
from forerun._proxies.core.errors import ExitCode, ProblemsError
from forerun._proxies.core.flops import count_params
from forerun._proxies.core.hyperparameters import HYPERPARAMETERS, RUN_WIDE
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.numbers import ForwardNumbers, GroupSettings, Kind, ParameterNumbers
from forerun._proxies.core.optimizers import OPTIMIZERS, RECIPES, OptimizerName, RecipeName
from forerun._proxies.core.programs import PATH_PLACEHOLDERS, Command, Factory, find_placeholders
from forerun._proxies.core.rules import Parametrization
from forerun._proxies.core.schedule import STEP_CONVENTION, Schedule, compute_lr_table
from forerun._proxies.core.shape import Shape
from forerun._proxies.core.spec import Dtype
from forerun._transfer.verdict.rules import TransferRule

SCHEMA_VERSION = 6
NUM_LR_SAMPLES = 64  # number of steps whose learning rate a frozen config shows
_MAX_STEPS, _MAX_GROUPS, _MAX_PATTERN_CHARS = 20_000_000, 1000, 100_000
_TOO_LONG = f"num_steps = {{}}: must be at most {_MAX_STEPS:,}; larger batches need fewer steps"
_PLAIN_PATTERN = re.compile(r"(?:[\w|]|\\\W|\\d\+|\[\w+\])*")
"""Regexes that cannot take exponential time: only names, alternatives, and numbers."""


class FrozenError(ProblemsError):
    """A file is not a frozen config, or the groups do not fit the parameters of a model."""


class TamperedError(FrozenError):
    """A file's content does not have the digest that it claims."""

    exit_code = ExitCode.CORRUPT


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterGroup(GroupSettings):
    """Parameters with the same optimizer, settings, and standard deviation of initial values."""

    optimizer: OptimizerName
    """Name of the optimizer (`forerun._proxies.core.optimizers.OPTIMIZERS`)."""
    pattern: str
    """Regex that whole names of parameters match."""
    kind: Kind
    init_std: float
    """Standard deviation of the normal initial values; gains start at one, biases at zero."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.require_one_of("optimizer", tuple(OPTIMIZERS))
        if checks.has_no_problem:
            spec = OPTIMIZERS[self.optimizer]
            missing = [name for name in spec.settings if name not in self.settings]
            unknown = [name for name in self.settings if name not in spec.settings]
            checks.require(
                not missing, f"settings of {self.optimizer}: missing {', '.join(missing)}"
            )
            checks.require(
                not unknown,
                f"settings of {self.optimizer}: unknown {', '.join(map(repr, unknown))}",
            )
            checks.require(
                spec.can_step(self.kind),
                f"optimizer = {self.optimizer!r}: cannot step parameters of kind {self.kind}",
            )
        values = SimpleNamespace(**self.settings)
        setting_checks = Checks(values)
        for name in sorted(self.settings):
            bound = HYPERPARAMETERS[name].below if name in HYPERPARAMETERS else None
            setting_checks.require_number(name, least=0, below=bound)
        # The checks have turned whole numbers into floats.
        object.__setattr__(self, "settings", vars(values))
        checks.problems += setting_checks.problems
        checks.require_number("init_std", least=0)
        is_short = len(self.pattern) <= _MAX_PATTERN_CHARS
        checks.require(
            is_short and _PLAIN_PATTERN.fullmatch(self.pattern) is not None,
            f"pattern = {self.pattern[:80]!r}: must be names separated by `|`, with numbers as "
            "`\\d+`",
        )
        checks.raise_problems()


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRate:
    """Learning rate over the run, as a function and as numbers to compare a scheduler with."""

    schedule: Schedule
    step_convention: str
    samples: tuple[tuple[int, float], ...]
    """Pairs of step and share of the peak, evenly spread from the first to the last step."""
    table_sha256: str
    """Content id of the shares at all steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """The training data and their order."""

    data_id: str
    tokenizer: str
    vocab_size: int
    num_train_tokens: int
    """Number of unique tokens."""
    weights: tuple[tuple[str, float], ...]
    """Weights of the corpus's sources, if the plan changes them."""
    order: Literal["every window once per epoch, keyed by (seed, epoch)"] = (
        "every window once per epoch, keyed by (seed, epoch)"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallelism:
    """Degrees of the device mesh; their product is the number of ranks."""

    data_parallel_shard: int
    data_parallel_replicate: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    microbatch_sequences: int = 0
    """Sequences in one forward pass of a rank; 0 for its whole share at once."""
    activation_checkpointing: RecomputeMode = "none"

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.require_whole(
            "data_parallel_shard", "data_parallel_replicate", "tensor", "pipeline", "context"
        )
        checks.require_whole("microbatch_sequences", least=0)
        checks.require_one_of("activation_checkpointing", ("none", "selective", "full"))
        checks.raise_problems()

    @property
    def num_data_ranks(self) -> int:
        """Number of shares into which a batch's sequences are divided."""
        return self.data_parallel_shard * self.data_parallel_replicate

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the run."""
        return self.num_data_ranks * self.tensor * self.pipeline * self.context


@dataclass(frozen=True, kw_only=True, slots=True)
class CurvePoint:
    """Training loss predicted for a step, as the mean over steps within 15 % of it (`WINDOW` of
    `forerun._scaling_fits.forecast.loss_curves`), in nats.
    """

    step: int
    loss_nats: float
    low_nats: float
    high_nats: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedLoss:
    """Validation loss predicted for the end of one new run, in nats per token."""

    loss_nats: float
    low_nats: float
    high_nats: float
    level: float
    extrapolation: float
    """Training FLOPs divided by those of the largest run that the forecast was fitted to."""
    curve: tuple[CurvePoint, ...] = ()
    """Training loss predicted over the run, at the same level; empty if the ladder has too few
    runs."""
    memory_octaves: float | None = None
    """Number of doublings of the step after which a run's deviation from the curve is forgotten
    (decorrelates), as measured in the ladder's runs; None if it was not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnTrainer:
    """A user's trainer in place of forerun's: its command, and the values of the placeholders."""

    command: Command
    values: dict[str, object]
    """Value by placeholder, without those that are paths of one machine (`PATH_PLACEHOLDERS`)."""
    resume: str = ""
    """Further arguments, with placeholders, that make the trainer resume; empty if it cannot."""
    num_params: int | None = field(default=None, metadata=canon.UNLESS_DEFAULT)
    """Number of parameters in the forecast, from `proxy.describe`; None to count `shape`'s."""

    def get_metrics_path(self, run_dir: Path) -> Path:
        """Return the path of a run's metrics file."""
        values = {**self.values, "run_dir": run_dir.resolve()}
        return run_dir.resolve() / self.command.metrics_path.format_map(values)

    @property
    def named(self) -> dict[str, object]:
        """Values that the command line contains: all if it has the path of their file."""
        named = self.command.placeholders
        if "run_json" in named:
            return dict(self.values)
        return {name: value for name, value in self.values.items() if name in named}

    def __post_init__(self) -> None:
        checks = Checks(self)
        for name, value in self.values.items():
            checks.require(
                value is None or _is_word_or_number(value),
                f"values.{name} = {value!r}: must be a finite number, a word or null",
            )
        if checks.has_no_problem:
            checks.problems += [
                f"values lacks {name}, which the command names"
                for name in self.command.placeholders | find_placeholders(self.resume)
                if name not in self.values and name not in PATH_PLACEHOLDERS
            ]
        checks.raise_problems()


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnModel:
    """A user's model, which the embedded trainer builds by its factory, shards, and trains."""

    factory: Factory
    values: dict[str, object]
    """Keyword arguments of the factory: the values of the plan's own axes."""
    num_params: int
    """Number of parameters at the frozen shape, for the forecast. Estimates of run times use the
    FLOPs of `shape`."""
    blocks: tuple[str, ...]
    """Patterns, such as `model.layers.*`, of the modules that are sharded one by one; all others
    are sharded together."""
    embeddings: tuple[str, ...]
    """Modules whose output is multiplied by `forward.embedding`."""
    readouts: tuple[str, ...]
    """Modules whose input is multiplied by `forward.output`."""

    @property
    def keywords(self) -> dict[str, float | int | str]:
        """The keyword arguments of the factory, typed."""
        return cast(dict[str, float | int | str], self.values)

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.require_whole("num_params")
        for name, value in self.values.items():
            checks.require(
                _is_word_or_number(value),
                f"values.{name} = {value!r}: must be a finite number or a word",
            )
        for pattern in self.blocks:
            checks.require(pattern.endswith(".*"), f"blocks: {pattern!r}: must be a path and `.*`")
        checks.raise_problems()


def _is_word_or_number(value: object) -> bool:
    """Return whether a value is a text or a finite number."""
    if type(value) is float:
        return math.isfinite(value)
    return isinstance(value, str) or type(value) is int


_SomeRecord = TypeVar("_SomeRecord")


def add_run_wide_fields(record: type[_SomeRecord]) -> type[_SomeRecord]:
    """Add a field to a class for each run-wide setting that it does not declare.

    The field is written only if the setting is not off. So a new setting does not change the digest
    of a decision that does not use it.
    """
    for name in RUN_WIDE:
        if name not in record.__annotations__:
            record.__annotations__[name] = "float | None"
            setattr(
                record,
                name,
                field(default=HYPERPARAMETERS[name].off, metadata=canon.UNLESS_DEFAULT),
            )
    return record


@dataclass(frozen=True, kw_only=True, slots=True)
@add_run_wide_fields
class Decision:
    """Everything that the main run computes with. The content id of a decision is its digest."""

    schema_version: int
    shape: Shape
    base_shape: Shape
    parametrization: Parametrization
    """Rules from which the numbers in `groups` and `forward` follow. The run uses only the numbers.
    """
    transfer: tuple[TransferRule, ...]
    """Evidence for the numbers in `groups`. The run does not use it."""
    forward: ForwardNumbers
    multiplier_form: Literal["multiplier"] = "multiplier"
    """Multipliers stay in the forward pass, as in the search. If the weights absorbed them, the
    gradient norm and thus the meaning of `clip_norm` would change."""
    groups: tuple[ParameterGroup, ...]
    optimizer: RecipeName
    """Name of the recipe (`RECIPES`) that assigned an optimizer to each group."""
    weight_decay_form: Literal["lr_times_decay"] = "lr_times_decay"
    """Decoupled decay: a step multiplies a weight by 1 - lr(t) * weight_decay."""
    learning_rate: LearningRate
    clip_norm: float | None
    batch_tokens: int
    num_tokens: int
    data: Data
    seed: int
    precision: Dtype
    parallelism: Parallelism
    checkpointing: Checkpointing
    predicted: PredictedLoss
    abort: AbortPolicy
    spikes: SpikePolicy = field(default=SpikePolicy())
    monitoring: Monitoring = field(default=Monitoring())
    compiled: bool = False
    """Whether torch.compile compiles each block."""
    own: OwnTrainer | None = field(default=None, metadata=canon.UNLESS_DEFAULT)
    """The user's own trainer, if it trains the run. Its command gets `own.values`. The decision
    then has no groups, and the trainer decides on parallelism."""
    model: OwnModel | None = field(default=None, metadata=canon.UNLESS_DEFAULT)
    """The user's model, if it is trained. A group whose `init_std` is 0 keeps the factory's initial
    values."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.require_whole("batch_tokens", "num_tokens")
        checks.require_whole("seed", least=0)
        self._check_settings(checks)
        checks.require(
            len(self.groups) <= _MAX_GROUPS,
            f"{format_counted(len(self.groups), 'group')}: must be at most {_MAX_GROUPS}",
        )
        stop_above = self.abort.train_loss_above_nats
        checks.require(
            stop_above > 0, f"abort.train_loss_above_nats = {stop_above!r}: must be above 0"
        )
        # Some trainers take the reciprocal of a multiplier, which must be finite.
        for name, value in asdict(self.forward).items():
            checks.require(
                1e-12 <= value <= 1e12, f"forward.{name} = {value!r}: must be from 1e-12 to 1e12"
            )
        schedule, ranks = self.learning_rate.schedule, self.parallelism.num_data_ranks
        checks.require(schedule.num_steps <= _MAX_STEPS, _TOO_LONG.format(schedule.num_steps))
        if checks.has_no_problem:
            warming_up, stages = schedule.batch_warmup_steps, schedule.batch_warmup_stages
            checks.require(
                self.num_tokens == schedule.num_full_batches * self.batch_tokens,
                f"num_tokens = {self.num_tokens}: must be "
                f"{format_counted(schedule.num_steps, 'step')} of {self.batch_tokens} tokens"
                + (f", {warming_up} of them warming up" if warming_up else ""),
            )
            smallest, remainder = divmod(self.batch_tokens, stages)
            checks.require(
                remainder == 0 and smallest % (self.shape.seq_len * ranks) == 0,
                f"batch_tokens = {self.batch_tokens}: must be whole sequences of "
                f"{self.shape.seq_len} for each of {format_counted(ranks, 'rank')}"
                + (f", also at its smallest, {smallest}" if stages > 1 else ""),
            )
        checks.raise_problems()

    def _check_settings(self, checks: Checks) -> None:
        """Check run-wide settings against their bounds, and groups against the recipe."""
        for name in RUN_WIDE:
            setting = HYPERPARAMETERS[name]
            if getattr(self, name) is not None or setting.off is not None:
                checks.require_number(
                    name,
                    above=setting.above,
                    least=setting.least,
                    below=setting.below,
                    most=setting.most,
                )
        checks.require_one_of("optimizer", tuple(RECIPES))
        if self.optimizer not in RECIPES:
            return
        names = [spec.name for spec in RECIPES[self.optimizer].optimizers]
        for group in self.groups:
            checks.require(
                group.optimizer in names,
                f"the group {group.pattern[:80]!r} has optimizer = {group.optimizer!r}: "
                f"{self.optimizer} has none but {', '.join(names)}",
            )

    @property
    def run_wide(self) -> dict[str, float | None]:
        """Run-wide settings by name."""
        return {name: getattr(self, name) for name in RUN_WIDE}

    @property
    def num_params(self) -> int:
        """Number of parameters N in the forecast and in the budget 6 N D."""
        user_code = self.model or self.own
        return (user_code and user_code.num_params) or count_params(self.shape).total

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON."""
        return canon.compute_content_id(self)


def sample_learning_rate(schedule: Schedule) -> LearningRate:
    """Sample and hash the table of a schedule.

    Raises:
        FrozenError: The schedule has too many steps.
    """
    if schedule.num_steps > _MAX_STEPS:
        raise FrozenError("learning rate", [_TOO_LONG.format(schedule.num_steps)])
    table = compute_lr_table(schedule)
    steps = sorted(
        {round(i * (len(table) - 1) / (NUM_LR_SAMPLES - 1)) for i in range(NUM_LR_SAMPLES)}
    )
    return LearningRate(
        schedule=schedule,
        step_convention=STEP_CONVENTION,
        samples=tuple((step, table[step]) for step in steps),
        table_sha256=canon.compute_content_id(list(table)),
    )


def build_groups(table: tuple[ParameterNumbers, ...]) -> tuple[ParameterGroup, ...]:
    """Group the parameters that have the same kind and numbers.

    The pattern of a group has one alternative for the same parameter of all layers.
    """
    keys = {p.name: (p.kind, p.optimizer, *sorted(p.settings.items()), p.init_std) for p in table}

    @functools.cache
    def matches_one_group(pattern: str) -> bool:
        return len({key for name, key in keys.items() if re.fullmatch(pattern, name)}) == 1

    members: dict[tuple[object, ...], tuple[ParameterNumbers, dict[str, None]]] = {}
    for parameter in table:
        literal = re.escape(parameter.name)
        # Try to replace all numbers in the name (count = 0), and then only the first. Later numbers
        # may distinguish different matrices, as in an nn.Sequential.
        patterns = (re.sub(r"\\\.\d+\\\.", r"\\.\\d+\\.", literal, count=num) for num in (0, 1))
        pattern = next(filter(matches_one_group, patterns), literal)
        members.setdefault(keys[parameter.name], (parameter, {}))[1][pattern] = None
    return tuple(
        ParameterGroup(
            pattern="|".join(patterns),
            kind=parameter.kind,
            optimizer=parameter.optimizer,
            settings=parameter.settings,
            init_std=parameter.init_std,
        )
        for parameter, patterns in members.values()
    )


def assign_groups(
    groups: tuple[ParameterGroup, ...], names: list[str]
) -> dict[str, ParameterGroup]:
    """Return the group of each parameter.

    Raises:
        FrozenError: A parameter is claimed by no group or by several, or a group claims none.
    """
    claims = {name: [g for g in groups if re.fullmatch(g.pattern, name)] for name in names}
    problems = [
        f"{format_counted(len(claiming), 'group')} claim {name}"
        if claiming
        else f"no group claims {name}"
        for name, claiming in claims.items()
        if len(claiming) != 1
    ]
    used = {group.pattern for claiming in claims.values() for group in claiming}
    problems += [
        f"the group {group.pattern!r} claims no parameter"
        for group in groups
        if group.pattern not in used
    ]
    if problems:
        raise FrozenError("parameter groups", problems)
    return {name: claiming[0] for name, claiming in claims.items()}
