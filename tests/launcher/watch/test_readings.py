"""A main run's log from every source, and everything that may be wrong with one: told, and never
fatal.
"""

import json

import numpy as np
import pytest
from watched_case import (
    finish,
    header,
    line,
    loss_at,
    read,
    reader,
    write_events,
    write_lines,
    write_run,
    write_wandb,
)

from launcher.base import metrics
from launcher.watch.logs import sources
from launcher.watch.logs.keys import ColumnNames
from launcher.watch.logs.readings import LogReader
from launcher.watch.logs.sources import source_of


def told(reading, text):
    found = [note for note in reading.notes if text in note]
    assert len(found) == 1, reading.notes
    return found[0]


# Sources


def test_our_own_run_whole(tmp_path):
    write_run(tmp_path / "run", 40, rank_seconds=[0.01, 0.02])
    finish(tmp_path / "run", 40, 2.25)
    for where in (tmp_path / "run", tmp_path / "run" / metrics.METRICS_FILE):
        reading = read(where)
        columns = reading.columns
        assert columns.steps.tolist() == list(range(1, 41))
        assert columns.train_loss_nats[7] == loss_at(8)
        assert columns.rank_seconds.shape == (40, 2)
        assert columns.header == header()
        assert reading.names_digest
        assert reading.notes == ()
        assert (reading.ending.event, reading.ending.validation_loss_nats) == ("finished", 2.25)
        assert columns.newest_at == (tmp_path / "run" / metrics.METRICS_FILE).stat().st_mtime


def test_names_given_by_option(tmp_path):
    lines = [{"n": s, "nested": {"ce": 3.0}, "loss": 99.0, "held": 2.5} for s in (1, 2)]
    path = write_lines(tmp_path / "log.jsonl", lines)
    reading = read(path, step="n", train_loss_nats="nested.ce", validation_loss_nats="held")
    assert reading.columns.train_loss_nats.tolist() == [3.0, 3.0]
    assert reading.columns.validation_loss_nats.tolist() == [2.5, 2.5]
    empty = read(path, step="n", train_loss_nats="nested.other")
    assert len(empty.columns) == 0
    assert "nested.ce" in told(empty, "the log has no train_loss_nats (tried: 'nested.other')")
    assert "--train-loss-key" in told(empty, "the log has no train_loss_nats")


def test_wandb_offline(tmp_path, monkeypatch):
    rows = [(s, {"train/loss": loss_at(s), "train/grad_norm": 1.5}) for s in range(1, 31)] + [
        (30, {"eval/loss": 2.5})
    ]
    files = write_wandb(tmp_path / "wb", rows, monkeypatch)
    for where in (tmp_path / "wb", f"{files}/.."):
        reading = read(where)
        assert reading.columns.train_loss_nats.tolist() == pytest.approx(
            [loss_at(s) for s in range(1, 31)], abs=1e-12
        )
        assert reading.columns.grad_norm.tolist() == [1.5] * 30
        assert (
            reading.columns.validation_steps.tolist(),
            reading.columns.validation_loss_nats.tolist(),
        ) == (
            [30],
            [2.5],
        )
        assert reading.columns.newest_at == pytest.approx(
            (tmp_path / "wb").stat().st_mtime, abs=120
        )


def test_tensorboard(tmp_path):
    rows = [(s, {"lm loss": loss_at(s), "iteration-time": 0.5}) for s in range(1, 21)] + [
        (20, {"lm loss validation": 2.5})
    ]
    reading = read(write_events(tmp_path / "tb", rows))
    assert reading.columns.train_loss_nats == pytest.approx(
        [loss_at(s) for s in range(1, 21)], abs=1e-6
    )
    assert reading.columns.seconds.tolist() == [0.5] * 20
    assert reading.columns.validation_steps.tolist() == [20]
    assert not any("again" in note for note in reading.notes)
    assert not reading.names_digest
    told(reading, "the log names no config")
    told(reading, "the log has no grad_norm and no tokens_per_second: ")


def test_steps_counted_from_zero(tmp_path):
    lines = [{"step": s, "loss": 3.0} for s in range(10)] + [{"step": 10, "val_loss": 2.5}]
    reading = read(write_lines(tmp_path / "log.jsonl", lines), num_steps=10)
    assert reading.columns.step == 10
    assert reading.columns.steps[0] == 1
    assert reading.columns.validation_steps.tolist() == [10]
    assert not any("outside" in note for note in reading.notes)


# What may be wrong


def test_missing_fields(tmp_path):
    lines = [
        json.dumps(header().__class__.__name__),
        line(1),
        {"step": 2},
        {"step": 3, "grad_norm": 1.0},
        line(4),
    ]
    lines += [
        {"train_loss_nats": 3.0, "step": "five"},
        {"train_loss_nats": 3.0, "step": -1},
        {**line(6), "step": 10**400},
        line(6),
    ]
    reading = read(write_lines(tmp_path / "log.jsonl", lines))
    assert reading.columns.steps.tolist() == [1, 4, 6]
    told(reading, "3 lines have a step that is not a whole number")
    told(reading, "1 line is not a JSON object: ")


def test_steps_beyond_the_run(tmp_path):
    reading = read(
        write_lines(tmp_path / "log.jsonl", [line(at) for at in (99, 100, 101, 256, 1e300)])
    )
    assert reading.columns.step == 100
    told(reading, "3 lines have steps outside 1 to 100")


def test_our_own_rewinds_are_no_fault(tmp_path):
    """A restart and a rollback: steps beyond were not made, and are not told of."""
    path = write_run(tmp_path, 20)
    metrics.append(tmp_path, header(step=16))
    for step in (17, 18, 19):
        metrics.append(tmp_path, line(step, train_loss_nats=6.0))
    back = {
        "event": "rolled_back",
        "step": 19,
        "to_step": 12,
        "skipped_sequences": 8,
        "clip_norm": None,
        "reason": "x",
    }
    metrics.append(tmp_path, back)
    metrics.append(tmp_path, line(13, train_loss_nats=5.0))
    reading = read(path)
    assert reading.columns.steps.tolist() == list(range(1, 14))
    assert reading.columns.train_loss_nats[-1] == 5.0
    assert [event["event"] for event in reading.columns.events] == [
        "started",
        "started",
        "rolled_back",
    ]
    assert reading.notes == ()


def test_a_last_line_cut_short(tmp_path):
    path = write_run(tmp_path, 8)
    path.write_bytes(path.read_bytes()[:-20])
    reading = read(path)
    assert reading.columns.step == 7
    told(reading, "its last line is cut short")
    following = reader(path)
    assert following.read().columns.step == 7
    assert following.read().notes == (), "while a run is followed its last line is waited for"
    whole = json.dumps(line(8)).encode()
    path.write_bytes(path.read_bytes().rpartition(b"\n")[0] + b"\n" + whole)
    assert read(path).columns.step == 8, "a last line that lacks nothing but its end counts"


def test_losses_that_are_no_numbers(tmp_path):
    lines = [
        line(1),
        '{"step": 2, "train_loss_nats": NaN}',
        '{"step": 3, "train_loss_nats": "inf"}',
        line(4),
    ]
    lines.append({"step": 5, "train_loss_nats": None})
    path = write_lines(tmp_path / "log.jsonl", lines)
    reading = read(path)
    assert np.isnan(reading.columns.train_loss_nats).tolist() == [False, True, True, False, True]
    told(reading, "1 training loss is not a number")
    reading = read(write_lines(path, [*lines, line(6)]))
    assert reading.columns.steps.tolist() == [1, 2, 3, 4, 6], (
        "a column without a value, as numbers came after it"
    )


def test_a_validation_loss_between_logged_steps_is_no_missing_loss(tmp_path):
    lines = [
        line(10),
        {"step": 15, "val_loss": 2.5, "train_loss_nats": None},
        line(20),
        {"step": 25, "val_loss": 2.4},
    ]
    columns = read(write_lines(tmp_path / "log.jsonl", lines)).columns
    assert columns.steps.tolist() == [10, 20]
    assert columns.validation_steps.tolist() == [15, 25]


def test_a_run_that_began_again_is_read_as_it_is_now(tmp_path):
    write_run(tmp_path, 30)
    following = reader(tmp_path)
    assert following.read().columns.step == 30
    metrics.rewind(tmp_path, 20)
    assert following.read().columns.step == 20
    metrics.append(tmp_path, line(21))
    assert (following.read().columns.step, following.read().notes) == (21, ())


def test_times_of_ranks_are_kept_of_the_newest_lines_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "NUM_RANK_LINES", 5)
    rows = [line(step, rank_seconds=[step, 1.0]) for step in range(1, 21)]
    columns = read(write_lines(tmp_path / "log.jsonl", rows)).columns
    assert (
        columns.rank_steps.tolist() == columns.rank_seconds[:, 0].tolist() == [16, 17, 18, 19, 20]
    )
    assert len(columns) == 20


def test_what_looks_like_a_run_of_wandb(tmp_path, monkeypatch):
    from launcher.watch.logs.sources import Files, OnlineRun

    monkeypatch.chdir(tmp_path)
    keys = ColumnNames({})
    for where in (
        "me/forerun/abc123",
        "me/forerun/runs/abc123",
        "https://wandb.ai/me/forerun/runs/abc123",
    ):
        found = source_of(where, keys)
        assert isinstance(found, OnlineRun)
        assert found._run_path == "me/forerun/abc123"
    (tmp_path / "me" / "forerun").mkdir(parents=True)
    for where in ("me/forerun/run.jsonl", "run", "frozen/run/", "../a/b/c"):
        assert isinstance(source_of(where, keys), Files), where


def test_losses_in_different_units_are_warned_of_and_declared_ones_converted(tmp_path):
    lines = [{"step": s, "loss": 6.2} for s in range(1, 101)] + [{"step": 100, "val_loss": 3.7}]
    path = write_lines(tmp_path / "log.jsonl", lines)
    told(read(path), "check that both are in nats per token")
    keys = ColumnNames({}, {"validation_loss_nats": 1.7})
    reading = LogReader(source_of(str(path), keys), keys, "ab" * 32, 100).read(last=True)
    assert reading.columns.validation_loss_nats.tolist() == [pytest.approx(3.7 * 1.7)]
    assert not any("nats per token" in note for note in reading.notes)
