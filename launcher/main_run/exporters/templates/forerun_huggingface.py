"""Train a frozen launch config of forerun with transformers' Trainer, and resume where it stopped.

`run.sh` starts this program. The numbers come from `forerun.json`, the model from `config.json`,
and the arguments from `training_arguments.json`. Added to the Trainer are a parameter group for
each frozen group, the frozen lr(t), initial values by (seed, name), the data order, and the abort
policy. The code uses the public classes of transformers and copies nothing from it.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forerun_torch
import torch
from accelerate import ParallelismConfig, init_empty_weights
from forerun_numbers import HERE, open_corpus, other_versions, read_numbers, refuse
from forerun_torch import (
    assign_groups,
    read_rows,
    set_initial_values,
    stop_before_update,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

from forerun._proxies.core.schedule import Schedule, compute_lr_multiplier
from forerun._proxies.data.tokens import TokenStore

FROZEN = read_numbers()
SCHEDULE = Schedule(**vars(FROZEN.schedule))
MESH = FROZEN.parallelism
NUM_RANKS = MESH.data_parallel_shard * MESH.data_parallel_replicate


def frozen_name(name: str) -> str:
    """Return the frozen config's name of a parameter of GraniteForCausalLM."""
    name = name.removeprefix("model.")
    for part, frozen_part in FROZEN.names:
        name = name.replace(part, frozen_part)
    return name


def empty_model() -> Any:
    """Return the model of `config.json` in float32, without its frozen initial values."""
    config = GraniteConfig.from_pretrained(HERE)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def build_model() -> Any:
    """Return the model with the frozen initial values.

    If it will be sharded, only the first rank sets them, and accelerate distributes them.
    """
    if MESH.data_parallel_shard > 1 and int(os.environ.get("RANK", "0")):
        with init_empty_weights(include_buffers=False):
            model = empty_model()
        return allocate_parameters(model)
    model = empty_model()
    set_initial_values(model, FROZEN, frozen_name)
    return model


def allocate_parameters(model: Any) -> Any:
    """Replace the parameters of a model by uninitialized ones on the CPU, and return the model.

    Memory that is never written takes no pages of the machine.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(torch.empty_like(parameter, device="cpu")))
    model.tie_weights()
    return model


def build_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer, with the frozen groups in order and at their peak learning rates."""
    groups = assign_groups(model, FROZEN.groups, frozen_name)
    named = dict(model.named_parameters())
    members = [
        [named[name] for name, assigned in groups.items() if assigned is group]
        for group in FROZEN.groups
    ]
    return forerun_torch.build_optimizer(FROZEN.groups, members)


def lr_share(step: int) -> float:
    """Return the learning rate at an update, counted from 0, divided by its peak.

    LambdaLR also asks for the update after the last.
    """
    return compute_lr_multiplier(SCHEDULE, min(step, SCHEDULE.num_steps - 1))


def build_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Build the scheduler, which multiplies the peak rates by the frozen share of each update."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lr_share)


class Batches:
    """The microbatches of this rank, from the current step of the run on."""

    def __init__(self, trainer: "FrozenTrainer") -> None:
        self.trainer = trainer

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield inputs and targets of each microbatch."""
        args = self.trainer.args
        rank, num_ranks, num_parts = (
            args.process_index,
            args.world_size,
            args.gradient_accumulation_steps,
        )
        for step in range(self.trainer.state.global_step, SCHEDULE.num_steps):
            first, count = SCHEDULE.count_sequences(step, FROZEN.batch_sequences)
            size = count // (num_ranks * num_parts)
            for part in range(num_parts):
                first_row = first + (rank * num_parts + part) * size
                ids = read_rows(FROZEN, self.trainer.store, first_row, size)
                yield {"input_ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


class FrozenTrainer(Trainer):
    """transformers' Trainer with frozen groups, learning rates, batches, and abort policy."""

    # compute_loss returns the mean over a microbatch, and all have the same size. The Trainer
    # divides by their number, and DDP or FSDP averages over ranks.
    loss_is_scaled_for_ga = False
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, store: TokenStore, model: torch.nn.Module, args: TrainingArguments) -> None:
        super().__init__(model=model, args=args)
        if self.is_fsdp_enabled != (MESH.data_parallel_shard > 1):
            where = args.device.type
            refuse(
                f"accelerate ignores FSDP on {where}: weights would not be sharded as frozen; it "
                "needs GPUs"
            )
        self.store = store
        self.loss_nats = torch.zeros((), device=args.device)

    def get_train_dataloader(self) -> Batches:
        """Return the batches in the frozen order."""
        return Batches(self)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Build the optimizer with the frozen groups."""
        if self.optimizer is None:
            self.optimizer = build_optimizer(self.model if model is None else model)
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """Build the scheduler with the frozen learning rates."""
        if self.lr_scheduler is None:
            self.lr_scheduler = build_scheduler(optimizer or self.optimizer)
        return self.lr_scheduler

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> torch.Tensor:
        """Return the mean cross-entropy in nats per token; every row has only training tokens."""
        logits = model(input_ids=inputs["input_ids"], use_cache=False).logits
        return torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), inputs["targets"].flatten()
        )

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Run the Trainer's step, and add up its losses."""
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        self.loss_nats += loss
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Check loss and gradient norm: the last place before the update is applied or saved."""
        norm = super()._get_grad_norm(model, grad_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        loss_nats, step = (
            self.accelerator.reduce(self.loss_nats, "mean").item(),
            self.state.global_step + 1,
        )
        self.loss_nats.zero_()
        stop_before_update(
            loss_nats, float(norm), step, SCHEDULE.warmup_steps, FROZEN.train_loss_above_nats
        )
        return norm


def training_arguments() -> TrainingArguments:
    """Return the frozen arguments, with those that JSON cannot express."""
    arguments = json.loads((HERE / "training_arguments.json").read_text())
    # Without this setting, accelerate does not connect ranks on CPUs.
    arguments["use_cpu"] = not torch.accelerator.is_available()
    [args] = HfArgumentParser(TrainingArguments).parse_dict(arguments)
    if MESH.data_parallel_shard > 1 and MESH.data_parallel_replicate > 1:
        args.parallelism_config = ParallelismConfig(
            dp_replicate_size=MESH.data_parallel_replicate, dp_shard_size=MESH.data_parallel_shard
        )
    if MESH.data_parallel_shard > 1 and args.bf16:
        # accelerate's own policy would reduce gradients in bfloat16.
        args.fsdp_plugin_args["mixed_precision_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    return args


def check(args: TrainingArguments) -> None:
    """Refuse versions and numbers of ranks with which the run would not be the frozen one."""
    problems = other_versions(FROZEN.needs)
    if args.world_size != NUM_RANKS or args.n_gpu > 1:
        problems.append(
            f"{args.world_size} ranks with {args.n_gpu} devices each: must be {NUM_RANKS} with one "
            "each, see run.sh"
        )
    if problems:
        refuse(*problems)


def newest_checkpoint(out: Path) -> str | None:
    """Return the newest complete checkpoint; the Trainer writes trainer_state.json last."""
    complete = [path.parent for path in out.glob("checkpoint-*/trainer_state.json")]
    newest = max(complete, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    return None if newest is None else str(newest)


def main() -> None:
    """Train to the end of the schedule, from the newest checkpoint if there is one."""
    args = training_arguments()
    check(args)
    store = open_corpus(FROZEN, os.environ.get("FORERUN_DATA"))
    FrozenTrainer(store, build_model(), args).train(
        resume_from_checkpoint=newest_checkpoint(Path(args.output_dir))
    )


if __name__ == "__main__":
    main()
