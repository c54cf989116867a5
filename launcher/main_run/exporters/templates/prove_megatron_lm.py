"""Print as JSON how Megatron reads `arguments.txt`, without GPU, data, or memory for weights.

The arguments are parsed twice: with the run's number of ranks, for Megatron's own checks, and with
a single rank, to build the model.
"""

import contextlib
import importlib
import importlib.metadata
import os
import sys
from typing import Any

os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "RANK": "0"}
import torch
from forerun_numbers import HERE, read_numbers
from forerun_torch import answer, read_rates
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import _get_param_groups, get_mup_config_overrides
from megatron.training import arguments, global_vars, training
from torch import distributed

FROZEN = read_numbers()
# Options for CPUs, which lack Transformer Engine, Apex, and fused kernels
CPU_OPTIONS = [
    "--use-cpu-initialization",
    "--no-initialization",
    "--transformer-impl",
    "local",
    "--no-rope-fusion",
    "--no-persist-layer-norm",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
]
ONE_RANK = [
    "--tensor-model-parallel-size",
    "1",
    "--pipeline-model-parallel-size",
    "1",
    "--context-parallel-size",
    "1",
]


def parse_arguments(num_ranks: int, extra: list[str]) -> Any:
    """Return the arguments as Megatron reads and completes them."""
    written = [
        word for line in (HERE / "arguments.txt").read_text().splitlines() for word in line.split()
    ]
    os.environ["WORLD_SIZE"] = str(num_ranks)
    sys.argv = ["pretrain_gpt.py", *written, *CPU_OPTIONS, *extra]
    with contextlib.redirect_stdout(sys.stderr):
        args = arguments.parse_args()
        arguments.validate_args(args)
    return args


# Without a GPU, Megatron must be told its architecture (9: Hopper) and its current device.
arguments.get_device_arch_version = lambda: 9
torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
mesh = FROZEN.parallelism
num_data_ranks = mesh.data_parallel_shard * mesh.data_parallel_replicate
parse_arguments(num_data_ranks * mesh.tensor * mesh.pipeline * mesh.context, [])
args = parse_arguments(1, [*ONE_RANK, "--num-distributed-optimizer-instances", "1"])
global_vars.set_args(args)
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
parallel_state.initialize_model_parallel()
config = arguments.core_transformer_config_from_args(args)
spec = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)
if args.spec:  # Megatron's gpt_builder does the same.
    spec = getattr(importlib.import_module(args.spec[0]), args.spec[1])
with torch.device("meta"):
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
    )
settings, overrides = training.get_megatron_optimizer_config(args)
if args.use_mup:  # Megatron's setup_model_and_optimizer does the same.
    overrides |= get_mup_config_overrides(settings, config.mup_width_mult, settings.optimizer)
if (settings.optimizer, settings.decoupled_weight_decay) != ("adam", True):
    raise SystemExit(f"the optimizer must be AdamW, Megatron's settings say {settings.optimizer}")
live = torch.optim.AdamW(
    _get_param_groups([model], settings, overrides),
    lr=settings.lr,
    eps=settings.adam_eps,
    betas=(settings.adam_beta1, settings.adam_beta2),
    weight_decay=settings.weight_decay,
)
scheduler = training.get_optimizer_param_scheduler(live)
rates = read_rates(
    live, FROZEN.steps, args.train_iters, lambda: scheduler.step(increment=args.global_batch_size)
)
# With a branch of 1 and a residual stream of 0, the sum is the residual multiplier. All layers must
# have the same multipliers; otherwise the assignments fail.
branch, stream = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
[residual] = {
    float(add(False, False)((branch, None), stream, 0.0))
    for layer in model.decoder.layers
    for add in (layer.self_attn_bda, layer.mlp_bda)
}
[attention] = {layer.self_attention.core_attention.softmax_scale for layer in model.decoder.layers}
answer(
    model,
    live,
    peak="max_lr",
    trainer="megatron-lm",
    version=importlib.metadata.version("megatron-core"),
    num_steps=args.train_iters,
    batch_tokens=args.global_batch_size * args.seq_length,
    clip_norm=args.clip_grad or None,
    forward={
        "embedding": config.mup_embedding_mult if config.use_mup else 1.0,
        "attention": attention,
        "residual": residual,
        "output": config.mup_output_mult if config.use_mup else 1.0,
    },
    steps=FROZEN.steps,
    rates=rates,
)
os._exit(0)  # gloo's threads may abort a normal exit.
