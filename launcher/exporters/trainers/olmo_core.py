"""The decision as an OLMo-core run: its own configs as JSON, a script that trains them, the corpus
reader.

`run.json` is in the form of OLMo-core's `Config.as_config_dict` (a config is a dict of its fields
and `_CLASS_`, the class to build; a field that is None is left out), so its own parser reads it:
model, AdamW groups by globs, scheduler, clip, mesh, checkpoints. Embedding and residual multipliers
are native there. What it lacks is in `templates/forerun_olmo_core.py`, whose classes the JSON
names: a scale of q . k that a config can tell, the readout's multiplier, initial values of (seed,
name), the data order of (seed, step), and the brakes.
"""

from __future__ import annotations

from pathlib import Path

from launcher.exporters.export_writer import PROVE_FILE, corpus_run_script, write_export
from launcher.exporters.fidelity import (
    ADAMW,
    MUON,
    Expressible,
    FidelityReport,
    Judgement,
    any_layer,
    names_by_group,
    rank_sequences,
    refuse,
    report,
)
from launcher.frozen.frozen import Decision, ParameterGroup
from launcher.frozen.launch_file import RUN_FILE
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.notation import counted
from proxies.core.schedule import Schedule
from proxies.core.shape import Shape, parameter_shapes
from proxies.model.decoder import NORM_EPS, ROPE_BASE

VERSIONS = ("3.0.0",)
EXPRESSIBLE = Expressible(optimizers={"adamw": ADAMW, "muon": MUON}, run_wide=("clip_norm",))
MODULE = "forerun_olmo_core"
SCRIPT = "train.py"
CONFIG_FILE = "run.json"
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
"""Parts of its other names, and ours; the module translates them back in this order."""


def export(decision: Decision, out_dir: Path, version: str = VERSIONS[-1]) -> FidelityReport:
    """Write `run.json`, its module, `train.py`, `prove.py`, `run.sh`, their numbers and the corpus
    reader.
    """
    refuse("olmo-core", decision, version, VERSIONS, _problems(decision), EXPRESSIBLE)
    notes = f"""
# Checkpoints go to outputs/{decision.digest[:16]} in the folder where it is started, which all nodes must share.
# If a rank runs out of memory: `run.sh train_module.rank_microbatch_size={decision.shape.seq_len}` runs the same batch
# one sequence at a time."""  # noqa: E501
    launch = corpus_run_script(
        decision,
        f"OLMo-core {version}",
        command=f'"$here/{SCRIPT}" "$@"',
        notes=notes,
        setup=" OLMO_SHARED_FS=1",
    )
    write_export(
        out_dir,
        decision,
        trainer="olmo-core",
        version=version,
        numbers={
            "needs": {"ai2-olmo-core": version},
            "names": [[*pair] for pair in (HEAD_NAMES | NAME_PARTS).items()],
        },
        programs={
            f"{MODULE}.py": f"{MODULE}.py",
            SCRIPT: "train_olmo_core.py",
            PROVE_FILE: "prove_olmo_core.py",
        },
        files={CONFIG_FILE: canon.pretty(run_config(decision)).decode(), RUN_FILE: launch},
    )
    return report("olmo-core", version, decision, _JUDGEMENTS, EXPRESSIBLE)


def parameter_names(shape: Shape) -> dict[str, str]:
    """Each of our parameters' name in OLMo-core's Transformer."""
    names: dict[str, str] = {}
    for ours in parameter_shapes(shape):
        names[ours] = {our_name: theirs for theirs, our_name in HEAD_NAMES.items()}.get(ours, ours)
        for theirs, our_part in NAME_PARTS.items():
            names[ours] = names[ours].replace(our_part, theirs)
    return names


def _problems(decision: Decision) -> dict[str, bool]:
    mesh, (share, microbatch) = decision.parallelism, rank_sequences(decision)
    return {
        "abort.on_non_finite = false: must be true, this export never steps on NaN": decision.abort.on_non_finite,  # noqa: E501
        "proxy.decay_shape = 'sqrt': must be 'linear', OLMo-core has no such decay": (
            decision.learning_rate.schedule.decay_shape == "linear"
        ),
        (
            f"launch.microbatch_sequences = {microbatch} does not divide a rank's share of "
            f"{counted(share, 'sequence')}"
        ): (share % microbatch == 0),
    } | {
        f"{name} = {degree}: must be 1, this export is data parallel only; or export to torchtitan": degree  # noqa: E501
        == 1
        for name, degree in (
            ("tensor", mesh.tensor),
            ("pipeline", mesh.pipeline),
            ("context", mesh.context),
        )
    }


def group_globs(decision: Decision) -> list[tuple[list[str], ParameterGroup]]:
    """Globs of each group over OLMo-core's names, each parameter matched by exactly one.

    Raises:
        FrozenError: the groups do not fit the shape's parameters.
    """
    grouped = names_by_group(decision, parameter_names(decision.shape))
    return [(_globs(names), group) for group, names in grouped]


def _globs(names: list[str]) -> list[str]:
    return [
        f"{before}*{after}" if after else before
        for before, after in dict.fromkeys(map(any_layer, names))
    ]


def scheduler_config(schedule: Schedule) -> dict[str, Json]:
    """OLMo-core's schedulers for the same lr(t).

    Its step s = t + 1. Warmup s / W is ours, but its decays are a step ahead: so the warmup's
    scheduler runs one step longer, at the peak, and the decay's begins its count after that.
    """
    warmup: dict[str, Json] = {
        **_config("optim.scheduler.ConstantWithWarmup"),
        "warmup": schedule.warmup_steps,
    }
    start = (
        schedule.num_steps - schedule.decay_steps
        if schedule.kind == "wsd"
        else schedule.warmup_steps
    )
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
    num_steps = decision.learning_rate.schedule.num_steps
    return {
        "_CLASS_": f"{MODULE}.RunConfig",
        "digest": decision.digest,
        "num_ranks": decision.parallelism.num_ranks,
        "model": _model(decision),
        "train_module": _train_module(decision),
        "trainer": {
            **_config("train.config.TrainerConfig"),
            "save_folder": f"outputs/{decision.digest[:16]}",
            "save_overwrite": True,  # what a killed run left of a checkpoint must not stop it again
            "max_duration": {
                **_config("train.common.Duration"),
                "value": num_steps,
                "unit": "steps",
            },
            "metrics_collect_interval": 1,
            "callbacks": {
                "checkpointer": {
                    **_config("train.callbacks.checkpointer.CheckpointerCallback"),
                    "save_interval": decision.checkpointing.every_steps,
                    "max_checkpoints": decision.checkpointing.keep,
                    "pre_train_checkpoint": False,
                    # Saved in a thread, ranks record its time at different steps, and reducing
                    # metrics then hangs.
                    "save_async": False,
                },
                "brakes": {"_CLASS_": f"{MODULE}.Brakes"},
            },
        },
    }


def _config(path: str) -> dict[str, Json]:
    return {"_CLASS_": f"olmo_core.{path}"}


def _norm() -> dict[str, Json]:
    return {
        **_config("nn.layer_norm.LayerNormConfig"),
        "name": "rms",
        "eps": NORM_EPS,
        "bias": False,
    }


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
            "layer_norm": {
                **_norm(),
                "_CLASS_": f"{MODULE}.ScaledNormConfig",
                "multiplier": forward.output,
            },
        },
    }


def _options(group: ParameterGroup) -> dict[str, Json]:
    """Return a group's options by the names that OLMo-core's optimizers have for them."""
    settings = group.settings
    found: dict[str, Json] = {"lr": group.learning_rate, "weight_decay": group.weight_decay}
    if group.optimizer == "muon":
        return {**found, "momentum": settings["momentum"]}
    return {**found, "eps": settings["eps"], "betas": [settings["beta1"], settings["beta2"]]}


def _train_module(decision: Decision) -> dict[str, Json]:
    mesh, seq_len = decision.parallelism, decision.shape.seq_len
    overrides: list[Json] = [
        {
            **_config("optim.config.OptimGroupOverride"),
            "params": list(globs),
            "opts": _options(group),
        }
        for globs, group in group_globs(decision)
    ]
    data_parallel: dict[str, Json] = {
        "name": "fsdp" if mesh.data_parallel_replicate == 1 else "hsdp",
        "reduce_dtype": "float32",
        **({"param_dtype": "bfloat16"} if decision.precision == "bfloat16" else {}),
    }
    if mesh.data_parallel_replicate > 1:
        data_parallel |= {
            "num_replicas": mesh.data_parallel_replicate,
            "shard_degree": mesh.data_parallel_shard,
        }
    optimizer: dict[str, Json] = {**_config("optim.adamw.AdamWConfig"), "foreach": True}
    if any(group.optimizer == "muon" for group in decision.groups):
        optimizer = {"_CLASS_": f"{MODULE}.MuonConfig"}
    told: dict[str, Json] = {
        **_config("train.train_module.transformer.config.TransformerTrainModuleConfig"),
        "compile_model": decision.compiled,
        "rank_microbatch_size": rank_sequences(decision)[1] * seq_len,
        "max_sequence_length": seq_len,
        "optim": {**optimizer, "group_overrides": overrides},
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
            **_config(
                "train.train_module.transformer.config.TransformerActivationCheckpointingConfig"
            ),
            "mode": {"full": "full", "selective": "selected_ops"}[mesh.activation_checkpointing],
        }
    return told


_JUDGEMENTS: dict[str, Judgement] = {
    "compiled": ("exact", "compile_model"),
    "shape.family": (
        "equivalent",
        (
            "OLMo-core's pre-norm blocks: rotary halves and base, norm eps, no document mask as "
            "forerun; angles in float32"
        ),
    ),
    "groups": ("exact", "group_overrides"),
    "groups.pattern": (
        "equivalent",
        "rewritten as globs over OLMo-core's names; each parameter is in one group",
    ),
    "learning_rate": (
        "exact",
        "OLMo-core's own schedulers in sequence; they multiply in another order",
    ),
    "clip_norm": ("exact", "torch's clipping by the norm of the whole gradient"),
    "seed": (
        "exact",
        "sets initial values and data order; OLMo-core's own generators get it modulo 2**32",
    ),
    "precision": (
        "equivalent",
        "FSDP2 casts parameters for products; weights, reductions and moments are float32",
    ),
    "parallelism": (
        "exact",
        "FSDP2, or HSDP with replicas; tensor, pipeline and context other than 1 are refused",
    ),
    "parallelism.activation_checkpointing": (
        "equivalent",
        (
            "selective: OLMo-core chooses what it keeps and what it recomputes; the values stay "
            "the "
            "same"
        ),
    ),
    "checkpointing.every_steps": (
        "exact",
        "OLMo-core's own checkpoints: weights, optimizer and position in the data",
    ),
    "checkpointing.keep": (
        "equivalent",
        "counts the checkpoints of one start of the run; a resumed run leaves older ones",
    ),
    "abort": ("exact", "a callback stops before the update"),
}
