"""The `prove.py` of a Megatron-LM export, as text: what Megatron's own parser, groups and scheduler make of it."""

PROVE = '''"""Tells as JSON what Megatron makes of `arguments.txt` beside it. Needs no GPU, data, or memory for weights.

Two parses: one at the run's number of ranks, for Megatron's own checks; one on a single rank, to build from.
"""

import contextlib
import importlib.metadata
import json
import os
import sys
from pathlib import Path

os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "RANK": "0"}
import torch
from megatron.core import num_microbatches_calculator as batches
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import _get_param_groups, get_mup_config_overrides
from megatron.training import arguments, global_vars, training
from torch import distributed

STEPS = @STEPS@
# What CPUs lack: Transformer Engine, Apex, fused kernels.
PLAIN = (
    "--use-cpu-initialization --no-initialization --transformer-impl local --no-rope-fusion --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion"
).split()
ALONE = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1".split()


def parsed(num_ranks, extra):
    told = [word for line in Path("arguments.txt").read_text().splitlines() for word in line.split()]
    os.environ["WORLD_SIZE"] = str(num_ranks)
    sys.argv = ["pretrain_gpt.py", *told, *PLAIN, *extra]
    with contextlib.redirect_stdout(sys.stderr):
        found = arguments.parse_args()
        arguments.validate_args(found)
    return found


arguments.get_device_arch_version = lambda: 9
torch.cuda.current_device = lambda: "cpu"
parsed(@NUM_RANKS@, [])
args = parsed(1, [*ALONE, "--num-distributed-optimizer-instances", "1"])
global_vars.set_args(args)
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
batches.init_num_microbatches_calculator(
    0, None, args.global_batch_size, args.micro_batch_size, 1, False,
    step_batch_size_schedule=args.step_batch_size_schedule, seq_length=args.seq_length,
)
config = arguments.core_transformer_config_from_args(args)
with torch.device("meta"):
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            qk_layernorm=args.qk_layernorm, normalization=args.normalization
        ),
        vocab_size=args.vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
    )
settings, overrides = training.get_megatron_optimizer_config(args)
if args.use_mup:  # as Megatron's setup_model_and_optimizer does
    overrides |= get_mup_config_overrides(settings, config.mup_width_mult, settings.optimizer)
if (settings.optimizer, settings.decoupled_weight_decay) != ("adam", True):
    raise SystemExit(f"AdamW is wanted, Megatron is told {settings.optimizer}")
live = torch.optim.AdamW(
    _get_param_groups([model], settings, overrides), lr=settings.lr, eps=settings.adam_eps,
    betas=(settings.adam_beta1, settings.adam_beta2), weight_decay=settings.weight_decay,
)
scheduler = training.get_optimizer_param_scheduler(live)
names = {parameter: name for name, parameter in model.named_parameters()}
parameters = {}
for row, group in enumerate(live.param_groups):
    for parameter in group["params"]:
        beta1, beta2 = group["betas"]
        parameters[names[parameter]] = {
            "num_elements": parameter.numel(), "learning_rate": group["max_lr"], "weight_decay": group["weight_decay"],
            "eps": group["eps"], "beta1": beta1, "beta2": beta2, "rates": row,
        }
wanted, rates, seen = set(STEPS), [[] for _ in live.param_groups], 0
for step in range(args.train_iters):
    if step in wanted:
        for row, group in zip(rates, live.param_groups, strict=True):
            row.append(group["lr"])
    batches.update_num_microbatches(seen, consistency_check=False)
    size = batches.get_current_global_batch_size()
    scheduler.step(increment=size)
    seen += size
[attention] = {layer.self_attention.core_attention.softmax_scale for layer in model.decoder.layers}
print(json.dumps({
    "trainer": "megatron-lm",
    "version": importlib.metadata.version("megatron-core"),
    "num_steps": args.train_iters,
    "batch_tokens": size * args.seq_length,
    "clip_norm": args.clip_grad or None,
    "forward": {  # its blocks have no residual multiplier
        "embedding": config.mup_embedding_mult if config.use_mup else 1.0, "attention": attention, "residual": 1.0,
        "output": config.mup_output_mult if config.use_mup else 1.0,
    },
    "steps": STEPS,
    "rates": rates,
    "parameters": parameters,
}), flush=True)
os._exit(0)  # gloo's threads may abort a normal end
'''
