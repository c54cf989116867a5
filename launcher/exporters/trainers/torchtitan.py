"""The decision as a torchtitan run: a module with one config function, the corpus reader beside it, a command line.

torchtitan takes `--module M --config F`. The module written here states the decision's numbers as literals and
builds torchtitan's own components from them: its Llama 3 blocks, per-pattern AdamW groups, scheduler, checkpoints. What
those lack, small subclasses add: forward multipliers, initial values of (seed, name), the data order of (seed, step)
and the brakes. So the run starts from the embedded trainer's weights, sees its batches and takes its steps.
`prove.py`, beside it, tells what torchtitan itself made of the numbers (launcher.exporters.proof).
"""

from __future__ import annotations

import re
from pathlib import Path

from launcher.exporters.fidelity import ExportError, FidelityReport, Judgement, judged
from launcher.exporters.foreign import JUDGEMENTS, by_layer, failed, names_by_group, refusals
from launcher.exporters.proof import PROVE_FILE
from launcher.exporters.reader import reader_files
from launcher.exporters.trainers.torchtitan_model_text import MODEL
from launcher.exporters.trainers.torchtitan_prove_text import PROVE
from launcher.exporters.trainers.torchtitan_text import IMPORTS, RUN
from launcher.exporters.trainers.torchtitan_versions import PIECES, in_version
from launcher.exporters.view import proof_steps
from launcher.frozen.files import RUN_FILE, corpus_run_script, group_literals, module_header, write_files
from launcher.frozen.frozen import Decision, Parallelism, ParameterGroup
from proxies.core.schedule import Schedule
from proxies.core.shape import Shape
from proxies.model.decoder import NORM_EPS, parameter_shapes
from proxies.model.rotary import ROPE_BASE


def problems(decision: Decision, version: str) -> list[str]:
    """Why a decision cannot be exported to a version; empty if it can."""
    return refusals(decision, version, tuple(PIECES)) + failed(_of_the_run(decision)) + failed(_of_the_mesh(decision))


def _of_the_run(decision: Decision) -> dict[str, bool]:
    schedule = decision.learning_rate.schedule
    return {
        "abort.on_non_finite = false: torchtitan always stops at a loss that is not finite": (
            decision.abort.on_non_finite
        ),
        f"shape.family = {decision.shape.family!r}: this export writes Llama 3 blocks, torchtitan has none of that "
        "family; use the native trainer": decision.shape.family == "llama",
        f"batch_warmup_stages = {schedule.batch_warmup_stages}: torchtitan's batch has one size": (
            schedule.batch_warmup_stages == 1
        ),
    }


def _of_the_mesh(decision: Decision) -> dict[str, bool]:
    """What the degrees ask that torchtitan refuses or gets wrong; read in its sources and tried (docs)."""
    shape, mesh = decision.shape, decision.parallelism
    share = decision.batch_tokens // shape.seq_len // mesh.num_data_ranks
    microbatch = mesh.microbatch_sequences or share
    num_microbatches, over = divmod(share, microbatch)
    return {
        f"microbatch_sequences = {microbatch} does not divide a rank's share of {share} sequences": over == 0,
        f"pipeline = {mesh.pipeline} with {num_microbatches} microbatches: 1F1B needs one per stage at least; smaller "
        "microbatch_sequences, or fewer stages": mesh.pipeline == 1 or num_microbatches >= mesh.pipeline,
        f"pipeline = {mesh.pipeline} for {shape.num_layers} layers: every stage needs one": mesh.pipeline
        <= shape.num_layers,
        "shape.tied = true with pipeline stages: the matrix would lie on two of them": mesh.pipeline == 1
        or not shape.tied,
        f"tensor = {mesh.tensor} does not divide num_kv_heads = {shape.num_kv_heads}": shape.num_kv_heads % mesh.tensor
        == 0,
        f"tensor = {mesh.tensor} with shape.qk_norm = true: torchtitan's Llama 3 layout has no place for the norms "
        "over heads": mesh.tensor == 1 or not shape.qk_norm,
        f"seq_len = {shape.seq_len} is no multiple of tensor = {mesh.tensor}, which cuts sequences too": shape.seq_len
        % mesh.tensor
        == 0,
        f"context = {mesh.context}: no proof of this export has been run under context parallelism (its attention "
        "needs a GPU); context = 1": mesh.context == 1,
    }


VERSIONS = tuple(PIECES)
MODULE = "forerun_torchtitan"


def export(decision: Decision, out_dir: Path, version: str = VERSIONS[-1]) -> FidelityReport:
    """Write `forerun_torchtitan.py`, `prove.py`, `run.sh` and the corpus reader (`proxies/`) into `out_dir`.

    Returns what became of every leaf field of the decision.

    Raises:
        ExportError: an unknown version, or what torchtitan cannot run; every problem at once, and nothing is written.
        FrozenError: the groups do not fit the shape's parameters.
    """
    if found := problems(decision, version):
        raise ExportError("torchtitan", found)
    files = {
        f"{MODULE}.py": _module_text(decision, version),
        PROVE_FILE: _prove_text(decision, version),
        RUN_FILE: _run_text(decision, version),
    }
    write_files(out_dir, reader_files() | files)
    return FidelityReport(trainer="torchtitan", version=version, entries=judged(decision, JUDGEMENTS | _JUDGEMENTS))


def parameter_names(shape: Shape) -> dict[str, str]:
    """Each of our parameters' name in torchtitan."""
    return {
        name: re.sub(r"\.attention\.(w[qkv])\.", r".attention.qkv_linear.\1.", name) for name in parameter_shapes(shape)
    }


def group_patterns(decision: Decision) -> list[tuple[str, ParameterGroup]]:
    """One regex per group over torchtitan's names, each parameter matched by exactly one.

    Raises:
        FrozenError: the groups do not fit the shape's parameters.
    """
    grouped = names_by_group(decision, parameter_names(decision.shape))
    return [(_pattern(names, decision.shape.num_layers), group) for group, names in grouped]


def _pattern(names: list[str], num_layers: int) -> str:
    parts = []
    for (before, after), layers in by_layer(names).items():
        which = r"\d+" if len(layers) == num_layers else f"(?:{'|'.join(layers)})"
        # Activation checkpointing puts `_checkpoint_wrapped_module` into the names the patterns are searched in.
        parts.append(re.escape(before) + (rf"{which}(?:\._\w+)*" if layers else "") + re.escape(after))
    return f"^(?:{'|'.join(parts)})$"


def _scheduler(schedule: Schedule) -> tuple[float | None, str]:
    """The `decay_ratio` and `decay_type` of torchtitan, whose step convention is ours."""
    if schedule.kind == "constant":
        return 0.0, "linear"
    if schedule.kind == "wsd":
        return schedule.decay_steps / schedule.num_steps, "linear"  # it rounds num_steps * ratio back
    return None, schedule.kind


def degrees(parallelism: Parallelism, num_sequences: int) -> dict[str, object]:
    """The module's literals for a mesh that deals out `num_sequences` a step.

    A rank's share (LOCAL_SEQUENCES) goes through the model in microbatches: accumulated one after another, or with
    pipeline stages filling these.
    """
    share = num_sequences // parallelism.num_data_ranks
    return {
        "LOCAL_SEQUENCES": share,
        "MICROBATCH_SEQUENCES": parallelism.microbatch_sequences or share,
        "DATA_PARALLEL_SHARD": parallelism.data_parallel_shard,
        "DATA_PARALLEL_REPLICATE": parallelism.data_parallel_replicate,
        "TENSOR_PARALLEL": parallelism.tensor,
        "PIPELINE_PARALLEL": parallelism.pipeline,
        "ACTIVATION_CHECKPOINTING": parallelism.activation_checkpointing,
    }


def _numbers(decision: Decision) -> dict[str, object]:
    """The literals of the module, in its order."""
    shape, schedule = decision.shape, decision.learning_rate.schedule
    decay_ratio, decay_type = _scheduler(schedule)
    num_sequences = decision.batch_tokens // shape.seq_len
    return {
        "DIGEST": decision.digest,
        "NUM_LAYERS": shape.num_layers,
        "WIDTH": shape.width,
        "NUM_HEADS": shape.num_heads,
        "NUM_KV_HEADS": shape.num_kv_heads,
        "FFN_WIDTH": shape.ffn_width,
        "VOCAB_SIZE": shape.vocab_size,
        "SEQ_LEN": shape.seq_len,
        "TIED": shape.tied,
        "QK_NORM": shape.qk_norm,
        "NORM_EPS": NORM_EPS,
        "ROPE_BASE": ROPE_BASE,
        "EMBEDDING_MULTIPLIER": decision.forward.embedding,
        "ATTENTION_SCALE": decision.forward.attention,
        "RESIDUAL_MULTIPLIER": decision.forward.residual,
        "OUTPUT_MULTIPLIER": decision.forward.output,
        "NUM_STEPS": schedule.num_steps,
        "WARMUP_STEPS": schedule.warmup_steps,
        "DECAY_RATIO": decay_ratio,
        "DECAY_TYPE": decay_type,
        "FINAL_FRACTION": schedule.final_fraction,
        "CLIP_NORM": decision.clip_norm,
        "GLOBAL_SEQUENCES": num_sequences,
        **degrees(decision.parallelism, num_sequences),
        "PRECISION": decision.precision,
        "CHECKPOINT_EVERY_STEPS": decision.checkpointing.every_steps,
        "CHECKPOINT_KEEP": decision.checkpointing.keep,
        "SEED": decision.seed,
        "DATA_ID": decision.data.data_id,
        "DATA_WEIGHTS": dict(decision.data.weights),
        "ABORT_ABOVE_NATS": decision.abort.train_loss_above_nats,
    }


def _module_text(decision: Decision, version: str) -> str:
    header = module_header(decision, f"A frozen launch config of forerun, for torchtitan {version}.")
    numbers = "".join(f"{name} = {value!r}\n" for name, value in _numbers(decision).items())
    fixed = in_version(IMPORTS, version), in_version(MODEL + RUN, version)
    return f"{header}{fixed[0]}\n{numbers}{group_literals(group_patterns(decision))}{fixed[1]}"


def _prove_text(decision: Decision, version: str) -> str:
    steps = proof_steps(decision.learning_rate.schedule)
    return in_version(PROVE, version).replace("<<MODULE>>", MODULE).replace("<<STEPS>>", repr(steps))


def _run_text(decision: Decision, version: str) -> str:
    ranks = decision.parallelism.num_ranks
    dry_steps = 2 if decision.parallelism.pipeline == 1 else 0
    smaller = in_version("<<SMALLER>>", version).replace("SEQ_LEN", str(decision.shape.seq_len))
    notes = f"""
# DRY_RUN=1 makes one rank of the {ranks} (RANK=r: another one) on one GPU, with no communication: it builds, shards
# and takes {dry_steps} steps, whose losses mean nothing. (Pipeline stages must talk before they step: none with these.)
# If a rank runs out of memory: `run.sh --{smaller}` accumulates the same batch in smaller pieces."""
    setup = f"""
if [ -n "${{DRY_RUN:-}}" ]; then
    export NGPU={ranks} RANK="${{RANK:-0}}" LOCAL_RANK=0 WORLD_SIZE={ranks}
    exec python -m torchtitan.train --module {MODULE} --config main_run --comm.mode fake_backend \\
        --training.steps {dry_steps} --checkpoint.no-enable "$@"
fi"""
    command = f'-m torchtitan.train --module {MODULE} --config main_run "$@"'
    return corpus_run_script(decision, f"torchtitan {version}", command=command, notes=notes, setup=setup)


_JUDGEMENTS: dict[str, Judgement] = {
    "shape.family": (
        "equivalent",
        "Llama 3 blocks; rotary pairs and base, norm eps, no document mask as ours; rotary angles in float32",
    ),
    "forward": ("exact", "the multipliers are modules of the model"),
    "groups.pattern": ("equivalent", "rewritten for torchtitan's parameter names; one pattern claims each parameter"),
    "learning_rate": ("exact", "torchtitan's own scheduler gives the table bit for bit"),
    "clip_norm": ("exact", "torch's clip_grad_norm_; none is an infinite norm"),
    "seed": ("exact", "of initial values and data order; torchtitan's own generator gets it too"),
    "precision": ("equivalent", "of parameters in products, by FSDP; weights, reductions and moments stay in float32"),
    "parallelism": ("exact", "pipeline stages run 1F1B; each stage's optimizer has the groups it holds parameters of"),
    "parallelism.activation_checkpointing": (
        "equivalent",
        "selective: torchtitan chooses what it keeps and what it computes again; the values stay the same",
    ),
    "checkpointing": ("exact", "torchtitan's own checkpoints, weights and optimizer both"),
    "abort.on_non_finite": ("exact", "a gradient that is not finite raises before the step"),
    "abort.train_loss_above_nats": ("equivalent", "raises after that step's update, before anything more is saved"),
}
