"""Under which names, and in which units, trainers log what the watch reads. Standard library only.

A name that is asked for by option takes the place of all of a column's, and is in the units of
`launcher.base.metrics`. Names change between versions. Each was read in the trainer's own sources,
at these commits:

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
"""Every row of W&B has these, also one that holds nothing of ours; the time is in seconds since
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
"""By column: what it may be called, the first that a source has counting."""
RECIPROCALS = frozenset({"throughput/device/BPS"})
"""Steps a second, in place of seconds."""
PER_DEVICE = frozenset({"throughput(tps)", "throughput/device/TPS"})
"""These count one device: the run's are as many times more as it has ranks."""


class ColumnNames:
    """Which name of a source is which column."""

    def __init__(
        self, asked: Mapping[str, str], factors: Mapping[str, float] | None = None
    ) -> None:
        """`asked`: column -> the one name it has there; empty ones are not asked for.

        `factors`: column -> what its values are multiplied by to be in our units; 1 for others.
        """
        self.factors = {**(factors or {})}
        self._asked = {column: name for column, name in asked.items() if name}
        self._names = {**NAMES, **{column: (name,) for column, name in self._asked.items()}}

    @property
    def wanted(self) -> frozenset[str]:
        """Every name that may be one of ours."""
        return frozenset(name for names in self._names.values() for name in names) | {TIME}

    def told(self, column: str) -> str:
        """The names a column may have, for the message that it has none."""
        return ", ".join(map(repr, self._names[column]))

    def chosen(self, there: Set[str]) -> dict[str, str]:
        """Column -> the name it has among these; a column that has none of them is not there."""
        found = {
            column: next((name for name in names if name in there), "")
            for column, names in self._names.items()
        }
        return {column: name for column, name in found.items() if name}
