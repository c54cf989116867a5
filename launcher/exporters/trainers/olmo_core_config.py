"""What `run.json` of an olmo-core export holds: OLMo-core's own configs, in the form its parser reads.

A config there is a dict of its fields and `_CLASS_`, the class to build; a field that is None is left out.
"""

from __future__ import annotations

from launcher.exporters.foreign import by_layer, names_by_group
from launcher.frozen.frozen import Decision, ParameterGroup
from proxies.core.canon import Json
from proxies.core.schedule import Schedule
from proxies.core.shape import Shape
from proxies.model.decoder import NORM_EPS, parameter_shapes
from proxies.model.rotary import ROPE_BASE

MODULE = "forerun_olmo_core"
HEAD_NAMES = {"lm_head.w_out.weight": "lm_head.weight", "lm_head.norm.weight": "norm.weight"}
"""OLMo-core's names of the readout's parameters, and ours."""
NAME_PARTS = {
    "embeddings.": "tok_embeddings.",
    "blocks.": "layers.",
    ".w_q.": ".wq.",
    ".w_k.": ".wk.",
    ".w_v.": ".wv.",
    ".w_out.": ".wo.",
    "feed_forward_norm.": "ffn_norm.",
}
"""Parts of its other names, and ours."""


def trainer_names(shape: Shape) -> dict[str, str]:
    """Each of our parameters' name in OLMo-core's Transformer."""
    names: dict[str, str] = {}
    for ours in parameter_shapes(shape):
        names[ours] = {our_name: theirs for theirs, our_name in HEAD_NAMES.items()}.get(ours, ours)
        for theirs, our_part in NAME_PARTS.items():
            names[ours] = names[ours].replace(our_part, theirs)
    return names


def group_globs(decision: Decision) -> list[tuple[list[str], ParameterGroup]]:
    """Globs of each group over OLMo-core's names, each parameter matched by exactly one.

    Raises:
        FrozenError: the groups do not fit the shape's parameters.
    """
    grouped = names_by_group(decision, trainer_names(decision.shape))
    return [(_globs(names, decision.shape.num_layers), group) for group, names in grouped]


def _globs(names: list[str], num_layers: int) -> list[str]:
    globs = []
    for (before, after), layers in by_layer(names).items():
        if not layers:
            globs.append(before)
        elif len(layers) == num_layers:
            globs.append(f"{before}*{after}")
        else:  # the star stands for the wrapper that activation checkpointing puts there, or for nothing
            globs += [f"{before}{layer}.*{after[1:]}" for layer in layers]
    return globs


def scheduler_config(schedule: Schedule) -> dict[str, Json]:
    """OLMo-core's schedulers for the same lr(t).

    Its step s = t + 1. Warmup s / W is ours, but its decays are a step ahead: so the warmup's scheduler runs one step
    longer, at the peak, and the decay's begins its count after that.
    """
    warmup: dict[str, Json] = {**_config("optim.scheduler.ConstantWithWarmup"), "warmup": schedule.warmup_steps}
    start = schedule.num_steps - schedule.decay_steps if schedule.kind == "wsd" else schedule.warmup_steps
    if schedule.kind == "constant" or start + 1 >= schedule.num_steps:
        return warmup
    kind = "CosWithWarmup" if schedule.kind == "cosine" else "LinearWithWarmup"
    decay: dict[str, Json] = {
        **_config(f"optim.scheduler.{kind}"),
        "warmup": 0,
        "t_max": schedule.num_steps - start,
        "alpha_f": schedule.final_fraction,
    }
    sequence: dict[str, Json] = {"schedulers": [warmup, decay], "schedulers_max": [start + 1]}
    return {**_config("optim.scheduler.SequentialScheduler"), **sequence}


def run_config(decision: Decision) -> dict[str, Json]:
    """What `run.json` holds, in the form of OLMo-core's `Config.as_config_dict`.

    Raises:
        FrozenError: the groups do not fit the shape's parameters.
    """
    shape, steps = decision.shape, decision.learning_rate.schedule
    groups = group_globs(decision)
    return {
        "_CLASS_": f"{MODULE}.RunConfig",
        "digest": decision.digest,
        "num_ranks": decision.parallelism.num_ranks,
        "seed": decision.seed,
        "model": _model(decision),
        "initial_values": [
            {"_CLASS_": f"{MODULE}.InitialValues", "params": list(globs), "std": group.init_std}
            for globs, group in groups
        ],
        "train_module": _train_module(decision, groups),
        "data_loader": {
            "_CLASS_": f"{MODULE}.CorpusLoaderConfig",
            "data_id": decision.data.data_id,
            "weights": [[name, share] for name, share in decision.data.weights],
            "seed": decision.seed,
            "sequence_length": shape.seq_len,
            "batch_sequences": decision.batch_tokens // shape.seq_len,
            "num_steps": steps.num_steps,
            "batch_warmup_steps": steps.batch_warmup_steps,
            "batch_warmup_stages": steps.batch_warmup_stages,
        },
        "trainer": {
            **_config("train.config.TrainerConfig"),
            "save_folder": f"outputs/{decision.digest[:16]}",
            "save_overwrite": True,  # what a killed run left of a checkpoint must not stop it again
            "max_duration": {**_config("train.common.Duration"), "value": steps.num_steps, "unit": "steps"},
            "metrics_collect_interval": 1,
            "callbacks": {
                "checkpointer": {
                    **_config("train.callbacks.checkpointer.CheckpointerCallback"),
                    "save_interval": decision.checkpointing.every_steps,
                    "max_checkpoints": decision.checkpointing.keep,
                    "pre_train_checkpoint": False,
                    # Saved in a thread, ranks record its time at different steps, and reducing metrics then hangs.
                    "save_async": False,
                },
                "brakes": {
                    "_CLASS_": f"{MODULE}.Brakes",
                    "warmup_steps": steps.warmup_steps,
                    "train_loss_above_nats": decision.abort.train_loss_above_nats,
                },
            },
        },
    }


def _config(path: str) -> dict[str, Json]:
    return {"_CLASS_": f"olmo_core.{path}"}


def _norm() -> dict[str, Json]:
    return {**_config("nn.layer_norm.LayerNormConfig"), "name": "rms", "eps": NORM_EPS, "bias": False}


def _model(decision: Decision) -> dict[str, Json]:
    shape, forward = decision.shape, decision.forward
    attention: dict[str, Json] = {
        "_CLASS_": f"{MODULE}.ScaledAttentionConfig",
        "n_heads": shape.num_heads,
        "n_kv_heads": shape.num_kv_heads,
        "bias": False,
        "rope": {**_config("nn.rope.RoPEConfig"), "theta": int(ROPE_BASE)},
        "backend": "torch",
        "softmax_scale": forward.attention,
    }
    if shape.qk_norm:
        attention |= {"qk_norm": _norm(), "use_head_qk_norm": True}
    return {
        **_config("nn.transformer.config.TransformerConfig"),
        "d_model": shape.width,
        "vocab_size": shape.vocab_size,
        "n_layers": shape.num_layers,
        "tie_word_embeddings": shape.tied,
        "embed_scale": forward.embedding,
        "block": {
            **_config("nn.transformer.config.TransformerBlockConfig"),
            "sequence_mixer": attention,
            "feed_forward": {
                **_config("nn.feed_forward.FeedForwardConfig"),
                "hidden_size": shape.ffn_width,
                "bias": False,
            },
            "layer_norm": _norm(),
            "attention_residual_alpha": forward.residual,
            "feed_forward_residual_alpha": forward.residual,
        },
        "lm_head": {
            **_config("nn.lm_head.LMHeadConfig"),
            "bias": False,
            "layer_norm": {**_norm(), "_CLASS_": f"{MODULE}.ScaledNormConfig", "multiplier": forward.output},
        },
    }


def _train_module(decision: Decision, groups: list[tuple[list[str], ParameterGroup]]) -> dict[str, Json]:
    mesh, seq_len = decision.parallelism, decision.shape.seq_len
    share = decision.batch_tokens // seq_len // mesh.num_data_ranks
    overrides: list[Json] = [
        {
            **_config("optim.config.OptimGroupOverride"),
            "params": list(globs),
            "opts": {
                "lr": group.learning_rate,
                "weight_decay": group.weight_decay,
                "eps": group.eps,
                "betas": [group.beta1, group.beta2],
            },
        }
        for globs, group in groups
    ]
    data_parallel: dict[str, Json] = {
        "name": "fsdp" if mesh.data_parallel_replicate == 1 else "hsdp",
        "reduce_dtype": "float32",
        **({"param_dtype": "bfloat16"} if decision.precision == "bfloat16" else {}),
    }
    if mesh.data_parallel_replicate > 1:
        data_parallel |= {"num_replicas": mesh.data_parallel_replicate, "shard_degree": mesh.data_parallel_shard}
    told: dict[str, Json] = {
        **_config("train.train_module.transformer.config.TransformerTrainModuleConfig"),
        "rank_microbatch_size": (mesh.microbatch_sequences or share) * seq_len,
        "max_sequence_length": seq_len,
        "optim": {**_config("optim.adamw.AdamWConfig"), "foreach": True, "group_overrides": overrides},
        "scheduler": scheduler_config(decision.learning_rate.schedule),
        "dp_config": {
            **_config("train.train_module.transformer.config.TransformerDataParallelConfig"),
            **data_parallel,
        },
    }
    if decision.clip_norm is not None:
        told["max_grad_norm"] = decision.clip_norm
    if mesh.activation_checkpointing != "none":
        told["ac_config"] = {
            **_config("train.train_module.transformer.config.TransformerActivationCheckpointingConfig"),
            "mode": {"full": "full", "selective": "selected_ops"}[mesh.activation_checkpointing],
        }
    return told
