"""Who sits where, counted and dealt; and what a worker of several ranks says once all have answered, or one died."""

import pytest

from sweeps.ray.groups import LAST_WORDS_SECONDS, Calls, counted, dealt, on_one_node
from sweeps.ray.nodes import Place, room
from sweeps.run.pool import Report

TWO = {"a": {"CPU": 8.0, "GPU": 2.0}, "b": {"CPU": 2.0, "GPU": 1.0}, "c": {"CPU": 4.0}}


@pytest.mark.parametrize(
    ("num_workers", "share", "spread"),
    [
        (1, 0.25, {"a": [1]}),
        (2, 0.25, {"a": [1, 1]}),
        (3, 0.25, {"a": [1, 1], "b": [1]}),
        (4, 0.25, {"a": [2, 1], "b": [1]}),
        (9, 0.25, {"a": [4, 3], "b": [2]}),  # b has two cores
        (10, 0.25, {"a": [4, 4], "b": [2]}),
        (3, 0.6, {"a": [1, 1], "b": [1]}),
    ],
)
def test_dealt_out(num_workers, share, spread):
    found = {}
    for node, part, count in dealt(TWO, Place(worker_gpus=share), num_workers):
        found.setdefault(node, []).append(count)
        assert count * share <= part <= 1
        assert part > 0.5 or node == "b", "two bundles of less would lie on one GPU"
    assert found == spread


def test_there_is_room_for_what_is_dealt():
    for share in (1 / 7, 0.2, 0.25, 0.3, 1 / 3, 0.4, 0.5, 0.75):
        place = Place(worker_gpus=share, worker_cpus=0.1)
        num_workers = room(TWO, place)
        assert num_workers == 3 * int(1 / share + 1e-9)
        assert sum(count for *_, count in dealt(TWO, place, num_workers)) == num_workers
        with pytest.raises(ValueError, match=f"no room for 1 of {num_workers + 1}"):
            dealt(TWO, place, num_workers + 1)


def test_a_gpu_that_others_use_in_part():
    there = {"a": {"CPU": 8.0, "GPU": 1.5}}
    assert dealt(there, Place(worker_gpus=0.25), 6) == [("a", 1.0, 4), ("a", 0.5, 2)]
    assert dealt(there, Place(worker_gpus=0.25), 1) == [("a", 0.5001, 1)]


def test_amounts_that_ray_cuts_off():
    for hundredths in range(1, 300):
        for count in range(1, 12):
            amount = counted(count * (hundredths / 100))
            assert int(amount * 10_000) == round(amount * 10_000) == 100 * hundredths * count
    assert (counted(4 * 0.25), counted(3.0 * 2**30)) == (1, 3 * 2**30), "whole ones stay as they are"


@pytest.mark.parametrize(
    ("place", "num_workers", "together"),
    [
        (Place(num_ranks=2), 7, True),
        (Place(num_ranks=3), 3, True),  # 2 and 0 and 1
        (Place(num_ranks=2, worker_gpus=1), 1, True),
        (Place(num_ranks=3, worker_gpus=1), 1, False),  # no node has three
        (Place(num_ranks=4, worker_gpus=1), 0, False),
        (Place(num_ranks=9), 1, False),
    ],
)
def test_room_for_ranks(place, num_workers, together):
    assert room(TWO, place) == num_workers
    assert on_one_node(TWO, place) == together


def test_in_words():
    assert str(Place(worker_gpus=0.25)) == "CPU 1, GPU 0.25 each"
    assert str(Place(num_ranks=4, worker_gpus=1, worker_memory_gib=8)) == "4 ranks, each of CPU 1, GPU 1, memory 8 GiB"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def begun(clock, num_ranks=2):
    calls = Calls(num_ranks, clock)
    for rank in range(num_ranks):
        calls.begin(f"reference {rank}", 5, rank)
    return calls


def answer(calls, rank, **report):
    assert calls.ended(f"reference {rank}") == (5, rank)
    calls.answered(rank, Report(worker=5, **report))


def test_all_ranks_must_answer_and_the_first_counts():
    calls = begun(Clock())
    answer(calls, 1)
    assert calls.over() == []
    answer(calls, 0, steps={0: 3})
    assert calls.over() == [Report(worker=5, steps={0: 3})]
    assert calls.over() == [] and calls.pending == []


def test_the_rank_that_died_explains_the_one_that_waited_for_it():
    calls = begun(Clock())
    answer(calls, 0, error="connection closed by peer", cause="error")
    assert calls.over() == [], "the other may know better"
    answer(calls, 1, error="rank 1 lost", cause="lost_worker")
    (report,) = calls.over()
    assert (report.error, report.cause) == ("rank 1 lost", "lost_worker")


def test_a_rank_that_waits_for_a_failed_one_is_not_waited_for():
    clock = Clock()
    calls = begun(clock, 3)
    answer(calls, 2)
    clock.now = 100.0
    assert calls.over() == [], "a rank may take long"
    answer(calls, 1, error="no memory", cause="out_of_memory")
    clock.now += LAST_WORDS_SECONDS + 0.1
    (report,) = calls.over()
    assert report.cause == "out_of_memory"
    assert calls.pending == [], "what rank 0 says at last is nobody's"


def test_a_worker_that_is_given_up_reports_nothing():
    calls = begun(Clock())
    calls.begin("another", 6, 0)
    answer(calls, 1)
    calls.forget(5)
    assert calls.pending == ["another"] and calls.over() == []
