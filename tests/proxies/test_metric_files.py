"""Metrics as wandb, TensorBoard and a JSON writer really write them, cut and damaged at every byte."""

import json
import math
import os
import random
import struct
import subprocess
import sys
import time

import pytest
from command_cases import command

from proxies.core import canon
from proxies.core.checks import SpecError
from proxies.core.tables.numerals import to_number
from proxies.external.growing_file import MetricsError
from proxies.external.metric_files import MetricFiles, units_agree
from proxies.external.wandb_run import WandbRun

LOSSES = {step: 3.0 - step / 70 for step in range(1, 31)}
KEYS = {"step_key": "iter", "train_loss_key": "train/loss", "validation_loss_key": "eval.loss", "grad_norm_key": "norm"}
FILL = "x" * 5000
"""Makes records span W&B's blocks of 32 kB."""


def read(format, path):
    metrics = MetricFiles(command(metrics_format=format, **KEYS), path)
    while metrics.read(100):
        pass
    metrics.end(100)
    return metrics.logged(), metrics


def check(logged, *, float32=False):
    rounded = {s: struct.unpack("f", struct.pack("f", v))[0] if float32 else v for s, v in LOSSES.items()}
    assert logged.train_loss == rounded and logged.validation_loss == {30: 2.5}
    assert logged.grad_norm == {s: s / 2 for s in LOSSES} and logged.bad is None


WANDB = f"""
import json, sys, wandb
losses = json.load(sys.stdin)
with wandb.init(project="p", dir=sys.argv[1]) as run:
    for step, loss in losses.items():
        run.log({{"iter": int(step), "train/loss": loss, "norm": int(step) / 2, "note": "{FILL}"}})
    run.log({{"iter": 30, "eval": {{"loss": 2.5}}}})
    if len(sys.argv) > 2: run.log({{"iter": 31, "train/loss": float("nan")}})
"""


def wandb_run(folder, *more):
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DISABLE_CODE": "true"}
    subprocess.run(
        [sys.executable, "-c", WANDB, str(folder), *more], input=json.dumps(LOSSES), text=True, check=True, cwd=folder,
        env=environment,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="session")
def wandb_dir(tmp_path_factory):
    return wandb_run(tmp_path_factory.mktemp("wandb") / "run")


@pytest.fixture(scope="session")
def events_dir(tmp_path_factory):
    from torch.utils.tensorboard import SummaryWriter

    folder = tmp_path_factory.mktemp("events") / "run"
    with SummaryWriter(str(folder)) as writer:
        for step, loss in LOSSES.items():
            writer.add_scalar("train/loss", loss, step)
            writer.add_scalar("norm", step / 2, step, new_style=True)  # a tensor
        writer.add_text("note", FILL)
        writer.add_scalar("eval.loss", 2.5, 30, double_precision=True)
    return folder


@pytest.fixture
def jsonl_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"iter": s, "train": {"ignored": 0}, "train/loss": v, "norm": s / 2} for s, v in LOSSES.items()]
    path.write_text("\n".join(json.dumps(line) for line in [*lines, {"iter": 30.0, "eval": {"loss": 2.5}}]) + "\n")
    return path


def test_a_value_of_any_depth_beside_the_loss_does_not_matter(jsonl_file):
    lines = jsonl_file.read_text().splitlines()
    deep = 3000 * '{"a": [' + 3000 * "]}"
    jsonl_file.write_text("".join(f'{line[:-1]}, "config": {deep}}}\n' for line in lines))
    check(read("jsonl", jsonl_file)[0])


def test_real_wandb(wandb_dir):
    logged, metrics = read("wandb", wandb_dir)
    check(logged)
    assert "note" in metrics.hint() and "eval.loss" in metrics.hint()


def test_our_reading_of_wandbs_file_is_wandbs_own(wandb_dir):
    """Every row, name and value, against wandb's generated classes."""
    from wandb.proto import wandb_internal_pb2 as pb

    (path,) = wandb_dir.rglob("*.wandb")
    run = WandbRun(path, frozenset({"iter", "train/loss", "_step", "note", "norm"}))
    rows = run.read(2**30)
    records = WandbRun(path, frozenset())
    records._pending = path.read_bytes()
    theirs = []
    for record in records._records():
        message = pb.Record()
        message.ParseFromString(record)
        if message.WhichOneof("record_type") == "history":
            items = {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in message.history.item}
            theirs.append({key: value for key, value in items.items() if key in run._wanted})
    assert rows == theirs and len(rows) == 31


def test_real_tensorboard(events_dir):
    check(read("tensorboard", events_dir)[0], float32=True)


def test_jsonl(jsonl_file):
    check(read("jsonl", jsonl_file)[0])


@pytest.fixture
def kinds(wandb_dir, events_dir, jsonl_file):
    return {
        "wandb": next(wandb_dir.rglob("*.wandb")),
        "tensorboard": next(events_dir.iterdir()),
        "jsonl": jsonl_file,
    }


FORMATS = ("wandb", "tensorboard", "jsonl")


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_grows_byte_by_byte_or_in_leaps_reads_as_the_whole(kinds, format, tmp_path):
    content, path = kinds[format].read_bytes(), tmp_path / "grow" / kinds[format].name
    path.parent.mkdir()
    chance = random.Random(3)
    metrics = MetricFiles(command(metrics_format=format, **KEYS), path if format == "jsonl" else path.parent)
    at, seen = 0, 0
    while at < len(content):
        at += chance.choice((1, 2, 6, 7, 13, 40, 500, 33_000))
        path.write_bytes(content[:at])  # the same inode, longer
        metrics.read(100)
        now = len(metrics.logged().train_loss)
        assert now >= seen
        seen = now
    metrics.end(100)
    check(metrics.logged(), float32=format == "tensorboard")


@pytest.mark.parametrize("format", ["wandb", "tensorboard"])
def test_a_flipped_bit_where_metrics_lie_is_refused(kinds, format, tmp_path):
    content = kinds[format].read_bytes()
    path = tmp_path / "flip" / kinds[format].name
    path.parent.mkdir()
    chance, places = random.Random(5), [i for i in range(len(content) - 9) if content[i : i + 10] == b"train/loss"]
    assert len(places) >= 30
    for place in chance.sample(places, 20):
        damaged = bytearray(content)
        damaged[place + chance.randrange(-8, 16)] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(MetricsError, match="damaged"):
            read(format, path.parent)


def test_nan_as_wandb_writes_it(tmp_path):
    logged, _ = read("wandb", wandb_run(tmp_path / "nan", "nan"))
    assert logged.bad == (31, "train/loss is NaN at step 31")


def test_several_files_are_one_run(tmp_path):
    """A trainer that resumed opened a second file; a rank that logs nothing another."""
    from torch.utils.tensorboard import SummaryWriter

    for suffix, steps in ((".1", range(1, 5)), (".2", range(3, 7)), (".0", ())):
        with SummaryWriter(str(tmp_path / "events"), filename_suffix=suffix) as writer:
            for step in steps:
                writer.add_scalar("train/loss", step + float(suffix) * 10, step)
        time.sleep(1.1 if suffix == ".1" else 0)  # names hold whole seconds
    logged, _ = read("tensorboard", tmp_path)
    assert logged.train_loss == {1: 2.0, 2: 3.0, 3: 5.0, 4: 6.0, 5: 7.0, 6: 8.0}


@pytest.mark.parametrize("how", ["cut and written anew", "replaced"])
def test_a_file_written_anew_is_read_anew(tmp_path, how):
    path = tmp_path / "m.jsonl"
    path.write_text('{"iter": 1, "train/loss": 1.0, "pad": "' + FILL + '"}\n{"iter": 9, "tr')
    metrics = MetricFiles(command(**KEYS), path)
    metrics.read(100)
    target = path if how.startswith("cut") else tmp_path / "beside"
    target.write_text('{"iter": 2, "train/loss": 2.0}\n')
    target.replace(path)
    metrics.read(100)
    assert metrics.logged().train_loss == {1: 1.0, 2: 2.0}


def test_what_is_no_such_file(tmp_path):
    (tmp_path / "a.wandb").write_bytes(b"no W&B run at all")
    with pytest.raises(MetricsError, match="this is not a W&B run"):
        read("wandb", tmp_path)
    (tmp_path / "a.tfevents").write_bytes(bytes(100))
    with pytest.raises(MetricsError, match=r"a.tfevents: the event at byte 0 is damaged"):
        read("tensorboard", tmp_path)
    _, metrics = read("wandb", tmp_path / "nowhere")
    assert metrics.hint() == f"there is no *.wandb at {tmp_path / 'nowhere'}"


NO_NUMBERS = (True, False, None, [3.0], {"value": 3.0}, "true", "", "three", "1_000", "0x10", "1,5", "3.0 nats",
              "1e400", 10**400, "\u0663")  # fmt: skip


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_what_is_no_number_is_no_loss(tmp_path, value):
    assert to_number(value) is None
    if value is None or isinstance(value, dict):
        return  # a column without a value, and nested columns
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"iter": 1, "train/loss": value}))
    with pytest.raises(MetricsError, match=r"train/loss is .* at step 1: must be a number"):
        read("jsonl", path)


def test_a_string_that_spells_a_number_is_one():
    spelled = {"3.5": 3.5, " -1e-3 ": -1e-3, "+.5": 0.5, "7.": 7.0, "Infinity": math.inf, "-inf": -math.inf}
    assert {text: to_number(text) for text in spelled} == spelled
    assert math.isnan(to_number("NaN")) and to_number(3) == 3.0


def test_a_pipe_in_place_of_a_log_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "log.jsonl")
    with pytest.raises(OSError, match="it is a pipe: must be a plain file"):
        read("jsonl", tmp_path / "log.jsonl")


def test_losses_are_taken_in_their_declared_units(tmp_path):
    units = {"train_loss_unit": "bits", "validation_loss_unit": "bits per byte", "bytes_per_token": 4.0}
    path = tmp_path / "log.jsonl"
    path.write_text('{"iter": 1, "train/loss": 6.0, "eval": {"loss": 1.25}}\n')
    metrics = MetricFiles(command(metrics_format="jsonl", **KEYS, **units), path)
    metrics.read(100)
    logged = metrics.logged()
    assert logged.train_loss == {1: pytest.approx(6.0 * math.log(2))}
    assert logged.validation_loss == {1: pytest.approx(5.0 * math.log(2))}
    with pytest.raises(SpecError, match="set metrics_bytes_per_token"):
        command(**{**units, "bytes_per_token": 0.0})
    assert not units_agree(6.2, 3.7) and not units_agree(3.0, 3.0 / math.log(2)) and units_agree(3.0, 3.3)


def test_the_declared_units_change_no_id_of_a_command_without_them():
    plain = canon.canonical(command(metrics_format="jsonl", **KEYS))
    assert "unit" not in plain and "bytes_per_token" not in plain
