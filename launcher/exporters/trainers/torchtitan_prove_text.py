"""The `prove.py` of a torchtitan export, as text: what its own parser, groups and scheduler make of the numbers."""

PROVE = '''"""Tells as JSON what torchtitan makes of the module beside it. Needs no GPU, data or memory for weights."""

import importlib.metadata
import json
import math
import warnings

import torch
from torchtitan.config import ConfigManager

STEPS = <<STEPS>>

config = ConfigManager().parse_args(["--module", "<<MODULE>>", "--config", "main_run"])
config.model_spec.model.update_from_config(config=config)
with torch.device("meta"):
    model = config.model_spec.model.build()
model.verify_module_protocol()
optimizers = config.optimizer.build(model_parts=[model])
scheduler = config.lr_scheduler.build(optimizers=optimizers, training_steps=config.training.steps)
groups, _ = optimizers._build_param_groups(model, config.optimizer.param_groups, {})
if list(groups) != ["AdamW"] or [type(part) for part in optimizers.optimizers] != [torch.optim.AdamW]:
    raise SystemExit(f"one torch.optim.AdamW is wanted, torchtitan builds {optimizers.optimizers}")
[live] = optimizers.optimizers
parameters = {}
for row, (group, stepped) in enumerate(zip(groups["AdamW"], live.param_groups, strict=True)):
    for name, parameter in zip(group["param_names"], group["params"], strict=True):
        if not any(parameter is other for other in stepped["params"]) or stepped["amsgrad"] or stepped["maximize"]:
            raise SystemExit(f"{name}: not stepped by plain AdamW in its own group")
        beta1, beta2 = stepped["betas"]
        parameters[name] = {
            "num_elements": parameter.numel(), "learning_rate": group["lr"], "weight_decay": stepped["weight_decay"],
            "eps": stepped["eps"], "beta1": beta1, "beta2": beta2, "rates": row,
        }
wanted, rates = set(STEPS), [[] for _ in live.param_groups]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the scheduler steps, the optimizer does not
    for step in range(config.training.steps):
        if step in wanted:
            for row, group in zip(rates, live.param_groups, strict=True):
                row.append(group["lr"])
        scheduler.step()
blocks = list(model.layers.values())
[(attention, residual)] = {(block.attention.scaling, block.multiplier) for block in blocks}
clip_norm = float(config.training.max_norm)
print(json.dumps({
    "trainer": "torchtitan",
    "version": importlib.metadata.version("torchtitan"),
    "num_steps": config.training.steps,
    "batch_tokens": <<BATCH_TOKENS>>,
    "clip_norm": None if math.isinf(clip_norm) else clip_norm,
    "forward": {
        "embedding": model.tok_embeddings.multiplier, "attention": attention, "residual": residual,
        "output": model.lm_head.multiplier,
    },
    "steps": STEPS,
    "rates": rates,
    "parameters": parameters,
}))
'''
