"""Tests of reading a main run's log from files, W&B, and TensorBoard.

A fault of a log must become a note, and no error.
"""

import dataclasses
import json

import numpy as np
import pytest
from watched_case import (
    compute_loss_at,
    make_header,
    make_line,
    make_reader,
    read_log,
    write_events,
    write_finished,
    write_lines,
    write_run,
    write_wandb,
)

from forerun._launcher.main_run import metrics_file
from forerun._launcher.main_run.watch.logs import sources
from forerun._launcher.main_run.watch.logs.columns import list_headers
from forerun._launcher.main_run.watch.logs.keys import ColumnNames
from forerun._launcher.main_run.watch.logs.readings import LogReader
from forerun._launcher.main_run.watch.logs.sources import open_source


def get_note(reading, text):
    """Return the one note that contains `text`."""
    matches = [note for note in reading.notes if text in note]
    assert len(matches) == 1, reading.notes
    return matches[0]


# ---- Sources ----


def test_foreruns_own_log_is_read(tmp_path):
    write_run(tmp_path / "run", 40, rank_seconds=[0.01, 0.02])
    write_finished(tmp_path / "run", 40, 2.25)
    for where in (tmp_path / "run", tmp_path / "run" / metrics_file.METRICS_FILE):
        reading = read_log(where)
        columns = reading.columns
        assert columns.steps.tolist() == list(range(1, 41))
        assert columns.train_loss_nats[7] == compute_loss_at(8)
        assert columns.rank_seconds.shape == (40, 2)
        (header,) = list_headers(columns.events)
        assert header == dataclasses.replace(make_header(), started_at=header.started_at)
        assert reading.names_digest
        assert reading.notes == ()
        assert (reading.ending.event, reading.ending.validation_loss_nats) == ("finished", 2.25)
        assert columns.newest_at == (tmp_path / "run" / metrics_file.METRICS_FILE).stat().st_mtime


def test_column_names_can_be_given(tmp_path):
    lines = [{"n": s, "nested": {"ce": 3.0}, "loss": 99.0, "held_out": 2.5} for s in (1, 2)]
    path = write_lines(tmp_path / "log.jsonl", lines)
    reading = read_log(path, step="n", train_loss_nats="nested.ce", validation_loss_nats="held_out")
    assert reading.columns.train_loss_nats.tolist() == [3.0, 3.0]
    assert reading.columns.validation_loss_nats.tolist() == [2.5, 2.5]
    empty = read_log(path, step="n", train_loss_nats="nested.other")
    assert len(empty.columns) == 0
    assert "nested.ce" in get_note(empty, "the log has no train_loss_nats (tried: 'nested.other')")
    assert "--train-loss-key" in get_note(empty, "the log has no train_loss_nats")


def test_wandb_offline_run_is_read(tmp_path, monkeypatch):
    rows = [
        (s, {"train/loss": compute_loss_at(s), "train/grad_norm": 1.5}) for s in range(1, 31)
    ] + [(30, {"eval/loss": 2.5})]
    files = write_wandb(tmp_path / "wb", rows, monkeypatch)
    for where in (tmp_path / "wb", f"{files}/.."):
        reading = read_log(where)
        assert reading.columns.train_loss_nats.tolist() == pytest.approx(
            [compute_loss_at(s) for s in range(1, 31)], abs=1e-12
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


def test_tensorboard_events_are_read(tmp_path):
    rows = [(s, {"lm loss": compute_loss_at(s), "iteration-time": 0.5}) for s in range(1, 21)] + [
        (20, {"lm loss validation": 2.5})
    ]
    reading = read_log(write_events(tmp_path / "tb", rows))
    assert reading.columns.train_loss_nats == pytest.approx(
        [compute_loss_at(s) for s in range(1, 21)], abs=1e-6
    )
    assert reading.columns.seconds.tolist() == [0.5] * 20
    assert reading.columns.validation_steps.tolist() == [20]
    assert not any("again" in note for note in reading.notes)
    assert not reading.names_digest
    get_note(reading, "the log names no config")
    get_note(reading, "the log has no grad_norm and no tokens_per_second: ")


def test_steps_counted_from_zero_are_shifted(tmp_path):
    lines = [{"step": s, "loss": 3.0} for s in range(10)] + [{"step": 10, "val_loss": 2.5}]
    reading = read_log(write_lines(tmp_path / "log.jsonl", lines), num_steps=10)
    assert reading.columns.step == 10
    assert reading.columns.steps[0] == 1
    assert reading.columns.validation_steps.tolist() == [10]
    assert not any("outside" in note for note in reading.notes)


# ---- Faults of a log ----


def test_lines_without_a_loss_or_a_valid_step_are_skipped(tmp_path):
    lines = [
        '"a string"',
        make_line(1),
        {"step": 2},
        {"step": 3, "grad_norm": 1.0},
        make_line(4),
    ]
    lines += [
        {"train_loss_nats": 3.0, "step": "five"},
        {"train_loss_nats": 3.0, "step": -1},
        {**make_line(6), "step": 10**400},
        make_line(6),
    ]
    reading = read_log(write_lines(tmp_path / "log.jsonl", lines))
    assert reading.columns.steps.tolist() == [1, 4, 6]
    get_note(reading, "3 lines with a step that is not a whole number")
    get_note(reading, "1 line is not a JSON object: ")


def test_steps_beyond_the_run_are_dropped(tmp_path):
    reading = read_log(
        write_lines(tmp_path / "log.jsonl", [make_line(at) for at in (99, 100, 101, 256, 1e300)])
    )
    assert reading.columns.step == 100
    get_note(reading, "3 lines with a step outside 1 to 100")


def test_foreruns_own_rewinds_are_no_fault(tmp_path):
    """Steps that the log repeats after a restart or a rollback get no note."""
    path = write_run(tmp_path, 20)
    metrics_file.append_line(tmp_path, make_header(step=16))
    for step in (17, 18, 19):
        metrics_file.append_line(tmp_path, make_line(step, train_loss_nats=6.0))
    back = {
        "event": "rolled_back",
        "step": 19,
        "to_step": 12,
        "skipped_sequences": 8,
        "clip_norm": None,
        "reason": "x",
    }
    metrics_file.append_line(tmp_path, back)
    metrics_file.append_line(tmp_path, make_line(13, train_loss_nats=5.0))
    reading = read_log(path)
    assert reading.columns.steps.tolist() == list(range(1, 14))
    assert reading.columns.train_loss_nats[-1] == 5.0
    assert [event["event"] for event in reading.columns.events] == [
        "started",
        "started",
        "rolled_back",
    ]
    assert reading.notes == ()


def test_last_line_that_is_cut_short_waits_or_gets_a_note(tmp_path):
    path = write_run(tmp_path, 8)
    path.write_bytes(path.read_bytes()[:-20])
    reading = read_log(path)
    assert reading.columns.step == 7
    get_note(reading, "its last line is cut short")
    reader = make_reader(path)
    assert reader.read().columns.step == 7
    assert reader.read().notes == (), "a reader that follows the run waits for the rest"
    complete_line = json.dumps(make_line(8)).encode()
    path.write_bytes(path.read_bytes().rpartition(b"\n")[0] + b"\n" + complete_line)
    assert read_log(path).columns.step == 8, "a last line counts without its newline"


def test_losses_that_are_no_numbers_are_noted(tmp_path):
    lines = [
        make_line(1),
        '{"step": 2, "train_loss_nats": NaN}',
        '{"step": 3, "train_loss_nats": "inf"}',
        make_line(4),
    ]
    lines.append({"step": 5, "train_loss_nats": None})
    path = write_lines(tmp_path / "log.jsonl", lines)
    reading = read_log(path)
    assert np.isnan(reading.columns.train_loss_nats).tolist() == [False, True, True, False, True]
    get_note(reading, "1 training loss that is not a number")
    reading = read_log(write_lines(path, [*lines, make_line(6)]))
    assert reading.columns.steps.tolist() == [1, 2, 3, 4, 6], "a null is a missing value"


def test_validation_loss_between_logged_steps_is_no_missing_loss(tmp_path):
    lines = [
        make_line(10),
        {"step": 15, "val_loss": 2.5, "train_loss_nats": None},
        make_line(20),
        {"step": 25, "val_loss": 2.4},
    ]
    columns = read_log(write_lines(tmp_path / "log.jsonl", lines)).columns
    assert columns.steps.tolist() == [10, 20]
    assert columns.validation_steps.tolist() == [15, 25]


def test_reader_follows_a_rewind(tmp_path):
    write_run(tmp_path, 30)
    reader = make_reader(tmp_path)
    assert reader.read().columns.step == 30
    metrics_file.rewind_metrics(tmp_path, 20)
    assert reader.read().columns.step == 20
    metrics_file.append_line(tmp_path, make_line(21))
    assert (reader.read().columns.step, reader.read().notes) == (21, ())


def test_times_of_ranks_are_kept_for_the_newest_lines_only(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "NUM_RANK_LINES", 5)
    rows = [make_line(step, rank_seconds=[step, 1.0]) for step in range(1, 21)]
    columns = read_log(write_lines(tmp_path / "log.jsonl", rows)).columns
    assert (
        columns.rank_steps.tolist() == columns.rank_seconds[:, 0].tolist() == [16, 17, 18, 19, 20]
    )
    assert len(columns) == 20


def test_wandb_run_paths_are_recognized(tmp_path, monkeypatch):
    from forerun._launcher.main_run.watch.logs.sources import LogFiles, OnlineRun

    monkeypatch.chdir(tmp_path)
    keys = ColumnNames({})
    for where in (
        "me/forerun/abc123",
        "me/forerun/runs/abc123",
        "https://wandb.ai/me/forerun/runs/abc123",
    ):
        source = open_source(where, keys)
        assert isinstance(source, OnlineRun)
        assert source._run_path == "me/forerun/abc123"
    (tmp_path / "me" / "forerun").mkdir(parents=True)
    for where in ("me/forerun/run.jsonl", "run", "frozen/run/", "../a/b/c"):
        assert isinstance(open_source(where, keys), LogFiles), where


def test_different_loss_units_get_a_note_and_declared_ones_are_converted(tmp_path):
    lines = [{"step": s, "loss": 6.2} for s in range(1, 101)] + [{"step": 100, "val_loss": 3.7}]
    path = write_lines(tmp_path / "log.jsonl", lines)
    get_note(read_log(path), "check that both are in nats per token")
    keys = ColumnNames({}, {"validation_loss_nats": 1.7})
    reading = LogReader(open_source(str(path), keys), keys, "ab" * 32, 100).read(last=True)
    assert reading.columns.validation_loss_nats.tolist() == [pytest.approx(3.7 * 1.7)]
    assert not any("nats per token" in note for note in reading.notes)
