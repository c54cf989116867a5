"""Lines become columns: later lines count, what is missing is NaN, what is no line is left out."""

import numpy as np
from planted_watch import header, started

from launcher.watch.logs.gathering import gather
from launcher.watch.logs.keys import Keys
from launcher.watch.logs.table import Table


def from_lines(rows):
    keys = Keys({})
    table = Table(keys.wanted)
    table.extend(rows)
    return gather([table], keys, 100, 1, None).columns


def line(step, loss, **more):
    return {"step": step, "train_loss_nats": loss, **more}


def test_lines_are_sorted_and_the_later_of_two_counts():
    columns = from_lines([line(1, 3.0), line(3, 2.0), line(2, 2.5, grad_norm=1.0), line(3, 2.2, grad_norm=2.0)])
    assert columns.steps.tolist() == [1, 2, 3] and columns.train_loss_nats.tolist() == [3.0, 2.5, 2.2]
    assert np.isnan(columns.grad_norm).tolist() == [True, False, False] and columns.grad_norm[2] == 2.0
    assert columns.step == 3 and len(columns) == 3 and columns.rank_seconds is None


def test_no_lines_are_no_trouble():
    columns = from_lines([])
    assert columns.step == 0 and len(columns) == 0 and columns.header is None


def test_what_is_not_a_number_is_nan_and_what_is_no_line_is_left_out():
    columns = from_lines([line(1, "NaN"), line(2, True), line("3", 2.0), {"step": 4}, line(5, 2.0, seconds=None)])
    assert columns.steps.tolist() == [1, 5]
    assert np.isnan(columns.train_loss_nats[0]) and np.isnan(columns.seconds).all()


def test_validation_and_ranks_have_their_own_steps():
    columns = from_lines([
        line(1, 3.0, rank_seconds=[1.0, 2.0]), line(2, 2.9, validation_loss_nats=2.8),
        line(4, 2.7, validation_loss_nats=None),
    ])  # fmt: skip
    assert columns.validation_steps.tolist() == [2] and columns.validation_loss_nats.tolist() == [2.8]
    assert columns.rank_steps.tolist() == [1] and columns.rank_seconds.tolist() == [[1.0, 2.0]]


def test_the_newest_readable_header_is_the_run_s():
    broken = {**started(step=9), "started_at": "yesterday"}
    columns = from_lines([started(), line(1, 3.0), started(step=1, num_ranks=4), {"event": "started"}, broken])
    assert columns.header == header(step=1, num_ranks=4)
    assert len(columns.events) == 4
