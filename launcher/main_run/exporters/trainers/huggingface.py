"""Export to Hugging Face: a Granite config, training arguments, and a script for transformers'
Trainer.

GraniteConfig is Llama's architecture with the four forward multipliers, so transformers serves a
checkpoint of this run as it is. The script (`templates/forerun_huggingface.py`) adds what the
Trainer lacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from forerun._launcher.main_run.exporters.export_checks import (
    ADAMW_AND_MUON,
    Expressible,
    count_rank_sequences,
    require_runnable,
)
from forerun._launcher.main_run.exporters.export_writer import (
    PROVE_FILE,
    format_corpus_run_script,
    write_export,
)
from forerun._launcher.main_run.exporters.fidelity import FidelityReport, Judgement, build_report
from forerun._launcher.main_run.frozen.frozen import Decision, assign_groups
from forerun._launcher.main_run.frozen.launch_file import RUN_FILE
from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.shape import Shape, list_parameter_shapes
from forerun._proxies.model.layers import NORM_EPS
from forerun._proxies.model.rotary import ROPE_BASE

ACCELERATE = {"5.23.0": "1.15.0"}
"""Version of accelerate that a version of transformers was verified with."""
VERSIONS = tuple(ACCELERATE)
EXPRESSIBLE = Expressible(optimizers=ADAMW_AND_MUON, run_wide=("clip_norm",))
CONFIG_FILE = "config.json"
ARGUMENTS_FILE = "training_arguments.json"
SCRIPT = "forerun_huggingface.py"
NAME_PARTS = {
    "embed_tokens": "tok_embeddings",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}
"""Parts of parameters' names: the part in forerun's name, by the part in GraniteForCausalLM's that
it replaces. The exported script translates Granite's names to forerun's in this order."""


def export(decision: Decision, out_dir: Path, version: str = VERSIONS[-1]) -> FidelityReport:
    """Write model config, training arguments, script, `prove.py`, `run.sh`, the numbers that these
    programs read, and the corpus reader.
    """
    problems = _find_problems(decision)
    require_runnable("huggingface", decision, version, VERSIONS, problems, EXPRESSIBLE)
    # Raises FrozenError if the groups do not fit; the assignment itself is not needed here.
    assign_groups(decision.groups, list(list_parameter_shapes(decision.shape)))
    needs = {"transformers": version, "accelerate": ACCELERATE[version]}
    versions = ", ".join(" ".join(item) for item in needs.items())
    write_export(
        out_dir,
        decision,
        trainer="huggingface",
        version=version,
        numbers={"needs": {**needs}, "names": [[*pair] for pair in NAME_PARTS.items()]},
        programs={SCRIPT: SCRIPT, PROVE_FILE: "prove_huggingface.py"},
        files={
            CONFIG_FILE: canon.to_pretty_json(build_model_config(decision)).decode(),
            ARGUMENTS_FILE: canon.to_pretty_json(build_training_arguments(decision)).decode(),
            RUN_FILE: format_corpus_run_script(
                decision, versions, command=f'"$here/{SCRIPT}" "$@"'
            ),
        },
    )
    return build_report("huggingface", version, decision, _JUDGEMENTS, EXPRESSIBLE)


def parameter_names(shape: Shape) -> dict[str, str]:
    """Return GraniteForCausalLM's name of each parameter by forerun's name."""
    names = {}
    for frozen_name in list_parameter_shapes(shape):
        name = frozen_name if frozen_name.startswith("lm_head.") else f"model.{frozen_name}"
        for part, frozen_part in NAME_PARTS.items():
            name = name.replace(f".{frozen_part}.", f".{part}.")
        names[frozen_name] = name
    return names


def build_model_config(decision: Decision) -> dict[str, Json]:
    """Return the fields of GraniteConfig, whose `logits_scaling` divides the logits."""
    shape, forward = decision.shape, decision.forward
    return {
        "model_type": "granite",
        "architectures": ["GraniteForCausalLM"],
        "dtype": "float32",
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.width,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "intermediate_size": shape.ffn_width,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.seq_len,
        "tie_word_embeddings": shape.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": NORM_EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_BASE},
        "embedding_multiplier": forward.embedding,
        "attention_multiplier": forward.attention,
        "residual_multiplier": forward.residual,
        "logits_scaling": 1 / forward.output,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def build_training_arguments(decision: Decision) -> dict[str, Json]:
    """Return the fields of TrainingArguments; the script builds optimizer and scheduler itself."""
    parallelism, (share, microbatch) = decision.parallelism, count_rank_sequences(decision)
    sharded = parallelism.data_parallel_shard > 1
    recompute = parallelism.activation_checkpointing != "none"
    arguments: dict[str, Json] = {
        "output_dir": f"outputs/{decision.digest[:16]}",
        "max_steps": decision.learning_rate.schedule.num_steps,
        "per_device_train_batch_size": microbatch,
        "gradient_accumulation_steps": share // microbatch,
        "activation_checkpointing": recompute and not sharded,  # FSDP has its own.
        "activation_checkpointing_kwargs": {"use_reentrant": False},
        "max_grad_norm": decision.clip_norm or 0.0,  # 0 measures without clipping.
        "torch_compile": decision.compiled,
        "bf16": decision.precision == "bfloat16",
        # transformers' own generators take no larger seed; nothing is drawn from them.
        "seed": decision.seed % 2**32,
        "save_strategy": "steps",
        "save_steps": decision.checkpointing.every_steps,
        "save_total_limit": decision.checkpointing.keep,
        "ignore_data_skip": True,  # The batches start at the resumed step by themselves.
        "logging_strategy": "steps",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "ddp_find_unused_parameters": False,
    }
    if sharded:
        arguments["fsdp"] = True
        arguments["fsdp_config"] = {
            "version": 2,
            "reshard_after_forward": True,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["GraniteDecoderLayer"],
            "state_dict_type": "SHARDED_STATE_DICT",
            "activation_checkpointing": recompute,
            "cpu_ram_efficient_loading": True,
        }
    return arguments


def _find_problems(decision: Decision) -> Iterator[str]:
    """Yield what transformers' Trainer or this export cannot do."""
    mesh, stages = decision.parallelism, decision.learning_rate.schedule.batch_warmup_stages
    share, microbatch = count_rank_sequences(decision)
    if decision.shape.qk_norm:
        yield "shape.qk_norm = true: Granite's attention has none; use the native trainer"
    if not decision.abort.on_non_finite:
        yield "abort.on_non_finite = false: must be true, this export never steps on NaN"
    if mesh.num_ranks != mesh.num_data_ranks:
        yield (
            f"launch.tensor = {mesh.tensor}, pipeline = {mesh.pipeline}, context = {mesh.context}: "
            "this export is data parallel only, so all three must be 1; torchtitan and Megatron-LM "
            "support them"
        )
    # The Trainer takes equally many microbatches at every step, also while the batch is small.
    if share % microbatch or share // stages % (share // microbatch):
        smallest = f", {share // stages} of them while the batch is smallest" if stages > 1 else ""
        yield (
            f"launch.microbatch_sequences = {microbatch} does not split a rank's "
            f"{format_counted(share, 'sequence')} evenly{smallest}"
        )


_JUDGEMENTS: dict[str, Judgement] = {
    "compiled": (
        "exact",
        "torch_compile; it costs memory that each rank builds the float32 model on its CPU first",
    ),
    "shape.family": (
        "equivalent",
        (
            "Granite blocks: rotary halves and base, norm eps, no document mask as in forerun; "
            "rotary angles in float32"
        ),
    ),
    "forward.output": (
        "equivalent",
        "Granite divides the logits by logits_scaling, forerun multiplies the readout's input",
    ),
    "multiplier_form": ("exact", "the searched multipliers are fields of config.json"),
    "groups": (
        "exact",
        "assigned by the frozen patterns over translated names; checked on the live model at start",
    ),
    "learning_rate": (
        "exact",
        "LambdaLR over the frozen function, exported with it; step 0 is the first update",
    ),
    "clip_norm": (
        "exact",
        "torch's clipping by the norm of the whole batch's gradient; max_grad_norm 0 is no clipping",  # noqa: E501
    ),
    "seed": (
        "exact",
        "sets initial values and data order; transformers' own generators get it modulo 2**32",
    ),
    "precision": (
        "equivalent",
        (
            "unsharded bfloat16 is autocast with a float32 residual stream (forerun: bfloat16); "
            "FSDP2 casts as forerun"
        ),
    ),
    "parallelism": (
        "equivalent",
        (
            "replicas use DDP, shards accelerate's FSDP2, both together its mesh: the same average "
            "in another order"
        ),
    ),
    "parallelism.activation_checkpointing": (
        "equivalent",
        "selective: the Trainer recomputes whole blocks; the values stay the same",
    ),
    "checkpointing": (
        "equivalent",
        "the Trainer's own, not hashed; it resumes from the newest that has a trainer_state.json",
    ),
    "abort": ("exact", "both of its checks stop the run before the update"),
}
