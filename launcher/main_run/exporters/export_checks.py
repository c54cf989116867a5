"""Checks before an export: whether a third-party trainer can run a decision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from forerun._launcher.main_run.frozen.frozen import Decision, sample_learning_rate
from forerun._proxies.core.errors import ProblemsError
from forerun._proxies.core.hyperparameters import HYPERPARAMETERS
from forerun._proxies.core.notation import format_counted


class ExportError(ProblemsError):
    """A decision cannot be exported: the trainer cannot run it, or has an unknown version."""

    label = " export"


@dataclass(frozen=True, kw_only=True, slots=True)
class Expressible:
    """The registered optimizers and run-wide settings that an export can write."""

    optimizers: Mapping[str, tuple[str, ...]]
    """Settings that the export writes, by optimizer."""
    run_wide: tuple[str, ...]
    """Run-wide settings that the export writes."""


ADAMW_SETTINGS = ("learning_rate", "weight_decay", "eps", "beta1", "beta2")
"""Settings of AdamW that exports write."""
ADAMW_AND_MUON = {
    "adamw": ADAMW_SETTINGS,
    "muon": ("learning_rate", "weight_decay", "momentum"),
}
"""Settings that exports write, by optimizer, for trainers with both."""


def require_runnable(
    trainer: str,
    decision: Decision,
    version: str,
    known_versions: Sequence[str],
    trainer_problems: Iterable[str],
    expressible: Expressible,
) -> None:
    """Check that a third-party trainer can run a decision.

    Args:
        trainer: Name of the trainer.
        decision: Decision that the trainer is to run.
        version: Version of the trainer that the user asked for.
        known_versions: Versions that the export is written for.
        trainer_problems: Reasons why this trainer in particular cannot run the decision.
        expressible: Optimizers, settings, and run-wide settings that the export writes.

    Raises:
        ExportError: The trainer cannot run the decision; the error lists every problem.
    """
    problems = []
    if version not in known_versions:
        problems.append(
            f"version {version!r} is not supported: this export is written for "
            f"{' and '.join(known_versions)}"
        )
    if decision.precision == "float64":
        problems.append("launch.precision = float64: must be float32 or bfloat16")
    if sample_learning_rate(decision.learning_rate.schedule) != decision.learning_rate:
        problems.append(
            "this version's learning-rate table differs from the frozen one: export with the "
            "version that froze it"
        )
    if decision.own is not None:  # the user's own trainer
        problems.append("own: your own trainer trains this config: use --to command")
    if decision.model is not None:
        problems.append(
            "model: your own model, which this trainer does not know: `forerun launch` trains it"
        )
    if decision.shape.family != "llama":
        problems.append(
            f"shape.family = {decision.shape.family!r}: this export writes llama-like models; use "
            "the native trainer"
        )
    problems += [*list_inexpressible(decision, expressible), *trainer_problems]
    if problems:
        raise ExportError(trainer, problems)


def count_rank_sequences(decision: Decision) -> tuple[int, int]:
    """Return the number of a rank's sequences in one batch, and in one forward pass."""
    share = decision.batch_tokens // decision.shape.seq_len // decision.parallelism.num_data_ranks
    return share, decision.parallelism.microbatch_sequences or share


def list_batch_problems(decision: Decision, *, can_grow: bool) -> list[str]:
    """Return the reasons why a trainer's ranks cannot share the batches of a decision.

    Args:
        decision: The decision.
        can_grow: Whether the trainer's batch can grow during the run.
    """
    share, microbatch = count_rank_sequences(decision)
    stages, problems = decision.learning_rate.schedule.batch_warmup_stages, []
    if share % microbatch:
        problems.append(
            f"launch.microbatch_sequences = {microbatch} does not divide a rank's share of "
            f"{format_counted(share, 'sequence')}"
        )
    if stages != 1 and not can_grow:
        problems.append(
            f"batch_warmup_stages = {stages}: must be 1 (proxy.batch_warmup_fraction = 0), this "
            "export's batch size is fixed"
        )
    return problems


def list_inexpressible(decision: Decision, expressible: Expressible) -> list[str]:
    """Return a problem for each optimizer, setting, and run-wide setting of a decision that an
    export cannot write.
    """
    problems = []
    for group in decision.groups:
        if group.optimizer not in expressible.optimizers:
            problems.append(
                f"optimizer = {group.optimizer!r}: this export writes "
                f"{' and '.join(expressible.optimizers)}; use another trainer"
            )
            continue
        written = expressible.optimizers[group.optimizer]
        problems += [
            f"{name} of {group.optimizer}: this export does not write it; use another trainer"
            for name in group.settings
            if name not in written
        ]
    problems += [
        f"{name} = {value}: this export cannot express it; use another trainer"
        for name, value in decision.run_wide.items()
        if name not in expressible.run_wide and value != HYPERPARAMETERS[name].off
    ]
    return list(dict.fromkeys(problems))
