"""A run read on from look to look says what a fresh reading says, whatever becomes of its files between two looks."""

import json
import random

import numpy as np
import pytest
from watched_case import DIGEST, header, line, write_events

from launcher.watch.logs import sources, table
from launcher.watch.logs.gathering import last_of_each
from launcher.watch.logs.keys import Keys
from launcher.watch.logs.readings import OtherRunError, Readings
from launcher.watch.logs.sources import source_of
from launcher.watch.logs.table import Table
from proxies.core import canon

NUM_STEPS = 60


def reader(where):
    keys = Keys({})
    return Readings(source_of(str(where), keys), keys, DIGEST, NUM_STEPS, 2)


def plain(value):
    """To compare by: arrays as lists, NaN as a word."""
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, float) and value != value:
        return "NaN"
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def seen(readings):
    """All that a look gives."""
    try:
        found = readings.read()
    except OtherRunError as error:
        return str(error)
    names = found.columns.__dataclass_fields__
    columns = {name: plain(getattr(found.columns, name)) for name in names if name != "header"}
    return {**columns, "header": found.columns.header, "notes": found.notes, "not_finite": found.not_finite,
            "names_digest": found.names_digest, "ending": found.ending}  # fmt: skip


class History:
    """A log that somebody writes, cuts, rewrites and loses."""

    def __init__(self, path, seed):
        self.path, self.rng, self.step = path, random.Random(seed), 0

    def act(self):
        self.rng.choice([self.append] * 6 + [self.odd, self.odd, self.event, self.replace, self.cut, self.lose])()

    def write(self, *rows):
        with self.path.open("a") as file:
            file.writelines((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)

    def append(self):
        for _ in range(self.rng.randrange(1, 12)):
            self.step += 1
            more = {"rank_seconds": [self.rng.random() for _ in range(self.rng.choice([2, 2, 3]))]}
            self.write(line(self.step, train_loss_nats=self.rng.random(), **more))

    def odd(self):
        step = self.rng.randrange(0, NUM_STEPS + 3)
        self.write(self.rng.choice([
            line(step, train_loss_nats=3.0) if step else {}, {"step": step, "train_loss_nats": None}, "garbage\0{",
            {"step": step, "loss": 9.0},
            {"step": step, "train_loss_nats": "NaN"}, {"step": step, "validation_loss_nats": 2.0}, {"step": step},
            {"step": step, "val_loss": 7.0}, {"step": "x", "train_loss_nats": 1.0}, {"train_loss_nats": 1.0},
            {"step": step, "loss_metrics/global_avg_loss": 4.0, "mfu": 40.0, "tps": 7.0},
            {"iter": step, "train/loss": 3.0, "mfu": 40.0}, {"step": step, "throughput(tps)": 5.0},
        ]))  # fmt: skip
        if self.rng.random() < 0.3:
            with self.path.open("a") as file:
                file.write('{"step": 5, "train_lo')

    def event(self):
        to = self.rng.randrange(0, max(1, self.step) + 1)
        started = canon.to_json(header(to, DIGEST if self.rng.random() < 0.95 else "cd" * 32))
        back = {"event": "rolled_back", "step": self.step, "to_step": to, "reason": "x"}
        self.write(self.rng.choice([started, back]))
        self.step = to

    def replace(self):
        """As our trainer's own rewind: another file under the name."""
        rows = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        kept = rows[: self.rng.randrange(len(rows) + 1)]
        new = self.path.with_suffix(".new")
        new.write_bytes(b"".join(kept))
        new.replace(self.path)

    def cut(self):
        """The same file, shorter, and perhaps longer again than it was."""
        if self.path.exists():
            size = self.path.stat().st_size
            with self.path.open("r+b") as file:
                file.truncate(self.rng.randrange(size + 1))
            for _ in range(self.rng.choice([0, 3])):
                self.append()

    def lose(self):
        self.path.unlink(missing_ok=True)
        self.step = 0


@pytest.mark.parametrize("seed", range(20))
def test_reading_on_is_reading_anew(tmp_path, seed, monkeypatch):
    monkeypatch.setattr(sources, "READ_BYTES", 700)  # a few lines a portion
    monkeypatch.setattr(table, "NUM_RANK_LINES", 7)
    history = History(tmp_path / "metrics.jsonl", seed)
    following = reader(tmp_path)
    for _ in range(14):
        history.act()
        assert seen(following) == seen(reader(tmp_path))


@pytest.mark.parametrize("seed", range(2))
def test_reading_on_several_files_is_reading_anew(tmp_path, seed):
    """Each of a run's files may grow, and a new one may come before an old one."""
    rng, following = random.Random(seed), reader(tmp_path)
    for number in range(5):
        first = rng.randrange(1, 40)
        rows = [(s, {"loss": rng.random(), "grad_norm": 1.0}) for s in range(first, first + 9)]
        rows += [(first, {"eval/loss": 2.0})] if number > 2 else []
        write_events(tmp_path / rng.choice("abc"), rows)
        assert seen(following) == seen(reader(tmp_path))


def test_what_was_read_is_not_read_again(tmp_path, monkeypatch):
    taken = []
    real = Table.extend
    monkeypatch.setattr(Table, "extend", lambda self, rows: (taken.append(len(rows)), real(self, rows)))
    history = History(tmp_path / "metrics.jsonl", 0)
    history.write(canon.to_json(header()), *(line(step) for step in range(1, 41)))
    following = reader(tmp_path)
    following.read()
    history.write(line(41))
    assert following.read().columns.step == 41
    assert following.read().columns.step == 41
    assert sum(taken) == 42


def test_a_better_name_that_comes_late_counts_for_all_lines(tmp_path):
    """As `trainer/global_step` of a W&B run whose first rows have none."""
    path = tmp_path / "log.jsonl"
    following = reader(path)
    path.write_text("".join(json.dumps({"_step": s, "loss": 1.0, "mfu(%)": 50.0}) + "\n" for s in (1, 2)))
    assert following.read().columns.mfu.tolist() == [0.5, 0.5]
    with path.open("a") as file:
        file.write(json.dumps({"step": 9, "lm loss": 3.0, "mfu": 0.4}) + "\n")
    columns = following.read().columns
    assert (columns.steps.tolist(), columns.train_loss_nats.tolist(), columns.mfu.tolist()) == ([9], [3.0], [0.4])


def test_a_step_0_that_comes_late_moves_all_steps(tmp_path):
    path = tmp_path / "log.jsonl"
    following = reader(path)
    path.write_text('{"step": 1, "loss": 1.0}\n')
    assert following.read().columns.steps.tolist() == [1]
    with path.open("a") as file:
        file.write('{"step": 0, "loss": 2.0}\n')
    assert following.read().columns.steps.tolist() == [1, 2]


def test_times_of_ranks_are_kept_of_the_newest_lines_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "NUM_RANK_LINES", 5)
    History(tmp_path / "metrics.jsonl", 0).write(*(line(step, rank_seconds=[step, 1.0]) for step in range(1, 21)))
    columns = reader(tmp_path).read().columns
    assert columns.rank_steps.tolist() == [16, 17, 18, 19, 20]
    assert columns.rank_seconds[:, 0].tolist() == [16, 17, 18, 19, 20]
    assert len(columns) == 20


def test_of_several_values_of_a_step_the_last_counts():
    steps, values = last_of_each(np.array([3.0, 1, 2, 1]), np.array([7.0, 5, 6, 8]))
    assert (steps.tolist(), values.tolist()) == ([1, 2, 3], [8, 6, 7])
