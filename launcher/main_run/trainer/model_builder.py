"""The frozen config as live torch objects: the model, its initial weights, and its optimizer.

Initial weights and optimizer are compared with the frozen numbers before the first step.

A frozen parameter group has the optimizer, its settings, and the initial std (standard deviation)
of all parameters whose names match its pattern. A proxy is one of the small models of the study
from which the config was frozen.

The model is forerun's decoder, or the one that the user's own factory builds. Both are built on the
meta device, so that no rank holds all of it. Parameters keep their full names and global sizes
under FSDP2, so groups are assigned on the full model. The initial value of a decoder's weight is a
function of (seed, name) alone, so any number of ranks starts from the same weights. A user's model
is built with its values on rank 0, as the proxies are, and broadcast parameter by parameter.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from forerun._launcher.main_run.frozen.frozen import (
    Decision,
    FrozenError,
    OwnModel,
    Parallelism,
    assign_groups,
)
from forerun._launcher.main_run.trainer.ranks import (
    agree,
    broadcast_parameter,
    build_device_mesh,
    gather_full_value,
    get_local_device,
    run_on_first_rank,
)
from forerun._proxies.core.hyperparameters import LEARNING_RATE
from forerun._proxies.core.notation import add_article
from forerun._proxies.external.construction import (
    Build,
    compute_logits,
    construct,
    construct_on_meta,
    find_block_prefixes,
    get_group_name,
    measure_spreads,
)
from forerun._proxies.external.factory import hook_multipliers, load_unchanged_factory
from forerun._proxies.model import optimizer as optimizers
from forerun._proxies.model.decoder import Checkpointing, Decoder, Multipliers, run_checkpointed
from forerun._proxies.model.loss import (
    FusedLoss,
    compute_part_loss,
    compute_token_loss,
    get_loss_weights,
)
from forerun._proxies.model.optimizer import build_torch_optimizer
from forerun._proxies.model.precision import PRECISIONS
from forerun._proxies.parametrization.parametrization import draw_tensor

STD_ERRORS = 6.0
"""Number of standard errors by which a measured initial std may differ from the frozen one."""
USER_STD_SLACK = 0.01
"""Share by which the initial std of a user's model may differ from the frozen one in addition to
its sampling error: the frozen std was measured too."""
MAX_CONSTANT_ERROR = 1e-6
"""Maximum error of the mean of a gain or bias, and of its std, around the value it starts at."""


# ---- Model ----


def load_trained_model(decision: Decision, code_dir: Path | None) -> TrainedModel:
    """Return the model of a decision.

    Args:
        decision: The decision.
        code_dir: Folder that a user's factory is imported from; None for the working directory.

    Raises:
        FactoryError: There is no such factory.
        FactoryChangedError: The factory's source is not the frozen one.
    """
    if decision.model is None:
        return TrainedModel(decision)
    user_model = decision.model
    build = load_unchanged_factory(user_model.factory, code_dir or Path(), user_model.keywords)
    return UserModel(decision, user_model, build)


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """forerun's decoder (`forerun._proxies.model.decoder.Decoder`), as the trainer uses it.

    `build_on_meta` builds the module. All other methods take that module, sharded or not.
    """

    decision: Decision

    def build_on_meta(self) -> nn.Module:
        """Return the model without its values, on the meta device.

        On a GPU the decoder computes the loss in parts, so the full logits are never in memory.
        """
        return Decoder(
            self.decision.shape,
            device="meta",
            checkpointing=self._checkpointing,
            fused_loss=get_local_device().type == "cuda",
        )

    @property
    def _checkpointing(self) -> Checkpointing:
        """Activations of a block that the backward pass recomputes."""
        choices: dict[str, Checkpointing] = {"none": False, "selective": "selective", "full": True}
        return choices[self.decision.parallelism.activation_checkpointing]

    def find_blocks(self, module: nn.Module) -> dict[str, nn.Module]:
        """Return the modules that are sharded one by one, by path.

        All other modules are sharded together.
        """
        user_model = self.decision.model
        patterns = user_model.blocks if user_model else ("layers.*",)
        return {
            f"{path}.{name}": block
            for path in (pattern.removesuffix(".*") for pattern in patterns)
            for name, block in module.get_submodule(path).named_children()
        }

    def forward(
        self, module: nn.Module, ids_BT: Tensor, targets_BT: Tensor | None = None
    ) -> Tensor:
        """Return logits, or the mean loss in nats per token, in the precision of training.

        Args:
            module: The model.
            ids_BT: Token ids, [B, T].
            targets_BT: Ids of the next tokens, [B, T]; None to return logits, [B * T, V].
        """
        multipliers = Multipliers.from_run(self.decision.forward, self.decision.run_wide)
        return cast(Tensor, module(ids_BT, multipliers, targets_BT))

    def initialize(self, module: nn.Module) -> None:
        """Give every parameter its initial value, a function of (seed, name); collective.

        The numbers of a parameter are drawn in sequence, so a rank cannot draw its own part alone.
        Instead, one rank draws the whole parameter and broadcasts it. The ranks draw at the same
        time: in each turn, every rank draws one of several parameters of similar size.

        Raises:
            FrozenError: The groups do not fit the model's parameters.
        """
        named = sorted(module.named_parameters(), key=lambda item: -item[1].numel())
        assigned = assign_groups(self.decision.groups, [name for name, _ in named])
        rank, num_ranks, value = dist.get_rank(), dist.get_world_size(), None
        for start in range(0, len(named), num_ranks):
            turn = named[start : start + num_ranks]
            if rank < len(turn):
                name, parameter = turn[rank]
                group, size = assigned[name], tuple(parameter.shape)
                value = draw_tensor(name, size, group.kind, group.init_std, self.decision.seed)
            for owner, (_, parameter) in enumerate(turn):
                broadcast_parameter(parameter, value, owner)

    @torch.no_grad()
    def prove_initial(self, module: nn.Module) -> None:
        """Compare the stds of the initial values with the frozen ones; collective.

        Each parameter of forerun's decoder is measured by itself. If its frozen std is 0, it must
        be constant: one for a gain, zero for a bias. Parameters of a user's model with one name in
        all blocks are measured together, because a factory may start blocks differently.

        Raises:
            FrozenError: A value is not the frozen one.
        """
        is_users, num_layers = self.decision.model is not None, self.decision.shape.num_layers
        named = dict(module.named_parameters())
        assigned = assign_groups(self.decision.groups, [*named])
        blocks = find_block_prefixes(module, num_layers) if is_users else frozenset()
        members: defaultdict[str, list[str]] = defaultdict(list)
        for name in named:
            members[get_group_name(name, blocks)].append(name)
        problems = []
        for key, names in members.items():
            group, count = assigned[names[-1]], sum(named[name].numel() for name in names)
            sums_3 = torch.stack([_sum_powers(named[name]) for name in names]).sum(dim=0)
            mean, square, fourth = (sums_3 / count).tolist()
            std = math.sqrt(max(0.0, square - mean**2))
            if group.init_std:
                # The tolerance follows from the standard error of the std. forerun's values are
                # normal. For a user's distribution, the error follows from the fourth moment.
                tolerance = STD_ERRORS * group.init_std / math.sqrt(2 * count)
                if is_users:
                    variance = max(0.0, fourth - std**4) / count
                    error = math.sqrt(variance) / (2 * std) if std else 0.0
                    tolerance = STD_ERRORS * error + USER_STD_SLACK * group.init_std
                if not abs(std - group.init_std) <= tolerance:  # so that NaN is refused too
                    problems.append(f"{key}: init std is {std:.6g}, frozen as {group.init_std:.6g}")
            elif not is_users:
                start = 1 if group.kind.endswith("gain") else 0
                if max(abs(mean - start), std) > MAX_CONSTANT_ERROR:
                    problems.append(f"{key}: {add_article(group.kind)} does not start at {start}")
        if problems:
            raise FrozenError("initial weights", problems)


@dataclass(frozen=True, slots=True)
class UserModel(TrainedModel):
    """The model that the user's factory builds."""

    user_model: OwnModel
    build: Build

    def build_on_meta(self) -> nn.Module:
        """Return the model on the meta device, with forward multipliers and recomputation added."""
        decision, how = self.decision, self._checkpointing
        module = construct_on_meta(self.build, decision.shape, decision.forward).float().train()
        hook_multipliers(
            module, decision.forward, self.user_model.embeddings, self.user_model.readouts
        )
        for block in self.find_blocks(module).values() if how else ():
            block.forward = partial(_recompute, how, block.forward)
        return module

    def forward(
        self, module: nn.Module, ids_BT: Tensor, targets_BT: Tensor | None = None
    ) -> Tensor:
        """Return logits or loss; a bfloat16 run computes under autocast, as its proxies do."""
        is_bfloat16 = self.decision.precision == "bfloat16"
        with torch.autocast(ids_BT.device.type, torch.bfloat16, enabled=is_bfloat16):
            logits_NV = compute_logits(module, ids_BT).flatten(0, 1)
        if targets_BT is None:
            return logits_NV
        return compute_token_loss(logits_NV, targets_BT, get_loss_weights(self.decision.run_wide))

    @torch.no_grad()
    def initialize(self, module: nn.Module) -> None:
        """Build the model on rank 0, as the proxies' models are built, and broadcast its values.

        Constants are broadcast too: buffers, and tensors in plain attributes.
        """
        is_first = dist.get_rank() == 0
        built = agree(lambda: self._build_initial() if is_first else nn.Module())
        values = dict(built.named_parameters())
        for name, parameter in module.named_parameters():
            broadcast_parameter(parameter, values.get(name), owner=0)
        constants = run_on_first_rank(lambda: [value.cpu() for _, _, value in _constants(built)])
        for (owner, name, _), value in zip([*_constants(module)], constants, strict=True):
            setattr(owner, name, value.to(get_local_device()))

    def _build_initial(self) -> nn.Module:
        """Build the model on the CPU, and scale its initial values to the frozen stds."""
        decision = self.decision
        module = construct(self.build, decision.shape, decision.forward, seed=decision.seed).float()
        parameters = dict(module.named_parameters())
        assigned = assign_groups(decision.groups, [*parameters])
        by_group = measure_spreads(self.build, decision.shape)
        blocks = find_block_prefixes(module, decision.shape.num_layers)
        for name, parameter in parameters.items():
            spread, frozen_std = by_group[get_group_name(name, blocks)], assigned[name].init_std
            if frozen_std and spread.is_random and frozen_std != spread.std:
                parameter.mul_(frozen_std / spread.std)
        return module


def _recompute(how: Checkpointing, forward: Any, *args: Any, **kwargs: Any) -> Any:
    return run_checkpointed(how, partial(forward, **kwargs), *args)


def _constants(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield module, name, and value of each tensor that is no parameter: a buffer, or a plain
    attribute.
    """
    for owner in module.modules():
        for name, value in [*owner._buffers.items(), *vars(owner).items()]:
            if isinstance(value, Tensor):
                yield owner, name, value


# ---- Sharding ----


def build_sharded_model(
    source: TrainedModel, parallelism: Parallelism, device_type: str
) -> nn.Module:
    """Return the model with its parameters sharded block by block, float32 and uninitialized.

    The model is built on the meta device, so no rank ever holds all of it. With the precision
    `bfloat16`, the passes compute in bfloat16. Gradients are reduced in float32, and weights and
    moments are kept in float32. A single rank shards nothing. There, forerun's own model casts its
    weights itself, as a proxy does (`forerun._proxies.model.precision`), which takes the host half
    of the time of FSDP2.

    Args:
        source: The model to build.
        parallelism: Layout of the decision, or another layout if the number of ranks differs.
        device_type: `cuda` or `cpu`.
    """
    decision, model = source.decision, source.build_on_meta()
    blocks = source.find_blocks(model).values()
    if decision.compiled:
        compile_parts(model, blocks)
    precision = PRECISIONS[decision.precision]
    if decision.model is None and parallelism.num_ranks == 1:
        decoder = cast(Decoder, model.to_empty(device=device_type))
        decoder.compute = precision.compute
        if decision.shape.tied:  # to_empty gave each of the two a parameter of its own
            decoder.lm_head.weight = decoder.tok_embeddings.weight
        return decoder
    policy = MixedPrecisionPolicy()
    if precision.compute != precision.weights:
        policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=precision.weights)
    mesh = build_device_mesh(parallelism, device_type)
    for part in (*blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    model.to_empty(device=mesh.device_type)
    return model


def compile_parts(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Compile each block of a model, and the parts of its loss.

    If the compiler fails, that part runs eagerly, and torch logs a warning. Backward passes are
    compiled together with the forward passes, because an error within a backward pass would end the
    run.
    """
    from torch._dynamo import config as dynamo_config  # loading the compiler takes seconds
    from torch._functorch import config as functorch_config

    dynamo_config.suppress_errors = True
    dynamo_config.fail_on_recompile_limit_hit = False  # torch refuses both; banks set it
    functorch_config.force_non_lazy_backward_lowering = True
    for block in blocks:
        block.compile()
    for module in model.modules():
        if isinstance(module, FusedLoss):
            module.compiled_part_loss = torch.compile(compute_part_loss)


def _sum_powers(parameter: Tensor) -> Tensor:
    """Return the sums of a parameter's values, squares, and fourth powers, float64, [3].

    The temporary copies take less memory than the optimizer's moments will.
    """
    values = parameter.detach().double()
    return torch.stack([gather_full_value(values.pow(power).sum()) for power in (1, 2, 4)])


# ---- Optimizer ----


def build_optimizer(model: nn.Module, decision: Decision) -> torch.optim.Optimizer:
    """Return the recipe's optimizer with one parameter group for each frozen group, in the same
    order, at the peak learning rates.

    Raises:
        FrozenError: The groups do not fit the model's parameters.
    """
    named = dict(model.named_parameters())
    assigned = assign_groups(decision.groups, [*named])
    members = [
        (group, [named[name] for name in assigned if assigned[name] == group])
        for group in decision.groups
    ]
    is_on_gpu = next(model.parameters()).is_cuda
    return build_torch_optimizer(decision.optimizer, members, fused=is_on_gpu)


def find_mismatches(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    decision: Decision,
    lr_share: float = 1.0,
) -> list[str]:
    """Return the differences of a live optimizer from the frozen groups.

    Args:
        model: Model whose parameters the optimizer updates.
        optimizer: The optimizer that trains the model.
        decision: The decision with the frozen groups.
        lr_share: Present learning rate divided by its peak, which is the same in all groups.

    Raises:
        FrozenError: The groups do not fit the model's parameters.
    """
    recipe = decision.optimizer
    if problems := optimizers.find_variant_problems(recipe, optimizer):
        return problems  # The groups of another optimizer have other keys.
    live: dict[nn.Parameter, dict[str, object]] = {}
    for group in optimizer.param_groups:
        actual = optimizers.read_settings(recipe, group)
        for parameter in group["params"]:
            live[parameter] = {"optimizer": actual.optimizer, **actual.settings}
    named = dict(model.named_parameters())
    for name, frozen in assign_groups(decision.groups, [*named]).items():
        settings = live.get(named[name], {})
        rate = frozen.learning_rate * lr_share
        expected = {"optimizer": frozen.optimizer, **frozen.settings, LEARNING_RATE: rate}
        problems += [
            f"{name}: {setting} is {settings.get(setting)!r}, frozen as {value!r}"
            for setting, value in expected.items()
            if settings.get(setting) != value
        ]
    return problems


def prove_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, decision: Decision, lr_share: float
) -> None:
    """Compare a live optimizer with the frozen groups (see `find_mismatches`).

    Raises:
        FrozenError: They differ.
    """
    if problems := find_mismatches(model, optimizer, decision, lr_share):
        raise FrozenError("live optimizer", problems)
