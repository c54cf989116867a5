"""Under which names, and in which units, trainers log what the watch reads. Standard library only.

A name that is asked for by option takes the place of all of a column's, and is in the units of `launcher.base.metrics`.
Names change between versions. Each was read in the trainer's own sources, at these commits:

- torchtitan b5bcd76 (2026-08-21), components/metrics.py, components/optimizer/lr_scheduler.py: tokens/s of one device,
  MFU in percent; wandb's own step.
- Megatron-LM d98e8a6 (2026-08-22), training/training.py; Megatron-Bridge 067f987 (2026-08-22), training/utils/
  train_utils.py, training/eval.py: `iteration-time` in seconds, `lm loss`; its `throughput` is TFLOP/s, no tokens.
- OLMo-core fa6c501 (2026-06-22), train/common.py, train/callbacks/speed_monitor.py: TPS of one device, batches per
  second in place of seconds, MFU in percent; an evaluator's loss has its label in the name: --validation-loss-key.
- Hugging Face transformers 0101dc0, integrations/integration_utils.py (`rewrite_logs`, WandbCallback): `train/` or
  `eval/` before a name; plain in its own logs, where `train_loss` is the mean of the run, of its end alone.
- Lightning 7f0c343 (2026-07-20), loggers/wandb.py, fabric/utilities/throughput.py: `trainer/global_step`; the loss has
  the name that the user's module gives it. litgpt 2685705 (2026-06-29), pretrain.py: `tokens` of one device,
  `iter_time` of a micro-batch (not read), MFU a share; in TensorBoard its steps are micro-batches.
- nanoGPT 3adf61e (2025-11-12), train.py: `iter`, and `mfu` in percent. nanochat 92d63d4 (2026-07-03),
  scripts/base_train.py: the loss smoothed, MFU in percent; its `val/bpb` are bits per byte, and no loss in nats.
- GPT-NeoX ea7aefd (2026-05-19), megatron/logging.py, megatron/training.py: MFU and HFU in percent.
- nanotron 2411b02 (2026-04-07), trainer.py: milliseconds.
- NeMo Automodel 36044ad (2026-08-22), recipes/llm/train_ft.py: `tps` of all devices, and `mfu` in percent.
- MaxText e591f30 (2026-08-22), common/metric_logger.py: tokens/s of one device.
- Composer 6405188 (2026-04-29), callbacks/speed_monitor.py, callbacks/optimizer_monitor.py, trainer/trainer.py: MFU a
  share; a step is wandb's own, or `time/batch`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set

UNASKED_STEP, TIME = "_step", "_timestamp"
"""Of every row of W&B, also of those that hold nothing of ours; the time is in seconds since 1970."""
STEP, LOSS, VALIDATION = "step", "train_loss_nats", "validation_loss_nats"
TOKENS_PER_SECOND, MFU = "tokens_per_second", "mfu"
NAMES: Mapping[str, tuple[str, ...]] = {
    STEP: (
        "step", "train/global_step", "trainer/global_step", "global_step", "iteration_step", "iteration", "iter",
        "time/batch", UNASKED_STEP,
    ),
    LOSS: (
        "train_loss_nats", "loss_metrics/global_avg_loss", "lm loss", "train/CE loss", "train/lm_loss", "lm_loss",
        "learning/loss", "loss/train/total", "train/loss", "loss", "train_loss",
    ),
    VALIDATION: (
        "validation_loss_nats", "validation_metrics/loss", "lm loss validation", "validation/lm_loss",
        "metrics/eval/LanguageCrossEntropy", "eval/avg_loss", "eval/loss", "eval_loss", "val/loss", "val_loss",
        "validation_loss",
    ),
    "grad_norm": (
        "grad_norm", "grad-norm", "train/grad_norm", "optim/total grad norm", "l2_norm/grad/global",
        "learning/grad_norm",
    ),
    "lr": (
        "lr", "lr/AdamW", "lr/AdamW/0", "learning-rate", "train/learning_rate", "learning_rate", "optim/LR (group 0)",
        "learning/current_learning_rate", "lr-DecoupledAdamW/group0",
    ),
    "tokens": ("total_tokens", "tokens", "n_tokens_seen", "throughput/total tokens", "consumed_tokens"),
    TOKENS_PER_SECOND: (
        "tokens_per_second", "throughput(tps)", "throughput/tokens_per_sec", "throughput/device/TPS", "tps",
        "runtime/tokens_per_sec", "tokens_per_sec", "perf/per_device_tokens_per_sec", "train/tok_per_sec",
        "items_per_sec", "device/items_per_sec",
    ),
    "seconds": (
        "seconds", "time_metrics/end_to_end(s)", "iteration-time", "throughput/device/BPS", "runtime/iteration_time",
        "time_per_iteration_ms", "perf/step_time_seconds", "train/dt",
    ),
    MFU: (
        "mfu", "mfu(%)", "throughput/device/MFU", "runtime/model_flops_utilization", "train/mfu", "device/mfu",
        "throughput/device/mfu",
    ),
    "hfu": ("hfu", "runtime/hardware_flops_utilization"),
}  # fmt: skip
"""By column: what it may be called, the first that a source has counting."""
FACTORS: Mapping[str, float] = {
    "time_per_iteration_ms": 1e-3,
    **dict.fromkeys(
        ("mfu(%)", "throughput/device/MFU", "runtime/model_flops_utilization", "runtime/hardware_flops_utilization",
         "train/mfu"),
        1e-2,
    ),
}  # fmt: skip
"""What makes a value one of `launcher.base.metrics`: seconds, shares."""
RECIPROCALS = frozenset({"throughput/device/BPS"})
"""Steps a second, in place of seconds."""
PER_DEVICE = frozenset({
    "throughput(tps)", "throughput/device/TPS", "perf/per_device_tokens_per_sec", "device/items_per_sec",
})  # fmt: skip
"""Of one device: the run's are as many times more as it has ranks."""
_WORDS = {"nan": math.nan, "inf": math.inf, "infinity": math.inf, "-inf": -math.inf, "-infinity": -math.inf}


class Keys:
    """Which name of a source is which column."""

    def __init__(self, asked: Mapping[str, str]) -> None:
        """`asked`: column -> the one name it has there; empty ones are not asked for."""
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
        found = {column: next((name for name in names if name in there), "") for column, names in self._names.items()}
        return {column: name for column, name in found.items() if name}

    def factor(self, column: str, names: Mapping[str, str]) -> float:
        """What a column's values are multiplied by, where `names` are those chosen."""
        name = names[column]
        if column in self._asked:
            return 1.0
        # nanoGPT and NeMo Automodel mean percent by the name that is ours for a share.
        if name == "mfu" and (names.get(STEP) == "iter" or names.get(TOKENS_PER_SECOND) == "tps"):
            return 1e-2
        return FACTORS.get(name, 1.0)


def number(value: object) -> float | None:
    """A float, NaN and infinities also as words; None for anything that is no number."""
    if type(value) is float:
        return value
    if isinstance(value, str):
        return _WORDS.get(value.strip().lower())
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
