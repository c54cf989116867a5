"""Tests of the readers of metrics, on files that wandb, TensorBoard and a JSON writer wrote.

They cover files that grow while they are read, damaged files, and units of losses.
"""

import json
import math
import os
import random
import struct
import subprocess
import sys
import time

import pytest
from command_cases import make_command

from forerun._proxies.core import canon
from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.tables.numerals import to_number
from forerun._proxies.external.growing_file import MetricsError
from forerun._proxies.external.metric_files import MetricFiles, have_same_unit
from forerun._proxies.external.wandb_run import WandbRun

LOSSES = {step: 3.0 - step / 70 for step in range(1, 31)}
"""Training loss by step. The gradient norm of a step is step / 2, and step 30 has a validation
loss of 2.5."""
KEYS = {
    "step_key": "iter",
    "train_loss_key": "train/loss",
    "validation_loss_key": "eval.loss",
    "grad_norm_key": "norm",
}
NOTE = "x" * 5000
"""Long text that makes records span W&B's blocks of 32 kB."""


def read_all(format, path):
    """Return the metrics of a file that no longer grows, and their reader."""
    metrics = MetricFiles(make_command(metrics_format=format, **KEYS), path)
    while metrics.read(100):
        pass
    metrics.end(100)
    return metrics.merge_metrics(), metrics


def round_to_float32(value):
    """Round a number to single precision."""
    return struct.unpack("f", struct.pack("f", value))[0]


def assert_all_metrics_are_read(logged, *, float32=False):
    """Assert that the metrics of every step were read, rounded to float32 or not."""
    losses = LOSSES
    if float32:
        losses = {step: round_to_float32(loss) for step, loss in LOSSES.items()}
    assert logged.train_loss == losses and logged.validation_loss == {30: 2.5}
    assert (
        logged.grad_norm == {step: step / 2 for step in LOSSES} and logged.first_nonfinite is None
    )


WANDB_SCRIPT = f"""
import json, sys, wandb
losses = json.load(sys.stdin)
with wandb.init(project="p", dir=sys.argv[1]) as run:
    for step, loss in losses.items():
        run.log({{"iter": int(step), "train/loss": loss, "norm": int(step) / 2, "note": "{NOTE}"}})
    run.log({{"iter": 30, "eval": {{"loss": 2.5}}}})
    if len(sys.argv) > 2: run.log({{"iter": 31, "train/loss": float("nan")}})
"""


def log_wandb_run(folder, *arguments):
    """Log a run with wandb in another process; return its folder.

    Args:
        arguments: With any argument, the run also logs NaN at step 31.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_DISABLE_CODE": "true",
    }
    subprocess.run(
        [sys.executable, "-c", WANDB_SCRIPT, str(folder), *arguments],
        input=json.dumps(LOSSES),
        text=True,
        check=True,
        cwd=folder,
        env=environment,
    )
    return folder


@pytest.fixture(scope="session")
def wandb_dir(tmp_path_factory):
    """Folder of a run that wandb logged."""
    return log_wandb_run(tmp_path_factory.mktemp("wandb") / "run")


@pytest.fixture(scope="session")
def events_dir(tmp_path_factory):
    """Folder of a run that TensorBoard's writer logged."""
    from torch.utils.tensorboard import SummaryWriter

    folder = tmp_path_factory.mktemp("events") / "run"
    with SummaryWriter(str(folder)) as writer:
        for step, loss in LOSSES.items():
            writer.add_scalar("train/loss", loss, step)
            writer.add_scalar("norm", step / 2, step, new_style=True)  # stored as a tensor
        writer.add_text("note", NOTE)
        writer.add_scalar("eval.loss", 2.5, 30, double_precision=True)
    return folder


@pytest.fixture
def jsonl_file(tmp_path):
    """File of a run that was logged as JSON lines."""
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"iter": step, "train": {"ignored": 0}, "train/loss": loss, "norm": step / 2}
        for step, loss in LOSSES.items()
    ]
    rows.append({"iter": 30.0, "eval": {"loss": 2.5}})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_line_that_is_nested_too_deeply_for_python_is_skipped(jsonl_file):
    with jsonl_file.open("a") as file:
        file.write(10**5 * "[" + 10**5 * "]" + "\n")
    assert_all_metrics_are_read(read_all("jsonl", jsonl_file)[0])


def test_run_of_wandb_is_read(wandb_dir):
    logged, metrics = read_all("wandb", wandb_dir)
    assert_all_metrics_are_read(logged)
    assert "note" in metrics.describe_contents() and "eval.loss" in metrics.describe_contents()


def test_rows_of_a_wandb_file_match_the_classes_of_wandb(wandb_dir):
    from wandb.proto import wandb_internal_pb2 as pb

    (path,) = wandb_dir.rglob("*.wandb")
    run = WandbRun(path, frozenset({"iter", "train/loss", "_step", "note", "norm"}))
    rows = run.read(2**30)
    # Split the file into records with forerun's reader, and parse them with W&B's own classes. The
    # reader has no public method for raw records.
    records = WandbRun(path, frozenset())
    records._pending = path.read_bytes()
    expected_rows = []
    for record in records._records():
        message = pb.Record()
        message.ParseFromString(record)
        if message.WhichOneof("record_type") == "history":
            row = {}
            for item in message.history.item:
                key = ".".join(item.nested_key) or item.key
                if key in run._metric_names:
                    row[key] = json.loads(item.value_json)
            expected_rows.append(row)
    # One row for each training loss, and one for the validation loss
    assert rows == expected_rows and len(rows) == len(LOSSES) + 1


def test_run_of_tensorboard_is_read(events_dir):
    assert_all_metrics_are_read(read_all("tensorboard", events_dir)[0], float32=True)


def test_json_lines_are_read(jsonl_file):
    assert_all_metrics_are_read(read_all("jsonl", jsonl_file)[0])


@pytest.fixture
def log_files(wandb_dir, events_dir, jsonl_file):
    """Log file of the run by format."""
    return {
        "wandb": next(wandb_dir.rglob("*.wandb")),
        "tensorboard": next(events_dir.iterdir()),
        "jsonl": jsonl_file,
    }


FORMATS = ("wandb", "tensorboard", "jsonl")


@pytest.mark.parametrize("format", FORMATS)
def test_file_may_grow_by_any_number_of_bytes_between_reads(log_files, format, tmp_path):
    content, path = log_files[format].read_bytes(), tmp_path / "grow" / log_files[format].name
    path.parent.mkdir()
    rng = random.Random(3)
    metrics = MetricFiles(
        make_command(metrics_format=format, **KEYS), path if format == "jsonl" else path.parent
    )
    num_bytes, num_losses = 0, 0
    while num_bytes < len(content):
        # Steps around the 7 bytes of W&B's record header, and one beyond its block of 32 kB
        num_bytes += rng.choice((1, 2, 6, 7, 13, 40, 500, 33_000))
        path.write_bytes(content[:num_bytes])  # keeps the inode
        metrics.read(100)
        old_num_losses, num_losses = num_losses, len(metrics.merge_metrics().train_loss)
        assert num_losses >= old_num_losses
    metrics.end(100)
    assert_all_metrics_are_read(metrics.merge_metrics(), float32=format == "tensorboard")


def test_flipped_bit_near_a_metric_is_refused(log_files, tmp_path):
    content = log_files["wandb"].read_bytes()
    path = tmp_path / "flip" / log_files["wandb"].name
    path.parent.mkdir()
    rng, key = random.Random(5), b"train/loss"
    positions = [i for i in range(len(content)) if content.startswith(key, i)]
    assert len(positions) >= len(LOSSES)
    for position in rng.sample(positions, 20):
        damaged = bytearray(content)
        damaged[position + rng.randrange(-8, 16)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(MetricsError, match="damaged"):
            read_all("wandb", path.parent)


def test_nan_logged_by_wandb_is_bad(tmp_path):
    logged, _ = read_all("wandb", log_wandb_run(tmp_path / "nan", "nan"))
    assert logged.first_nonfinite == (31, "train/loss is NaN at step 31")


def test_several_event_files_are_one_run(tmp_path):
    """A resumed trainer opens a second file, whose losses take precedence over those of the first.

    A rank that logs nothing has a file of its own. The planted loss is the step plus the number of
    the file: files 1 and 2 both have steps 3 and 4.
    """
    from torch.utils.tensorboard import SummaryWriter

    for suffix, steps in ((".1", range(1, 5)), (".2", range(3, 7)), (".0", ())):
        with SummaryWriter(str(tmp_path / "events"), filename_suffix=suffix) as writer:
            for step in steps:
                writer.add_scalar("train/loss", step + int(suffix.removeprefix(".")), step)
        if suffix == ".1":
            time.sleep(1.1)  # names of event files contain whole seconds
    logged, _ = read_all("tensorboard", tmp_path)
    assert logged.train_loss == {1: 2.0, 2: 3.0, 3: 5.0, 4: 6.0, 5: 7.0, 6: 8.0}


@pytest.mark.parametrize("is_replaced", [False, True], ids=["truncated", "replaced"])
def test_file_that_begins_again_is_read_from_its_start(tmp_path, is_replaced):
    path = tmp_path / "m.jsonl"
    path.write_text('{"iter": 1, "train/loss": 1.0, "pad": "' + NOTE + '"}\n{"iter": 9, "tr')
    metrics = MetricFiles(make_command(**KEYS), path)
    metrics.read(100)
    # A file that is truncated keeps its inode; one that is replaced has another.
    new_file = tmp_path / "new.jsonl" if is_replaced else path
    new_file.write_text('{"iter": 2, "train/loss": 2.0}\n')
    new_file.replace(path)
    metrics.read(100)
    assert metrics.merge_metrics().train_loss == {1: 1.0, 2: 2.0}


def test_files_of_another_format_and_missing_files_are_named(tmp_path):
    (tmp_path / "a.wandb").write_bytes(b"no W&B run at all")
    with pytest.raises(MetricsError, match="this is not a W&B run"):
        read_all("wandb", tmp_path)
    (tmp_path / "a.tfevents").write_bytes(b"no TensorBoard events at all")
    with pytest.raises(MetricsError, match=r"a.tfevents: the event at byte 0 is damaged"):
        read_all("tensorboard", tmp_path)
    _, metrics = read_all("wandb", tmp_path / "nowhere")
    assert metrics.describe_contents() == f"there is no *.wandb at {tmp_path / 'nowhere'}"


NOT_NUMBERS = (
    True,
    False,
    None,
    [3.0],
    {"value": 3.0},
    "true",
    "",
    "three",
    "1_000",
    "0x10",
    "1,5",
    "3.0 nats",
    "1e400",
    10**400,
    "\u0663",
)


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=repr)
def test_value_that_is_not_a_number_is_refused_as_a_loss(tmp_path, value):
    assert to_number(value) is None
    # In a log, None means no value at this step, and a dict holds metrics with nested names.
    if value is None or isinstance(value, dict):
        return
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"iter": 1, "train/loss": value}))
    with pytest.raises(MetricsError, match=r"train/loss is .* at step 1: must be a number"):
        read_all("jsonl", path)


def test_numbers_may_be_written_as_strings():
    numbers = {
        "3.5": 3.5,
        " -1e-3 ": -1e-3,
        "+.5": 0.5,
        "7.": 7.0,
        "Infinity": math.inf,
        "-inf": -math.inf,
    }
    assert {text: to_number(text) for text in numbers} == numbers
    assert math.isnan(to_number("NaN")) and to_number(3) == 3.0


def test_pipe_instead_of_a_log_is_refused(tmp_path):
    """Opening a pipe would wait for its writer."""
    os.mkfifo(tmp_path / "log.jsonl")
    with pytest.raises(OSError, match="it is a pipe: must be a plain file"):
        read_all("jsonl", tmp_path / "log.jsonl")


def test_losses_are_converted_from_their_declared_units(tmp_path):
    units = {
        "train_loss_unit": "bits",
        "validation_loss_unit": "bits per byte",
        "bytes_per_token": 4.0,
    }
    path = tmp_path / "log.jsonl"
    path.write_text('{"iter": 1, "train/loss": 6.0, "eval": {"loss": 1.25}}\n')
    metrics = MetricFiles(make_command(metrics_format="jsonl", **KEYS, **units), path)
    metrics.read(100)
    logged = metrics.merge_metrics()
    assert logged.train_loss == {1: pytest.approx(6.0 * math.log(2))}
    assert logged.validation_loss == {1: pytest.approx(5.0 * math.log(2))}
    with pytest.raises(SpecError, match="set metrics_bytes_per_token"):
        make_command(**{**units, "bytes_per_token": 0.0})


def test_have_same_unit_detects_losses_in_bits():
    assert have_same_unit(3.0, 3.3)
    assert not have_same_unit(3.0, 3.0 / math.log(2))
    assert not have_same_unit(6.2, 3.7)


def test_default_units_are_not_part_of_a_commands_id():
    text = canon.to_canonical_json(make_command(metrics_format="jsonl", **KEYS))
    assert "unit" not in text and "bytes_per_token" not in text
