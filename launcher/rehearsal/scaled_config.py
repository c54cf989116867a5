"""The scaled-down copy of a frozen config that the drills train, and the record of what it stands
for.

Kept: family, GQA, tying, QK norm, the groups' kinds and patterns, parametrization, schedule form,
clip, precision, recomputation, gradient accumulation, policies, seed. Made small: layers, heads,
head dim, sequence, batch, steps and ranks; blocks are not compiled.

The numbers of each group are what the parametrization's own table gives at the small shape for the
hyperparameters that the frozen numbers imply at the base shape, over width and depth alone: the
copy's batch and duration count as its base.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher.base.policy import Checkpointing, Monitoring
from launcher.frozen.frozen import (
    Data,
    Decision,
    FrozenError,
    Parallelism,
    ParameterGroup,
    assign_groups,
    groups_of,
    learning_rate_of,
)
from proxies.core.canon import Json
from proxies.core.hyperparameters import HYPERPARAMETERS, Hparams, OwnValue
from proxies.core.numbers import ForwardNumbers, ParameterNumbers
from proxies.core.optimizers import RECIPES
from proxies.core.schedule import Schedule
from proxies.core.shape import Shape
from proxies.core.spec import MAX_SEED, Numerics, RunSpec
from proxies.data.tokens import Manifest
from proxies.external.factory import numbers_of
from proxies.parametrization.parametrization import forward_numbers

NUM_STEPS, EVERY_STEPS, WARMUP_STEPS = 16, 4, 4
NUM_LAYERS, HEAD_DIM, SEQ_LEN, BATCH_SEQUENCES, NUM_RANKS = 2, 16, 32, 8, 2
AGREE = 1e-6
"""Groups that imply hyperparameters farther apart than this share were not made by the
parametrization's table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledConfig:
    """What is trained in the drills."""

    decision: Decision
    stands_for: str
    """The digest of the config that is rehearsed."""
    kind: Literal["scaled", "full"]
    spec: RunSpec | None
    """The same run as a proxy; None for the full shape."""

    def told(self) -> dict[str, Json]:
        """For the attestation."""
        shape, decision = self.decision.shape, self.decision
        return {
            "kind": self.kind,
            "digest": decision.digest,
            "stands_for": self.stands_for,
            "layers": shape.num_layers,
            "width": shape.width,
            "seq_len": shape.seq_len,
            "num_steps": decision.learning_rate.schedule.num_steps,
            "batch_tokens": decision.batch_tokens,
            "num_ranks": decision.parallelism.num_ranks,
        }


def scaled_copy(decision: Decision, manifest: Manifest, code_dir: Path = Path()) -> ScaledConfig:
    """The small copy of a config, on the corpus (or the cut of it) of that manifest.

    A user's own model, whose code lies in `code_dir`, is copied at twice the width that it was
    searched at, for nobody knows which other shapes its factory builds.

    Raises:
        FrozenError: the frozen numbers are not of the parametrization that the config names.
        FactoryError, FactoryChangedError: there is no such factory, or it is another.
    """
    base = (
        _small_base(decision.shape) if decision.model is None else _shortened(decision.base_shape)
    )
    shape = base.at_width(2 * base.width)
    schedule = short_schedule(decision.learning_rate.schedule)
    batch_tokens = BATCH_SEQUENCES * shape.seq_len
    base_batch_tokens, base_num_tokens = _own_tokens(decision, batch_tokens, schedule)
    spec = RunSpec(
        shape=shape,
        base_shape=base,
        parametrization=decision.parametrization,
        hparams=_implied(decision, code_dir),
        schedule=schedule,
        batch_tokens=batch_tokens,
        data_id=manifest.data_id,
        seed=decision.seed % (MAX_SEED + 1),
        numerics=Numerics(dtype=decision.precision),
        optimizer=decision.optimizer,
        base_batch_tokens=base_batch_tokens,
        base_num_tokens=base_num_tokens,
        factory=None if decision.model is None else decision.model.factory,
    )
    table = numbers_of(spec, code_dir)
    own = decision.model and dataclasses.replace(
        decision.model, num_params=sum(math.prod(numbers.size) for numbers in table)
    )
    layout = decision.parallelism
    copy = dataclasses.replace(
        decision,
        shape=shape,
        base_shape=base,
        forward=forward_numbers(spec),
        batch_tokens=spec.batch_tokens,
        groups=groups_of(table) if own else _with_numbers(decision.groups, table),
        learning_rate=learning_rate_of(schedule),
        model=own,
        num_tokens=spec.num_tokens,
        data=_data(decision, manifest),
        seed=spec.seed,
        parallelism=Parallelism(
            data_parallel_shard=NUM_RANKS,
            microbatch_sequences=1 if layout.microbatch_sequences else 0,
            activation_checkpointing=layout.activation_checkpointing,
        ),
        checkpointing=_cadence(decision),
        monitoring=_monitoring(decision),
        compiled=False,
    )
    return ScaledConfig(decision=copy, stands_for=decision.digest, kind="scaled", spec=spec)


def full_copy(decision: Decision, manifest: Manifest) -> ScaledConfig:
    """The real shape, groups, batch and parallelism, with few steps, on the cut of that
    manifest.
    """
    schedule = short_schedule(decision.learning_rate.schedule)
    copy = dataclasses.replace(
        decision,
        learning_rate=learning_rate_of(schedule),
        checkpointing=_cadence(decision),
        monitoring=_monitoring(decision),
        num_tokens=int(decision.batch_tokens * schedule.num_full_batches),
        data=_data(decision, manifest),
    )
    return ScaledConfig(decision=copy, stands_for=decision.digest, kind="full", spec=None)


def short_schedule(schedule: Schedule) -> Schedule:
    """The same form in few steps: warmup and batch warmup in the first quarter, a final decay of
    the same share.
    """
    decay = round(NUM_STEPS * schedule.decay_steps / schedule.num_steps)
    stages = min(2, schedule.batch_warmup_stages)
    warmup = WARMUP_STEPS if schedule.warmup_steps else 0
    return dataclasses.replace(
        schedule,
        num_steps=NUM_STEPS,
        warmup_steps=warmup,
        decay_steps=min(max(1, decay), NUM_STEPS - warmup) if schedule.kind == "wsd" else 0,
        batch_warmup_steps=WARMUP_STEPS if stages > 1 else 0,
        batch_warmup_stages=stages,
    )


def _small_base(shape: Shape) -> Shape:
    """Half as wide as the copy: so that the copy's groups have numbers of their own, as the real
    one's.
    """
    grouped = shape.num_heads > shape.num_kv_heads
    head_dim, num_heads = min(HEAD_DIM, shape.head_dim), 2 if grouped else 1
    width = head_dim * num_heads
    return dataclasses.replace(
        _shortened(shape),
        width=width,
        num_heads=num_heads,
        num_kv_heads=1,
        ffn_width=max(8, 8 * round(width * shape.ffn_width / shape.width / 8)),
    )


def _shortened(shape: Shape) -> Shape:
    """At most so many layers and tokens as the drills take."""
    return dataclasses.replace(
        shape, num_layers=min(NUM_LAYERS, shape.num_layers), seq_len=min(SEQ_LEN, shape.seq_len)
    )


def _own_tokens(
    decision: Decision, batch_tokens: int, schedule: Schedule
) -> tuple[int | None, int | None]:
    """A run's batch and tokens as its base's, for a parametrization that asks."""
    asks = decision.parametrization.needs_tokens
    return (batch_tokens, int(batch_tokens * schedule.num_full_batches)) if asks else (None, None)


def _implied(decision: Decision, code_dir: Path = Path()) -> Hparams:
    """The hyperparameters at the base shape whose table holds the frozen numbers."""
    schedule = decision.learning_rate.schedule
    base_batch_tokens, base_num_tokens = _own_tokens(decision, decision.batch_tokens, schedule)
    set_by = _groups_by_hyperparameter(decision)
    alike = {
        name: members[0].settings[setting]
        for name, (setting, members) in set_by.items()
        if HYPERPARAMETERS[name].scaling in (None, "moments")  # one number for the whole run
    }
    # Whatever is one at the base stands in the table as the parametrization's own factor.
    ones = {
        **dict.fromkeys(RECIPES[decision.optimizer].hyperparameters, 1.0),
        **alike,
        **decision.run_wide,
    }
    own = tuple(_fixed(*item) for item in decision.model.keywords.items()) if decision.model else ()

    def table(**known: float) -> tuple[tuple[ParameterNumbers, ...], ForwardNumbers]:
        spec = RunSpec(
            shape=decision.shape,
            base_shape=decision.base_shape,
            parametrization=decision.parametrization,
            hparams=Hparams(**{**ones, **known}, own=own),  # type: ignore[arg-type]
            schedule=schedule,
            batch_tokens=decision.batch_tokens,
            data_id=decision.data.data_id,
            seed=0,
            numerics=Numerics(),
            optimizer=decision.optimizer,
            base_batch_tokens=base_batch_tokens,
            base_num_tokens=base_num_tokens,
            factory=None if decision.model is None else decision.model.factory,
        )
        return numbers_of(spec, code_dir), forward_numbers(spec)

    rows = table()[0]
    rates = {
        name: _share(members, rows, setting)
        for name, (setting, members) in set_by.items()
        if HYPERPARAMETERS[name].scaling == "learning_rate"
    }
    rows, forward = table(**rates)
    shared = {}
    for name, (setting, members) in set_by.items():
        if name not in (*rates, *alike):
            with_it = [group for group in members if group.settings[setting]]
            shared[name] = _share(with_it, rows, setting) if with_it else 0.0
    multipliers = {
        one.name: getattr(decision.forward, one.multiplies) / getattr(forward, one.multiplies)
        for one in HYPERPARAMETERS.values()
        if one.multiplies
    }
    return Hparams(**{**ones, **rates, **shared, **multipliers}, own=own)


def _groups_by_hyperparameter(decision: Decision) -> dict[str, tuple[str, list[ParameterGroup]]]:
    """Return, by hyperparameter, the setting that it sets and the groups that have that setting
    from it.
    """
    recipe = RECIPES[decision.optimizer]
    found: dict[str, tuple[str, list[ParameterGroup]]] = {}
    for group in decision.groups:
        for setting in group.settings:
            name = recipe.hyperparameter_for(group.optimizer, setting)
            found.setdefault(name, (setting, []))[1].append(group)
    return found


def _fixed(name: str, value: float | int | str) -> OwnValue:
    """A keyword of the user's factory, as the main run has it."""
    if isinstance(value, str):
        return OwnValue(name=name, value=0, word=value)
    return OwnValue(name=name, value=value, whole=isinstance(value, int))


def _share(
    groups: Sequence[ParameterGroup], table: tuple[ParameterNumbers, ...], setting: str
) -> float:
    """Return the ratio of the frozen values of a setting to the table's, which is the same for
    every group.
    """
    shares = [group.settings[setting] / _member(group, table).settings[setting] for group in groups]
    if max(shares) - min(shares) > AGREE * max(shares):
        problem = (
            f"{setting}: the groups imply from {min(shares):.6g} to {max(shares):.6g} at the base "
            "shape, but the "
            "parametrization has one value, so no small copy can have them; --full rehearses the "
            "real shape"
        )
        raise FrozenError("rehearsal", [problem])
    return float(shares[0])


def _member(group: ParameterGroup, table: tuple[ParameterNumbers, ...]) -> ParameterNumbers:
    for numbers in table:
        if re.fullmatch(group.pattern, numbers.name):
            return numbers
    raise FrozenError("rehearsal", [f"the group {group.pattern[:80]!r} claims no parameter"])


def _with_numbers(
    groups: tuple[ParameterGroup, ...], table: tuple[ParameterNumbers, ...]
) -> tuple[ParameterGroup, ...]:
    """Return the frozen groups with the small table's numbers."""
    rows = [_member(group, table) for group in groups]
    small = tuple(
        dataclasses.replace(
            group, optimizer=row.optimizer, settings=row.settings, init_std=row.init_std
        )
        for group, row in zip(groups, rows, strict=True)
    )
    assign_groups(small, [numbers.name for numbers in table])
    return small


def _data(decision: Decision, manifest: Manifest) -> Data:
    """The cut, whose shares are its own."""
    return dataclasses.replace(
        decision.data,
        data_id=manifest.data_id,
        num_train_tokens=manifest.num_tokens("train"),
        weights=(),
    )


def _cadence(decision: Decision) -> Checkpointing:
    return Checkpointing(every_steps=EVERY_STEPS, keep=max(3, decision.checkpointing.keep))


def _monitoring(decision: Decision) -> Monitoring:
    """What the run looks at, often enough to happen."""
    often = {
        f.name: EVERY_STEPS
        for f in dataclasses.fields(Monitoring)
        if getattr(decision.monitoring, f.name)
    }
    return dataclasses.replace(decision.monitoring, **often)
