"""What Megatron-LM's command line makes of a few numbers: rate, decay and eps of each parameter,
and lr(t).

Megatron (0.19) knows four sorts of parameters: word embeddings, the output layer, other matrices,
vectors. One peak rate, one decay and one eps serve them all, but for two rules (its
`get_standard_config_overrides` and `get_mup_config_overrides`): vectors never decay; `--use-mup`
divides the other matrices' rate and eps by m = hidden size / base hidden size. The decay stays as
it is. (`--decoupled-lr`, one rate for embeddings and output layer, is not used.) The tests hold
what is computed here against Megatron's own groups and its own scheduler.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from launcher.frozen.frozen import Decision, ParameterGroup, assign_groups
from proxies.core.schedule import DecayShape, lr_table
from proxies.core.shape import parameter_shapes

Sort = Literal["embedding", "output", "matrix", "vector"]
SAME = 1e-12
"""Relative; what Megatron multiplies and divides again rounds, nothing else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flags:
    """The numbers Megatron's rules start from."""

    learning_rate: float
    """`--lr`: the peak of all but the matrices under `--use-mup`."""
    weight_decay: float
    eps: float
    """`--adam-eps`: of all but the matrices under `--use-mup`."""
    beta1: float
    beta2: float
    base_width: int | None
    """`--mup-base-hidden-size`; None: without `--use-mup`."""


WSD_STYLES: dict[DecayShape, str] = {"linear": "linear", "sqrt": "minus_sqrt"}
"""Megatron's words for the decay of WSD."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheduler:
    """Megatron's lr(t), t counted from 0."""

    kind: str
    warmup: int
    init_share: float
    """`--lr-warmup-init` over the peak. One absolute number for all groups: nonzero only where
    their peaks agree."""
    total: int
    decay: int
    """Steps of WSD's last part."""
    final_fraction: float
    decay_shape: DecayShape = "linear"

    def share(self, step: int) -> float:
        """The rate as a share of the peak (`OptimizerParamScheduler.get_lr`)."""
        if 0 < self.warmup >= step:
            return self.init_share + (1 - self.init_share) * step / self.warmup
        if self.kind == "constant":
            return 1.0
        if self.kind == "wsd":
            done = max(0, step - (self.total - self.decay)) / self.decay
        else:
            done = (step - self.warmup) / (self.total - self.warmup)
        if self.kind == "cosine":
            share = 0.5 * (math.cos(math.pi * done) + 1)
        else:
            share = 1 - (math.sqrt(done) if self.decay_shape == "sqrt" else done)
        return self.final_fraction + share * (1 - self.final_fraction)


def sorts(decision: Decision) -> dict[Sort, list[tuple[str, ParameterGroup]]]:
    """Every parameter's name and frozen numbers, by Megatron's sort.

    Raises:
        FrozenError: the groups do not fit the shape's parameters.
    """
    sizes = parameter_shapes(decision.shape)
    found: dict[Sort, list[tuple[str, ParameterGroup]]] = {}
    for name, group in assign_groups(decision.groups, list(sizes)).items():
        sort: Sort = "output" if name.startswith("lm_head") else "matrix"
        if len(sizes[name]) == 1:
            sort = "vector"
        elif name.startswith("tok_embeddings"):
            sort = "embedding"
        found.setdefault(sort, []).append((name, group))
    return found


def flags_of(decision: Decision) -> Flags:
    """The flags that give most parameters their frozen numbers: matrices, which hold most weights,
    always theirs.

    Raises:
        FrozenError: the groups do not fit the shape's parameters.
    """
    of = {sort: members[0][1] for sort, members in sorts(decision).items()}
    matrix, vector = of["matrix"], of["vector"]
    forward, shape = decision.forward, decision.shape
    multiplier = vector.learning_rate / matrix.learning_rate if matrix.learning_rate > 0 else 1.0
    plain = (
        math.isclose(multiplier, 1, rel_tol=SAME)
        and forward.embedding == forward.output == 1
        and math.isclose(forward.attention, 1 / math.sqrt(shape.head_dim), rel_tol=SAME)
    )
    base_width = None if plain else max(1, round(shape.width / multiplier))
    return Flags(
        learning_rate=vector.learning_rate,
        weight_decay=matrix.weight_decay,
        eps=matrix.settings["eps"] * (1 if base_width is None else shape.width / base_width),
        beta1=matrix.settings["beta1"],
        beta2=matrix.settings["beta2"],
        base_width=base_width,
    )


def numbers_of(flags: Flags, width: int, sort: Sort) -> dict[str, float]:
    """Return what Megatron trains a sort of parameter with, by AdamW's settings."""
    scale = (
        1.0 / (width / flags.base_width)
        if flags.base_width is not None and sort == "matrix"
        else 1.0
    )
    return {
        "learning_rate": flags.learning_rate * scale,
        "weight_decay": 0.0 if sort == "vector" else flags.weight_decay,
        "eps": flags.eps * scale,
        "beta1": flags.beta1,
        "beta2": flags.beta2,
    }


def differences(decision: Decision, flags: Flags) -> dict[str, str]:
    """Return, by AdamW's setting, where Megatron's number is not the frozen one; nothing for
    settings that agree.
    """
    found: dict[str, dict[str, None]] = {}
    for sort, members in sorts(decision).items():
        for field, theirs in numbers_of(flags, decision.shape.width, sort).items():
            for _, group in members:
                ours = group.settings[field]
                if not math.isclose(ours, theirs, rel_tol=SAME):
                    said = f"{group.kind}: frozen {ours:.6g}, Megatron {theirs:.6g}"
                    found.setdefault(field, {})[said] = None
    return {field: "; ".join(said) for field, said in found.items()}


def scheduler_of(decision: Decision, flags: Flags) -> tuple[Scheduler, float]:
    """The scheduler nearest to the frozen table, and how far it is: the largest difference of
    shares of the peak.

    Megatron warms up from step 0's t / W, ours from (t + 1) / W. Where all peaks agree, W - 1 steps
    from a start of peak / W give ours; but a decay that starts at the warmup's end then starts a
    step early.
    """
    schedule = decision.learning_rate.schedule
    rates = {
        numbers_of(flags, decision.shape.width, sort)["learning_rate"]
        for sort in ("matrix", "vector")
    }
    warmup = schedule.warmup_steps
    starts = [(warmup, 0.0)]
    if len(rates) == 1 and warmup:
        starts.append((max(1, warmup - 1), 1 / warmup))
    table, found = lr_table(schedule), []
    for steps, init_share in starts:
        scheduler = Scheduler(
            kind=schedule.kind,
            decay_shape=schedule.decay_shape,
            warmup=steps,
            init_share=init_share,
            total=schedule.num_steps,
            decay=schedule.decay_steps,
            final_fraction=schedule.final_fraction,
        )
        off = max(abs(scheduler.share(step) - share) for step, share in enumerate(table))
        found.append((scheduler, off))
    return min(found, key=lambda one: one[1])
