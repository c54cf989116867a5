"""Export to OLMo-core: its own configs as JSON, a script that trains them, and the corpus reader.

`run.json` has the form of OLMo-core's `Config.as_config_dict`: a config is a dict of its fields and
`_CLASS_`, the class to build; a field that is None is left out. OLMo-core's own parser reads it:
model, AdamW groups by globs, scheduler, clipping, mesh, and checkpoints. Embedding and residual
multipliers are native there. `templates/forerun_olmo_core.py` has the classes that OLMo-core lacks:
a config with a scale of q . k, the readout's multiplier, initial values by (seed, name), the data
order by (seed, step), and the abort policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from forerun._launcher.main_run.exporters.export_checks import (
    ADAMW_AND_MUON,
    Expressible,
    count_rank_sequences,
    list_batch_problems,
    require_runnable,
)
from forerun._launcher.main_run.exporters.export_writer import (
    PROVE_FILE,
    format_corpus_run_script,
    list_name_parts_by_group,
    write_export,
)
from forerun._launcher.main_run.exporters.fidelity import FidelityReport, Judgement, build_report
from forerun._launcher.main_run.frozen.frozen import Decision, ParameterGroup
from forerun._launcher.main_run.frozen.launch_file import RUN_FILE
from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.shape import Shape, list_parameter_shapes
from forerun._proxies.model.layers import NORM_EPS
from forerun._proxies.model.rotary import ROPE_BASE

VERSIONS = ("3.0.0",)
EXPRESSIBLE = Expressible(optimizers=ADAMW_AND_MUON, run_wide=("clip_norm",))
MODULE = "forerun_olmo_core"
SCRIPT = "train.py"
CONFIG_FILE = "run.json"
HEAD_NAMES = {"lm_head.w_out.weight": "lm_head.weight", "lm_head.norm.weight": "norm.weight"}
"""forerun's name of each parameter of the readout, by OLMo-core's name."""
NAME_PARTS = {
    "embeddings.": "tok_embeddings.",
    "blocks.": "layers.",
    ".w_q.": ".wq.",
    ".w_k.": ".wk.",
    ".w_v.": ".wv.",
    ".w_out.": ".wo.",
    "feed_forward_norm.": "ffn_norm.",
}
"""Parts of all other parameters' names: the part in forerun's name, by the part in OLMo-core's that
it replaces. The exported module translates OLMo-core's names to forerun's in this order."""


def export(decision: Decision, out_dir: Path, version: str = VERSIONS[-1]) -> FidelityReport:
    """Write the files of the export.

    These are `run.json`, the module with the classes that `run.json` names, `train.py`, `prove.py`,
    `run.sh`, the numbers that these programs read, and the corpus reader.
    """
    problems = _find_problems(decision)
    require_runnable("olmo-core", decision, version, VERSIONS, problems, EXPRESSIBLE)
    notes = f"""
# Checkpoints go to outputs/{decision.digest[:16]} in the working directory, which all nodes must share.
# If a rank runs out of memory: `run.sh train_module.rank_microbatch_size={decision.shape.seq_len}` runs the same batch
# one sequence at a time."""  # noqa: E501
    launch = format_corpus_run_script(
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
        files={
            CONFIG_FILE: canon.to_pretty_json(build_run_config(decision)).decode(),
            RUN_FILE: launch,
        },
    )
    return build_report("olmo-core", version, decision, _JUDGEMENTS, EXPRESSIBLE)


def parameter_names(shape: Shape) -> dict[str, str]:
    """Return the name of each parameter in OLMo-core's Transformer by forerun's name."""
    names = {}
    head_names = {frozen_name: name for name, frozen_name in HEAD_NAMES.items()}
    for frozen_name in list_parameter_shapes(shape):
        name = head_names.get(frozen_name, frozen_name)
        for part, frozen_part in NAME_PARTS.items():
            name = name.replace(frozen_part, part)
        names[frozen_name] = name
    return names


def _find_problems(decision: Decision) -> Iterator[str]:
    """Yield what OLMo-core or this export cannot do."""
    yield from list_batch_problems(decision, can_grow=True)
    if not decision.abort.on_non_finite:
        yield "abort.on_non_finite = false: must be true, this export never steps on NaN"
    if decision.learning_rate.schedule.decay_shape != "linear":
        yield "proxy.decay_shape = 'sqrt': must be 'linear', OLMo-core has no such decay"
    for name in ("tensor", "pipeline", "context"):
        if (degree := getattr(decision.parallelism, name)) != 1:
            yield (
                f"{name} = {degree}: must be 1, this export is data parallel only; or export to "
                "torchtitan"
            )


def build_scheduler_config(schedule: Schedule) -> dict[str, Json]:
    """Return OLMo-core's schedulers for the same lr(t).

    OLMo-core counts steps from 1. So its warmup equals forerun's, but its decays are a step ahead.
    Therefore the warmup's scheduler runs one step longer, at the peak, and the decay's scheduler
    starts to count after that.
    """
    warmup = _make_config("optim.scheduler.ConstantWithWarmup", warmup=schedule.warmup_steps)
    start = schedule.warmup_steps
    if schedule.kind == "wsd":
        start = schedule.num_steps - schedule.decay_steps
    if schedule.kind == "constant" or start + 1 >= schedule.num_steps:
        return warmup
    kind = "CosWithWarmup" if schedule.kind == "cosine" else "LinearWithWarmup"
    decay = _make_config(
        f"optim.scheduler.{kind}",
        warmup=0,
        t_max=schedule.num_steps - start,
        alpha_f=schedule.final_fraction,
    )
    return _make_config(
        "optim.scheduler.SequentialScheduler",
        schedulers=[warmup, decay],
        schedulers_max=[start + 1],
    )


def build_run_config(decision: Decision) -> dict[str, Json]:
    """Return the content of `run.json`.

    Raises:
        FrozenError: The groups do not fit the shape's parameters.
    """
    return {
        "_CLASS_": f"{MODULE}.RunConfig",
        "digest": decision.digest,
        "num_ranks": decision.parallelism.num_ranks,
        "model": _build_model(decision),
        "train_module": _build_train_module(decision),
        "trainer": _make_config(
            "train.config.TrainerConfig",
            save_folder=f"outputs/{decision.digest[:16]}",
            save_overwrite=True,  # A killed run may have left a part of a checkpoint.
            max_duration=_make_config(
                "train.common.Duration",
                value=decision.learning_rate.schedule.num_steps,
                unit="steps",
            ),
            metrics_collect_interval=1,
            callbacks={
                "checkpointer": _make_config(
                    "train.callbacks.checkpointer.CheckpointerCallback",
                    save_interval=decision.checkpointing.every_steps,
                    max_checkpoints=decision.checkpointing.keep,
                    pre_train_checkpoint=False,
                    # If checkpoints are saved in a thread, ranks record the time at different
                    # steps, and the reduction of metrics hangs.
                    save_async=False,
                ),
                # Stops the run by the abort policy, and writes metrics.jsonl.
                "brakes": {"_CLASS_": f"{MODULE}.Brakes"},
            },
        ),
    }


def _make_config(path: str, **fields: Json) -> dict[str, Json]:
    """Return the config of a class of OLMo-core."""
    return {"_CLASS_": f"olmo_core.{path}", **fields}


def _build_norm() -> dict[str, Json]:
    return _make_config("nn.layer_norm.LayerNormConfig", name="rms", eps=NORM_EPS, bias=False)


def _build_model(decision: Decision) -> dict[str, Json]:
    shape, forward = decision.shape, decision.forward
    attention: dict[str, Json] = {
        "_CLASS_": f"{MODULE}.ScaledAttentionConfig",
        "n_heads": shape.num_heads,
        "n_kv_heads": shape.num_kv_heads,
        "bias": False,
        "rope": _make_config("nn.rope.RoPEConfig", theta=int(ROPE_BASE)),
        "backend": "torch",
        "softmax_scale": forward.attention,
    }
    if shape.qk_norm:
        attention |= {"qk_norm": _build_norm(), "use_head_qk_norm": True}
    return _make_config(
        "nn.transformer.config.TransformerConfig",
        d_model=shape.width,
        vocab_size=shape.vocab_size,
        n_layers=shape.num_layers,
        tie_word_embeddings=shape.tied,
        embed_scale=forward.embedding,
        block=_make_config(
            "nn.transformer.config.TransformerBlockConfig",
            sequence_mixer=attention,
            feed_forward=_make_config(
                "nn.feed_forward.FeedForwardConfig", hidden_size=shape.ffn_width, bias=False
            ),
            layer_norm=_build_norm(),
            attention_residual_alpha=forward.residual,
            feed_forward_residual_alpha=forward.residual,
        ),
        lm_head=_make_config(
            "nn.lm_head.LMHeadConfig",
            bias=False,
            layer_norm={
                **_build_norm(),
                "_CLASS_": f"{MODULE}.ScaledNormConfig",
                "multiplier": forward.output,
            },
        ),
    )


def _build_options(group: ParameterGroup) -> dict[str, Json]:
    """Return a group's options by their names in OLMo-core's optimizers."""
    settings = group.settings
    options: dict[str, Json] = {"lr": group.learning_rate, "weight_decay": group.weight_decay}
    if group.optimizer == "muon":
        return {**options, "momentum": settings["momentum"]}
    return {**options, "eps": settings["eps"], "betas": [settings["beta1"], settings["beta2"]]}


def _build_train_module(decision: Decision) -> dict[str, Json]:
    mesh, seq_len = decision.parallelism, decision.shape.seq_len
    # Each group has globs over OLMo-core's names; each parameter matches exactly one of them.
    overrides: list[Json] = [
        _make_config(
            "optim.config.OptimGroupOverride",
            params=["*".join(parts) for parts in names],
            opts=_build_options(group),
        )
        for group, names in list_name_parts_by_group(decision, parameter_names(decision.shape))
    ]
    data_parallel = _make_config(
        "train.train_module.transformer.config.TransformerDataParallelConfig",
        name="fsdp" if mesh.data_parallel_replicate == 1 else "hsdp",
        reduce_dtype="float32",
    )
    if decision.precision == "bfloat16":
        data_parallel["param_dtype"] = "bfloat16"
    if mesh.data_parallel_replicate > 1:
        data_parallel |= {
            "num_replicas": mesh.data_parallel_replicate,
            "shard_degree": mesh.data_parallel_shard,
        }
    optimizer = _make_config("optim.adamw.AdamWConfig", foreach=True)
    if any(group.optimizer == "muon" for group in decision.groups):
        optimizer = {"_CLASS_": f"{MODULE}.MuonConfig"}
    train_module = _make_config(
        "train.train_module.transformer.config.TransformerTrainModuleConfig",
        compile_model=decision.compiled,
        rank_microbatch_size=count_rank_sequences(decision)[1] * seq_len,
        max_sequence_length=seq_len,
        optim={**optimizer, "group_overrides": overrides},
        scheduler=build_scheduler_config(decision.learning_rate.schedule),
        dp_config=data_parallel,
    )
    if decision.clip_norm is not None:
        train_module["max_grad_norm"] = decision.clip_norm
    if mesh.activation_checkpointing != "none":
        train_module["ac_config"] = _make_config(
            "train.train_module.transformer.config.TransformerActivationCheckpointingConfig",
            mode={"full": "full", "selective": "selected_ops"}[mesh.activation_checkpointing],
        )
    return train_module


_JUDGEMENTS: dict[str, Judgement] = {
    "compiled": ("exact", "compile_model"),
    "shape.family": (
        "equivalent",
        (
            "OLMo-core's pre-norm blocks; rotary halves and base, norm eps, no document mask as "
            "in forerun; rotary angles in float32"
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
            "the same"
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
