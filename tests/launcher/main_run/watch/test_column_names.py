"""Tests of the names and units of log columns.

A row as each trainer writes it must be read in forerun's units.
"""

import pytest
from watched_case import read_log, write_lines

from forerun._launcher.main_run.watch.logs.keys import NAMES, PER_DEVICE

NUM_RANKS = 4
LOSS, TOKENS, SECONDS = 2.5, 800.0, 0.25
"""Loss in nats, tokens per second of all ranks, and seconds per step of every row below."""
ROWS = {
    "torchtitan": {
        "_step": 3,
        "loss_metrics/global_avg_loss": LOSS,
        "loss_metrics/global_max_loss": 9.0,
        "grad_norm": 1.5,
        "throughput(tps)": TOKENS / NUM_RANKS,
        "tflops": 3.0,
        "time_metrics/end_to_end(s)": SECONDS,
        "lr/AdamW": 1e-3,
        "validation_metrics/loss": 2.0,
    },
    "Megatron-LM": {
        "_step": 3,
        "lm loss": LOSS,
        "grad-norm": 1.5,
        "learning-rate": 1e-3,
        "iteration-time": SECONDS,
        "throughput": 412.0,
        "lm loss validation": 2.0,
    },
    "Megatron-Bridge": {
        "_step": 3,
        "lm loss": LOSS,
        "throughput/tokens_per_sec": TOKENS,
        "grad-norm": 1.5,
    },
    "OLMo-core": {
        "_step": 3,
        "train/CE loss": LOSS,
        "optim/total grad norm": 1.5,
        "optim/LR (group 0)": 1e-3,
        "throughput/device/TPS": TOKENS / NUM_RANKS,
        "throughput/device/BPS": 1 / SECONDS,
    },
    "transformers": {
        "train/global_step": 3,
        "_step": 99,
        "train/loss": LOSS,
        "train/grad_norm": 1.5,
        "train/learning_rate": 1e-3,
        "eval/loss": 2.0,
    },
    "transformers, its own log": {
        "step": 3,
        "loss": LOSS,
        "grad_norm": 1.5,
        "learning_rate": 1e-3,
        "eval_loss": 2.0,
    },
    "forerun": {
        "step": 3,
        "train_loss_nats": LOSS,
        "grad_norm": 1.5,
        "lr": 1e-3,
        "tokens_per_second": TOKENS,
        "seconds": SECONDS,
        "mfu": 0.4,
        "validation_loss_nats": 2.0,
    },
}
"""Rows by trainer, in the trainer's own names and units."""
EXPECTED_COLUMNS = {"grad_norm": 1.5, "tokens_per_second": TOKENS, "seconds": SECONDS, "mfu": 0.4}
"""Values of columns in forerun's units, for every row that has them."""


@pytest.mark.parametrize("trainer", ROWS)
def test_row_of_each_trainer_is_read_in_foreruns_units(tmp_path, trainer):
    row = ROWS[trainer]
    reading = read_log(write_lines(tmp_path / "log.jsonl", [row]), num_ranks=NUM_RANKS)
    columns = reading.columns
    assert (columns.steps.tolist(), columns.train_loss_nats.tolist()) == ([3], [LOSS])
    num_checked = 0
    for column, value in EXPECTED_COLUMNS.items():
        if any(name in row for name in NAMES[column]):
            assert getattr(columns, column).tolist() == [pytest.approx(value)], column
            num_checked += 1
    # At most eight columns of a row are not in EXPECTED_COLUMNS.
    assert num_checked >= len(row) - 8, "the row must hold columns that are checked"
    has_validation = any(name in row for name in NAMES["validation_loss_nats"])
    assert columns.validation_loss_nats.tolist() == [2.0] * has_validation
    assert sum("per device" in note for note in reading.notes) == bool(PER_DEVICE & set(row))


def test_mean_loss_of_a_run_is_not_a_step_loss(tmp_path):
    """The Hugging Face Trainer's last line has the run's mean loss as `train_loss`."""
    rows = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "train_loss": 2.5}]
    assert read_log(write_lines(tmp_path / "log.jsonl", rows)).columns.train_loss_nats.tolist() == [
        3.0,
        2.0,
    ]
