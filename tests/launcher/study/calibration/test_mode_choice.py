"""Tests of the rule that chooses a mode, on machines with planted speeds.

A mode is the way in which a worker trains: the number of trials at once (the slots of a bank), the
number of threads, and whether the model is compiled and its steps are recorded as CUDA graphs.
"""

import dataclasses

import pytest
from planted_machine import PlantedMachine

from forerun._launcher.study.calibration.mode_choice import ModeMeasurements, choose_mode
from forerun._launcher.study.plan.calibration_records import ModeRequest, PlannedWork
from forerun._proxies.core.shape import Shape
from forerun._proxies.core.spec import Numerics

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
"""The mode with one slot and no acceleration."""
LONG = PlannedWork(kinds=("", ""), phases=((400, (1000,) * 400),))
"""Work of two workers: 400 runs of 1,000 steps, which may all be trained at once."""
GIB = 2**30


def make_request(*names):
    """Return a request in which the fields `names` of the mode may be chosen."""
    return ModeRequest(part="proxy", shape=SHAPE, batch_tokens=64, given=PLAIN, open=names)


def choose(machine, work=LONG, names=("num_slots",), threads=1):
    """Return the choice of a mode, in which the fields `names` may be chosen."""
    return choose_mode(make_request(*names), work, ModeMeasurements(PLAIN, machine), threads)


def test_slots_double_while_that_pays():
    machine = PlantedMachine(lambda mode: 10.0 * min(mode.num_slots, 16) ** 0.8)
    choice = choose(machine)
    assert choice.chosen == dataclasses.replace(PLAIN, num_slots=16)
    assert [figure.mode.num_slots for figure in choice.figures] == [1, 2, 4, 8, 16, 32]
    assert "times as fast as one slot" in choice.why


def test_no_more_slots_are_measured_than_the_work_fills():
    machine = PlantedMachine(lambda mode: 10.0 * mode.num_slots)
    four_runs = PlannedWork(kinds=("", ""), phases=((4, (1000,) * 4),))
    choice = choose(machine, four_runs)
    assert choice.chosen.num_slots == 2
    assert max(figure.mode.num_slots for figure in choice.figures) == 2
    # With eight runs in flight on two workers, each worker has four.
    eight_at_once = PlannedWork(kinds=("", ""), phases=((8, (1000,) * 400),))
    assert choose(machine, eight_at_once).chosen.num_slots == 4


def test_slots_stop_before_memory_is_full():
    machine = PlantedMachine(
        lambda mode: 10.0 * mode.num_slots,
        free=10 * GIB,
        held=lambda mode: GIB + mode.num_slots * GIB // 2,
    )
    choice = choose(machine)
    assert choice.chosen.num_slots == 16  # 9 GiB; 32 slots would take 17
    assert max(figure.mode.num_slots for figure in choice.figures) == 16, "32 is not measured"


def compute_compiled_speed(mode):
    return 15.0 if mode.compiled else 10.0


@pytest.mark.parametrize(("num_steps", "is_compiled"), [(100, False), (3_000, True)])
def test_compiling_is_tried_and_chosen_only_for_a_long_search(num_steps, is_compiled):
    machine = PlantedMachine(compute_compiled_speed, first=40.0, again=2.0)
    # On each of the two workers, the runs take 40 s or 20 min.
    work = PlannedWork(kinds=("", ""), phases=((8, (num_steps,) * 8),))
    choice = choose(machine, work, ("compiled",))
    assert choice.chosen.compiled is is_compiled
    assert any(figure.mode.compiled for figure in choice.figures) is is_compiled


def test_threads_are_chosen_only_with_the_slots():
    threaded = PlantedMachine(lambda mode: 10.0 * mode.num_threads**0.5)
    assert choose(threaded, threads=1).chosen.num_threads == 1
    assert choose(threaded, threads=7).chosen.num_threads == 4
    assert choose(threaded, names=("compiled",), threads=7).chosen.num_threads == 1


def test_gpu_uses_graphs_and_the_slots_that_still_pay():
    # Launches take 9 ms of a step, and 1 ms with graphs; a trial's arithmetic takes 2 ms.
    def compute_speed(mode):
        launches = 0.001 if mode.cuda_graphs else 0.009
        return mode.num_slots / (launches + 0.002 * mode.num_slots)

    choice = choose(PlantedMachine(compute_speed, kind="cuda"))
    assert choice.chosen.cuda_graphs
    assert choice.chosen.num_slots > 1
    # A run limited by arithmetic (10M parameters, 32 x 512 tokens) gains nothing.
    arithmetic_limited = PlantedMachine(lambda mode: 10.0, kind="cuda")
    assert choose(arithmetic_limited).chosen == PLAIN
    # With graphs, one slot is as fast as several.
    launch_limited = PlantedMachine(
        lambda mode: 100.0 if mode.cuda_graphs else 10.0 * min(mode.num_slots, 4), kind="cuda"
    )
    assert choose(launch_limited).chosen == dataclasses.replace(PLAIN, cuda_graphs=True)


def compute_h100_speed(mode):
    """Return the steps per second of all slots together, as measured for a model of 40M parameters
    with 32 x 512 tokens a step on an H100. Only all accelerations together make it faster.
    """
    together = mode.compiled and mode.cuda_graphs and mode.fused_loss
    return (55.6 if together else 20.4) * min(mode.num_slots, 4) ** 0.03


def test_gpu_tries_all_accelerations_together():
    open_fields = ("num_slots", "compiled")
    best = dataclasses.replace(PLAIN, compiled=True, cuda_graphs=True, fused_loss=True)
    machine = PlantedMachine(compute_h100_speed, kind="cuda", first=40.0, again=2.0)
    choice = choose(machine, names=open_fields)
    assert choice.chosen == best
    # Only one compiled mode is measured, because compiling takes most of a minute.
    assert sum(figure.mode.compiled for figure in choice.figures) == 1
    gains_by_slots = PlantedMachine(
        lambda mode: compute_h100_speed(mode) * min(mode.num_slots, 16) ** 0.5, kind="cuda"
    )
    assert choose(gains_by_slots, names=open_fields).chosen == dataclasses.replace(
        best, num_slots=16
    )
    short = PlannedWork(kinds=("", ""), phases=((8, (100,) * 8),))  # 20 s do not pay for compiling
    choice = choose(PlantedMachine(compute_h100_speed, kind="cuda"), short, open_fields)
    assert not any(figure.mode.compiled for figure in choice.figures)
    # A speed of 0 means that the machine cannot train in this mode.
    refuses_fused_loss = PlantedMachine(
        lambda mode: 0 if mode.fused_loss else 10.0 * min(mode.num_slots, 4), kind="cuda"
    )
    assert choose(refuses_fused_loss, names=open_fields).chosen.num_slots == 4


def test_short_work_is_not_compiled():
    """A step takes 1.2 ms, or 0.5 ms if it is compiled and recorded, whatever the number of slots.
    The 64 runs of 400 steps are over before compiling pays.
    """
    short = PlannedWork(kinds=("",), phases=((64, (400,) * 64),))

    def compute_speed(mode):
        return mode.num_slots / (0.0005 if mode.cuda_graphs and mode.compiled else 0.0012)

    machine = PlantedMachine(compute_speed, kind="cuda", first=40.0, again=0.6)
    choice = choose(machine, short, ("num_slots", "compiled"))
    assert not any(figure.mode.compiled for figure in choice.figures)


def count_slots_chosen(speed, num_seeds):
    """Return the number of slots that is chosen on a noisy machine, for each seed of the noise."""
    return [
        choose(PlantedMachine(speed, noise=0.15, seed=seed)).chosen.num_slots
        for seed in range(num_seeds)
    ]


def test_noise_rarely_decides():
    """The plain one of two equally fast modes is chosen in spite of noise. A mode that is twice as
    fast is found.
    """
    equal = count_slots_chosen(lambda mode: 10.0, 100)
    assert sum(slots > 1 for slots in equal) <= 1
    near = count_slots_chosen(lambda mode: 10.0 * min(mode.num_slots, 2) ** 0.1, 50)
    assert sum(slots > 1 for slots in near) <= 10, "7 % faster is below the margin"
    twice = count_slots_chosen(lambda mode: 10.0 * min(mode.num_slots, 2), 50)
    assert all(slots >= 2 for slots in twice)
    assert sum(slots == 2 for slots in twice) >= 40, "four slots are as fast as two"


def test_choice_by_the_median_without_a_margin_follows_noise(monkeypatch):
    """Without the lower bound and the margin, `test_noise_rarely_decides` would fail."""
    monkeypatch.setattr("forerun._launcher.study.calibration.mode_choice.MIN_MODE_SPEEDUP", 0.0)
    monkeypatch.setattr(
        "forerun._launcher.study.calibration.mode_choice.bound_median",
        lambda ratios: sorted(ratios)[len(ratios) // 2],
    )
    equal = count_slots_chosen(lambda mode: 10.0, 100)
    assert sum(slots > 1 for slots in equal) > 10


def test_planned_time_counts_workers_with_different_rates():
    """The unit is a step of the fastest worker. A worker that is three times as fast as the other
    takes six of eight runs of 100 steps, and both workers end after 600 such steps.
    """
    work = PlannedWork(kinds=("slow", "fast"), phases=((8, (100,) * 8),))
    assert work.count_bank_steps(1, [3.0, 1.0]) == 600
    assert work.count_bank_steps(1, [1.0, 1.0]) == 400
    assert work.count_bank_steps(4, [3.0, 1.0]) == 300, "all at once, the slow worker ends last"
    one_by_one = PlannedWork(kinds=("slow", "fast"), phases=((1, (100,) * 8),))
    assert one_by_one.count_bank_steps(1, [3.0, 1.0]) == 2400, "the slow worker makes every run"


def test_mode_that_pays_for_the_whole_pool_is_chosen():
    """Compiling makes a fast kind of worker 1.5 times as fast, and a slow kind a fifth slower. The
    choice depends on the time at which all planned runs have ended.
    """

    class TwoKindsMachine:
        def __init__(self, **speeds):
            self.machines = {kind: PlantedMachine(speed) for kind, speed in speeds.items()}

        def __call__(self, modes):
            return [
                dataclasses.replace(machine.answer(modes), kind=kind)
                for kind, machine in self.machines.items()
            ]

    def choose_for(kinds):
        machine = TwoKindsMachine(
            slow=lambda mode: 0.8 if mode.compiled else 1.0,
            fast=lambda mode: 4.5 if mode.compiled else 3.0,
        )
        work = PlannedWork(kinds=kinds, phases=((400, (1000,) * 400),))
        measurements = ModeMeasurements(PLAIN, machine)
        return choose_mode(make_request("compiled"), work, measurements).chosen

    assert choose_for(("slow", "fast")).compiled
    assert not choose_for(("slow",) * 8 + ("fast",)).compiled
