"""What single keys of a plan cannot show about its tests of transfer."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.plan.plan import Plan

MOST_OCTAVES = 20.0
"""From the base value: beyond, no float of a run would be sane."""


def transfer_lists(plan: Plan) -> dict[str, Sequence[float]]:
    """Lists in which no value may come twice."""
    transfer = plan.transfer
    return {
        "transfer.offsets_octaves": transfer.offsets_octaves,
        "transfer.narrow_offsets_octaves": transfer.narrow_offsets_octaves,
        "transfer.control_offsets_octaves": transfer.control_offsets_octaves,
        "transfer.hyperparameter_offsets_octaves": transfer.hyperparameter_offsets_octaves,
        "transfer.durations": transfer.durations,
        "transfer.depths": transfer.depths,
        "transfer.batches": transfer.batches,
    }


def transfer_problems(plan: Plan) -> list[str]:
    """Everything about `[transfer]` that does not hold together."""
    transfer, base = plan.transfer, plan.proxy.base_width
    problems = [
        f"transfer.{name} = {list(widths)}: must hold proxy.base_width = {base}, whose optimum is the one transferred"
        for name, widths in (("widths", transfer.widths), ("hyperparameter_widths", plan.hyperparameter_widths))
        if base not in widths
    ]
    if list(transfer.check_widths) != sorted(transfer.check_widths):
        problems.append(f"transfer.check_widths = {list(transfer.check_widths)}: increasing widths are wanted")
    depths = transfer.check_depths
    if list(depths) != sorted(set(depths)) or len(depths) == 1:
        problems.append(f"transfer.check_depths = {list(depths)}: two or more increasing depths, or none, are wanted")
    problems += _axis_problems(plan) + _value_problems(plan)
    far = {
        name: values
        for name, values in transfer_lists(plan).items()
        if "offsets" in name and max(map(abs, values)) > MOST_OCTAVES
    }
    return problems + [
        f"{name} = {list(values)}: offsets of at most {MOST_OCTAVES:g} octaves are wanted"
        for name, values in far.items()
    ]


def _axis_problems(plan: Plan) -> list[str]:
    """Each axis has the base and something else on it, in runs that can be made."""
    transfer, proxy = plan.transfer, plan.proxy
    axes: dict[str, tuple[Sequence[float], float]] = {
        "durations": (transfer.durations, 1.0),
        "batches": (transfer.batches, 1.0),
        "depths": (transfer.depths, plan.model.num_layers),
    }
    problems = [
        f"transfer.{name} = {list(values)}: must hold {base:g}, the proxies' own, and at least one more"
        for name, (values, base) in axes.items()
        if values and (base not in values or len(values) < 2)
    ]
    whole = plan.model.seq_len * plan.batch_stages
    for ratio in transfer.batches:
        batch = ratio * proxy.batch_tokens
        if proxy.batch_tokens % whole == 0 and batch % whole:
            problems.append(
                f"transfer.batches: {ratio:g} times proxy.batch_tokens = {batch:g} tokens, no multiple of {whole}"
            )
    problems += [
        f"transfer: a run of {ratio * proxy.num_steps:.3g} steps is too short"
        for ratio in (*transfer.durations, *(1 / ratio for ratio in transfer.batches))
        if round(ratio * proxy.num_steps) < max(1, plan.batch_stages - 1)
    ]
    steps = [round(ratio * proxy.num_steps) for ratio in transfer.durations]
    if len(set(steps)) < len(steps) == len(set(transfer.durations)):
        problems.append(
            f"transfer.durations = {list(transfer.durations)}: of {proxy.num_steps} steps, {steps}: each once"
        )
    if plan.target.batch_tokens % whole:
        problems.append(f"target.batch_tokens = {plan.target.batch_tokens}: no multiple of {whole} tokens")
    return problems


def _value_problems(plan: Plan) -> list[str]:
    """Hyperparameters that are tested have octaves, and sizes to be tested at."""
    transfer = plan.transfer
    zero = [name for name, value in plan.proxy.hyperparameters.items() if value == 0]
    sizes = {"depth": ("depths", transfer.depths), "batch": ("batches", transfer.batches)}
    sizes |= {"duration": ("durations", transfer.durations)}
    nowhere = [
        f"transfer.hyperparameters.{name}: over {axis}, and transfer.{sizes[axis][0]} is empty"
        for name, axes in transfer.hyperparameters.items()
        for axis in axes
        if axis in sizes and not sizes[axis][1]
    ]
    return (
        nowhere
        + [
            f"transfer.hyperparameters.{name}: tested by factors of 2, and proxy.{name} is 0"
            for name in plan.transfer.hyperparameters
            if name in zero and name not in {*plan.search.axes, *plan.search.choices}
        ]
        + [
            f"transfer.hyperparameters.{name} = {list(axes)}: each axis once"
            for name, axes in plan.transfer.hyperparameters.items()
            if len(set(axes)) < len(axes)
        ]
    )
