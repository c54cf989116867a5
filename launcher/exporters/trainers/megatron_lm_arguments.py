"""The decision as Megatron-LM's command line: every argument but the paths of a run."""

from __future__ import annotations

import math

from launcher.exporters.fidelity import rank_sequences
from launcher.exporters.trainers.megatron_lm_numbers import Flags, Scheduler
from launcher.frozen.frozen import Decision
from proxies.model.decoder import NORM_EPS
from proxies.model.rotary import ROPE_BASE

Arguments = dict[str, str | int | float | bool | None]
"""By flag; True: a flag without a value; False and None: left out."""


def argument_lines(decision: Decision, flags: Flags, scheduler: Scheduler) -> str:
    """Every argument of the run but its paths, a flag and its value on each line."""
    told = {
        **_model(decision, flags),
        **_optimizer(decision, flags, scheduler),
        **_batch(decision, scheduler),
        **_machine(decision),
    }
    lines = {f"--{name}": value for name, value in told.items() if value is not None and value is not False}
    return "".join(f"{name}\n" if value is True else f"{name} {value}\n" for name, value in lines.items())


def _model(decision: Decision, flags: Flags) -> Arguments:
    shape, forward = decision.shape, decision.forward
    grouped = shape.num_kv_heads != shape.num_heads
    told: Arguments = {
        "num-layers": shape.num_layers,
        "hidden-size": shape.width,
        "num-attention-heads": shape.num_heads,
        "kv-channels": shape.head_dim,
        "ffn-hidden-size": shape.ffn_width,
        "seq-length": shape.seq_len,
        "max-position-embeddings": shape.seq_len,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": shape.vocab_size,
        "make-vocab-size-divisible-by": 1,
        "swiglu": True,
        "disable-bias-linear": True,
        "normalization": "RMSNorm",
        "norm-epsilon": NORM_EPS,
        "position-embedding-type": "rope",
        "rotary-base": int(ROPE_BASE),
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "group-query-attention": grouped,
        "num-query-groups": shape.num_kv_heads if grouped else None,
        "untie-embeddings-and-output-weights": not shape.tied,
        "qk-layernorm": shape.qk_norm,
    }
    if flags.base_width is not None:
        # 1.0 would mean 1 / m: the number next to it is taken as it is.
        auto = forward.output == 1.0 and flags.base_width != shape.width
        told |= {
            "use-mup": True,
            "mup-base-hidden-size": flags.base_width,
            "mup-embedding-mult": forward.embedding,
            "mup-output-mult": math.nextafter(1, 0) if auto else forward.output,
            "mup-attn-scale-power": 1.0,
            "mup-base-head-dim": (forward.attention * shape.head_dim) ** 2,
        }
    return told


def _optimizer(decision: Decision, flags: Flags, scheduler: Scheduler) -> Arguments:
    final, wsd = scheduler.final_fraction, scheduler.kind == "wsd"
    return {
        "optimizer": "adam",
        "lr": flags.learning_rate,
        "min-lr": flags.learning_rate * final,
        "lr-warmup-init": flags.learning_rate * scheduler.init_share,
        "lr-decay-style": "WSD" if wsd else scheduler.kind,
        "weight-decay": flags.weight_decay,
        "adam-beta1": flags.beta1,
        "adam-beta2": flags.beta2,
        "adam-eps": flags.eps,
        "clip-grad": decision.clip_norm or 0.0,
        "lr-wsd-decay-style": "linear" if wsd else None,
    }


def _batch(decision: Decision, scheduler: Scheduler) -> Arguments:
    return {
        "micro-batch-size": rank_sequences(decision)[1],
        "global-batch-size": decision.batch_tokens // decision.shape.seq_len,
        "train-iters": scheduler.total,
        "lr-decay-iters": scheduler.total,
        "lr-warmup-iters": scheduler.warmup,
        "lr-wsd-decay-iters": scheduler.decay if scheduler.kind == "wsd" else None,
    }


def _machine(decision: Decision) -> Arguments:
    mesh, sharded = decision.parallelism, decision.parallelism.data_parallel_shard > 1
    recomputed, whole = mesh.activation_checkpointing != "none", mesh.activation_checkpointing == "full"
    replicas = mesh.data_parallel_replicate
    return {
        "tensor-model-parallel-size": mesh.tensor,
        "pipeline-model-parallel-size": mesh.pipeline,
        "context-parallel-size": mesh.context,
        "seed": 1 + decision.seed % 2**31,  # Megatron takes no 0
        "ckpt-format": "torch_dist",
        "save-interval": decision.checkpointing.every_steps,
        "log-interval": 1,
        "split": "1,0,0",
        "eval-iters": 0,
        "use-distributed-optimizer": sharded,
        "num-distributed-optimizer-instances": replicas if sharded and replicas > 1 else None,
        "recompute-granularity": mesh.activation_checkpointing if recomputed else None,
        "recompute-method": "uniform" if whole else None,
        "recompute-num-layers": 1 if whole else None,
        "bf16": decision.precision == "bfloat16",
        "no-check-for-nan-in-loss-and-grad": not decision.abort.on_non_finite,
    }
