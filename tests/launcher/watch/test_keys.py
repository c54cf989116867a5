"""Rows as each trainer writes them, by the names and in the units that its sources have (see
`watch.logs.keys`).
"""

import pytest
from watched_case import read, write_lines

from launcher.watch.logs.keys import NAMES, PER_DEVICE

RANKS = 4
LOSS, TOKENS, SECONDS = 2.5, 800.0, 0.25
"""What every row below says."""
ROWS = {
    "torchtitan": {
        "_step": 3,
        "loss_metrics/global_avg_loss": LOSS,
        "loss_metrics/global_max_loss": 9.0,
        "grad_norm": 1.5,
        "throughput(tps)": TOKENS / RANKS,
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
        "throughput/device/TPS": TOKENS / RANKS,
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
    "ours": {
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
_COLUMNS = {"grad_norm": 1.5, "tokens_per_second": TOKENS, "seconds": SECONDS, "mfu": 0.4}


@pytest.mark.parametrize("trainer", ROWS)
def test_a_row_of_each_trainer_is_read_in_our_units(tmp_path, trainer):
    row = ROWS[trainer]
    found = read(write_lines(tmp_path / "log.jsonl", [row]), num_ranks=RANKS)
    columns = found.columns
    assert (columns.steps.tolist(), columns.train_loss_nats.tolist()) == ([3], [LOSS])
    read_names = 0
    for column, value in _COLUMNS.items():
        if any(name in row for name in NAMES[column]):
            assert getattr(columns, column).tolist() == [pytest.approx(value)], column
            read_names += 1
    assert read_names >= len(row) - 8
    has_validation = any(name in row for name in NAMES["validation_loss_nats"])
    assert columns.validation_loss_nats.tolist() == [2.0] * has_validation
    assert sum("per device" in note for note in found.notes) == bool(PER_DEVICE & set(row))


def test_the_mean_of_a_run_is_not_the_loss_of_its_steps(tmp_path):
    """Hugging Face's last line has `train_loss`."""
    rows = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "train_loss": 2.5}]
    assert read(write_lines(tmp_path / "log.jsonl", rows)).columns.train_loss_nats.tolist() == [
        3.0,
        2.0,
    ]
