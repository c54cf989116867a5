"""What the tests of the W&B window share: small records, a study logged, and a reader of what was
written.
"""

import json

from wandb_server import Server  # noqa: F401  (whoever takes the case takes the service)

from launcher.dashboards.records import RunRecord
from launcher.dashboards.wandb_writer import log_runs
from proxies.external.wandb_run import WandbRun

RUN_ID, STUDY = "0123456789abcdef", "5" * 16


def small_record():
    """The record of a study."""
    return RunRecord(
        run_id=RUN_ID,
        name="study 01234567",
        config={"proxy": {"base_width": 32}, "study": STUDY},
        summary={"transfer/width/learning_rate/outcome": "holds", "n": 0.5},
    )


def small_run(number, loss=None, num_steps=5):
    """The record of a proxy: its loss halves at every step."""
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


def small_study(num_runs=2):
    """The study's own run, and some proxies."""
    return [small_record(), *(small_run(number) for number in range(1, num_runs + 1))]


def log_one(study_dir, record):
    """A run alone, logged offline; its folder."""
    return log_runs(study_dir, [record])[0][record.run_id]


def read_run(path):
    """config, summary, and history rows of a run's folder, as wandb's own message types read
    them.
    """
    from wandb.proto import wandb_internal_pb2

    (file,) = path.glob("run-*.wandb")
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
            rows.append(
                {
                    ".".join(i.nested_key) or i.key: json.loads(i.value_json)
                    for i in record.history.item
                }
            )
    return config, summary, rows
