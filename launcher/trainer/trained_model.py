"""What the embedded trainer trains: forerun's decoder, or the model that the user's own factory
builds.

The user's model is built on the meta device like ours, so that no rank holds the whole of it; one
rank builds it with its numbers as the proxies do, and hands them out parameter by parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.frozen.frozen import Decision, FrozenError, OwnModel, assign_groups
from launcher.trainer import assembly
from launcher.trainer.ranks import device, hand_out, own_part, together
from proxies.external.construction import (
    Build,
    block_prefixes,
    construct,
    group_of,
    logits_of,
    outline,
    spreads,
)
from proxies.external.factory import checked_load, hook_multipliers
from proxies.model.decoder import Checkpointing, Decoder, Multipliers, recomputed
from proxies.model.loss import loss_weights, token_loss

MEASURED = 0.01
"""Share by which a user's initial std may be another than frozen beside its sampling error: both
are measured."""


class TrainedModel(Protocol):
    """The model of a frozen config; `module` is what `outline` gave, sharded or not."""

    @property
    def decision(self) -> Decision:
        """The config."""

    def outline(self) -> nn.Module:
        """The model without its numbers, on the meta device."""

    def blocks(self, module: nn.Module) -> dict[str, nn.Module]:
        """Modules that are sharded each by itself, by path; the rest is one part."""

    def logits(self, module: nn.Module, ids_BT: Tensor) -> Tensor:
        """Logits [N, V] of token ids [B, T], N = B * T, in the arithmetic of training."""

    def loss(self, module: nn.Module, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean loss in nats per token of token ids [B, T] and the ids that follow them, a
        scalar.
        """

    def initialize(self, module: nn.Module) -> None:
        """Give every parameter its initial value, and every buffer its value; collective."""

    def prove_initial(self, module: nn.Module) -> None:
        """Hold the initial values against the frozen ones; collective. Raises FrozenError."""


def trained_model(decision: Decision, code_dir: Path | None) -> TrainedModel:
    """The model of a config; the user's factory is found from `code_dir`, or the folder that this
    process is in.

    Raises:
        FactoryError, FactoryChangedError: there is no such factory, or it is another.
    """
    if decision.model is None:
        return OurModel(decision)
    own = decision.model
    return UserModel(decision, checked_load(own.factory, code_dir or Path(), own.keywords))


def recomputing(decision: Decision) -> Checkpointing:
    """What the backward pass of a block computes again."""
    asked = decision.parallelism.activation_checkpointing
    return "selective" if asked == "selective" else asked == "full"


@dataclass(frozen=True, slots=True)
class OurModel:
    """`proxies.model.decoder.Decoder`."""

    decision: Decision

    def outline(self) -> Decoder:
        """See `TrainedModel`. On a GPU the loss is taken by parts: the logits are never whole in
        memory.
        """
        on_gpu = device().type == "cuda"
        return Decoder(
            self.decision.shape,
            device="meta",
            checkpointing=recomputing(self.decision),
            fused_loss=on_gpu,
        )

    def blocks(self, module: nn.Module) -> dict[str, nn.Module]:
        """See `TrainedModel`."""
        return {
            f"layers.{name}": block
            for name, block in module.get_submodule("layers").named_children()
        }

    def logits(self, module: nn.Module, ids_BT: Tensor) -> Tensor:
        """See `TrainedModel`."""
        return cast(Tensor, module(ids_BT, self._multipliers))

    def loss(self, module: nn.Module, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """See `TrainedModel`."""
        return cast(Tensor, module(ids_BT, self._multipliers, targets_BT))

    @property
    def _multipliers(self) -> Multipliers:
        return Multipliers.of_run(self.decision.forward, self.decision.run_wide)

    def initialize(self, module: nn.Module) -> None:
        """See `TrainedModel`."""
        assembly.initialize(module, self.decision.groups, self.decision.seed)

    def prove_initial(self, module: nn.Module) -> None:
        """See `TrainedModel`."""
        assembly.prove_init(module, self.decision.groups)


@dataclass(frozen=True, slots=True)
class UserModel:
    """What the user's factory builds."""

    decision: Decision
    build: Build

    @property
    def _own(self) -> OwnModel:
        assert self.decision.model is not None
        return self.decision.model

    def outline(self) -> nn.Module:
        """See `TrainedModel`; hooked for the forward multipliers, its blocks set to compute again
        what is asked.
        """
        decision, how = self.decision, recomputing(self.decision)
        module = outline(self.build, decision.shape, decision.forward).float().train()
        hook_multipliers(module, decision.forward, self._own.embeddings, self._own.readouts)
        for block in self.blocks(module).values() if how else ():
            block.forward = partial(_again, how, block.forward)
        return module

    def blocks(self, module: nn.Module) -> dict[str, nn.Module]:
        """See `TrainedModel`."""
        lists = [pattern.removesuffix(".*") for pattern in self._own.blocks]
        return {
            f"{path}.{name}": block
            for path in lists
            for name, block in module.get_submodule(path).named_children()
        }

    def logits(self, module: nn.Module, ids_BT: Tensor) -> Tensor:
        """See `TrainedModel`: as the proxies, by autocast where the run is in bfloat16."""
        with torch.autocast(
            ids_BT.device.type, torch.bfloat16, enabled=self.decision.precision == "bfloat16"
        ):
            return logits_of(module, ids_BT).flatten(0, 1)

    def loss(self, module: nn.Module, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """See `TrainedModel`."""
        return token_loss(
            self.logits(module, ids_BT), targets_BT, loss_weights(self.decision.run_wide)
        )

    @torch.no_grad()
    def initialize(self, module: nn.Module) -> None:
        """See `TrainedModel`: rank 0 builds the model as the proxies' is built, and the others get
        it from there.
        """
        first = dist.get_rank() == 0
        started = together(lambda: self._started() if first else None)
        given = {} if started is None else dict(started.named_parameters())
        for name, parameter in module.named_parameters():
            hand_out(parameter, given.get(name), owner=0)
        kept = (
            {}
            if started is None
            else {(path, name): value.cpu() for path, name, value in _constants(started)}
        )
        constants: list[dict[tuple[str, str], Tensor]] = [kept]
        dist.broadcast_object_list(constants, src=0)
        for path, name, there in [*_constants(module)]:
            owner, value = module.get_submodule(path), constants[0][path, name]
            if name in owner._buffers:
                there.copy_(value)
            else:
                setattr(owner, name, value.to(next(module.parameters()).device))

    def _started(self) -> nn.Module:
        """The model with its numbers, on the CPU: what the factory draws, times what brings it to
        the frozen stds.
        """
        decision = self.decision
        module = construct(self.build, decision.shape, decision.forward, seed=decision.seed).float()
        parameters = dict(module.named_parameters())
        assigned, here = (
            assign_groups(decision.groups, [*parameters]),
            spreads(self.build, decision.shape),
        )
        blocks = block_prefixes(module, decision.shape.num_layers)
        for name, parameter in parameters.items():
            spread, wanted = here[group_of(name, blocks)], assigned[name].init_std
            if wanted and spread.random and wanted != spread.std:
                parameter.mul_(wanted / spread.std)
        return module

    @torch.no_grad()
    def prove_initial(self, module: nn.Module) -> None:
        """See `TrainedModel`: stds over all blocks together, for a factory may start each block
        otherwise.
        """
        blocks = block_prefixes(module, self.decision.shape.num_layers)
        assigned = assign_groups(
            self.decision.groups, [name for name, _ in module.named_parameters()]
        )
        sums: dict[str, Tensor] = {}
        wanted: dict[str, float] = {}
        for name, parameter in module.named_parameters():
            part, share = own_part(parameter)
            part = part.double()
            group = group_of(name, blocks)
            wanted[group] = assigned[name].init_std
            found = torch.stack(
                [part.new_tensor(part.numel()), *(part.pow(power).sum() for power in (1, 2, 4))]
            )
            sums[group] = sums[group] + share * found if group in sums else share * found
        total_G4 = torch.stack([*sums.values()])
        dist.all_reduce(total_G4)
        problems = []
        for group, (count, total, squares, fourths) in zip(sums, total_G4.tolist(), strict=True):
            std, frozen = math.sqrt(max(0.0, squares / count - (total / count) ** 2)), wanted[group]
            # The standard error of a std, whatever the distribution: half of that of the variance,
            # over the std.
            error = (
                math.sqrt(max(0.0, fourths / count - std**4) / count) / (2 * std) if std else 0.0
            )
            if frozen and abs(std - frozen) > assembly.STD_ERRORS * error + MEASURED * frozen:
                problems.append(f"{group}: init std is {std:.6g}, frozen as {frozen:.6g}")
        if problems:
            raise FrozenError("initial weights", problems)


def _again(how: Checkpointing, forward: Any, *inputs: Any, **named: Any) -> Any:
    return recomputed(how, partial(forward, **named), *inputs)


def _constants(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Tensors beside the parameters, as (module, name, value): buffers, and plain attributes
    without a value.
    """
    for path, child in module.named_modules():
        for name, value in [*child._buffers.items(), *vars(child).items()]:
            if isinstance(value, Tensor):
                yield path, name, value
