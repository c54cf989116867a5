"""Names and units under which trainers log the metrics that the watch reads.

This module uses the standard library only. A name given by option replaces all names of its column,
and is in the units of `forerun._launcher.main_run.metrics_file`. Names change between versions;
each was read in the trainer's own source, at these commits:

- torchtitan b5bcd76 (2026-08-21), components/metrics.py, components/optimizer/lr_scheduler.py: logs
  the tokens per second of one device, and leaves the step to wandb.
- Megatron-LM d98e8a6 (2026-08-22), training/training.py; Megatron-Bridge 067f987 (2026-08-22),
  training/utils/train_utils.py, training/eval.py: log `iteration-time` in seconds and `lm loss`.
  Their `throughput` is in TFLOP/s, not in tokens, so it is not read.
- OLMo-core fa6c501 (2026-06-22), train/common.py, train/callbacks/speed_monitor.py: logs the tokens
  per second (TPS) of one device, and batches per second instead of seconds. The name of a
  validation loss has the evaluator's label, so it is given by --validation-loss-key.
- Hugging Face transformers 0101dc0, integrations/integration_utils.py (`rewrite_logs`,
  WandbCallback): puts `train/` or `eval/` before a name in W&B, but not in its own logs. There the
  last line has `train_loss`, the mean over the whole run, so `loss` takes precedence.
- nanoGPT, train.py: logs `iter`, `train/loss` and `val/loss`. Its `mfu` is in percent, and -100
  before it is measured; both count as impossible values.
- LLaMA-Factory's `trainer_log.jsonl` has `current_steps`; Lightning's CSVLogger has
  `train_loss_step` and `train_loss_epoch`. The names of any other trainer are given by option.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

WANDB_STEP, WANDB_TIME = "_step", "_timestamp"
"""Keys in every row of W&B, even in rows that have no known metric: W&B's own step, and the time in
seconds since 1970."""
STEP, LOSS, VALIDATION = "step", "train_loss_nats", "validation_loss_nats"
TOKENS_PER_SECOND = "tokens_per_second"
NOISE_SCALE = ("noise_scale_tokens", "noise_scale_low_tokens", "noise_scale_high_tokens")
NAMES: Mapping[str, tuple[str, ...]] = {
    STEP: ("step", "train/global_step", "iteration", "iter", "current_steps", WANDB_STEP),
    LOSS: (
        "train_loss_nats",
        "loss_metrics/global_avg_loss",
        "lm loss",
        "train/CE loss",
        "train/loss",
        "loss",
        "train_loss",
        "train_loss_step",
    ),
    VALIDATION: (
        "validation_loss_nats",
        "validation_metrics/loss",
        "lm loss validation",
        "eval/loss",
        "eval_loss",
        "val_loss",
        "val/loss",
    ),
    "grad_norm": ("grad_norm", "grad-norm", "train/grad_norm", "optim/total grad norm"),
    TOKENS_PER_SECOND: (
        "tokens_per_second",
        "throughput(tps)",
        "throughput/tokens_per_sec",
        "throughput/device/TPS",
    ),
    "seconds": ("seconds", "time_metrics/end_to_end(s)", "iteration-time", "throughput/device/BPS"),
    "mfu": ("mfu",),
    **{name: (name,) for name in NOISE_SCALE},
}
"""Possible names of each column; the first that a source has is used."""
RECIPROCALS = frozenset({"throughput/device/BPS"})
"""Names of columns in steps per second instead of seconds."""
PER_DEVICE = frozenset({"throughput(tps)", "throughput/device/TPS"})
"""Names of columns that count one device; they are multiplied by the number of ranks."""


class ColumnNames:
    """The names that a source may use for each column."""

    def __init__(
        self, asked: Mapping[str, str], factors: Mapping[str, float] | None = None
    ) -> None:
        """Combine the user's names with the known ones.

        Args:
            asked: Name by column, from the user's options. An empty name means that the option was
                not given, and the column keeps its known names.
            factors: Factors by column that convert its values to forerun's units; 1 for others.
        """
        self.factors = factors or {}
        self._names = {**NAMES, **{column: (name,) for column, name in asked.items() if name}}

    @property
    def wanted(self) -> frozenset[str]:
        """Every name that may be a column, and the name of the time."""
        return frozenset().union(*self._names.values(), [WANDB_TIME])

    def format_names(self, column: str) -> str:
        """Return the possible names of a column, for the message that none was found."""
        return ", ".join(map(repr, self._names[column]))

    def choose_names(self, available: Set[str]) -> dict[str, str]:
        """Return the name that each column has among those of a source, if it has one."""
        return {
            column: next(name for name in names if name in available)
            for column, names in self._names.items()
            if not available.isdisjoint(names)
        }
