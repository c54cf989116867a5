"""The fixed text of the scripts that the huggingface export writes: train.py's imports, and the run it makes of the
numbers; and prove.py.

Text, not code, since transformers lives in an environment of its own. Between train.py's two parts go the decision's
numbers, as literals. Written against transformers 5.23.0 and accelerate 1.15.0; nothing of theirs is copied.
"""

IMPORTS = """import hashlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import accelerate
import torch
import transformers
from accelerate import ParallelismConfig
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GraniteConfig, HfArgumentParser, Trainer, TrainingArguments

from proxies.core import canon
from proxies.data.tokens import TokenStore
from proxies.core.schedule import Schedule, lr_multiplier, lr_table

HERE = Path(__file__).resolve().parent
"""

MACHINERY = '''

def frozen_name(name: str) -> str:
    """The frozen config's name of a parameter of GraniteForCausalLM."""
    name = name.removeprefix("model.")
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def claimed(model: torch.nn.Module) -> dict[str, dict]:
    """Each parameter's group: exactly one, and none without a parameter."""
    names = [name for name, _ in model.named_parameters()]
    claims = {name: [g for g in GROUPS if re.fullmatch(g["pattern"], frozen_name(name))] for name in names}
    problems = [f"{len(found)} groups claim {name}" for name, found in claims.items() if len(found) != 1]
    used = [group for found in claims.values() for group in found]
    problems += [f"the group {group['pattern']!r} claims no parameter" for group in GROUPS if group not in used]
    if problems:
        raise ValueError("; ".join(problems))
    return {name: found[0] for name, found in claims.items()}


def initial_value(name: str, size: torch.Size, init_std: float) -> torch.Tensor:
    """Ones for norm gains (std 0), else normal(0, init_std) drawn on the CPU from a seed of (SEED, name)."""
    if init_std == 0:
        return torch.ones(size)
    seed = int.from_bytes(hashlib.sha256(f"{SEED}/{frozen_name(name)}".encode()).digest()[:7], "big")
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * init_std


def empty_model() -> torch.nn.Module:
    """The model of config.json, in float32."""
    config = GraniteConfig.from_pretrained(HERE)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


@torch.no_grad()
def build_model() -> torch.nn.Module:
    """The model with the frozen initial values."""
    model = empty_model()
    groups = claimed(model)
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_value(name, parameter.shape, groups[name]["init_std"]))
    return model


def build_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    """One parameter group per frozen group, in the frozen order, at the peak rates."""
    groups, named = claimed(model), dict(model.named_parameters())
    return torch.optim.AdamW(
        [
            {"params": [named[name] for name, g in groups.items() if g is group], **group["optimizer_kwargs"]}
            for group in GROUPS
        ],
        foreach=True,
    )


def lr_share(step: int) -> float:
    """Share of the peak at update `step`, counted from 0; LambdaLR also asks for the one after the last."""
    return lr_multiplier(SCHEDULE, min(step, SCHEDULE.num_steps - 1))


def build_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Each group's peak rate times the frozen share, the first update at the share of step 0."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lr_share)


class Batches:
    """This rank's rows of each batch from the run's present step on, a microbatch at a time."""

    def __init__(self, trainer: "FrozenTrainer") -> None:
        self.trainer = trainer

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        args = self.trainer.args
        rank, num_ranks, num_parts = args.process_index, args.world_size, args.gradient_accumulation_steps
        for step in range(self.trainer.state.global_step, SCHEDULE.num_steps):
            first, count = SCHEDULE.sequences(step, BATCH_SEQUENCES)
            size = count // (num_ranks * num_parts)
            for part in range(num_parts):
                ids = torch.from_numpy(self.trainer.store.train_batch(
                    seed=SEED, first_sequence=first + (rank * num_parts + part) * size, num_sequences=size,
                    seq_len=SEQ_LEN))
                yield {"input_ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


class FrozenTrainer(Trainer):
    """transformers' Trainer with the frozen groups, learning rates, batches and brakes."""

    # compute_loss gives the mean of a microbatch, and all are of one size: the Trainer divides by their number, and
    # DDP or FSDP averages over ranks.
    loss_is_scaled_for_ga = False

    def __init__(self, store: TokenStore, model: torch.nn.Module, args: TrainingArguments) -> None:
        super().__init__(model=model, args=args)
        if self.is_fsdp_enabled != (DATA_PARALLEL_SHARD > 1):
            stop(f"accelerate leaves out FSDP on {args.device.type}: weights would not be sharded as frozen; GPUs are "
                 "wanted")
        self.store = store
        self.loss_nats = torch.zeros((), device=args.device)

    def get_train_dataloader(self) -> Batches:
        return Batches(self)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = build_optimizer(self.model if model is None else model)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        if self.lr_scheduler is None:
            self.lr_scheduler = build_scheduler(optimizer or self.optimizer)
        return self.lr_scheduler

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None) -> torch.Tensor:
        """Mean cross-entropy in nats per token; every row is full, so no token is left out or counted twice."""
        logits = model(input_ids=inputs["input_ids"], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), inputs["targets"].flatten())

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.loss_nats += loss
        return loss

    def _get_grad_norm(self, model, grad_norm=None):
        """The last stop before the update: nothing has been stepped on or saved yet."""
        norm = super()._get_grad_norm(model, grad_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        loss_nats, step = self.accelerator.reduce(self.loss_nats, "mean").item(), self.state.global_step
        self.loss_nats.zero_()
        if not (math.isfinite(loss_nats) and math.isfinite(norm)):
            raise RuntimeError(
                f"loss {loss_nats} or gradient norm {float(norm)} not finite at step {step + 1}, before its update")
        if step > SCHEDULE.warmup_steps and loss_nats > ABORT_ABOVE_NATS:
            raise RuntimeError(f"loss {loss_nats} over {ABORT_ABOVE_NATS} nats at step {step + 1}, before its update")
        return norm


def training_arguments() -> TrainingArguments:
    """The frozen arguments, and what only code can say of them."""
    told = json.loads((HERE / "training_arguments.json").read_text())
    told["use_cpu"] = not torch.accelerator.is_available()  # untold, accelerate leaves ranks on CPUs each to itself
    [args] = HfArgumentParser(TrainingArguments).parse_dict(told)
    if DATA_PARALLEL_SHARD > 1 and DATA_PARALLEL_REPLICATE > 1:
        args.parallelism_config = ParallelismConfig(
            dp_replicate_size=DATA_PARALLEL_REPLICATE, dp_shard_size=DATA_PARALLEL_SHARD)
    if DATA_PARALLEL_SHARD > 1 and args.bf16:
        # accelerate's own policy would reduce gradients in bfloat16.
        args.fsdp_plugin_args["mixed_precision_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return args


def stop(problem: str) -> NoReturn:
    """End with 2 and a sentence; where ranks share a problem, of each machine's only the first one says it."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)  # the first one's end is theirs, unless it is theirs alone
    print(f"train.py: {problem}", file=sys.stderr, flush=True)
    os._exit(2)  # not through exit handlers that wait for other ranks


def refuse(args: TrainingArguments, store: TokenStore) -> None:
    """Say at once all that would make this another run than the frozen one."""
    installed = {"transformers": transformers.__version__, "accelerate": accelerate.__version__}
    problems = [f"{name} {installed[name]}: {version} is wanted" for name, version in VERSIONS.items()
                if installed[name] != version]
    if store.manifest.data_id != DATA_ID:
        problems.append(f"the corpus has data_id {store.manifest.data_id}, frozen as {DATA_ID}")
    if canon.content_id(list(lr_table(SCHEDULE))) != LR_TABLE_SHA256:
        problems.append("the learning rates are not the frozen ones")
    if args.world_size != DATA_PARALLEL_SHARD * DATA_PARALLEL_REPLICATE or args.n_gpu > 1:
        problems.append(f"{args.world_size} ranks with {args.n_gpu} devices each: "
                        f"{DATA_PARALLEL_SHARD * DATA_PARALLEL_REPLICATE} with one each are wanted, see run.sh")
    if problems:
        stop("; ".join(problems))


def newest_checkpoint(out: Path) -> str | None:
    """The newest one that is whole: the Trainer writes its trainer_state.json last."""
    found = [path.parent for path in out.glob("checkpoint-*/trainer_state.json")]
    return str(max(found, key=lambda path: int(path.name.rpartition("-")[2]))) if found else None


def main() -> None:
    """Train to the end of the schedule, from the newest checkpoint if there is one."""
    args = training_arguments()
    try:
        corpus = os.environ.get("FORERUN_DATA") or stop("FORERUN_DATA is not set: the corpus folder is wanted")
        store = TokenStore(Path(corpus), weights=DATA_WEIGHTS or None)
    except (ValueError, OSError) as error:
        stop(str(error))
    refuse(args, store)
    FrozenTrainer(store, build_model(), args).train(resume_from_checkpoint=newest_checkpoint(Path(args.output_dir)))


if __name__ == "__main__":
    main()
'''

PROVE = '''"""Tells as JSON what transformers makes of the files beside it. Needs no GPU, no data, no weights."""

import json
import warnings

import torch
import train
import transformers

STEPS = <<STEPS>>

args = train.training_arguments()
with torch.device("meta"):
    model = train.empty_model()
optimizer = train.build_optimizer(model)
scheduler = train.build_scheduler(optimizer)
if type(optimizer) is not torch.optim.AdamW or any(g["amsgrad"] or g["maximize"] for g in optimizer.param_groups):
    raise SystemExit(f"plain torch.optim.AdamW is wanted: {optimizer}")
names = {parameter: name for name, parameter in model.named_parameters()}
parameters = {
    names[parameter]: {
        "num_elements": parameter.numel(), "learning_rate": group["initial_lr"], "weight_decay": group["weight_decay"],
        "eps": group["eps"], "beta1": group["betas"][0], "beta2": group["betas"][1], "rates": row,
    }
    for row, group in enumerate(optimizer.param_groups)
    for parameter in group["params"]
}
wanted, rates = set(STEPS), [[] for _ in optimizer.param_groups]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the scheduler steps, the optimizer does not
    for step in range(args.max_steps):
        if step in wanted:
            for row, group in zip(rates, optimizer.param_groups, strict=True):
                row.append(group["lr"])
        scheduler.step()
[(attention, residual)] = {(layer.self_attn.scaling, layer.residual_multiplier) for layer in model.model.layers}
num_ranks = train.DATA_PARALLEL_SHARD * train.DATA_PARALLEL_REPLICATE
print(json.dumps({
    "trainer": "huggingface",
    "version": transformers.__version__,
    "num_steps": args.max_steps,
    "batch_tokens": args.per_device_train_batch_size * args.gradient_accumulation_steps * num_ranks * train.SEQ_LEN,
    "clip_norm": args.max_grad_norm if args.max_grad_norm > 0 else None,
    "forward": {
        "embedding": model.model.embedding_multiplier, "attention": attention, "residual": residual,
        "output": 1 / model.config.logits_scaling,
    },
    "steps": STEPS,
    "rates": rates,
    "parameters": parameters,
}))
'''
