"""Logs of a main run as trainers leave them: ours, a JSONL with other names, W&B offline,
TensorBoard.
"""

import dataclasses
import datetime
import json
import math
import random

from launcher.base import metrics
from launcher.frozen.frozen import CurvePoint, PredictedLoss, learning_rate_of
from launcher.watch.logs.keys import ColumnNames
from launcher.watch.logs.readings import LogReader
from launcher.watch.logs.sources import source_of
from proxies.core.schedule import Schedule

DIGEST = "ab" * 32
NUM_STEPS = 400


def header(step=0, digest=DIGEST):
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return metrics.Header(
        digest=digest,
        step=step,
        started_at=now,
        num_ranks=1,
        device="cpu",
        model_flops_per_token=6e3,
        peak_flops_per_second=None,
    )


def loss_at(step):
    """A loss that falls with a little noise, the same whenever it is asked for."""
    return 2.0 + 3.0 / math.sqrt(step) + random.Random(step).gauss(0, 0.01)


def line(step, **more):
    return {
        "step": step,
        "train_loss_nats": loss_at(step),
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": step * 256,
        "tokens_per_second": 1e4,
        "seconds": 0.0256,
        **more,
    }


def write_run(folder, last, *, first=1, digest=DIGEST, **more):
    """Lines of ours, from `first` to `last`, below a header."""
    folder.mkdir(parents=True, exist_ok=True)
    metrics.append(folder, header(first - 1, digest))
    for step in range(first, last + 1):
        metrics.append(folder, line(step, **more))
    return folder / metrics.METRICS_FILE


def reader(where, num_steps=100, digest=DIGEST, num_ranks=1, **asked):
    """What follows a log; `asked`: column -> the name it has there."""
    keys = ColumnNames(asked)
    return LogReader(source_of(str(where), keys), keys, digest, num_steps, num_ranks)


def read(where, num_steps=100, **given):
    """A log as it is now, its last line too."""
    return reader(where, num_steps, **given).read(last=True)


def finish(folder, step, loss):
    metrics.write_ending(
        folder,
        metrics.AttemptEnd(event="finished", exit_code=0, step=step, validation_loss_nats=loss),
    )


def write_lines(path, lines):
    path.write_text(
        "".join((text if isinstance(text, str) else json.dumps(text)) + "\n" for text in lines)
    )
    return path


def write_wandb(folder, rows, monkeypatch):
    """A real offline run; rows are (step, values)."""
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
    folder = run.dir
    run.finish()
    wandb.teardown()
    return folder


def write_events(folder, rows):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))
    for step, values in rows:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
    writer.close()
    return folder


def watched_decision(decision, num_steps=400):
    """The same, longer, with a course that `loss_at` follows and a forecast of its end."""
    schedule = Schedule(kind="cosine", num_steps=num_steps, warmup_steps=10)
    shares = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0)
    points = tuple(
        CurvePoint(
            step=at,
            loss_nats=(mid := 2.0 + 3.0 / math.sqrt(at)),
            low_nats=0.95 * mid,
            high_nats=1.05 * mid,
        )
        for at in (round(share * num_steps) for share in shares)
    )
    end = points[-1]
    predicted = PredictedLoss(
        loss_nats=end.loss_nats,
        low_nats=end.low_nats,
        high_nats=end.high_nats,
        level=0.9,
        extrapolation=10.0,
        curve=points,
        memory_octaves=1.0,
    )
    return dataclasses.replace(
        decision,
        learning_rate=learning_rate_of(schedule),
        num_tokens=num_steps * decision.batch_tokens,
        predicted=predicted,
    )
