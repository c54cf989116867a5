"""Names and units under which trainers log the metrics that the watch reads.

This module uses the standard library only. A name given by option replaces all names of its column,
and is in the units of `launcher.base.metrics`. Names change between versions; each was read in the
trainer's own source, at these commits:

- torchtitan b5bcd76 (2026-08-21), components/metrics.py, components/optimizer/lr_scheduler.py:
  tokens/s of one device; wandb's own step.
- Megatron-LM d98e8a6 (2026-08-22), training/training.py; Megatron-Bridge 067f987 (2026-08-22),
  training/utils/ train_utils.py, training/eval.py: `iteration-time` in seconds, `lm loss`; its
  `throughput` is TFLOP/s, no tokens.
- OLMo-core fa6c501 (2026-06-22), train/common.py, train/callbacks/speed_monitor.py: TPS of one
  device, batches per second in place of seconds; an evaluator's loss has its label in the name:
  --validation-loss-key.
- Hugging Face transformers 0101dc0, integrations/integration_utils.py (`rewrite_logs`,
  WandbCallback): `train/` or `eval/` before a name; plain in its own logs, where `train_loss` is
  the mean of the run, of its end alone: `loss` comes before it.
- nanoGPT, train.py: `iter`, `train/loss` and `val/loss`; `mfu` in percent, and -100 before it is
  measured.
- LLaMA-Factory's `trainer_log.jsonl` has `current_steps`; Lightning's CSVLogger `train_loss_step`
  and `_epoch`. Any other trainer's names are given by option.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

UNASKED_STEP, TIME = "_step", "_timestamp"
"""Keys in every row of W&B, even in rows that have no known metric. The time is in seconds since
1970."""
STEP, LOSS, VALIDATION = "step", "train_loss_nats", "validation_loss_nats"
TOKENS_PER_SECOND = "tokens_per_second"
NOISE_SCALE = ("noise_scale_tokens", "noise_scale_low_tokens", "noise_scale_high_tokens")
NAMES: Mapping[str, tuple[str, ...]] = {
    STEP: ("step", "train/global_step", "iteration", "iter", "current_steps", UNASKED_STEP),
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
            asked: The one name of a column by column; columns with an empty name keep the known
                names.
            factors: Factors by column that convert its values to forerun's units; 1 for others.
        """
        self.factors = {**(factors or {})}
        self._asked = {column: name for column, name in asked.items() if name}
        self._names = {**NAMES, **{column: (name,) for column, name in self._asked.items()}}

    @property
    def wanted(self) -> frozenset[str]:
        """Every name that may be a column, and the name of the time."""
        return frozenset(name for names in self._names.values() for name in names) | {TIME}

    def told(self, column: str) -> str:
        """Return the possible names of a column, for the message that none was found."""
        return ", ".join(map(repr, self._names[column]))

    def chosen(self, there: Set[str]) -> dict[str, str]:
        """Return the name that each column has among those of a source, if it has one."""
        names_by_column = {
            column: next((name for name in names if name in there), "")
            for column, names in self._names.items()
        }
        return {column: name for column, name in names_by_column.items() if name}
