"""Print as JSON how torchtitan reads the module in this folder.

The program needs no GPU, no data, and no memory for weights.
"""

import importlib.metadata
import math

import torch
from forerun_torch import answer, read_rates
from forerun_torchtitan import FROZEN
from torchtitan.config import ConfigManager

config = ConfigManager().parse_args(["--module", "forerun_torchtitan", "--config", "main_run"])
config.model_spec.model.update_from_config(config=config)
with torch.device("meta"):
    model = config.model_spec.model.build()
model.verify_module_protocol()
optimizers = config.optimizer.build(model_parts=[model])
scheduler = config.lr_scheduler.build(optimizers=optimizers, training_steps=config.training.steps)
[live] = optimizers.optimizers
# All layers must have the same multipliers; otherwise the assignment fails.
[(attention, residual)] = {
    (block.attention.scaling, block.multiplier) for block in model.layers.values()
}
clip_norm, training = float(config.training.max_norm), config.training
answer(
    model,
    live,
    trainer="torchtitan",
    version=importlib.metadata.version("torchtitan"),
    num_steps=training.steps,
    batch_tokens=training.global_batch_size * training.seq_len,
    clip_norm=None if math.isinf(clip_norm) else clip_norm,
    forward={
        "embedding": model.tok_embeddings.multiplier,
        "attention": attention,
        "residual": residual,
        "output": model.lm_head.multiplier,
    },
    steps=FROZEN.steps,
    rates=read_rates(live, FROZEN.steps, training.steps, scheduler.step),
)
