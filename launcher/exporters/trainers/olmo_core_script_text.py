"""The `train.py` and `prove.py` of an olmo-core export, as text; `<<NAME>>` stands for what an export fills in.

The script builds OLMo-core's own model, train module and trainer from `run.json`; the proof tells what they became.
"""

TRAIN_TEXT = '''"""Trains `run.json` beside it; resumes where it stopped. Started by run.sh, a process per rank.

Arguments are overrides as OLMo-core takes them, such as train_module.rank_microbatch_size=4096; of a number that was
frozen they make another run.
"""

import importlib.metadata
import os
import sys

import torch
from olmo_core.distributed.utils import get_world_size
from olmo_core.train import prepare_training_environment, teardown_training_environment

from forerun_olmo_core import RUN_FILE, RunConfig, set_initial_values, unclaimed

VERSION = "<<VERSION>>"


def main() -> None:
    config = RunConfig.from_file(RUN_FILE, overrides=sys.argv[1:])
    on_gpu = torch.cuda.is_available()
    prepare_training_environment(seed=config.seed % 2**32, backend="cpu:gloo,cuda:nccl" if on_gpu else "cpu:gloo")
    model = config.model.build(init_device="meta")
    problems = unclaimed(model, config)
    if (installed := importlib.metadata.version("ai2-olmo-core")) != VERSION:
        problems.append(f"ai2-olmo-core {installed}: {VERSION} is wanted")
    if get_world_size() != config.num_ranks:
        problems.append(f"{get_world_size()} ranks: {config.num_ranks} are wanted, see run.sh")
    if problems:
        raise SystemExit("; ".join(problems))
    train_module = config.train_module.build(model)
    set_initial_values(train_module.model, config)
    loader = config.data_loader.build(train_module.dp_process_group, config.trainer.save_folder)
    config.trainer.build(train_module, loader).fit()
    if not on_gpu:  # gloo's teardown aborts now and then; `fit` has ended with a barrier
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    teardown_training_environment()


if __name__ == "__main__":
    main()
'''

PROVE_TEXT = '''"""Tells as JSON what OLMo-core makes of `run.json`. Needs no GPU, data, or memory for weights."""

import importlib.metadata
import json
from types import SimpleNamespace

import torch

from forerun_olmo_core import RUN_FILE, RunConfig

STEPS = <<STEPS>>
FLOPS_PER_TOKEN = <<FLOPS>>

config = RunConfig.from_file(RUN_FILE)
module, duration = config.train_module, config.trainer.max_duration
model = config.model.build(init_device="meta")
optimizer = module.optim.build(model, strict=True)
if type(optimizer) is not torch.optim.AdamW or duration.unit != "steps":
    raise SystemExit(f"AdamW for some steps is wanted, OLMo-core builds {optimizer} for {duration}")
if (flops := model.num_flops_per_token(config.data_loader.sequence_length)) != FLOPS_PER_TOKEN:
    raise SystemExit(f"OLMo-core counts {flops} FLOPs a token, forerun {FLOPS_PER_TOKEN} by its convention olmo")
names = {parameter: name for name, parameter in model.named_parameters()}
parameters = {}
for row, group in enumerate(optimizer.param_groups):
    if group["amsgrad"] or group["maximize"]:
        raise SystemExit(f"group {row} is not stepped by plain AdamW")
    beta1, beta2 = group["betas"]
    for parameter in group["params"]:
        parameters[names[parameter]] = {
            "num_elements": parameter.numel(), "learning_rate": group["initial_lr"],
            "weight_decay": group["weight_decay"], "eps": group["eps"], "beta1": beta1, "beta2": beta2, "rates": row,
        }
rates = [[] for _ in optimizer.param_groups]
for step in STEPS:  # OLMo-core counts updates from 1
    for row, group in zip(rates, optimizer.param_groups, strict=True):
        told = SimpleNamespace(global_step=step + 1, max_steps=duration.value)
        row.append(float(module.scheduler.set_lr(group, told)))
blocks = list(model.blocks.values())
[attention] = {block.attention.backend.scale for block in blocks}
[residual] = {
    stream.alpha for b in blocks for stream in (b.attention_residual_stream, b.feed_forward_residual_stream)
}
print(json.dumps({
    "trainer": "olmo-core",
    "version": importlib.metadata.version("ai2-olmo-core"),
    "num_steps": duration.value,
    "batch_tokens": config.data_loader.batch_sequences * config.data_loader.sequence_length,
    "clip_norm": module.max_grad_norm,
    "forward": {
        "embedding": model.embed_scale, "attention": attention, "residual": residual,
        "output": model.lm_head.norm.multiplier,
    },
    "steps": STEPS,
    "rates": rates,
    "parameters": parameters,
}))
'''
