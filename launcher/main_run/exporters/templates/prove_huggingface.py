"""Print as JSON how transformers reads the files in this folder.

The program needs no GPU, no data, and no memory for weights.
"""

import importlib.metadata

import forerun_huggingface as run
import torch
from forerun_huggingface import FROZEN
from forerun_torch import answer, read_rates

args = run.training_arguments()
with torch.device("meta"):
    model = run.empty_model()
optimizer = run.build_optimizer(model)
scheduler = run.build_scheduler(optimizer)
[(attention, residual)] = {
    (layer.self_attn.scaling, layer.residual_multiplier) for layer in model.model.layers
}
answer(
    model,
    optimizer,
    trainer="huggingface",
    version=importlib.metadata.version("transformers"),
    num_steps=args.max_steps,
    batch_tokens=args.per_device_train_batch_size
    * args.gradient_accumulation_steps
    * run.NUM_RANKS
    * FROZEN.shape.seq_len,
    clip_norm=args.max_grad_norm if args.max_grad_norm > 0 else None,
    forward={
        "embedding": model.model.embedding_multiplier,
        "attention": attention,
        "residual": residual,
        "output": 1 / model.config.logits_scaling,
    },
    steps=FROZEN.steps,
    rates=read_rates(optimizer, FROZEN.steps, args.max_steps, scheduler.step),
)
