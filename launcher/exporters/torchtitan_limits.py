"""What torchtitan, or this export of it, cannot run: every problem of a decision, with its number and a way out."""

from __future__ import annotations

from launcher.exporters.foreign import failed, refusals
from launcher.exporters.torchtitan_versions import PIECES
from launcher.frozen import Decision


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
