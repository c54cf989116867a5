"""The frozen numbers as live torch objects (model, initial weights, optimizer), and the proof that they are equal.

Parameters keep their full names and global sizes under FSDP2, so groups are assigned on the full model, and a weight's
initial value depends on (seed, name) alone: any number of ranks starts from the same weights.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from launcher.frozen.frozen import Decision, FrozenError, Parallelism, ParameterGroup, assign_groups, learning_rate_of
from launcher.trainer.ranks import device_mesh
from proxies.core.optimizers import DEFAULT, GROUP_NUMBERS, OptimizerName
from proxies.model import optimizer as optimizers
from proxies.model.optimizer import torch_optimizer
from proxies.model.precision import PRECISIONS
from proxies.parametrization.parametrization import drawn

if TYPE_CHECKING:
    from launcher.trainer.trained_model import TrainedModel

_OTHERS = "; export to a trainer that supports them"
STD_ERRORS = 6.0
"""A measured init std farther from the frozen one than so many standard errors is another distribution."""


def sharded_model(source: TrainedModel, parallelism: Parallelism, device_type: str) -> nn.Module:
    """The model with its parameters sharded block by block, float32 and uninitialized.

    Built on the meta device, so no rank ever holds the whole of it. Under `bfloat16` the forward and backward passes
    compute in bfloat16; gradients are reduced, and weights and moments kept, in float32. `parallelism` is the
    decision's own, or what other ranks make of it.
    """
    decision, model = source.decision, source.outline()
    blocks = source.blocks(model).values()
    if decision.compiled:
        for block in blocks:
            block.compile()
    policy, precision = MixedPrecisionPolicy(), PRECISIONS[decision.precision]
    if precision.compute != precision.weights:
        policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=precision.weights)
    mesh = device_mesh(parallelism, device_type)
    for part in (*blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    model.to_empty(device=mesh.device_type)
    return model


@torch.no_grad()
def initialize(model: nn.Module, groups: tuple[ParameterGroup, ...], seed: int) -> None:
    """Give every parameter its initial value of (seed, name), each rank keeping its own part.

    Raises:
        FrozenError: the groups do not fit the model's parameters.
    """
    assigned = assign_groups(groups, [name for name, _ in model.named_parameters()])
    for name, parameter in model.named_parameters():
        group = assigned[name]
        full = drawn(name, tuple(parameter.shape), group.kind, group.init_std, seed).to(parameter.device)
        if isinstance(parameter, DTensor):  # every rank has all of it: nothing is sent
            full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(full)


def build_optimizer(
    model: nn.Module, groups: tuple[ParameterGroup, ...], name: OptimizerName = DEFAULT
) -> torch.optim.Optimizer:
    """The optimizer with one parameter group per frozen group, in the frozen order, at the peak rates.

    Raises:
        FrozenError: the groups do not fit the model's parameters.
    """
    named = dict(model.named_parameters())
    assigned = assign_groups(groups, list(named))
    return torch_optimizer(
        name, [(group, [named[member] for member in assigned if assigned[member] == group]) for group in groups]
    )


def mismatches(
    model: nn.Module, optimizer: torch.optim.Optimizer, groups: tuple[ParameterGroup, ...], lr_share: float = 1.0,
    name: OptimizerName = DEFAULT,
) -> list[str]:  # fmt: skip
    """Where the live optimizer differs from the frozen groups, with the rates at `lr_share` of their peak.

    Raises:
        FrozenError: the groups do not fit the model's parameters.
    """
    names = {id(parameter): parameter_name for parameter_name, parameter in model.named_parameters()}
    assigned = assign_groups(groups, [*names.values()])
    live = {
        names[id(parameter)]: optimizers.live_numbers(group)
        for group in optimizer.param_groups for parameter in group["params"] if id(parameter) in names
    }  # fmt: skip
    problems = [f"the optimizer lacks {parameter}" for parameter in assigned if parameter not in live]
    for parameter, numbers in live.items():
        frozen = {field: getattr(assigned[parameter], field) for field in GROUP_NUMBERS}
        frozen["learning_rate"] *= lr_share
        problems += [
            f"{parameter}: {field} is {numbers[field]!r}, frozen as {frozen[field]!r}"
            for field in frozen
            if numbers[field] != frozen[field]
        ]
    return problems + optimizers.not_plain(name, optimizer)


@torch.no_grad()
def prove_init(model: nn.Module, groups: tuple[ParameterGroup, ...]) -> None:
    """Hold the initial weights, gathered, against the frozen stds; collective.

    Raises:
        FrozenError: a weight's std is not the frozen one within its sampling error, a gain is not one, or a bias is
            not zero.
    """
    assigned = assign_groups(groups, [name for name, _ in model.named_parameters()])
    problems = []
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        measured = float(full.std(correction=0))
        wanted = assigned[name].init_std
        start = {"gain": 1, "bias": 0}.get(assigned[name].kind.rpartition("_")[2])
        if start is not None:
            if not bool((full == start).all()):
                problems.append(f"{name}: a {assigned[name].kind} does not start at {start}")
        # The standard error of a normal sample's std is std / sqrt(2 n).
        elif abs(measured - wanted) > STD_ERRORS * wanted / math.sqrt(2 * full.numel()):
            problems.append(f"{name}: init std is {measured:.6g}, frozen as {wanted:.6g}")
    if problems:
        raise FrozenError("initial weights", problems)


def unfit(decision: Decision) -> list[str]:
    """Why the embedded trainer cannot run a decision, on whatever corpus and ranks; empty if it can."""
    if decision.own is not None:
        return ["your own trainer trains this config: `forerun export FROZEN --to command` writes how to start it"]
    layout = decision.parallelism
    expected = {
        "this version's learning-rate table differs from the frozen one: train with the version that froze it": (
            decision.learning_rate == learning_rate_of(decision.learning_rate.schedule)
        ),
        f"parallelism: tensor = {layout.tensor}, pipeline = {layout.pipeline}, context = {layout.context}: this "
        f"trainer is data parallel only, so all three must be 1{_OTHERS * (decision.model is None)}": (
            layout.tensor == layout.pipeline == layout.context == 1
        ),
        "precision = float64: must be float32 or bfloat16": decision.precision != "float64",
        "abort.on_non_finite = false: must be true, this trainer never steps on NaN": decision.abort.on_non_finite,
    }
    return [problem for problem, holds in expected.items() if not holds]
