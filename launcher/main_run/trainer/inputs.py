"""The command line, config, and corpus of a run, and all reasons to refuse them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from forerun._launcher.main_run.frozen.frozen import Decision, sample_learning_rate
from forerun._launcher.main_run.frozen.launch_file import read_launch
from forerun._launcher.main_run.trainer.ranks import TrainerError
from forerun._proxies.core.hyperparameters import HYPERPARAMETERS
from forerun._proxies.core.notation import format_counted
from forerun._proxies.data.tokens import TokenStore
from forerun._proxies.model.loss import LOSS_TERMS
from forerun._proxies.model.optimizer import APPLIED_TO_GRADIENT

RUN_WIDE_APPLIED = (*APPLIED_TO_GRADIENT, *LOSS_TERMS)
"""Run-wide settings that the embedded trainer applies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """The options of one rank's command line."""

    config: Path
    """The launch config, `launch.json`."""
    data: Path
    """Folder of the corpus."""
    out: Path
    """Folder of the run: metrics, checkpoints, and how it ended."""
    stop_after: int | None = None
    """Number of steps after which the run saves and stops; None for the schedule's end."""
    allow_world_size: bool = False
    """Whether any number of ranks may train. All of them shard then, and the loss curve is the same
    up to rounding."""
    code: Path | None = None
    """Folder of the user's own model; None for the working directory."""


def read_inputs(options: RunOptions) -> tuple[Decision, TokenStore]:
    """Return the decision and the corpus.

    Raises:
        TrainerError: Decision and corpus do not fit each other, the ranks, or this trainer.
    """
    decision = read_launch(options.config)
    store = TokenStore(options.data, weights=dict(decision.data.weights) or None)
    if problems := _find_misfits(
        decision, store.manifest.data_id, options
    ) + find_reasons_to_refuse(decision):
        raise TrainerError("; ".join(problems))
    return decision, store


def _find_misfits(decision: Decision, data_id: str, options: RunOptions) -> list[str]:
    """Return the reasons why a decision cannot be trained on this corpus and these ranks."""
    ranks, stages = dist.get_world_size(), decision.learning_rate.schedule.batch_warmup_stages
    sequences, problems = decision.batch_tokens // decision.shape.seq_len, []
    if data_id != decision.data.data_id:
        problems.append(
            f"the corpus {options.data} has data_id {data_id[:16]}..., must be "
            f"{decision.data.data_id[:16]}..."
        )
    if not options.allow_world_size and ranks != decision.parallelism.num_ranks:
        problems.append(
            f"{format_counted(ranks, 'rank')}: must be {decision.parallelism.num_ranks}, as in the "
            "config"
        )
    if sequences % (ranks * stages):
        problems.append(
            f"a batch of {sequences} sequences in {format_counted(stages, 'warmup stage')} does "
            f"not give {format_counted(ranks, 'rank')} whole sequences"
        )
    if options.stop_after is not None and options.stop_after < 1:
        problems.append(f"stop_after = {options.stop_after}: must be above 0")
    return problems


def find_reasons_to_refuse(decision: Decision) -> list[str]:
    """Return the reasons why the embedded trainer cannot run a decision on any corpus and ranks."""
    if decision.own is not None:
        command = "forerun export FROZEN --to command"
        return [f"your own trainer trains this config: `{command}` writes how to start it"]
    layout, learning_rate = decision.parallelism, decision.learning_rate
    problems = []
    if learning_rate != sample_learning_rate(learning_rate.schedule):
        problems.append(
            "this version's learning-rate table differs from the frozen one: train with the "
            "version that froze it"
        )
    if not layout.tensor == layout.pipeline == layout.context == 1:
        advice = "; export to a trainer that supports them" if decision.model is None else ""
        problems.append(
            f"parallelism: tensor = {layout.tensor}, pipeline = {layout.pipeline}, context = "
            f"{layout.context}: this trainer is data parallel only, so all three must be 1{advice}"
        )
    if decision.precision == "float64":
        problems.append("precision = float64: must be float32 or bfloat16")
    if not decision.abort.on_non_finite:
        problems.append(
            "abort.on_non_finite = false: must be true, this trainer never steps on NaN"
        )
    problems += [
        f"{name} = {value}: this trainer does not apply it"
        for name, value in decision.run_wide.items()
        if name not in RUN_WIDE_APPLIED and value != HYPERPARAMETERS[name].off
    ]
    return problems
