import threading
import time

import pytest
import torch
from proxy_cases import TINY, run_spec

from proxies.core.schedule import Schedule
from proxies.data.tokens import DataError
from proxies.training.prefetch import Prefetch

CPU = torch.device("cpu")
WARMING = Schedule(kind="constant", num_steps=6, batch_warmup_steps=3, batch_warmup_stages=4)


class Watched:
    """A store that notes which thread reads what, and takes its time."""

    def __init__(self, store, seconds=0.0):
        self.store, self.seconds, self.read = store, seconds, []

    def train_batch(self, **where):
        self.read.append((where["first_sequence"], threading.current_thread() is threading.main_thread()))
        time.sleep(self.seconds)
        return self.store.train_batch(**where)


def batch(store, first, count):
    return torch.from_numpy(store.train_batch(seed=5, first_sequence=first, num_sequences=count, seq_len=16))


@pytest.fixture
def spec(store):
    return run_spec(store.manifest.data_id, num_slots=1, seed=5, schedule=WARMING)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [4, 5, 0], [2, 2, 2, 3]], ids=str)
def test_a_batch_is_that_of_its_step_in_any_order(store, spec, order):
    batches = Prefetch(store, spec, CPU)
    for step in order:
        assert torch.equal(batches.take(step), batch(store, *WARMING.sequences(step, 4)))


def test_the_next_batch_is_read_meanwhile_and_none_past_the_end(store, spec):
    watched = Watched(store, seconds=0.02)
    batches = Prefetch(watched, spec, CPU)
    for step in range(6):
        batches.take(step)
        time.sleep(0.06)
    assert watched.read == [(WARMING.sequences(step, 4)[0], step == 0) for step in range(6)]
    assert batches.seconds_waited >= 0.02  # the first one's time: nobody had read it before


def test_waiting_is_counted(store, spec):
    batches = Prefetch(Watched(store, seconds=0.03), spec, CPU)
    for step in range(3):
        batches.take(step)
    assert batches.seconds_waited >= 0.08


def test_what_the_reader_meets_is_raised_where_the_batch_is_taken(store):
    long = run_spec(store.manifest.data_id, shape=TINY.at_depth(1), num_slots=1)

    class Broken(Watched):
        def train_batch(self, **where):
            if where["first_sequence"]:
                raise DataError("the disk is gone")
            return super().train_batch(**where)

    batches = Prefetch(Broken(store), long, CPU)
    batches.take(0)
    with pytest.raises(DataError, match="the disk is gone"):
        batches.take(1)


@pytest.mark.gpu
def test_batches_arrive_on_the_gpu(store, spec):
    batches = Prefetch(store, spec, torch.device("cuda"))
    for step in range(6):
        ids = batches.take(step)
        assert ids.is_cuda and torch.equal(ids.cpu(), batch(store, *WARMING.sequences(step, 4)))
