"""The decision as a torchtitan run: a module with one config function, its numbers, the corpus
reader, a command line.

torchtitan takes `--module M --config F`. The module (`templates/forerun_torchtitan.py`) builds
torchtitan's own components from `forerun.json`: its Llama 3 blocks, per-pattern AdamW groups,
scheduler, checkpoints. So the run starts from the embedded trainer's weights, sees its batches and
takes its steps. `prove.py`, beside it, tells what torchtitan itself made of the numbers
(launcher.exporters.proof).
"""

from __future__ import annotations

import re
from pathlib import Path

from launcher.exporters.export_writer import PROVE_FILE, corpus_run_script, groups_of, write_export
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
from proxies.core.optimizers import RECIPES
from proxies.core.schedule import Schedule
from proxies.core.shape import Shape, parameter_shapes
from proxies.model.decoder import NORM_EPS, ROPE_BASE

VERSIONS = ("0.3.0",)
EXPRESSIBLE = Expressible(optimizers={"adamw": ADAMW, "muon": MUON}, run_wide=("clip_norm",))
MODULE = "forerun_torchtitan"
_MODULES = ("torchtitan.components.dataloader", "torchtitan.components.checkpointer")
"""Modules of the release that torchtitan's main branch of August 2026 does not have."""


def _problems(decision: Decision) -> dict[str, bool]:
    """What torchtitan refuses or gets wrong; read in its sources and tried (docs)."""
    shape, mesh, stages = (
        decision.shape,
        decision.parallelism,
        decision.learning_rate.schedule.batch_warmup_stages,
    )
    share, microbatch = rank_sequences(decision)
    return {
        (
            "abort.on_non_finite = false: must be true, torchtitan always stops at a loss that is "
            "not "
            "finite"
        ): (decision.abort.on_non_finite),
        f"batch_warmup_stages = {stages}: must be 1 (proxy.batch_warmup_fraction = 0), "
        "torchtitan's batch size is fixed": stages == 1,
        (
            f"launch.microbatch_sequences = {microbatch} does not divide a rank's share of {share} "
            "sequences"
        ): share % microbatch == 0,
        f"launch.pipeline = {mesh.pipeline}: must be 1, torch up to 2.13 accepts no microbatches "
        "split by "
        "torchtitan; or export to Megatron-LM": mesh.pipeline == 1,
        f"launch.tensor = {mesh.tensor} does not divide num_kv_heads = {shape.num_kv_heads}": shape.num_kv_heads  # noqa: E501
        % mesh.tensor
        == 0,
        f"launch.tensor = {mesh.tensor} with optimizer = {decision.optimizer!r}: must be 1, its "
        "matrices must be "
        "whole or in shards of rows": mesh.tensor == 1
        or not RECIPES[decision.optimizer].main.only_matrices,
        f"launch.tensor = {mesh.tensor} with shape.qk_norm = true: torchtitan's Llama 3 layout "
        "does not cover the "
        "norms over heads": mesh.tensor == 1 or not shape.qk_norm,
        f"seq_len = {shape.seq_len} must be a multiple of tensor = {mesh.tensor}, which splits it": shape.seq_len  # noqa: E501
        % mesh.tensor
        == 0,
        f"launch.context = {mesh.context}: must be 1, this export is not proven under context "
        "parallelism (its "
        "attention needs a GPU)": mesh.context == 1,
    }


def export(decision: Decision, out_dir: Path, version: str = VERSIONS[-1]) -> FidelityReport:
    """Write `forerun_torchtitan.py`, `prove.py`, `run.sh`, their numbers and the corpus reader into
    `out_dir`.
    """
    refuse("torchtitan", decision, version, VERSIONS, _problems(decision), EXPRESSIBLE)
    decay_ratio, decay_type = _scheduler(decision.learning_rate.schedule)
    notes = """
# If a rank runs out of memory: `run.sh --training.local_batch_size 1` accumulates the same batch in smaller pieces."""  # noqa: E501
    command = f'-m torchtitan.train --module {MODULE} --config main_run "$@"'
    write_export(
        out_dir,
        decision,
        trainer="torchtitan",
        version=version,
        numbers={
            "needs": {"torchtitan": version},
            "needs_modules": list(_MODULES),
            "norm_eps": NORM_EPS,
            "rope_base": ROPE_BASE,
            "groups": groups_of(group_patterns(decision)),
            "decay_ratio": decay_ratio,
            "decay_type": decay_type,
            "rank_microbatch_sequences": rank_sequences(decision)[1],
        },
        programs={
            f"{MODULE}.py": f"{MODULE}.py",
            "forerun_versions.py": "forerun_versions.py",
            PROVE_FILE: "prove_torchtitan.py",
        },
        files={
            RUN_FILE: corpus_run_script(
                decision, f"torchtitan {version}", command=command, notes=notes
            )
        },
    )
    return report("torchtitan", version, decision, _JUDGEMENTS, EXPRESSIBLE)


def parameter_names(shape: Shape) -> dict[str, str]:
    """Each of our parameters' name in torchtitan."""
    return {
        name: re.sub(r"\.attention\.(w[qkv])\.", r".attention.qkv_linear.\1.", name)
        for name in parameter_shapes(shape)
    }


def group_patterns(decision: Decision) -> list[tuple[str, ParameterGroup]]:
    """One regex per group over torchtitan's names, each parameter matched by exactly one.

    Raises:
        FrozenError: the groups do not fit the shape's parameters.
    """
    grouped = names_by_group(decision, parameter_names(decision.shape))
    return [(_pattern(names), group) for group, names in grouped]


def _pattern(names: list[str]) -> str:
    parts = []
    for before, after in dict.fromkeys(map(any_layer, names)):
        # Activation checkpointing puts `_checkpoint_wrapped_module` into the names the patterns are
        # searched in.
        parts.append(re.escape(before) + (r"\d+(?:\._\w+)*" + re.escape(after) if after else ""))
    return f"^(?:{'|'.join(parts)})$"


def _scheduler(schedule: Schedule) -> tuple[float | None, str]:
    """The `decay_ratio` and `decay_type` of torchtitan, whose step convention is ours."""
    if schedule.kind == "constant":
        return 0.0, "linear"
    if schedule.kind == "wsd":
        # it rounds num_steps * ratio back
        return schedule.decay_steps / schedule.num_steps, schedule.decay_shape
    return None, schedule.kind


_JUDGEMENTS: dict[str, Judgement] = {
    "shape.family": (
        "equivalent",
        (
            "Llama 3 blocks; rotary pairs and base, norm eps, no document mask as in forerun; "
            "rotary "
            "angles in float32"
        ),
    ),
    "forward": ("exact", "the multipliers are modules of the model"),
    "compiled": (
        "exact",
        (
            "compile.enable; CUDA graphs on a GPU, unmeasured (FORERUN_CUDA_GRAPHS=0: none); "
            "FORERUN_DETERMINISTIC=1: slow"
        ),
    ),
    "groups.pattern": (
        "equivalent",
        "rewritten for torchtitan's parameter names; each parameter matches one pattern",
    ),
    "learning_rate": ("exact", "torchtitan's own scheduler gives the table bit for bit"),
    "clip_norm": ("exact", "torch's clip_grad_norm_; an infinite norm is no clipping"),
    "seed": ("exact", "sets initial values and data order; torchtitan's own generator gets it too"),
    "precision": (
        "equivalent",
        "FSDP casts parameters for products; weights, reductions and moments stay in float32",
    ),
    "parallelism": ("exact", "pipeline and context other than 1 are refused"),
    "parallelism.activation_checkpointing": (
        "equivalent",
        (
            "selective: torchtitan chooses what it keeps and what it recomputes; the values stay "
            "the "
            "same"
        ),
    ),
    "checkpointing": (
        "exact",
        "torchtitan's own asynchronous checkpoints of weights and optimizer",
    ),
    "abort.on_non_finite": ("exact", "a gradient that is not finite raises before the step"),
    "abort.train_loss_above_nats": (
        "equivalent",
        "raises after that step's update, before the next save",
    ),
}
