"""The scaled-down copy of a frozen config that the drills train.

The copy keeps family, grouped-query attention, tying, QK norm, the groups' kinds and patterns,
parametrization, form of the schedule, clip norm, precision, recomputation, gradient accumulation,
policies, and seed. The numbers of layers, heads, sequences, steps and ranks, the head dim, and the
sequence length are small, and blocks are not compiled.

The frozen numbers imply hyperparameters at the base shape. From these, the parametrization's own
table gives the numbers of the copy's groups at the small shape. The copy's batch and duration count
as its base, so only width and depth scale.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forerun._launcher.main_run.frozen.frozen import (
    Decision,
    FrozenError,
    Parallelism,
    ParameterGroup,
    assign_groups,
    build_groups,
    sample_learning_rate,
)
from forerun._launcher.main_run.frozen.run_policies import Checkpointing, Monitoring
from forerun._proxies.core.hyperparameters import HYPERPARAMETERS, Hparams, UserValue
from forerun._proxies.core.numbers import ParameterNumbers
from forerun._proxies.core.optimizers import RECIPES
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.shape import Shape
from forerun._proxies.core.spec import MAX_SEED, Numerics, RunSpec
from forerun._proxies.data.tokens import Manifest
from forerun._proxies.external.factory import get_parameter_numbers
from forerun._proxies.parametrization.parametrization import compute_forward_numbers

# Steps of the copy; steps between two checkpoints or measurements; steps of its warmup. The drills
# count on them (`registry.CUTS`, `fault_drills.BETWEEN_SAVES`).
NUM_STEPS, EVERY_STEPS, WARMUP_STEPS = 16, 4, 4
# Maximum layers, head dim and sequence length of the copy; its sequences per batch; its ranks
NUM_LAYERS, HEAD_DIM, SEQ_LEN, BATCH_SEQUENCES, NUM_RANKS = 2, 16, 32, 8, 2
MAX_DISAGREEMENT = 1e-6
"""Share by which the hyperparameters that two groups imply may differ, because numbers were
rounded. If they differ by more, the groups do not come from the parametrization's table."""


def build_full_copy(decision: Decision, manifest: Manifest) -> Decision:
    """Return the config with its real shape, groups, batch and parallelism, but with few steps on a
    small part of the corpus.
    """
    return _shorten(decision, manifest, decision.batch_tokens)


def build_scaled_copy(
    decision: Decision, manifest: Manifest, code_dir: Path = Path()
) -> tuple[Decision, RunSpec]:
    """Return the small copy of a config, which trains on a small part of the corpus (the cut).

    A user's own model is copied at twice the width at which it was searched, because other shapes
    may not fit its factory.

    Args:
        decision: The config.
        manifest: Manifest of the cut.
        code_dir: Folder of a user's own model.

    Returns:
        The copy, and the same run as the spec of a proxy.

    Raises:
        FrozenError: The frozen numbers do not follow from the config's parametrization.
        FactoryError, FactoryChangedError: There is no such factory, or it is another one.
    """
    base = decision.base_shape if decision.model else _choose_small_base(decision.shape)
    base = dataclasses.replace(
        base, num_layers=min(NUM_LAYERS, base.num_layers), seq_len=min(SEQ_LEN, base.seq_len)
    )
    layout = decision.parallelism
    copy = _shorten(
        decision,
        manifest,
        BATCH_SEQUENCES * base.seq_len,
        shape=base.at_width(2 * base.width),
        base_shape=base,
        seed=decision.seed % (MAX_SEED + 1),
        parallelism=Parallelism(
            data_parallel_shard=NUM_RANKS,
            microbatch_sequences=min(1, layout.microbatch_sequences),
            activation_checkpointing=layout.activation_checkpointing,
        ),
        compiled=False,
    )
    spec = _build_spec(copy, _infer_hparams(decision, code_dir))
    table = get_parameter_numbers(spec, code_dir)
    if copy.model:
        num_params = sum(math.prod(numbers.size) for numbers in table)
        model, groups = dataclasses.replace(copy.model, num_params=num_params), build_groups(table)
    else:
        model, groups = None, _replace_numbers(decision.groups, table)
    copy = dataclasses.replace(
        copy, forward=compute_forward_numbers(spec), groups=groups, model=model
    )
    return copy, spec


def _shorten(decision: Decision, manifest: Manifest, batch_tokens: int, **changes: Any) -> Decision:
    """Return a decision that trains few steps on the cut corpus, and saves and measures often."""
    schedule = shorten_schedule(decision.learning_rate.schedule)
    monitored = [
        field.name
        for field in dataclasses.fields(Monitoring)
        if getattr(decision.monitoring, field.name)
    ]
    return dataclasses.replace(
        decision,
        learning_rate=sample_learning_rate(schedule),
        batch_tokens=batch_tokens,
        num_tokens=int(batch_tokens * schedule.num_full_batches),
        checkpointing=Checkpointing(
            # Drills that damage the newest checkpoint need older ones.
            every_steps=EVERY_STEPS,
            keep=max(3, decision.checkpointing.keep),
        ),
        monitoring=dataclasses.replace(
            decision.monitoring, **dict.fromkeys(monitored, EVERY_STEPS)
        ),
        data=dataclasses.replace(
            decision.data,
            data_id=manifest.data_id,
            num_train_tokens=manifest.count_tokens("train"),
            weights=(),  # the cut has its own
        ),
        **changes,
    )


def shorten_schedule(schedule: Schedule) -> Schedule:
    """Return the same form in few steps: warmup and batch warmup in the first quarter, a final
    decay of the same share.
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


def _choose_small_base(shape: Shape) -> Shape:
    """Return a base half as wide as the copy, so that the copy's groups have numbers that differ
    from the base's.
    """
    is_grouped = shape.num_heads > shape.num_kv_heads
    num_heads = 2 if is_grouped else 1
    width = min(HEAD_DIM, shape.head_dim) * num_heads
    return dataclasses.replace(
        shape,
        width=width,
        num_heads=num_heads,
        num_kv_heads=1,
        ffn_width=max(8, 8 * round(width * shape.ffn_width / shape.width / 8)),
    )


def _build_spec(decision: Decision, hparams: Hparams) -> RunSpec:
    """Return a decision as the spec of a proxy; its batch and tokens also count as its base's."""
    needs_tokens = decision.parametrization.needs_tokens
    return RunSpec(
        shape=decision.shape,
        base_shape=decision.base_shape,
        parametrization=decision.parametrization,
        hparams=hparams,
        schedule=decision.learning_rate.schedule,
        batch_tokens=decision.batch_tokens,
        data_id=decision.data.data_id,
        seed=decision.seed % (MAX_SEED + 1),
        numerics=Numerics(dtype=decision.precision),
        optimizer=decision.optimizer,
        base_batch_tokens=decision.batch_tokens if needs_tokens else None,
        base_num_tokens=decision.num_tokens if needs_tokens else None,
        factory=decision.model.factory if decision.model else None,
    )


# ---- Hyperparameters that the frozen numbers imply ----


def _infer_hparams(decision: Decision, code_dir: Path = Path()) -> Hparams:
    """Return the hyperparameters at the base shape from which the frozen numbers follow.

    The table is the parametrization's, with the numbers of every parameter of a shape.
    """
    recipe = RECIPES[decision.optimizer]
    keywords = decision.model.keywords if decision.model else {}
    user_values = tuple(_build_user_value(name, value) for name, value in keywords.items())
    # With all hyperparameters at one, the table shows the parametrization's own factors.
    values: dict[str, float | None] = {
        **dict.fromkeys(recipe.hyperparameters, 1.0),
        **decision.run_wide,
    }
    # Hyperparameter -> the setting that it determines, and the groups with that setting
    set_by: dict[str, tuple[str, list[ParameterGroup]]] = {}
    for group in decision.groups:
        for setting in group.settings:
            name = recipe.get_hyperparameter_name(group.optimizer, setting)
            set_by.setdefault(name, (setting, []))[1].append(group)

    def make_hparams() -> Hparams:
        return Hparams(**values, own=user_values)  # type: ignore[arg-type]

    # A setting that the table does not scale has one number in all groups, which is the
    # hyperparameter itself.
    scaling = {name: HYPERPARAMETERS[name].scaling for name in set_by}
    alike = [name for name in set_by if scaling[name] in (None, "moments")]
    for name in alike:
        setting, groups = set_by[name]
        values[name] = groups[0].settings[setting]
    # Learning rates come first, because other settings may scale with them.
    rates = [name for name in set_by if scaling[name] == "learning_rate"]
    for names in (rates, [name for name in set_by if name not in (*alike, *rates)]):
        table = get_parameter_numbers(_build_spec(decision, make_hparams()), code_dir)
        values |= {name: _find_ratio(*set_by[name], table) for name in names}
    forward = compute_forward_numbers(_build_spec(decision, make_hparams()))
    for name, hyperparameter in HYPERPARAMETERS.items():
        if field := hyperparameter.multiplies:
            values[name] = getattr(decision.forward, field) / getattr(forward, field)
    return make_hparams()


def _find_ratio(
    setting: str, groups: Sequence[ParameterGroup], table: tuple[ParameterNumbers, ...]
) -> float:
    """Return the ratio of the groups' values of a setting to those in the table; 0 if all groups
    have 0.

    Raises:
        FrozenError: The ratio is not the same in all groups.
    """
    ratios = [
        group.settings[setting] / _find_member(group, table).settings[setting]
        for group in groups
        if group.settings[setting]
    ]
    if not ratios:
        return 0.0
    if max(ratios) - min(ratios) > MAX_DISAGREEMENT * max(ratios):
        problem = (
            f"{setting}: the groups imply from {min(ratios):.6g} to {max(ratios):.6g} at the base "
            "shape, but the parametrization has one value, so no small copy can have them; --full "
            "rehearses the real shape"
        )
        raise FrozenError("rehearsal", [problem])
    return ratios[0]


def _build_user_value(name: str, value: float | int | str) -> UserValue:
    """Return a keyword of the user's factory, as the main run has it."""
    if isinstance(value, str):
        return UserValue(name=name, value=0, word=value)
    return UserValue(name=name, value=value, whole=isinstance(value, int))


def _find_member(group: ParameterGroup, table: tuple[ParameterNumbers, ...]) -> ParameterNumbers:
    """Return the numbers of the first parameter of a group."""
    for numbers in table:
        if re.fullmatch(group.pattern, numbers.name):
            return numbers
    raise FrozenError("rehearsal", [f"the group {group.pattern[:80]!r} claims no parameter"])


def _replace_numbers(
    groups: tuple[ParameterGroup, ...], table: tuple[ParameterNumbers, ...]
) -> tuple[ParameterGroup, ...]:
    """Return the frozen groups with the numbers of the copy's parameters.

    Raises:
        FrozenError: A group has no parameter in the copy, or a parameter not exactly one group.
    """
    copied = []
    for group in groups:
        row = _find_member(group, table)
        copied.append(
            dataclasses.replace(
                group, optimizer=row.optimizer, settings=row.settings, init_std=row.init_std
            )
        )
    copied_groups = tuple(copied)
    assign_groups(copied_groups, [row.name for row in table])
    return copied_groups
