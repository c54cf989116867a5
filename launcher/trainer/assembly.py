"""The frozen numbers as live torch objects (model, initial weights, optimizer), and the proof that
they are equal.

Parameters keep their full names and global sizes under FSDP2, so groups are assigned on the full
model, and a weight's initial value depends on (seed, name) alone: any number of ranks starts from
the same weights.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from launcher.frozen.frozen import (
    Decision,
    FrozenError,
    Parallelism,
    ParameterGroup,
    assign_groups,
    learning_rate_of,
)
from launcher.trainer.ranks import device_mesh, hand_out, own_part
from proxies.core.hyperparameters import HYPERPARAMETERS, LEARNING_RATE
from proxies.core.notation import with_article
from proxies.model import optimizer as optimizers
from proxies.model.decoder import Decoder
from proxies.model.loss import LOSS_TERMS, FusedLoss, surprise_and_gradient
from proxies.model.optimizer import torch_optimizer
from proxies.model.precision import PRECISIONS
from proxies.parametrization.parametrization import drawn

if TYPE_CHECKING:
    from launcher.trainer.trained_model import TrainedModel

_OTHERS = "; export to a trainer that supports them"
RUN_WIDE_APPLIED = (*optimizers.APPLIED_TO_GRADIENT, *LOSS_TERMS)
"""Run-wide settings that the embedded trainer applies."""
STD_ERRORS = 6.0
"""A measured init std farther from the frozen one than so many standard errors is another
distribution."""


def sharded_model(source: TrainedModel, parallelism: Parallelism, device_type: str) -> nn.Module:
    """The model with its parameters sharded block by block, float32 and uninitialized.

    Built on the meta device, so no rank ever holds the whole of it. Under `bfloat16` the forward
    and backward passes compute in bfloat16; gradients are reduced, and weights and moments kept, in
    float32. `parallelism` is the decision's own, or what other ranks make of it. One rank alone
    shards nothing: forerun's own model casts its weights itself there, as a proxy does
    (`proxies.model.precision`), and the host is spared FSDP2's half of its work.
    """
    decision, model = source.decision, source.outline()
    blocks = source.blocks(model).values()
    if decision.compiled:
        compile_parts([*blocks], [part for part in model.modules() if isinstance(part, FusedLoss)])
    policy, precision = MixedPrecisionPolicy(), PRECISIONS[decision.precision]
    if isinstance(model, Decoder) and parallelism.num_ranks == 1:
        model.compute = precision.compute
        model.to_empty(device=device_type)
        if decision.shape.tied:  # which made each of the two a parameter of its own
            model.lm_head.weight = model.tok_embeddings.weight
        return model
    if precision.compute != precision.weights:
        policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=precision.weights)
    mesh = device_mesh(parallelism, device_type)
    for part in (*blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    model.to_empty(device=mesh.device_type)
    return model


def compile_parts(blocks: Sequence[nn.Module], losses: Sequence[FusedLoss] = ()) -> None:
    """torch.compile of each block, and of a loss's parts; from the first that cannot be, all are
    eager, and say so.

    Backward passes are compiled with the forward ones: an error in the midst of a backward pass
    could only end the run.
    """
    from torch._dynamo.exc import TorchDynamoException  # the compiler takes seconds to load
    from torch._functorch import config as functorch_config

    if hasattr(functorch_config, "force_non_lazy_backward_lowering"):  # since torch 2.8
        functorch_config.force_non_lazy_backward_lowering = True

    def guarded(compiled: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
        def call(*inputs: Any, **named: Any) -> Any:
            try:
                return compiled(*inputs, **named)
            except TorchDynamoException as error:
                for block in blocks:
                    block._compiled_call_impl = None
                for loss in losses:
                    loss.of_part = None
                first = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
                print(
                    f"blocks cannot be compiled ({first}): this rank goes on eagerly, slower, with "
                    "the same numbers up "
                    "to rounding",
                    file=sys.stderr,
                    flush=True,
                )
                return eager(*inputs, **named)

        return call

    for block in blocks:
        block.compile()
        assert block._compiled_call_impl is not None
        block._compiled_call_impl = guarded(block._compiled_call_impl, block)
    for loss in losses:
        loss.of_part = guarded(torch.compile(surprise_and_gradient), surprise_and_gradient)


def initialize(model: nn.Module, groups: tuple[ParameterGroup, ...], seed: int) -> None:
    """Give every parameter its initial value of (seed, name), each rank keeping its own part;
    collective.

    A value is drawn number after number, so nobody can draw its last rows alone. Instead each
    parameter is drawn by one rank, as many at a time as there are ranks, those of about one size
    together, and handed out.

    Raises:
        FrozenError: the groups do not fit the model's parameters.
    """
    named = sorted(model.named_parameters(), key=lambda item: -item[1].numel())
    assigned = assign_groups(groups, [name for name, _ in named])
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for start in range(0, len(named), num_ranks):
        turn, mine = named[start : start + num_ranks], None
        if rank < len(turn):
            name, parameter = turn[rank]
            mine = drawn(
                name, tuple(parameter.shape), assigned[name].kind, assigned[name].init_std, seed
            )
        for owner, (_, parameter) in enumerate(turn):
            hand_out(parameter, mine if owner == rank else None, owner)


def build_optimizer(
    model: nn.Module, groups: tuple[ParameterGroup, ...], recipe: str
) -> torch.optim.Optimizer:
    """Return the recipe's optimizer with one parameter group per frozen group, in their order, at
    the peak rates.

    Raises:
        FrozenError: the groups do not fit the model's parameters.
    """
    named = dict(model.named_parameters())
    assigned = assign_groups(groups, list(named))
    members = [
        (group, [named[name] for name in assigned if assigned[name] == group]) for group in groups
    ]
    fused = all(parameter.device.type == "cuda" for parameter in named.values())
    return torch_optimizer(recipe, members, fused=fused)


def mismatches(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    groups: tuple[ParameterGroup, ...],
    recipe: str,
    lr_share: float = 1.0,
) -> list[str]:
    """Return where the live optimizer differs from the frozen groups, with the rates at `lr_share`
    of their peak.

    Raises:
        FrozenError: the groups do not fit the model's parameters.
    """
    if problems := optimizers.not_plain(recipe, optimizer):
        return problems  # its groups have other keys
    names = {
        id(parameter): parameter_name for parameter_name, parameter in model.named_parameters()
    }
    assigned = assign_groups(groups, [*names.values()])
    live = {
        names[id(parameter)]: optimizers.live_settings(recipe, group)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in names
    }
    problems = [
        f"the optimizer lacks {parameter}" for parameter in assigned if parameter not in live
    ]
    for parameter, there in live.items():
        frozen = assigned[parameter]
        if there.optimizer != frozen.optimizer:
            problems.append(
                f"{parameter}: optimizer is {there.optimizer!r}, frozen as {frozen.optimizer!r}"
            )
            continue
        wanted = {**frozen.settings, LEARNING_RATE: frozen.learning_rate * lr_share}
        problems += [
            f"{parameter}: {name} is {there.settings[name]!r}, frozen as {value!r}"
            for name, value in wanted.items()
            if there.settings[name] != value
        ]
    return problems


@torch.no_grad()
def prove_init(model: nn.Module, groups: tuple[ParameterGroup, ...]) -> None:
    """Hold the initial weights, each rank its part, against the frozen stds; collective.

    Raises:
        FrozenError: a weight's std is not the frozen one within its sampling error, a gain is not
            one, or a bias is not zero.
    """
    named = dict(model.named_parameters())
    assigned = assign_groups(groups, [*named])
    starts = {
        name: {"gain": 1, "bias": 0}.get(assigned[name].kind.rpartition("_")[2]) for name in named
    }
    sums = []
    for name, parameter in named.items():
        part, share = own_part(parameter)
        start = starts[name]
        astray = part.new_zeros(()) if start is None else torch.ne(part, start).sum()
        sums.append(share * torch.stack([*_sums(part), astray.double()]))
    total_P3 = torch.stack(sums)
    dist.all_reduce(total_P3)
    problems = []
    for (name, parameter), (total, square, astray) in zip(
        named.items(), total_P3.tolist(), strict=True
    ):
        wanted, count = assigned[name].init_std, parameter.numel()
        measured = math.sqrt(max(0.0, square / count - (total / count) ** 2))
        if starts[name] is not None:
            if astray:
                problems.append(
                    f"{name}: {with_article(assigned[name].kind)} does not start at {starts[name]}"
                )
        # The standard error of a normal sample's std is std / sqrt(2 n).
        elif not abs(measured - wanted) <= STD_ERRORS * wanted / math.sqrt(2 * count):
            problems.append(f"{name}: init std is {measured:.6g}, frozen as {wanted:.6g}")
    if problems:
        raise FrozenError("initial weights", problems)


def _sums(part: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of a tensor and that of its squares, float64; of few ranks' parts some are empty."""
    if not part.numel():
        return (zero := torch.zeros((), dtype=torch.float64, device=part.device)), zero
    variance, mean = (moment.double() for moment in torch.var_mean(part, correction=0))
    return part.numel() * mean, part.numel() * (variance + mean.square())


def unfit(decision: Decision) -> list[str]:
    """Why the embedded trainer cannot run a decision, on whatever corpus and ranks; empty if it
    can.
    """
    if decision.own is not None:
        return [
            (
                "your own trainer trains this config: `forerun export FROZEN --to command` writes "
                "how "
                "to start it"
            )
        ]
    layout = decision.parallelism
    expected = {
        (
            "this version's learning-rate table differs from the frozen one: train with the "
            "version "
            "that froze it"
        ): (decision.learning_rate == learning_rate_of(decision.learning_rate.schedule)),
        f"parallelism: tensor = {layout.tensor}, pipeline = {layout.pipeline}, context = "
        f"{layout.context}: this "
        f"trainer is data parallel only, so all three must be 1{_OTHERS * (decision.model is None)}": (  # noqa: E501
            layout.tensor == layout.pipeline == layout.context == 1
        ),
        "precision = float64: must be float32 or bfloat16": decision.precision != "float64",
        "abort.on_non_finite = false: must be true, this trainer never steps on NaN": decision.abort.on_non_finite,  # noqa: E501
        **{
            f"{name} = {value}: this trainer does not apply it": False
            for name, value in decision.run_wide.items()
            if name not in RUN_WIDE_APPLIED and value != HYPERPARAMETERS[name].off
        },
    }
    return [problem for problem, holds in expected.items() if not holds]
