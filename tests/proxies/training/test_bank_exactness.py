"""Tests that a run in a bank does not depend on its neighbors, bit by bit.

A bank trains several runs as one batched model, each in its slot. In a given mode and number of
slots, the curve of a run is the same whichever slot it has, whatever its neighbors do, and whenever
it was admitted. Suffixes of tensors name their dimensions: K slots and P weights of one model.
"""

import dataclasses
import math
from functools import partial

import pytest
import torch
from proxy_cases import TINY, finish_runs, make_run_spec, set_row_updates
from torch.utils._python_dispatch import TorchDispatchMode

from forerun._proxies.core.failures import classify, describe_error
from forerun._proxies.core.spec import Numerics
from forerun._proxies.model.bank_adamw import BankAdamW
from forerun._proxies.training.bank import NUM_WARMUPS, Bank, CudaGraph

pytestmark = [
    pytest.mark.usefixtures("few_windows"),
    # torch's compiler itself causes this warning.
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]

WIDE = TINY.at_width(32).at_depth(2)
NUM_SLOTS = 4
MODES = {
    "float32": {},
    "float64": {"dtype": "float64"},
    "bfloat16": {"dtype": "bfloat16"},
    "fused": {"fused_loss": True},
    "bfloat16, fused": {"dtype": "bfloat16", "fused_loss": True},
    "compiled": {"compiled": True},
    "rows at once": {},
}
"""Changes of the spec by mode.

In the mode "rows at once", the optimizer updates all trials at once, as it does on a GPU.
"""
SLOW_MODES = {
    "inductor": {"compiled": True},
    "inductor, fused": {"compiled": True, "fused_loss": True, "dtype": "bfloat16"},
}
ALL_MODES = [*MODES, *(pytest.param(mode, marks=pytest.mark.slow) for mode in SLOW_MODES)]
DIVERGING = {"learning_rate": 1e30, "clip_norm": None, "num_steps": 20}
"""Changes of a spec with which a run diverges."""


class ModeCase:
    """The specs and the banks of one mode."""

    def __init__(self, store, monkeypatch, mode):
        self.store = store
        self.changes = {**MODES, **SLOW_MODES}[mode]
        self.backend = "inductor" if mode in SLOW_MODES else "eager"
        if mode == "rows at once":
            set_row_updates(monkeypatch, "adamw", by_row=False)

    def make_spec(self, seed, **changes):
        """Return the spec of a run with this seed."""
        common = {"shape": WIDE, "base_shape": TINY, "weight_decay": 0.1, **self.changes}
        return make_run_spec(
            self.store.manifest.data_id, seed=seed, num_slots=NUM_SLOTS, **common, **changes
        )

    def build_bank(self):
        """Build a bank without runs."""
        spec = self.make_spec(0)
        options = {"optimizer": "adamw", "device": "cpu", "compile_backend": self.backend}
        return Bank(spec.shape, spec.batch_tokens, spec.numerics, self.store, **options)


@pytest.fixture
def make_case(store, monkeypatch):
    """A function of a mode that returns its `ModeCase`."""
    return partial(ModeCase, store, monkeypatch)


def train_without_neighbors(case, spec, slot=0):
    """Train a run in a bank with other slots free."""
    bank = case.build_bank()
    bank.admit(slot, spec)
    return finish_runs(bank, until=spec)[spec.id]


def make_neighbors(case):
    """Return three runs that differ in all hyperparameters and end at different steps."""
    return [
        case.make_spec(1, learning_rate=0.3, num_steps=5),
        case.make_spec(2, parametrization="sp", num_steps=9, clip_norm=None),
        case.make_spec(
            3,
            parametrization="completep",
            beta1=0.5,
            output_multiplier=4.0,
            eps=1e-3,
            clip_norm=0.01,
            num_steps=40,
        ),
    ]


def train_among_neighbors(case, spec, *, neighbors=None, step=0, slot=2):
    """Train a run that is admitted when its neighbors are at `step`.

    If `step` is not 0, another run has used the slot before.
    """
    bank = case.build_bank()
    neighbors = neighbors or make_neighbors(case)
    neighbor_slots = [i for i in range(NUM_SLOTS) if i != slot]
    for neighbor_slot, neighbor in zip(neighbor_slots, neighbors, strict=True):
        bank.admit(neighbor_slot, neighbor)
    if step:
        # The run that had the slot before ends before `step`.
        bank.admit(slot, case.make_spec(8, learning_rate=0.1, num_steps=max(3, step - 1)))
        while (done := max(bank.steps.values())) < step:
            bank.advance(step - done)
            assert max(bank.steps.values()) > done, "the bank must go on"
        assert slot not in bank.steps
    bank.admit(slot, spec)
    return finish_runs(bank, until=spec)[spec.id]


@pytest.mark.parametrize("mode", ALL_MODES)
def test_run_does_not_depend_on_its_neighbors_slot_or_time_of_admission(make_case, mode):
    case = make_case(mode)
    spec = case.make_spec(11)
    expected = train_without_neighbors(case, spec)
    assert expected[0].status == "finished"
    assert train_among_neighbors(case, spec) == expected
    assert train_among_neighbors(case, spec, step=6, slot=3) == expected


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["float32", "bfloat16", "fused", "rows at once"])
def test_run_admitted_at_step_137_is_the_same(make_case, mode):
    case = make_case(mode)
    spec = case.make_spec(11, num_steps=60)
    neighbors = [case.make_spec(seed, num_steps=250, learning_rate=0.02) for seed in (1, 2, 3)]
    outcome = train_among_neighbors(case, spec, neighbors=neighbors, step=137)
    assert outcome == train_without_neighbors(case, spec)


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
def test_diverging_neighbor_does_not_change_a_run(make_case, mode):
    """The neighbor diverges by its rate, or because of a bad number among its weights."""
    case, slot = make_case(mode), 3
    spec = case.make_spec(11)
    expected = train_without_neighbors(case, spec, 1)
    for bad_weight in (None, math.nan, math.inf, 1e38):
        changes = DIVERGING if bad_weight is None else {"num_steps": 20}
        bank = case.build_bank()
        bank.admit(1, spec)
        bank.admit(slot, case.make_spec(5, **changes))
        bank.advance(2)
        if bad_weight is not None:
            # Some weights of every parameter
            bank.optimizer.weights_KP[slot, 5::7] = bad_weight
        assert finish_runs(bank, until=spec)[spec.id] == expected
        assert slot not in bank.steps, "the neighbor must have diverged"
        assert bank.optimizer.weights_KP[[slot]].eq(0).all()


def plant_common_norm(patch):
    """Give all trials the gradient norm of the bank."""
    real_gather = BankAdamW.gather_gradients

    def gather(optimizer):
        return real_gather(optimizer).square().sum().sqrt().expand(NUM_SLOTS).clone()

    patch.setattr(BankAdamW, "gather_gradients", gather)


def plant_common_step(patch):
    """Give all trials the largest number of updates, which the bias correction uses."""
    real_step = BankAdamW.step

    def step(optimizer, shares, active, norms):
        optimizer.updates_K1[:] = optimizer.updates_K1.max()
        real_step(optimizer, shares, active, norms)

    patch.setattr(BankAdamW, "step", step)


def plant_kept_moments(patch):
    """Keep the moments of the run that had the slot before."""

    def clear(optimizer, trial):
        optimizer.weights_KP[trial] = 0

    patch.setattr(BankAdamW, "clear", clear)


@pytest.mark.parametrize("plant", [plant_common_norm, plant_common_step, plant_kept_moments])
def test_mistakes_in_the_bank_are_noticed(make_case, monkeypatch, plant):
    """The comparisons above can fail: they notice each planted mistake."""
    case = make_case("float32")
    spec = case.make_spec(11)
    expected = train_without_neighbors(case, spec)
    plant(monkeypatch)
    assert train_among_neighbors(case, spec, step=6, slot=3) != expected


def test_nan_gradient_of_a_free_slot_does_not_spread(make_case):
    """A free slot must be masked by `where`, because NaN * 0 is NaN."""
    case = make_case("rows at once")
    bank = case.build_bank()
    bank.admit(0, case.make_spec(5))
    bank.advance(2)
    bank.optimizer.gradients_KP[1] = torch.nan
    active_K1 = torch.tensor([[True], [False], [False], [False]])
    ones_K1 = torch.ones(NUM_SLOTS, 1)
    bank.optimizer.step(ones_K1.double(), active_K1, ones_K1)
    assert bank.optimizer.weights_KP.isfinite().all() and bank.optimizer.first_KP[1].eq(0).all()


def test_optimizer_has_one_index_of_rates_for_all_trials(make_case):
    """The index takes four bytes per weight of one trial, not of all K trials.

    All other large tensors are the weights, the gradients and two moments.
    """
    optimizer = make_case("rows at once").build_bank().optimizer
    tensors = [value for value in vars(optimizer).values() if isinstance(value, torch.Tensor)]
    index_bytes, small_tensors_bytes = 4 * optimizer.weights_KP.shape[1], 4096
    max_bytes = 4 * optimizer.weights_KP.nbytes + index_bytes + small_tensors_bytes
    assert sum(tensor.nbytes for tensor in tensors) <= max_bytes


class HostReadCounter(TorchDispatchMode):
    """Counts how often the host reads a value from the device, which would wait for the device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
        )
        return function(*args, **(kwargs or {}))


def plant_host_read(patch):
    """Let the optimizer read whether all rows are active."""
    real_step = BankAdamW.step

    def step(optimizer, shares, active, norms):
        if not active.all():
            norms = torch.where(active, norms, 0)
        real_step(optimizer, shares, active, norms)

    patch.setattr(BankAdamW, "step", step)


def test_step_reads_no_value_from_the_device(make_case, monkeypatch):
    """A read could not be recorded in a CUDA graph."""
    # The mode as it is used on GPUs
    monkeypatch.setitem(MODES, "rows at once", {"dtype": "bfloat16", "fused_loss": True})
    case = make_case("rows at once")

    def count_host_reads():
        bank = case.build_bank()
        bank.admit(0, case.make_spec(5))
        with HostReadCounter() as counter:
            bank._train_step()
        return counter.count

    assert count_host_reads() == 0
    plant_host_read(monkeypatch)
    assert count_host_reads() == 1, "the counter must notice a read"


def test_numerics_are_part_of_a_runs_id_and_change_its_curve(make_case):
    spec = make_case("float32").make_spec(1)
    numerics_changes = (
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
    ids = set()
    for changes in numerics_changes:
        numerics = dataclasses.replace(spec.numerics, **changes)
        ids.add(dataclasses.replace(spec, numerics=numerics).id)
    assert len(ids) == len(numerics_changes)
    dtypes, curves = ("float32", "bfloat16", "float64"), set()
    for dtype in dtypes:
        case = make_case(dtype)
        _, curve = train_without_neighbors(case, case.make_spec(1))
        curves.add(curve.train_loss_nats)
    assert len(curves) == len(dtypes)


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
    ("dtype", "tolerance"), [("float64", 1e-9), ("float32", 1e-3), ("bfloat16", 0.05)]
)
def test_training_on_a_gpu_matches_the_cpu(store, mode, dtype, tolerance):
    """Neighbors end, diverge, and leave their slots free, also while steps are replayed."""
    common = {"shape": WIDE, "base_shape": TINY, "dtype": dtype, "num_slots": NUM_SLOTS}
    spec = make_run_spec(store.manifest.data_id, seed=11, **common, **mode)
    bank = Bank(
        spec.shape,
        spec.batch_tokens,
        spec.numerics,
        store,
        optimizer="adamw",
        device="cuda",
    )
    bank.admit(0, make_run_spec(store.manifest.data_id, seed=1, **common, **mode, num_steps=5))
    bank.admit(3, make_run_spec(store.manifest.data_id, seed=2, **common, **mode, **DIVERGING))
    bank.advance(3)
    bank.admit(2, spec)
    result, curve = finish_runs(bank, until=spec)[spec.id]
    cpu_spec = dataclasses.replace(spec, numerics=Numerics(num_slots=NUM_SLOTS, dtype="float64"))
    cpu_bank = Bank(
        cpu_spec.shape,
        cpu_spec.batch_tokens,
        cpu_spec.numerics,
        store,
        optimizer="adamw",
        device="cpu",
    )
    cpu_bank.admit(2, cpu_spec)
    cpu_result, cpu_curve = finish_runs(cpu_bank)[cpu_spec.id]
    assert result.loss_nats == pytest.approx(cpu_result.loss_nats, abs=tolerance)
    assert curve.train_loss_nats == pytest.approx(cpu_curve.train_loss_nats, abs=tolerance)
    assert result.environment["device"] != "cpu"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("mode", [mode for mode in GPU_MODES if "cuda_graphs" not in mode], ids=str)
def test_step_on_a_gpu_does_not_wait_for_the_device(store, mode):
    spec = make_run_spec(store.manifest.data_id, shape=WIDE, base_shape=TINY, **mode)
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
def test_out_of_memory_in_a_recording_is_reported_and_another_one_can_begin():
    """The step asks for twice the device's memory, but not in the warmup before the recording."""
    stream = torch.cuda.current_stream()
    num_bytes, num_calls = 2 * torch.cuda.mem_get_info()[1], 0

    def step():
        nonlocal num_calls
        num_calls += 1
        small_tensor = torch.ones(4, dtype=torch.uint8, device="cuda")
        if num_calls > NUM_WARMUPS:
            torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        return small_tensor.sum()

    with pytest.raises(RuntimeError) as error:
        CudaGraph(step)
    assert classify(error.value) == "out_of_memory"
    assert "out of memory" in describe_error(error.value)
    assert torch.cuda.current_stream() == stream
    num_bytes, num_calls = 4, 0
    assert CudaGraph(step)().item() == 4
