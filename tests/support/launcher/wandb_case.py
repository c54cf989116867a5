"""Shared parts of the tests of W&B: small records, and a reader of the files that wandb writes."""

import json

from wandb_server import Server  # noqa: F401  (re-exported for the tests)

from forerun._launcher.report.dashboards.run_record import RunRecord
from forerun._launcher.report.dashboards.wandb_writer import log_runs
from forerun._proxies.external.wandb_run import WandbRun

RUN_ID, STUDY = "0123456789abcdef", "5" * 16


def make_study_record():
    """Return the record of a study's own run."""
    return RunRecord(
        run_id=RUN_ID,
        name="study 01234567",
        config={"proxy": {"base_width": 32}, "study": STUDY},
        summary={"transfer/width/learning_rate/outcome": "holds", "n": 0.5},
    )


def make_run_record(number, loss=None, num_steps=5):
    """Return the record of a proxy run whose loss halves at every step."""
    rows = [
        {"step": step, "tokens": 64 * step, "train_loss_nats": 8.0 / 2**step}
        for step in range(1, num_steps + 1)
    ]
    return RunRecord(
        run_id=f"{number:016x}",
        name=f"search mup {number}",
        group="search",
        job_type="trial",
        config={"study": STUDY, "learning_rate": 0.1 * number},
        summary={"status": "finished", "validation_loss_nats": loss or 1.5 + number},
        rows=lambda: rows,
        rows_id=f"{number} {num_steps}",
    )


def make_study_records(num_runs=2):
    """Return the records of a study: its own run, and some proxy runs."""
    return [make_study_record(), *(make_run_record(number) for number in range(1, num_runs + 1))]


def log_run(study_dir, record):
    """Log one run offline and return its folder."""
    return log_runs(study_dir, [record])[0][record.run_id]


def read_run(path):
    """Return config, summary, and history rows of a run's folder, parsed with wandb's messages."""
    from wandb.proto import wandb_internal_pb2

    (file,) = path.glob("run-*.wandb")
    # forerun's reader splits the file into records; wandb's own messages decode them.
    reader = WandbRun(file, frozenset())
    reader._pending = file.read_bytes()
    config, summary, rows = {}, {}, []
    for raw in reader._records():
        record = wandb_internal_pb2.Record.FromString(raw)
        for item in record.run.config.update:
            config[item.key] = json.loads(item.value_json)
        for item in record.summary.update:
            summary[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
        if record.WhichOneof("record_type") == "history":
            row = {}
            for item in record.history.item:
                row[".".join(item.nested_key) or item.key] = json.loads(item.value_json)
            rows.append(row)
    return config, summary, rows
