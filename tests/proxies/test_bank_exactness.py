"""At one K and mode a slot's curve is bitwise the same whatever its neighbours are, whenever it was
admitted.
"""

import dataclasses
import math
from functools import partial

import pytest
import torch
from proxy_cases import TINY, run_spec
from torch.utils._python_dispatch import TorchDispatchMode

from proxies.core.failures import classify, described
from proxies.core.spec import Numerics
from proxies.model.bank_adamw import BankAdamW
from proxies.model.optimizer import IMPLEMENTATIONS
from proxies.training.bank import NUM_WARMUPS, Bank, CudaGraph

pytestmark = [
    pytest.mark.usefixtures("few_windows"),
    # torch's own compiler calls it
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]

WIDE = TINY.at_width(32).at_depth(2)
MODES = {
    "float32": {},
    "float64": {"dtype": "float64"},
    "bfloat16": {"dtype": "bfloat16"},
    "fused": {"fused_loss": True},
    "bfloat16, fused": {"dtype": "bfloat16", "fused_loss": True},
    "compiled": {"compiled": True},
    "rows at once": {},
}
SLOW = {
    "inductor": {"compiled": True},
    "inductor, fused": {"compiled": True, "fused_loss": True, "dtype": "bfloat16"},
}
ALL_MODES = [*MODES, *(pytest.param(mode, marks=pytest.mark.slow) for mode in SLOW)]
WILD = {"learning_rate": 1e30, "clip_norm": None, "num_steps": 20}


@pytest.fixture
def case(store, monkeypatch, request):
    """Makes runs and banks of a mode; "rows at once" is the optimizer's form on a GPU, here on the
    CPU.
    """

    class Case:
        def __init__(self, mode):
            self.changes = {**MODES, **SLOW}[mode]
            self.backend = "inductor" if mode in SLOW else "eager"
            if mode == "rows at once":
                built = dataclasses.replace(
                    IMPLEMENTATIONS["adamw"], bank=partial(BankAdamW, by_row=False)
                )
                monkeypatch.setitem(IMPLEMENTATIONS, "adamw", built)

        def spec(self, seed, **changes):
            common = {"shape": WIDE, "base_shape": TINY, "weight_decay": 0.1, **self.changes}
            return run_spec(store.manifest.data_id, seed=seed, **common, **changes)

        def bank(self):
            spec = self.spec(0)
            options = {"optimizer": "adamw", "device": "cpu", "compile_backend": self.backend}
            return Bank(spec.shape, spec.batch_tokens, spec.numerics, store, **options)

    return Case


def finished(bank, spec):
    """The outcome of `spec`, all but its time; whatever else ends meanwhile."""
    while True:
        for _, result, curve in bank.advance(100):
            if result.id == spec.id:
                return dataclasses.replace(result, seconds=0.0), curve


def alone(case, spec, slot=0):
    bank = case.bank()
    bank.admit(slot, spec)
    return finished(bank, spec)


def neighbours(case):
    """Unlike the subject in everything a slot may choose, and ending at steps of their own."""
    return [
        case.spec(1, learning_rate=0.3, num_steps=5),
        case.spec(2, parametrization="sp", num_steps=9, clip_norm=None),
        case.spec(
            3,
            parametrization="completep",
            beta1=0.5,
            output_multiplier=4.0,
            eps=1e-3,
            clip_norm=0.01,
            num_steps=40,
        ),
    ]


def among(case, subject, *, step=0, slot=2):
    """The outcome of a run admitted when its neighbours are at `step`, into a slot that another run
    has left.
    """
    bank = case.bank()
    for index, spec in zip((i for i in range(4) if i != slot), neighbours(case), strict=True):
        bank.admit(index, spec)
    if step:
        bank.admit(slot, case.spec(8, learning_rate=0.1, num_steps=max(3, step - 1)))
        while max(bank.steps.values()) < step:
            bank.advance(step - max(bank.steps.values()))
        assert slot in bank.free_slots
    bank.admit(slot, subject)
    return finished(bank, subject)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_curve_is_its_own_whoever_is_beside_it_and_since_when(case, mode):
    made = case(mode)
    subject = made.spec(11)
    wanted = alone(made, subject)
    assert wanted[0].status == "finished"
    assert among(made, subject) == wanted
    assert among(made, subject, step=6, slot=3) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["float32", "bfloat16", "fused", "rows at once"])
def test_a_run_refilled_at_step_137_is_the_same(case, mode, monkeypatch):
    made = case(mode)
    subject = made.spec(11, num_steps=60)
    long = [made.spec(seed, num_steps=250, learning_rate=0.02) for seed in (1, 2, 3)]
    monkeypatch.setitem(globals(), "neighbours", lambda case: long)
    assert among(made, subject, step=137) == alone(made, subject)


@pytest.mark.parametrize(
    "mode",
    [
        "float32",
        "bfloat16",
        "fused",
        "rows at once",
        pytest.param("inductor", marks=pytest.mark.slow),
    ],
)
def test_a_diverging_neighbour_does_not_show(case, mode):
    """By its rate; by a NaN, an infinity, a huge number among its weights: at the step itself and
    later.
    """
    made, slot = case(mode), 3
    subject = made.spec(11)
    wanted = alone(made, subject, 1)
    for poison in (None, math.nan, math.inf, 1e38):
        bank = made.bank()
        bank.admit(1, subject)
        bank.admit(slot, made.spec(5, **WILD) if poison is None else made.spec(5, num_steps=20))
        bank.advance(2)
        if poison is not None:
            bank.optimizer.weights_KP[slot, 5::7] = poison
        assert finished(bank, subject) == wanted
        assert slot in bank.free_slots, "the neighbour has not diverged: this test could not fail"
        assert bank.optimizer.weights_KP[[slot]].eq(0).all()


def norm_of_all(patch):
    real = BankAdamW.gather_gradients

    def gather(optimizer):
        return real(optimizer).square().sum().sqrt().expand(4).clone()

    patch.setattr(BankAdamW, "gather_gradients", gather)


def shared_steps(patch):
    real = BankAdamW.step

    def step(optimizer, shares, active, norms):
        optimizer.updates_K1[:] = optimizer.updates_K1.max()
        real(optimizer, shares, active, norms)

    patch.setattr(BankAdamW, "step", step)


def moments_left(patch):
    """In a slot, by the run before it."""

    def clear(optimizer, trial):
        optimizer.weights_KP[trial] = 0

    patch.setattr(BankAdamW, "clear", clear)


@pytest.mark.parametrize("plant", [norm_of_all, shared_steps, moments_left])
def test_the_comparison_can_fail(case, monkeypatch, plant):
    made = case("float32")
    subject = made.spec(11)
    wanted = alone(made, subject)
    plant(monkeypatch)
    assert among(made, subject, step=6, slot=3) != wanted


def test_an_inactive_rows_nan_stays_where_it_is(case):
    """where, not times: NaN * 0 is NaN."""
    made = case("rows at once")
    bank = made.bank()
    bank.admit(0, made.spec(5))
    bank.advance(2)
    bank.optimizer.gradients_KP[1] = torch.nan
    active = torch.tensor([[True], [False], [False], [False]])
    bank.optimizer.step(torch.ones(4, 1).double(), active, torch.ones(4, 1))
    assert bank.optimizer.weights_KP.isfinite().all() and bank.optimizer.first_KP[1].eq(0).all()


def test_rates_take_four_bytes_a_weight_whatever_the_trials(case):
    """Beside weights, gradients and two moments: one index of all trials. Planted in this size: [K,
    P] of any rate.
    """
    optimizer = case("rows at once").bank().optimizer
    held = [value for value in vars(optimizer).values() if isinstance(value, torch.Tensor)]
    index_bytes, per_tensor_bytes = 4 * optimizer.weights_KP.shape[1], 4096
    assert (
        sum(x.nbytes for x in held)
        <= 4 * optimizer.weights_KP.nbytes + index_bytes + per_tensor_bytes
    )


class Asked(TorchDispatchMode):
    """How often the host asks the device for a number."""

    times = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.times += function in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
        )
        return function(*args, **(kwargs or {}))


def asking(patch):
    real = BankAdamW.step

    def step(optimizer, shares, active, norms):
        if not active.all():
            norms = torch.where(active, norms, 0)
        real(optimizer, shares, active, norms)

    patch.setattr(BankAdamW, "step", step)


def test_a_step_asks_the_device_for_nothing(case, monkeypatch):
    """As it is on a GPU, where it is recorded. Planted: the optimizer asks whether all rows are
    active.
    """
    monkeypatch.setitem(MODES, "rows at once", {"dtype": "bfloat16", "fused_loss": True})
    made, times = case("rows at once"), []
    for plant in (lambda patch: None, asking):
        plant(monkeypatch)
        bank = made.bank()
        bank.admit(0, made.spec(5))
        with Asked() as seen:
            bank._train_step()
        times.append(seen.times)
    assert times == [0, 1]


def test_another_mode_is_another_run(case):
    """Numerics are part of a run's id; their defaults are not written down, so that older ids
    stay.
    """
    made = case("float32")
    spec = made.spec(1)
    ids = {
        dataclasses.replace(spec, numerics=dataclasses.replace(spec.numerics, **changes)).id
        for changes in (
            {},
            {"dtype": "float64"},
            {"dtype": "bfloat16"},
            {"compiled": True},
            {"fused_loss": True},
            {"cuda_graphs": True},
            {"matmul_precision": "medium"},
            {"num_slots": 5},
            {"num_threads": 2},
        )
    }
    assert len(ids) == 9
    curves = {
        mode: alone(case(mode), case(mode).spec(1))[1]
        for mode in ("float32", "bfloat16", "float64")
    }
    assert len({curve.train_loss_nats for curve in curves.values()}) == 3


GPU_MODES = [
    {},
    {"fused_loss": True},
    {"compiled": True},
    {"cuda_graphs": True},
    {"cuda_graphs": True, "compiled": True, "fused_loss": True},
]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", GPU_MODES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "near"), [("float64", 1e-9), ("float32", 1e-3), ("bfloat16", 0.05)]
)
def test_a_gpu_trains_as_the_cpu(store, mode, dtype, near):
    """Among neighbours that end, diverge and are replaced; a recorded step knows of it."""
    common = {"shape": WIDE, "base_shape": TINY, "dtype": dtype}
    subject = run_spec(store.manifest.data_id, seed=11, **common, **mode)
    bank = Bank(
        subject.shape,
        subject.batch_tokens,
        subject.numerics,
        store,
        optimizer="adamw",
        device="cuda",
    )
    bank.admit(0, run_spec(store.manifest.data_id, seed=1, **common, **mode, num_steps=5))
    bank.admit(3, run_spec(store.manifest.data_id, seed=2, **common, **mode, **WILD))
    bank.advance(3)
    bank.admit(2, subject)
    result, curve = finished(bank, subject)
    plain = dataclasses.replace(subject, numerics=Numerics(num_slots=4, dtype="float64"))
    cpu = Bank(
        plain.shape, plain.batch_tokens, plain.numerics, store, optimizer="adamw", device="cpu"
    )
    cpu.admit(2, plain)
    wanted, their_curve = finished(cpu, plain)
    assert result.loss_nats == pytest.approx(wanted.loss_nats, abs=near)
    assert curve.train_loss_nats == pytest.approx(their_curve.train_loss_nats, abs=near)
    assert result.environment["device"] != "cpu"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("mode", GPU_MODES[:3], ids=str)
def test_a_step_on_a_gpu_waits_for_nothing(store, mode):
    spec = run_spec(store.manifest.data_id, shape=WIDE, base_shape=TINY, **mode)
    bank = Bank(
        spec.shape, spec.batch_tokens, spec.numerics, store, optimizer="adamw", device="cuda"
    )
    bank.admit(0, spec)
    bank.advance(2)
    try:
        torch.cuda.set_sync_debug_mode("error")
        bank._train_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_memory_that_runs_out_in_a_recording_is_told_and_leaves_the_device_as_it_was():
    """Planted: the recording alone, not the runs before it, asks for twice the device's memory."""
    before, most, calls = torch.cuda.current_stream(), 2 * torch.cuda.mem_get_info()[1], []

    def step():
        calls.append(None)
        some = torch.ones(4, dtype=torch.uint8, device="cuda")
        if len(calls) > NUM_WARMUPS:
            torch.empty(most, dtype=torch.uint8, device="cuda")
        return some.sum()

    with pytest.raises(RuntimeError) as error:
        CudaGraph(step)
    assert classify(error.value) == "out_of_memory" and "out of memory" in described(error.value)
    assert torch.cuda.current_stream() == before
    calls.clear()
    most = 4
    assert CudaGraph(step)().item() == 4
