"""The rule of the calibration, on machines whose speed is planted."""

import dataclasses

import pytest
from planted_machine import Machine

from launcher.calibration.mode_choice import Bench, choose
from launcher.plan.calibration_records import ModeRequest, PlannedWork
from proxies.core.shape import Shape
from proxies.core.spec import Numerics

SHAPE = Shape(
    num_layers=1,
    width=16,
    num_heads=2,
    num_kv_heads=2,
    ffn_width=32,
    vocab_size=64,
    seq_len=16,
    family="llama",
)
PLAIN = Numerics()
LONG = PlannedWork(kinds=("", ""), phases=((400, (1000,) * 400),))
GIB = 2**30


def asked(*names):
    return ModeRequest(part="proxy", shape=SHAPE, batch_tokens=64, given=PLAIN, open=names)


def chosen(machine, work=LONG, names=("num_slots",), threads=1, **options):
    return choose(asked(*names), work, Bench(PLAIN, machine), threads, **options)


def test_slots_double_while_that_pays():
    fast_to = Machine(lambda mode: 10.0 * min(mode.num_slots, 16) ** 0.8)
    found = chosen(fast_to)
    assert found.chosen == dataclasses.replace(PLAIN, num_slots=16)
    assert [figure.mode.num_slots for figure in found.figures] == [1, 2, 4, 8, 16, 32]
    assert "times as fast as one slot" in found.why


def test_slots_that_nothing_would_fill_are_not_even_looked_at():
    twice = Machine(lambda mode: 10.0 * mode.num_slots)
    few = PlannedWork(kinds=("", ""), phases=((4, (1000,) * 4),))
    found = chosen(twice, few)
    assert found.chosen.num_slots == 2
    assert max(figure.mode.num_slots for figure in found.figures) == 2
    # a search with parallelism 8
    in_flight = PlannedWork(kinds=("", ""), phases=((8, (1000,) * 400),))
    assert chosen(Machine(lambda mode: 10.0 * mode.num_slots), in_flight).chosen.num_slots == 4


def test_memory_ends_the_climb_before_it_is_full():
    machine = Machine(
        lambda mode: 10.0 * mode.num_slots,
        free=10 * GIB,
        held=lambda mode: GIB + mode.num_slots * GIB // 2,
    )
    found = chosen(machine)
    assert found.chosen.num_slots == 16  # 9 GiB; 32 would hold 17
    assert max(figure.mode.num_slots for figure in found.figures) == 16, "more was not even tried"


def compiler(mode):
    return 15.0 if mode.compiled else 10.0


@pytest.mark.parametrize(
    ("num_steps", "is_compiled", "is_tried"), [(100, False, False), (3_000, True, True)]
)
def test_compiling_pays_only_in_a_long_search(num_steps, is_compiled, is_tried):
    machine = Machine(compiler, first=40.0, again=2.0)
    # 40 s and 20 min one by one
    work = PlannedWork(kinds=("", ""), phases=((8, (num_steps,) * 8),))
    found = chosen(machine, work, ("compiled",))
    assert found.chosen.compiled is is_compiled
    assert any(figure.mode.compiled for figure in found.figures) is is_tried


def test_threads_only_where_they_are_open():
    threaded = Machine(lambda mode: 10.0 * mode.num_threads**0.5)
    assert chosen(threaded, threads=1).chosen.num_threads == 1
    assert chosen(threaded, threads=7).chosen.num_threads == 4
    assert chosen(threaded, names=("compiled",), threads=7).chosen.num_threads == 1, (
        "slots are given: threads too"
    )


def test_a_gpu_gets_graphs_and_the_slots_that_these_leave_worth_it():
    # launches take 9 ms of a step, 1 ms of which is left by graphs; a trial's arithmetic takes 2
    def gpu(mode):
        launches = 0.001 if mode.cuda_graphs else 0.009
        return mode.num_slots / (launches + 0.002 * mode.num_slots)

    found = chosen(Machine(gpu, kind="cuda"))
    assert found.chosen.cuda_graphs
    assert found.chosen.num_slots > 1
    # by arithmetic: 10M parameters, 32 x 512 tokens
    bound = chosen(Machine(lambda mode: 10.0, kind="cuda"))
    assert bound.chosen == PLAIN
    graphs = chosen(
        Machine(
            lambda mode: 100.0 if mode.cuda_graphs else 10.0 * min(mode.num_slots, 4), kind="cuda"
        )
    )
    assert graphs.chosen == dataclasses.replace(PLAIN, cuda_graphs=True), (
        "without launches one slot does as well"
    )


def h100(mode):
    """40M at 32 x 512 on one: what arithmetic bounds gains by all together only. Steps a second, of
    all slots.
    """
    together = mode.compiled and mode.cuda_graphs and mode.fused_loss
    return (55.6 if together else 20.4) * min(mode.num_slots, 4) ** 0.03


def test_a_gpu_tries_all_together():
    both = ("num_slots", "compiled")
    best = dataclasses.replace(PLAIN, compiled=True, cuda_graphs=True, fused_loss=True)
    found = chosen(Machine(h100, kind="cuda", first=40.0, again=2.0), names=both)
    assert found.chosen == best
    assert sum(figure.mode.compiled for figure in found.figures) == 1, (
        "each compiles for most of a minute"
    )
    many = Machine(lambda mode: h100(mode) * min(mode.num_slots, 16) ** 0.5, kind="cuda")
    assert chosen(many, names=both).chosen == dataclasses.replace(best, num_slots=16)
    seldom = PlannedWork(kinds=("", ""), phases=((8, (100,) * 8),))  # 20 s: not worth compiling
    assert not any(
        figure.mode.compiled for figure in chosen(Machine(h100, kind="cuda"), seldom, both).figures
    )
    refused = Machine(
        lambda mode: 0 if mode.fused_loss else 10.0 * min(mode.num_slots, 4), kind="cuda"
    )
    assert chosen(refused, names=both).chosen.num_slots == 4


def test_slots_that_need_no_compiling_are_kept_where_the_work_is_short():
    """Launches bound it: a step of 1.2 ms, .5 ms compiled and recorded, whatever the slots; 64 runs
    of 400 steps.
    """
    short = PlannedWork(kinds=("",), phases=((64, (400,) * 64),))

    def launches(mode):
        return mode.num_slots / (0.0005 if mode.cuda_graphs and mode.compiled else 0.0012)

    found = chosen(
        Machine(launches, kind="cuda", first=40.0, again=0.6), short, ("num_slots", "compiled")
    )
    assert not any(figure.mode.compiled for figure in found.figures)


def test_noise_seldom_decides():
    """Of two that are alike in truth the plain one is taken, whatever the noise; one twice as fast
    is not missed.
    """
    alike = [
        chosen(Machine(lambda mode: 10.0, noise=0.15, seed=seed)).chosen.num_slots
        for seed in range(100)
    ]
    assert sum(slots > 1 for slots in alike) <= 1
    near = [
        chosen(Machine(lambda mode: 10.0 * min(mode.num_slots, 2) ** 0.1, noise=0.15, seed=s))
        for s in range(50)
    ]
    assert sum(found.chosen.num_slots > 1 for found in near) <= 10, "7 % is not for the taking"
    twice = [
        chosen(Machine(lambda m: 10.0 * min(m.num_slots, 2), noise=0.15, seed=s)).chosen
        for s in range(50)
    ]
    assert all(mode.num_slots >= 2 for mode in twice)
    assert sum(mode.num_slots == 2 for mode in twice) >= 40, "four are as fast as two"


def test_a_choice_without_its_margin_would_flip(monkeypatch):
    """The mutant: the median alone, no margin."""
    monkeypatch.setattr("launcher.calibration.mode_choice.MARGIN", 0.0)
    monkeypatch.setattr(
        "launcher.calibration.mode_choice.surely", lambda ratios: sorted(ratios)[len(ratios) // 2]
    )
    alike = [
        chosen(Machine(lambda mode: 10.0, noise=0.15, seed=seed)).chosen.num_slots
        for seed in range(100)
    ]
    assert sum(slots > 1 for slots in alike) > 10


def test_planned_time_is_that_of_workers_of_two_rates():
    """Two workers, one three times as fast: of eight runs it takes six, and all end with it."""
    work = PlannedWork(kinds=("slow", "fast"), phases=((8, (100,) * 8),))
    assert work.bank_steps(1, [3.0, 1.0]) == 600
    assert work.bank_steps(1, [1.0, 1.0]) == 400
    assert work.bank_steps(4, [3.0, 1.0]) == 300, "all at once: the slow one ends last"
    assert (
        PlannedWork(kinds=("slow", "fast"), phases=((1, (100,) * 8),)).bank_steps(1, [3.0, 1.0])
        == 2400
    )


def test_what_pays_on_most_of_the_pool_is_chosen_for_all():
    """Compiled, a fast kind gains by half and a slow one loses a fifth; what counts is when the
    planned runs end.
    """

    class Kinds:
        def __init__(self, **speeds):
            self.machines = {kind: Machine(speed) for kind, speed in speeds.items()}

        def __call__(self, modes):
            return [
                dataclasses.replace(one.answer(modes), kind=kind)
                for kind, one in self.machines.items()
            ]

    def best(kinds):
        machine = Kinds(
            slow=lambda mode: 0.8 if mode.compiled else 1.0,
            fast=lambda m: 4.5 if m.compiled else 3.0,
        )
        work = PlannedWork(kinds=kinds, phases=((400, (1000,) * 400),))
        return choose(asked("compiled"), work, Bench(PLAIN, machine)).chosen

    assert best(("slow", "fast")).compiled
    assert not best(("slow",) * 8 + ("fast",)).compiled
