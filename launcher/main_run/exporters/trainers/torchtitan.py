"""Export to torchtitan: a module with one config function, its numbers, the corpus reader, and the
command line.

torchtitan takes `--module M --config F`. The module (`templates/forerun_torchtitan.py`) builds
torchtitan's own components from `forerun.json`: its Llama 3 blocks, AdamW groups by patterns,
scheduler, and checkpoints. The run starts from the embedded trainer's weights, sees its batches,
and takes its steps.
"""

from __future__ import annotations

import re
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
    format_groups,
    list_name_parts_by_group,
    write_export,
)
from forerun._launcher.main_run.exporters.fidelity import FidelityReport, Judgement, build_report
from forerun._launcher.main_run.frozen.frozen import Decision, ParameterGroup
from forerun._launcher.main_run.frozen.launch_file import RUN_FILE
from forerun._proxies.core.optimizers import RECIPES
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.shape import Shape, list_parameter_shapes
from forerun._proxies.model.layers import NORM_EPS
from forerun._proxies.model.rotary import ROPE_BASE

VERSIONS = ("0.3.0",)
EXPRESSIBLE = Expressible(optimizers=ADAMW_AND_MUON, run_wide=("clip_norm",))
MODULE = "forerun_torchtitan"
_NEEDED_MODULES = ("torchtitan.components.dataloader", "torchtitan.components.checkpointer")
"""Modules of the release that torchtitan's main branch of August 2026 does not have."""


def export(decision: Decision, out_dir: Path, version: str = VERSIONS[-1]) -> FidelityReport:
    """Write `forerun_torchtitan.py`, `prove.py`, `run.sh`, their numbers, and the corpus reader."""
    problems = _find_problems(decision)
    require_runnable("torchtitan", decision, version, VERSIONS, problems, EXPRESSIBLE)
    decay_ratio, decay_type = _choose_decay(decision.learning_rate.schedule)
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
            "needs_modules": list(_NEEDED_MODULES),
            "norm_eps": NORM_EPS,
            "rope_base": ROPE_BASE,
            "groups": format_groups(build_group_patterns(decision)),
            "decay_ratio": decay_ratio,
            "decay_type": decay_type,
            "rank_microbatch_sequences": count_rank_sequences(decision)[1],
        },
        programs={
            f"{MODULE}.py": f"{MODULE}.py",
            "forerun_versions.py": "forerun_versions.py",
            PROVE_FILE: "prove_torchtitan.py",
        },
        files={
            RUN_FILE: format_corpus_run_script(
                decision, f"torchtitan {version}", command=command, notes=notes
            )
        },
    )
    return build_report("torchtitan", version, decision, _JUDGEMENTS, EXPRESSIBLE)


def _find_problems(decision: Decision) -> Iterator[str]:
    """Yield what torchtitan refuses or gets wrong, as its sources and trial runs show."""
    shape, mesh = decision.shape, decision.parallelism
    yield from list_batch_problems(decision, can_grow=False)
    if not decision.abort.on_non_finite:
        yield (
            "abort.on_non_finite = false: must be true, torchtitan always stops at a loss that is "
            "not finite"
        )
    if mesh.pipeline != 1:
        yield (
            f"launch.pipeline = {mesh.pipeline}: must be 1, torch up to 2.13 accepts no "
            "microbatches split by torchtitan; or export to Megatron-LM"
        )
    if shape.num_kv_heads % mesh.tensor:
        yield f"launch.tensor = {mesh.tensor} does not divide num_kv_heads = {shape.num_kv_heads}"
    if mesh.tensor != 1 and RECIPES[decision.optimizer].main.only_matrices:
        yield (
            f"launch.tensor = {mesh.tensor} with optimizer = {decision.optimizer!r}: must be 1, "
            "its matrices must be whole or in shards of rows"
        )
    if mesh.tensor != 1 and shape.qk_norm:
        yield (
            f"launch.tensor = {mesh.tensor} with shape.qk_norm = true: torchtitan's Llama 3 layout "
            "does not cover the norms over heads"
        )
    if shape.seq_len % mesh.tensor:
        yield (
            f"seq_len = {shape.seq_len} must be a multiple of tensor = {mesh.tensor}, which splits "
            "it"
        )
    if mesh.context != 1:
        yield (
            f"launch.context = {mesh.context}: must be 1, this export is not proven under context "
            "parallelism (its attention needs a GPU)"
        )


def parameter_names(shape: Shape) -> dict[str, str]:
    """Return torchtitan's name of each parameter by forerun's name."""
    return {
        name: re.sub(r"\.attention\.(w[qkv])\.", r".attention.qkv_linear.\1.", name)
        for name in list_parameter_shapes(shape)
    }


def build_group_patterns(decision: Decision) -> list[tuple[str, ParameterGroup]]:
    """Return a regex over torchtitan's names for each group; each parameter matches exactly one.

    Raises:
        FrozenError: The groups do not fit the shape's parameters.
    """
    patterns = []
    for group, names in list_name_parts_by_group(decision, parameter_names(decision.shape)):
        # Activation checkpointing adds `_checkpoint_wrapped_module` after the number of the layer.
        alternatives = (r"\d+(?:\._\w+)*".join(map(re.escape, parts)) for parts in names)
        patterns.append((f"^(?:{'|'.join(alternatives)})$", group))
    return patterns


def _choose_decay(schedule: Schedule) -> tuple[float | None, str]:
    """Return torchtitan's `decay_ratio` and `decay_type`; both count steps alike."""
    if schedule.kind == "constant":
        return 0.0, "linear"
    if schedule.kind == "wsd":
        # torchtitan rounds num_steps * ratio to whole steps, which gives decay_steps again.
        return schedule.decay_steps / schedule.num_steps, schedule.decay_shape
    return None, schedule.kind


_JUDGEMENTS: dict[str, Judgement] = {
    "shape.family": (
        "equivalent",
        (
            "Llama 3 blocks; rotary pairs and base, norm eps, no document mask as in forerun; "
            "rotary angles in float32"
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
            "the same"
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
