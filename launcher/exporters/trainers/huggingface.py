"""The decision as a Hugging Face run: a Granite config, training arguments, a script for
transformers' Trainer.

GraniteConfig is Llama's architecture with the four forward multipliers, so a checkpoint of this run
is served by transformers as it is. The script (`templates/forerun_huggingface.py`) gives the
Trainer what it lacks. `prove.py`, beside it, tells what transformers itself made of the numbers
(launcher.exporters.proof).
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
    rank_sequences,
    refuse,
    report,
)
from launcher.frozen.frozen import Decision, assign_groups
from launcher.frozen.launch_file import RUN_FILE
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.notation import counted
from proxies.core.shape import Shape, parameter_shapes
from proxies.model.decoder import NORM_EPS, ROPE_BASE

ACCELERATE = {"5.23.0": "1.15.0"}
"""The version of accelerate that each known one of transformers was verified with."""
VERSIONS = tuple(ACCELERATE)
EXPRESSIBLE = Expressible(optimizers={"adamw": ADAMW, "muon": MUON}, run_wide=("clip_norm",))
CONFIG_FILE = "config.json"
ARGUMENTS_FILE = "training_arguments.json"
SCRIPT = "forerun_huggingface.py"
NAMES = {
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
"""Parts of GraniteForCausalLM's parameter names, and ours; the script translates them back in this
order."""


def export(decision: Decision, out_dir: Path, version: str = VERSIONS[-1]) -> FidelityReport:
    """Write model config, training arguments, script, `prove.py`, `run.sh`, their numbers and the
    corpus reader.
    """
    refuse("huggingface", decision, version, VERSIONS, _problems(decision), EXPRESSIBLE)
    assign_groups(decision.groups, list(parameter_shapes(decision.shape)))
    needs = {"transformers": version, "accelerate": ACCELERATE[version]}
    trainer = ", ".join(" ".join(each) for each in needs.items())
    write_export(
        out_dir,
        decision,
        trainer="huggingface",
        version=version,
        numbers={"needs": {**needs}, "names": [[*pair] for pair in NAMES.items()]},
        programs={SCRIPT: SCRIPT, PROVE_FILE: "prove_huggingface.py"},
        files={
            CONFIG_FILE: canon.pretty(model_config(decision)).decode(),
            ARGUMENTS_FILE: canon.pretty(training_arguments(decision)).decode(),
            RUN_FILE: corpus_run_script(decision, trainer, command=f'"$here/{SCRIPT}" "$@"'),
        },
    )
    return report("huggingface", version, decision, _JUDGEMENTS, EXPRESSIBLE)


def parameter_names(shape: Shape) -> dict[str, str]:
    """Each of our parameters' name in GraniteForCausalLM."""
    names = {}
    for ours in parameter_shapes(shape):
        theirs = ours if ours.startswith("lm_head.") else f"model.{ours}"
        for part, our_part in NAMES.items():
            theirs = theirs.replace(f".{our_part}.", f".{part}.")
        names[ours] = theirs
    return names


def model_config(decision: Decision) -> dict[str, Json]:
    """The fields of GraniteConfig. Its `logits_scaling` divides the logits; its rotary pairs are
    halves, as ours.
    """
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


def training_arguments(decision: Decision) -> dict[str, Json]:
    """The fields of TrainingArguments; `train.py` builds optimizer and scheduler itself."""
    parallelism, (share, microbatch) = decision.parallelism, rank_sequences(decision)
    sharded, recompute = (
        parallelism.data_parallel_shard > 1,
        parallelism.activation_checkpointing != "none",
    )
    arguments: dict[str, Json] = {
        "output_dir": f"outputs/{decision.digest[:16]}",
        "max_steps": decision.learning_rate.schedule.num_steps,
        "per_device_train_batch_size": microbatch,
        "gradient_accumulation_steps": share // microbatch,
        "activation_checkpointing": recompute and not sharded,  # sharded, it is FSDP's own
        "activation_checkpointing_kwargs": {"use_reentrant": False},
        "max_grad_norm": decision.clip_norm or 0.0,  # 0: the norm is measured, nothing is clipped
        "torch_compile": decision.compiled,
        "bf16": decision.precision == "bfloat16",
        # transformers' own generators take no more; nothing is drawn from them
        "seed": decision.seed % 2**32,
        "save_strategy": "steps",
        "save_steps": decision.checkpointing.every_steps,
        "save_total_limit": decision.checkpointing.keep,
        "ignore_data_skip": True,  # the batches begin at the resumed step themselves
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


def _problems(decision: Decision) -> dict[str, bool]:
    mesh, stages = decision.parallelism, decision.learning_rate.schedule.batch_warmup_stages
    share, microbatch = rank_sequences(decision)
    # The Trainer takes equally many microbatches at every step, so while the batch is small they
    # are.
    even = share % microbatch == 0 and share // stages % (share // microbatch) == 0
    return {
        "shape.qk_norm = true: Granite's attention has none; use the native trainer": not decision.shape.qk_norm,  # noqa: E501
        "abort.on_non_finite = false: must be true, this export never steps on NaN": decision.abort.on_non_finite,  # noqa: E501
        f"launch.tensor = {mesh.tensor}, pipeline = {mesh.pipeline}, context = {mesh.context}: "
        "this export is "
        "data parallel only, so all three must be 1; torchtitan and Megatron-LM support them": mesh.num_ranks  # noqa: E501
        == mesh.num_data_ranks,
        f"launch.microbatch_sequences = {microbatch} does not split a rank's "
        f"{counted(share, 'sequence')} evenly"
        + (f", {share // stages} of them while the batch is smallest" if stages > 1 else ""): even,
    }


_JUDGEMENTS: dict[str, Judgement] = {
    "compiled": (
        "exact",
        "torch_compile; it costs memory that each rank builds the float32 model on its CPU first",
    ),
    "shape.family": (
        "equivalent",
        (
            "Granite blocks: rotary halves and base, norm eps, no document mask as in forerun; "
            "rotary "
            "angles in float32"
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
            "FSDP2 "
            "casts as forerun"
        ),
    ),
    "parallelism": (
        "equivalent",
        (
            "replicas use DDP, shards accelerate's FSDP2, both together its mesh: the same average "
            "in "
            "another order"
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
    "abort": ("exact", "both stop before the update"),
}
