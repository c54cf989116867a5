"""The frozen launch config: one content-addressed decision, and its attestations.

`decision` holds everything the main run computes with, and nothing that depends on when, where or
how often one ran. Evidence, environment, parity and rehearsal are attestations: files that name the
digest and carry their own hash. A hash shows accident and edit, not a forger.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, TypeVar, cast

from launcher.base.policy import AbortPolicy, Checkpointing, Monitoring, Recomputed, SpikePolicy
from proxies.core import canon
from proxies.core.checks import Checks
from proxies.core.errors import ExitCode, InputError
from proxies.core.flops import count_params
from proxies.core.hyperparameters import HYPERPARAMETERS, RUN_WIDE
from proxies.core.notation import counted
from proxies.core.numbers import ForwardNumbers, GroupSettings, Kind, ParameterNumbers
from proxies.core.optimizers import OPTIMIZERS, RECIPES, OptimizerName, RecipeName
from proxies.core.programs import PLACES, Command, Factory, placeholders_in
from proxies.core.rules import Parametrization
from proxies.core.schedule import STEP_CONVENTION, Schedule, lr_table
from proxies.core.shape import Shape
from proxies.core.spec import Dtype
from transfer.verdict.rules import TransferRule

SCHEMA_VERSION = 6
NUM_LR_SAMPLES = 64
# steps are counted out one by one
MOST_STEPS, MOST_GROUPS, MOST_PATTERN = 20_000_000, 1000, 100_000
_TOO_LONG = f"num_steps = {{}}: must be at most {MOST_STEPS:,}; larger batches need fewer steps"
_PLAIN = r"(?:[\w|]|\\\W|\\d\+|\[\w+\])*"


class FrozenError(InputError):
    """A frozen file that is not one, or parameters its groups do not fit. `problems` lists all of
    it.
    """

    def __init__(self, what: str, problems: list[str]) -> None:
        self.problems = problems
        super().__init__(f"{what}: " + "; ".join(problems))


class TamperedError(FrozenError):
    """The content does not have the digest it claims."""

    exit_code = ExitCode.CORRUPT


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterGroup(GroupSettings):
    """Parameters that one optimizer steps with the same settings, and whose initial values have one
    std.
    """

    optimizer: OptimizerName
    """Name of the optimizer that steps them (`proxies.core.optimizers.OPTIMIZERS`)."""
    pattern: str
    """Regex matched against whole names."""
    kind: Kind
    init_std: float
    """Normal(0, init_std); gains start at one, biases at zero."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.one_of("optimizer", tuple(OPTIMIZERS))
        if checks.fine:
            spec = OPTIMIZERS[self.optimizer]
            missing = [name for name in spec.settings if name not in self.settings]
            unknown = [name for name in self.settings if name not in spec.settings]
            checks.that(not missing, f"settings of {self.optimizer}: missing {', '.join(missing)}")
            checks.that(
                not unknown,
                f"settings of {self.optimizer}: unknown {', '.join(map(repr, unknown))}",
            )
            able = spec.can_step(self.kind)
            checks.that(
                able, f"optimizer = {self.optimizer!r}: cannot step parameters of kind {self.kind}"
            )
        values = SimpleNamespace(**self.settings)
        settings = Checks(values)
        for name in sorted(self.settings):
            settings.number(
                name,
                least=0,
                below=HYPERPARAMETERS[name].below if name in HYPERPARAMETERS else None,
            )
        object.__setattr__(self, "settings", vars(values))  # with floats for whole numbers
        checks.problems += settings.problems
        checks.number("init_std", least=0)
        plain = len(self.pattern) <= MOST_PATTERN and re.fullmatch(_PLAIN, self.pattern) is not None
        checks.that(
            plain,
            f"pattern = {self.pattern[:80]!r}: must be names separated by `|`, with numbers as "
            "`\\d+`",
        )
        checks.done()


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRate:
    """lr(t) as a function and as numbers, to compare a trainer's own scheduler with."""

    schedule: Schedule
    step_convention: str
    samples: tuple[tuple[int, float], ...]
    """(step, share of the peak), evenly spread, first and last step among them."""
    table_sha256: str
    """Content id of the share at every step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """What is trained on, and in which order."""

    data_id: str
    tokenizer: str
    vocab_size: int
    num_train_tokens: int
    """Unique tokens at hand."""
    weights: tuple[tuple[str, float], ...]
    """Shares of the corpus's sources, where the plan changes them."""
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
    """Sequences in one forward pass of a rank; 0: all of its share at once."""
    activation_checkpointing: Recomputed = "none"

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.whole(
            "data_parallel_shard", "data_parallel_replicate", "tensor", "pipeline", "context"
        )
        checks.whole("microbatch_sequences", least=0)
        checks.one_of("activation_checkpointing", ("none", "selective", "full"))
        checks.done()

    @property
    def num_data_ranks(self) -> int:
        """Shares into which a batch's sequences are dealt."""
        return self.data_parallel_shard * self.data_parallel_replicate

    @property
    def num_ranks(self) -> int:
        """Ranks of the run."""
        return self.num_data_ranks * self.tensor * self.pipeline * self.context


@dataclass(frozen=True, kw_only=True, slots=True)
class CurvePoint:
    """Training loss expected on the way, in nats per token: the mean over the steps within 15 % of
    `step`.
    """

    step: int
    loss_nats: float
    low_nats: float
    high_nats: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedLoss:
    """Validation loss expected at the end of the run, in nats per token, for one new run."""

    loss_nats: float
    low_nats: float
    high_nats: float
    level: float
    extrapolation: float
    """Training FLOPs over the largest fitted run's."""
    curve: tuple[CurvePoint, ...] = ()
    """How training loss is to run down there, at the same level; empty where the ladder has too few
    runs to say."""
    memory_octaves: float | None = None
    """Over so many doublings of the step a departure from the curve is forgotten, as the ladder's
    own runs show: what is one departure, and what are several. None: not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnTrainer:
    """The user's own trainer, where forerun's model is not what trains: a command, and what each
    placeholder is.
    """

    command: Command
    values: dict[str, object]
    """By placeholder, all but the places of one machine (`proxies.core.programs.PLACES`)."""
    resume: str = ""
    """Arguments behind the command's by which it goes on where it stopped, placeholders allowed;
    empty: it cannot."""
    num_params: int | None = field(default=None, metadata=canon.UNLESS_DEFAULT)
    """N of the forecast, by `proxy.describe`; None: the count of `shape`."""

    def metrics_at(self, run_dir: Path) -> Path:
        """Where a run logs its metrics."""
        values = {name: str(value) for name, value in self.values.items()} | {
            "run_dir": str(run_dir.resolve())
        }
        return run_dir.resolve() / self.command.metrics_path.format_map(values)

    @property
    def named(self) -> dict[str, object]:
        """Those that the command line names; all, if it gets them as a file."""
        named = self.command.named
        return {
            name: value
            for name, value in self.values.items()
            if "run_json" in named or name in named
        }

    def __post_init__(self) -> None:
        checks = Checks(self)
        for name, value in self.values.items():
            fine = (
                value is None
                or isinstance(value, str)
                or (type(value) in (int, float) and math.isfinite(value))  # type: ignore[arg-type]
            )
            checks.that(fine, f"values.{name} = {value!r}: must be a finite number, a word or null")
        if checks.fine:
            checks.problems += [
                f"values lacks {name}, which the command names"
                for name in self.command.named | placeholders_in(self.resume)
                if name not in self.values and name not in PLACES
            ]
        checks.done()


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnModel:
    """The user's own model, which the embedded trainer builds by its factory, shards and trains."""

    factory: Factory
    values: dict[str, object]
    """Keywords of the factory: the plan's own axes."""
    num_params: int
    """Of the model at the frozen shape: N of the forecast. Run times follow the FLOPs of
    `shape`."""
    blocks: tuple[str, ...]
    """Lists of modules, such as `model.layers.*`, each of which is sharded by itself; the rest is
    one part."""
    embeddings: tuple[str, ...]
    """Modules whose output `forward.embedding` scales."""
    readouts: tuple[str, ...]
    """Modules whose input `forward.output` scales."""

    @property
    def keywords(self) -> dict[str, float | int | str]:
        """`values`, for the factory."""
        return cast(dict[str, float | int | str], self.values)

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.whole("num_params")
        for name, value in self.values.items():
            fine = isinstance(value, str) or (type(value) in (int, float) and math.isfinite(value))  # type: ignore[arg-type]
            checks.that(fine, f"values.{name} = {value!r}: must be a finite number or a word")
        for pattern in self.blocks:
            checks.that(pattern.endswith(".*"), f"blocks: {pattern!r}: must be a path and `.*`")
        checks.done()


_SomeRecord = TypeVar("_SomeRecord")


def with_run_wide(record: type[_SomeRecord]) -> type[_SomeRecord]:
    """Add to a class a field for each run-wide setting that it does not spell out.

    Such a field is written only where the setting is not off. So a new setting changes no digest of
    a run without it.
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
@with_run_wide
class Decision:
    """Everything the main run computes with. Its content id is the digest."""

    schema_version: int
    shape: Shape
    base_shape: Shape
    parametrization: Parametrization
    """A label. What counts is the numbers in `groups` and `forward`."""
    transfer: tuple[TransferRule, ...]
    """Evidence. What counts is the numbers in `groups`."""
    forward: ForwardNumbers
    multiplier_form: Literal["multiplier"] = "multiplier"
    """As when clip was searched: absorbed in the weights, gradients would have another norm, clip
    another meaning."""
    groups: tuple[ParameterGroup, ...]
    optimizer: RecipeName
    """Name of the recipe that assigned an optimizer to each group
    (`proxies.core.optimizers.RECIPES`)."""
    weight_decay_form: Literal["lr_times_decay"] = "lr_times_decay"
    """A step multiplies a weight by 1 - lr(t) * weight_decay."""
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
    """torch.compile of each block."""
    own: OwnTrainer | None = field(default=None, metadata=canon.UNLESS_DEFAULT)
    """Of such a trainer `values` count: there are no groups, and what is parallel is up to it."""
    model: OwnModel | None = field(default=None, metadata=canon.UNLESS_DEFAULT)
    """Where that is not forerun's. Of a group whose `init_std` is 0 the values stay as its factory
    draws them."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.whole("batch_tokens", "num_tokens")
        checks.whole("seed", least=0)
        self._check_settings(checks)
        checks.that(
            len(self.groups) <= MOST_GROUPS,
            f"{counted(len(self.groups), 'group')}: must be at most {MOST_GROUPS}",
        )
        stop_above = self.abort.train_loss_above_nats
        checks.that(
            stop_above > 0, f"abort.train_loss_above_nats = {stop_above!r}: must be above 0"
        )
        # of some of them trainers want the reciprocal
        for name, value in asdict(self.forward).items():
            checks.that(
                1e-12 <= value <= 1e12, f"forward.{name} = {value!r}: must be from 1e-12 to 1e12"
            )
        schedule, ranks = self.learning_rate.schedule, self.parallelism.num_data_ranks
        checks.that(schedule.num_steps <= MOST_STEPS, _TOO_LONG.format(schedule.num_steps))
        if checks.fine:
            checks.that(
                self.num_tokens == schedule.num_full_batches * self.batch_tokens,
                f"num_tokens = {self.num_tokens}: must be {counted(schedule.num_steps, 'step')} of "
                f"{self.batch_tokens} tokens"
                + (
                    f", {schedule.batch_warmup_steps} of them warming up"
                    if schedule.batch_warmup_steps
                    else ""
                ),
            )
            smallest, rest = divmod(self.batch_tokens, schedule.batch_warmup_stages)
            checks.that(
                rest == 0 and smallest % (self.shape.seq_len * ranks) == 0,
                f"batch_tokens = {self.batch_tokens}: must be whole sequences of "
                f"{self.shape.seq_len} for each of "
                f"{counted(ranks, 'rank')}"
                + (
                    f" at its smallest, {smallest}, too" if schedule.batch_warmup_stages > 1 else ""
                ),
            )
        checks.done()

    def _check_settings(self, checks: Checks) -> None:
        """Check run-wide settings against their bounds, and each group's optimizer against the
        recipe.
        """
        for one in map(HYPERPARAMETERS.__getitem__, RUN_WIDE):
            if getattr(self, one.name) is not None or one.off is not None:
                checks.number(
                    one.name, above=one.above, least=one.least, below=one.below, most=one.most
                )
        checks.one_of("optimizer", tuple(RECIPES))
        names = (
            [spec.name for spec in RECIPES[self.optimizer].optimizers]
            if self.optimizer in RECIPES
            else []
        )
        for group in self.groups:
            problem = (
                f"the group {group.pattern[:80]!r} has optimizer = {group.optimizer!r}: "
                f"{self.optimizer} has none"
            )
            checks.that(not names or group.optimizer in names, f"{problem} but {', '.join(names)}")

    @property
    def run_wide(self) -> dict[str, float | None]:
        """Run-wide settings by name."""
        return {name: getattr(self, name) for name in RUN_WIDE}

    @property
    def num_params(self) -> int:
        """N, in the forecast and the budget 6 N D."""
        counted = self.model.num_params if self.model else self.own.num_params if self.own else None
        return counted or count_params(self.shape).total

    @property
    def digest(self) -> str:
        """Sha256 of the canonical JSON."""
        return canon.content_id(self)


def learning_rate_of(schedule: Schedule) -> LearningRate:
    """The schedule with its sampled and hashed table. Raises FrozenError beyond `MOST_STEPS`."""
    if schedule.num_steps > MOST_STEPS:
        raise FrozenError("learning rate", [_TOO_LONG.format(schedule.num_steps)])
    table = lr_table(schedule)
    steps = sorted(
        {round(i * (len(table) - 1) / (NUM_LR_SAMPLES - 1)) for i in range(NUM_LR_SAMPLES)}
    )
    return LearningRate(
        schedule=schedule,
        step_convention=STEP_CONVENTION,
        samples=tuple((step, table[step]) for step in steps),
        table_sha256=canon.content_id(list(table)),
    )


def groups_of(table: tuple[ParameterNumbers, ...]) -> tuple[ParameterGroup, ...]:
    """Fold a parameter table into groups: same kind and numbers, layers as one pattern."""
    keys = {p.name: (p.kind, p.optimizer, *sorted(p.settings.items()), p.init_std) for p in table}

    @functools.cache
    def is_one(pattern: str) -> bool:
        return len({key for name, key in keys.items() if re.fullmatch(pattern, name)}) == 1

    members: dict[tuple[object, ...], tuple[ParameterNumbers, dict[str, None]]] = {}
    for p in table:
        literal = re.escape(p.name)
        # Numbers further in may tell matrices apart, as in an nn.Sequential.
        patterns = (re.sub(r"\\\.\d+\\\.", r"\\.\\d+\\.", literal, count=most) for most in (0, 1))
        pattern = next(filter(is_one, patterns), literal)
        members.setdefault(keys[p.name], (p, {}))[1][pattern] = None
    return tuple(
        ParameterGroup(
            pattern="|".join(patterns),
            kind=p.kind,
            optimizer=p.optimizer,
            settings=p.settings,
            init_std=p.init_std,
        )
        for p, patterns in members.values()
    )


def assign_groups(
    groups: tuple[ParameterGroup, ...], names: list[str]
) -> dict[str, ParameterGroup]:
    """Each parameter's group.

    Raises:
        FrozenError: a parameter no group or more than one claims, or a group that claims none; all
            at once.
    """
    claims = {name: [g for g in groups if re.fullmatch(g.pattern, name)] for name in names}
    problems = [f"no group claims {name}" for name, found in claims.items() if not found]
    problems += [
        f"{counted(len(found), 'group')} claim {name}"
        for name, found in claims.items()
        if len(found) > 1
    ]
    used = {g.pattern for found in claims.values() for g in found}
    problems += [
        f"the group {g.pattern!r} claims no parameter" for g in groups if g.pattern not in used
    ]
    if problems:
        raise FrozenError("parameter groups", problems)
    return {name: found[0] for name, found in claims.items()}
