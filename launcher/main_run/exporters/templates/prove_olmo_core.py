"""Print as JSON how OLMo-core reads `run.json`, without GPU, data, or memory for weights."""

import importlib.metadata
from types import SimpleNamespace

from forerun_olmo_core import FROZEN, RUN_FILE, RunConfig
from forerun_torch import answer

config = RunConfig.from_file(RUN_FILE)
module, duration = config.train_module, config.trainer.max_duration
model = config.model.build(init_device="meta")
optimizer = module.optim.build(model, strict=True)
if duration.unit != "steps":
    raise SystemExit(f"the duration must be in steps, OLMo-core reads {duration}")
rates: list[list[float]] = [[] for _ in optimizer.param_groups]
for step in FROZEN.steps:  # OLMo-core counts updates from 1.
    for row, group in zip(rates, optimizer.param_groups, strict=True):
        trainer = SimpleNamespace(global_step=step + 1, max_steps=duration.value)
        row.append(float(module.scheduler.set_lr(group, trainer)))
blocks = list(model.blocks.values())
[attention] = {block.attention.backend.scale for block in blocks}
[residual] = {
    stream.alpha
    for b in blocks
    for stream in (b.attention_residual_stream, b.feed_forward_residual_stream)
}
answer(
    model,
    optimizer,
    trainer="olmo-core",
    version=importlib.metadata.version("ai2-olmo-core"),
    num_steps=duration.value,
    batch_tokens=FROZEN.batch_sequences * FROZEN.shape.seq_len,
    clip_norm=module.max_grad_norm,
    forward={
        "embedding": model.embed_scale,
        "attention": attention,
        "residual": residual,
        "output": model.lm_head.norm.multiplier,
    },
    steps=FROZEN.steps,
    rates=rates,
)
