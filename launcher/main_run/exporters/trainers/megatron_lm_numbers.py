"""Numbers of Megatron-LM's command line: rate, decay, and eps of each parameter, and lr(t).

Megatron (0.19) distinguishes four sorts of parameters: word embeddings, the output layer, other
matrices, and vectors. All have the same peak rate, decay, and eps, apart from two rules (its
`get_standard_config_overrides` and `get_mup_config_overrides`): vectors never decay, and
`--use-mup` divides rate and eps of the other matrices by hidden size / base hidden size, but not
their decay. (`--decoupled-lr`, a second rate for embeddings and output layer, is not used.) The
tests compare what is computed here with Megatron's own groups and its own scheduler.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from forerun._launcher.main_run.frozen.frozen import Decision, ParameterGroup, assign_groups
from forerun._proxies.core.schedule import DecayShape, Schedule, compute_lr_table
from forerun._proxies.core.shape import list_parameter_shapes

Sort = Literal["embedding", "output", "matrix", "vector"]
"""Megatron's sort of a parameter, by which its rate, decay, and eps follow from the flags."""
SAME_TOLERANCE = 1e-12
"""Relative difference up to which numbers count as the same: Megatron multiplies and divides, and
each operation rounds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flags:
    """The numbers that Megatron's rules start from."""

    learning_rate: float
    """`--lr`: the peak rate of all parameters except the matrices under `--use-mup`."""
    weight_decay: float
    eps: float
    """`--adam-eps`: eps of all parameters except the matrices under `--use-mup`."""
    beta1: float
    beta2: float
    base_width: int | None
    """`--mup-base-hidden-size`; None without `--use-mup`."""


WSD_STYLES: dict[DecayShape, str] = {"linear": "linear", "sqrt": "minus_sqrt"}
"""Megatron's names for the decay of WSD."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheduler:
    """Megatron's lr(t), with t counted from 0."""

    frozen: Schedule
    """The frozen schedule, with which Megatron's agrees after the warmup."""
    warmup: int
    """Steps of Megatron's warmup."""
    init_share: float
    """`--lr-warmup-init` divided by the peak. The flag is one rate for all groups, so the share is
    nonzero only if all groups have the same peak."""

    def compute_share(self, step: int) -> float:
        """Return the learning rate divided by its peak (`OptimizerParamScheduler.get_lr`)."""
        frozen, num_steps = self.frozen, self.frozen.num_steps
        if 0 < self.warmup >= step:
            return self.init_share + (1 - self.init_share) * step / self.warmup
        if frozen.kind == "constant":
            return 1.0
        if frozen.kind == "wsd":
            progress = max(0, step - (num_steps - frozen.decay_steps)) / frozen.decay_steps
        else:
            progress = (step - self.warmup) / (num_steps - self.warmup)
        if frozen.kind == "cosine":
            share = 0.5 * (math.cos(math.pi * progress) + 1)
        else:
            share = 1 - (math.sqrt(progress) if frozen.decay_shape == "sqrt" else progress)
        return frozen.final_fraction + share * (1 - frozen.final_fraction)


def sort_parameters(decision: Decision) -> dict[Sort, list[tuple[str, ParameterGroup]]]:
    """Return the name and the group of every parameter, by Megatron's sort.

    Raises:
        FrozenError: The groups do not fit the shape's parameters.
    """
    shapes = list_parameter_shapes(decision.shape)
    parameters: dict[Sort, list[tuple[str, ParameterGroup]]] = defaultdict(list)
    for name, group in assign_groups(decision.groups, list(shapes)).items():
        sort: Sort = "output" if name.startswith("lm_head") else "matrix"
        if len(shapes[name]) == 1:
            sort = "vector"
        elif name.startswith("tok_embeddings"):
            sort = "embedding"
        parameters[sort].append((name, group))
    return parameters


def choose_flags(decision: Decision) -> Flags:
    """Return the flags that give as many parameters as possible their frozen numbers.

    The matrices, which have most of the weights, always get theirs.
    """
    parameters, forward, shape = sort_parameters(decision), decision.forward, decision.shape
    (_, matrix), (_, vector) = parameters["matrix"][0], parameters["vector"][0]
    multiplier = vector.learning_rate / matrix.learning_rate if matrix.learning_rate > 0 else 1.0
    needs_no_mup = (
        math.isclose(multiplier, 1, rel_tol=SAME_TOLERANCE)
        and forward.embedding == forward.output == 1
        and math.isclose(forward.attention, 1 / math.sqrt(shape.head_dim), rel_tol=SAME_TOLERANCE)
    )
    base_width = None if needs_no_mup else max(1, round(shape.width / multiplier))
    return Flags(
        learning_rate=vector.learning_rate,
        weight_decay=matrix.weight_decay,
        eps=matrix.settings["eps"] * (1 if base_width is None else shape.width / base_width),
        beta1=matrix.settings["beta1"],
        beta2=matrix.settings["beta2"],
        base_width=base_width,
    )


def derive_settings(flags: Flags, width: int, sort: Sort) -> dict[str, float]:
    """Return the AdamW settings with which Megatron trains a sort of parameter."""
    scale = 1.0
    if flags.base_width is not None and sort == "matrix":
        scale = 1.0 / (width / flags.base_width)
    return {
        "learning_rate": flags.learning_rate * scale,
        "weight_decay": 0.0 if sort == "vector" else flags.weight_decay,
        "eps": flags.eps * scale,
        "beta1": flags.beta1,
        "beta2": flags.beta2,
    }


def describe_differences(decision: Decision, flags: Flags) -> dict[str, str]:
    """Return a text by AdamW setting, for each setting that Megatron does not apply as frozen."""
    differences: dict[str, dict[str, None]] = defaultdict(dict)
    for sort, parameters in sort_parameters(decision).items():
        for setting, value in derive_settings(flags, decision.shape.width, sort).items():
            for _, group in parameters:
                frozen = group.settings[setting]
                if not math.isclose(frozen, value, rel_tol=SAME_TOLERANCE):
                    text = f"{group.kind}: frozen {frozen:.6g}, Megatron {value:.6g}"
                    differences[setting][text] = None
    return {setting: "; ".join(texts) for setting, texts in differences.items()}


def choose_scheduler(decision: Decision, flags: Flags) -> tuple[Scheduler, float]:
    """Return the scheduler nearest to the frozen table, and the largest difference between their
    shares of the peak.

    At step t of a warmup of W steps, Megatron's rate is t / W of the peak, and forerun's is
    (t + 1) / W. Where all groups have the same peak, W - 1 steps from a start at peak / W give the
    frozen warmup. But then a decay that starts at the warmup's end starts a step early.
    """
    schedule = decision.learning_rate.schedule
    warmup = schedule.warmup_steps
    starts = [(warmup, 0.0)]
    if warmup and flags.base_width in (None, decision.shape.width):
        starts.append((max(1, warmup - 1), 1 / warmup))
    table, candidates = compute_lr_table(schedule), []
    for num_steps, init_share in starts:
        scheduler = Scheduler(frozen=schedule, warmup=num_steps, init_share=init_share)
        error = max(abs(scheduler.compute_share(step) - share) for step, share in enumerate(table))
        candidates.append((scheduler, error))
    return min(candidates, key=lambda candidate: candidate[1])
