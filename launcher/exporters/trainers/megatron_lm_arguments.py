"""The decision as Megatron-LM's command line: every argument but the paths of a run."""

from __future__ import annotations

import math

from launcher.exporters.trainers.megatron_lm_numbers import Flags, Scheduler, seen_before
from launcher.frozen.frozen import Decision
from proxies.model.decoder import NORM_EPS
from proxies.model.rotary import ROPE_BASE


def arguments(decision: Decision, flags: Flags, scheduler: Scheduler) -> list[tuple[str, ...]]:
    """Every argument of the run but its paths: flag, then values."""
    return [
        *_model(decision, flags),
        *_optimizer(decision, flags, scheduler),
        *_batch(decision, scheduler),
        *_machine(decision),
    ]


def _model(decision: Decision, flags: Flags) -> list[tuple[str, ...]]:
    shape, forward = decision.shape, decision.forward
    lines: list[tuple[str, ...]] = [
        ("--num-layers", str(shape.num_layers)),
        ("--hidden-size", str(shape.width)),
        ("--num-attention-heads", str(shape.num_heads)),
        ("--kv-channels", str(shape.head_dim)),
        ("--ffn-hidden-size", str(shape.ffn_width)),
        ("--seq-length", str(shape.seq_len)),
        ("--max-position-embeddings", str(shape.seq_len)),
        ("--tokenizer-type", "NullTokenizer"),
        ("--vocab-size", str(shape.vocab_size)),
        ("--make-vocab-size-divisible-by", "1"),
        ("--swiglu",),
        ("--disable-bias-linear",),
        ("--normalization", "RMSNorm"),
        ("--norm-epsilon", repr(NORM_EPS)),
        ("--position-embedding-type", "rope"),
        ("--rotary-base", str(int(ROPE_BASE))),
        ("--attention-dropout", "0.0"),
        ("--hidden-dropout", "0.0"),
    ]
    if shape.num_kv_heads != shape.num_heads:
        lines += [("--group-query-attention",), ("--num-query-groups", str(shape.num_kv_heads))]
    lines += [] if shape.tied else [("--untie-embeddings-and-output-weights",)]
    lines += [("--qk-layernorm",)] if shape.qk_norm else []
    if flags.base_width is not None:
        # 1.0 would mean 1 / m: the number next to it is taken as it is.
        auto = forward.output == 1.0 and flags.base_width != shape.width
        lines += [
            ("--use-mup",),
            ("--mup-base-hidden-size", str(flags.base_width)),
            ("--mup-embedding-mult", repr(forward.embedding)),
            ("--mup-output-mult", repr(math.nextafter(1, 0) if auto else forward.output)),
            ("--mup-attn-scale-power", "1.0"),
            ("--mup-base-head-dim", repr((forward.attention * shape.head_dim) ** 2)),
        ]
    return lines


def _optimizer(decision: Decision, flags: Flags, scheduler: Scheduler) -> list[tuple[str, ...]]:
    schedule, final = decision.learning_rate.schedule, scheduler.final_fraction
    lines: list[tuple[str, ...]] = [
        ("--optimizer", "adam"),
        ("--lr", repr(flags.learning_rate)),
        ("--min-lr", repr(flags.learning_rate * final)),
        ("--lr-warmup-init", repr(flags.learning_rate * scheduler.init_share)),
        ("--lr-decay-style", "WSD" if schedule.kind == "wsd" else schedule.kind),
        ("--weight-decay", repr(flags.weight_decay)),
        ("--adam-beta1", repr(flags.beta1)),
        ("--adam-beta2", repr(flags.beta2)),
        ("--adam-eps", repr(flags.eps)),
        ("--clip-grad", repr(decision.clip_norm or 0.0)),
    ]
    if schedule.kind == "wsd":
        lines.append(("--lr-wsd-decay-style", "linear"))
    if (ends := flags.decoupled_learning_rate) is not None:
        lines += [("--decoupled-lr", repr(ends)), ("--decoupled-min-lr", repr(ends * final))]
    return lines


def _batch(decision: Decision, scheduler: Scheduler) -> list[tuple[str, ...]]:
    schedule, seq_len = decision.learning_rate.schedule, decision.shape.seq_len
    batch, mesh = decision.batch_tokens // seq_len, decision.parallelism
    share = batch // schedule.batch_warmup_stages // mesh.num_data_ranks
    lines: list[tuple[str, ...]] = [("--micro-batch-size", str(mesh.microbatch_sequences or share))]
    if schedule.batch_warmup_steps:  # Megatron takes this with runs measured in sequences only
        seen = seen_before(schedule, batch)
        stages = {int(schedule.batch_share(step) * batch): step for step in reversed(range(schedule.num_steps))}
        ramp = ",".join(f"{seen[step] * seq_len}:{size}" for size, step in sorted(stages.items()))
        lines.append(("--step-batch-size-schedule", ramp))
        unit, one = "samples", 1
    else:
        lines.append(("--global-batch-size", str(batch)))
        unit, one = "iters", batch
    lines += [(f"--train-{unit}", str(scheduler.total // one)), (f"--lr-decay-{unit}", str(scheduler.total // one))]
    lines.append((f"--lr-warmup-{unit}", str(scheduler.warmup // one)))
    if schedule.kind == "wsd":
        lines.append((f"--lr-wsd-decay-{unit}", str(scheduler.decay // one)))
    return lines


def _machine(decision: Decision) -> list[tuple[str, ...]]:
    mesh = decision.parallelism
    lines: list[tuple[str, ...]] = [
        ("--tensor-model-parallel-size", str(mesh.tensor)),
        ("--pipeline-model-parallel-size", str(mesh.pipeline)),
        ("--context-parallel-size", str(mesh.context)),
        ("--seed", str(1 + decision.seed % 2**31)),  # Megatron takes no 0
        ("--ckpt-format", "torch_dist"),
        ("--save-interval", str(decision.checkpointing.every_steps)),
        ("--log-interval", "1"),
        ("--split", "1,0,0"),
        ("--eval-iters", "0"),
    ]
    if mesh.data_parallel_shard > 1:
        lines.append(("--use-distributed-optimizer",))
        if mesh.data_parallel_replicate > 1:
            lines.append(("--num-distributed-optimizer-instances", str(mesh.data_parallel_replicate)))
    if mesh.activation_checkpointing != "none":
        lines.append(("--recompute-granularity", mesh.activation_checkpointing))
        if mesh.activation_checkpointing == "full":
            lines += [("--recompute-method", "uniform"), ("--recompute-num-layers", "1")]
    lines += [("--bf16",)] if decision.precision == "bfloat16" else []
    lines += [] if decision.abort.on_non_finite else [("--no-check-for-nan-in-loss-and-grad",)]
    return lines
