"""Cases for tests of the watch: logs of a main run as trainers write them (forerun's own, a JSONL
with other names, W&B offline, TensorBoard).
"""

import dataclasses
import datetime
import json
import math
import random

from forerun._launcher.main_run import metrics_file
from forerun._launcher.main_run.frozen.frozen import CurvePoint, PredictedLoss, sample_learning_rate
from forerun._launcher.main_run.watch.logs.keys import ColumnNames
from forerun._launcher.main_run.watch.logs.readings import LogReader
from forerun._launcher.main_run.watch.logs.sources import open_source
from forerun._proxies.core.schedule import Schedule

DIGEST = "ab" * 32
"""Digest of the config that the logs name, unless a test gives another."""
NUM_STEPS = 400
"""Number of steps of the run that `add_forecast` forecasts."""


def make_header(step=0, digest=DIGEST):
    """Return the header that forerun's trainer writes when it starts at a step."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return metrics_file.AttemptStart(
        digest=digest,
        step=step,
        started_at=now,
        num_ranks=1,
        device="cpu",
        model_flops_per_token=6e3,
        peak_flops_per_second=None,
    )


def compute_expected_loss(step):
    """Return the planted loss at a step in nats, without noise."""
    return 2.0 + 3.0 / math.sqrt(step)


def compute_loss_at(step):
    """Return the planted loss with a little noise, always the same at the same step."""
    return compute_expected_loss(step) + random.Random(step).gauss(0, 0.01)


def make_line(step, **more):
    """Return a line of forerun's log; `more` adds or replaces fields."""
    return {
        "step": step,
        "train_loss_nats": compute_loss_at(step),
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": step * 256,
        "tokens_per_second": 1e4,
        "seconds": 0.0256,
        **more,
    }


def write_run(folder, last, *, first=1, digest=DIGEST, **more):
    """Write a log in forerun's own format, with a header and the lines of the steps from `first` to
    `last`; return its path. `more` is as for `make_line`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    metrics_file.append_line(folder, make_header(first - 1, digest))
    for step in range(first, last + 1):
        metrics_file.append_line(folder, make_line(step, **more))
    return folder / metrics_file.METRICS_FILE


def make_reader(where, num_steps=100, digest=DIGEST, num_ranks=1, **names):
    """Return a reader that follows a log; `names` are the names of columns in that log."""
    keys = ColumnNames(names)
    return LogReader(open_source(str(where), keys), keys, digest, num_steps, num_ranks)


def read_log(where, num_steps=100, **options):
    """Read a log once, including its last line; the options are those of `make_reader`."""
    return make_reader(where, num_steps, **options).read(last=True)


def write_finished(folder, step, loss):
    """Write the ending of a finished run with its final validation loss in nats."""
    metrics_file.write_ending(
        folder,
        metrics_file.AttemptEnd(
            event="finished", exit_code=0, step=step, validation_loss_nats=loss
        ),
    )


def write_lines(path, lines):
    """Write lines, each a text or a value to write as JSON; return the path."""
    path.write_text(
        "".join((text if isinstance(text, str) else json.dumps(text)) + "\n" for text in lines)
    )
    return path


def write_wandb(folder, rows, monkeypatch):
    """Write a real offline run of W&B below a folder; return the folder of its files.

    The rows are pairs of a step and its values by name.
    """
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    settings = wandb.Settings(
        mode="offline",
        root_dir=str(folder),
        console="off",
        x_disable_meta=True,
        x_disable_stats=True,
        silent=True,
        x_disable_machine_info=True,
    )
    run = wandb.init(project="planted", settings=settings)
    for step, values in rows:
        run.log(values, step=step)
    files_dir = run.dir
    run.finish()
    wandb.teardown()
    return files_dir


def write_events(folder, rows):
    """Write TensorBoard events into a folder, and return it.

    The rows are pairs of a step and its values by name.
    """
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))
    for step, values in rows:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
    writer.close()
    return folder


def add_forecast(decision):
    """Return the decision with `NUM_STEPS` steps, and with a forecast curve that the planted losses
    follow.
    """
    schedule = Schedule(kind="cosine", num_steps=NUM_STEPS, warmup_steps=10)
    points = []
    for share in (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0):
        step = round(share * NUM_STEPS)
        middle = compute_expected_loss(step)
        point = CurvePoint(
            step=step, loss_nats=middle, low_nats=0.95 * middle, high_nats=1.05 * middle
        )
        points.append(point)
    end = points[-1]
    predicted = PredictedLoss(
        loss_nats=end.loss_nats,
        low_nats=end.low_nats,
        high_nats=end.high_nats,
        level=0.9,
        extrapolation=10.0,
        curve=tuple(points),
        memory_octaves=1.0,
    )
    return dataclasses.replace(
        decision,
        learning_rate=sample_learning_rate(schedule),
        num_tokens=NUM_STEPS * decision.batch_tokens,
        predicted=predicted,
    )
