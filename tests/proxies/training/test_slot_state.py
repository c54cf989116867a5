"""Tests of saved states: resumed runs equal uninterrupted ones, and damaged states are refused.

A state holds what one run needs to go on. A run trains alone, or in one slot of a bank, which is
several runs trained as one batched model.
"""

import contextlib
import dataclasses
import hashlib
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from proxy_cases import TINY, build_user_module, finish_runs, make_run_spec

from forerun._proxies.core.programs import Factory
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.data.tokens import TokenStore
from forerun._proxies.model.bank_adamw import BankAdamW
from forerun._proxies.training.bank import Bank
from forerun._proxies.training.run_progress import get_environment
from forerun._proxies.training.single_trial import SingleTrialEngine
from forerun._proxies.training.slot_state import (
    StateError,
    discard_newest_state,
    load_newest_state,
    save_state,
)

pytestmark = pytest.mark.usefixtures("few_windows")

WIDE = TINY.at_width(32)
BATCH_WARMUP = Schedule(
    kind="cosine", num_steps=12, warmup_steps=2, batch_warmup_steps=5, batch_warmup_stages=4
)
FACTORY = Factory(target="user:build", source_sha256="0" * 64)
CPU = torch.device("cpu")


@pytest.fixture(name="tokens", scope="session")
def tokens_fixture(corpus):
    """Token store of the corpus. Its name is not `store`, because tests here store states."""
    return TokenStore(corpus)


def make_spec(tokens, **changes):
    """Return the spec of a run on this corpus."""
    common = {"shape": WIDE, "base_shape": TINY, "weight_decay": 0.1, "seed": 7, "clip_norm": 0.5}
    return make_run_spec(tokens.manifest.data_id, **{**common, **changes})


def build_bank(spec, tokens, **options):
    """Build the bank of a run."""
    return Bank(spec.shape, spec.batch_tokens, spec.numerics, tokens, optimizer="adamw", **options)


def finish(engine, spec):
    """Train until a run ends; return its (result, curve) without the time that it took."""
    return finish_runs(engine, until=spec)[spec.id]


def save_and_load(folder, engine, index, spec):
    """Save the state of a run and return it as another process would load it."""
    save_state(folder, engine.get_state(index))
    notes = []
    state = load_newest_state(folder, spec.id, get_environment(CPU), notes)
    assert notes == []
    return state


COMPILED = {"compiled": True}
"""Mode of the slow cases."""


# Torch's compiler itself causes the warning.
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("mode", "stop_step"),
    [
        ({}, 1),
        ({"dtype": "float64"}, 11),
        ({"dtype": "bfloat16"}, 3),
        ({"fused_loss": True}, 3),
        pytest.param(COMPILED, 3, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_run_resumed_in_another_slot_of_another_bank_is_the_same(tokens, tmp_path, mode, stop_step):
    spec = make_spec(tokens, **mode)
    before = build_bank(spec, tokens)
    before.admit(0, spec)
    before.admit(3, make_spec(tokens, **mode, seed=1, num_steps=20))
    before.advance(stop_step)
    state = save_and_load(tmp_path, before, 0, spec)
    assert state.header.step == stop_step

    after = build_bank(spec, tokens)
    after.admit(0, make_spec(tokens, **mode, seed=2, num_steps=2, learning_rate=0.3))
    after.advance(10)
    after.admit(0, make_spec(tokens, **mode, seed=3, num_steps=20, parametrization="sp"))
    after.advance(2)
    after.admit(2, spec, state)
    assert after.steps == {0: 2, 2: stop_step}

    uninterrupted = build_bank(spec, tokens)
    uninterrupted.admit(1, spec)
    assert finish(after, spec) == finish(uninterrupted, spec)


# The parts are AdamW's first and second moments, and its number of updates.
@pytest.mark.parametrize("lost_part", ["first", "second", "updates"])
def test_lost_part_of_a_state_is_noticed(tokens, monkeypatch, lost_part):
    """The comparison above can fail: it notices a state without one of its parts."""
    spec = make_spec(tokens)
    before, after, uninterrupted = (build_bank(spec, tokens) for _ in range(3))
    before.admit(0, spec)
    before.advance(3)
    state = before.get_state(0)
    real_restore = BankAdamW.restore

    def restore_without_part(optimizer, trial, tensors, num_updates):
        tensors = dict(tensors)
        if lost_part == "updates":
            num_updates = 0
        else:
            tensors[lost_part] = torch.zeros_like(tensors[lost_part])
        real_restore(optimizer, trial, tensors, num_updates)

    monkeypatch.setattr(BankAdamW, "restore", restore_without_part)
    after.admit(0, spec, state)
    uninterrupted.admit(0, spec)
    assert finish(after, spec) != finish(uninterrupted, spec)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("changes", "stop_step"),
    [
        ({}, 11),
        ({"dtype": "bfloat16"}, 1),
        ({"schedule": BATCH_WARMUP}, 3),
        pytest.param(COMPILED, 3, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_resumed_single_trial_is_the_same(tokens, tmp_path, changes, stop_step):
    spec = make_spec(tokens, num_slots=1, **changes)
    before, after, uninterrupted = (SingleTrialEngine(tokens, device="cpu") for _ in range(3))
    before.admit(0, spec)
    before.advance(stop_step)
    after.admit(0, spec, save_and_load(tmp_path, before, 0, spec))
    uninterrupted.admit(0, spec)
    assert after.steps == {0: stop_step}
    assert finish(after, spec) == finish(uninterrupted, spec)


def test_resumed_user_model_keeps_its_buffers(tokens, tmp_path):
    spec = dataclasses.replace(make_spec(tokens, shape=TINY, num_slots=1), factory=FACTORY)
    before, after, uninterrupted = (
        SingleTrialEngine(tokens, device="cpu", build=build_user_module) for _ in range(3)
    )
    before.admit(0, spec)
    before.advance(4)
    state = save_and_load(tmp_path, before, 0, spec)
    after.admit(0, spec, state)
    uninterrupted.admit(0, spec)
    expected = finish(uninterrupted, spec)
    assert finish(after, spec) == expected

    # The run continues differently if the buffer is lost.
    tensors = state.tensors | {"calls": torch.zeros_like(state.tensors["calls"])}
    after.admit(0, spec, dataclasses.replace(state, tensors=tensors))
    assert finish(after, spec) != expected


@pytest.mark.parametrize(("engine", "num_microbatches"), [("bank", 3), ("single", 4)])
def test_microbatches_from_the_middle_of_a_run_give_the_same_losses(
    tokens, engine, num_microbatches
):
    """forerun resumes a run that is out of memory with microbatches and records their number."""
    spec = make_spec(tokens, dtype="float64", num_slots=4 if engine == "bank" else 1)

    def build_engine(**options):
        if engine == "bank":
            return build_bank(spec, tokens, **options)
        return SingleTrialEngine(tokens, **options)

    before, uninterrupted = build_engine(), build_engine()
    before.admit(0, spec)
    before.advance(5)
    resumed = build_engine(num_microbatches=num_microbatches)
    resumed.admit(0, spec, before.get_state(0))
    uninterrupted.admit(0, spec)
    result, curve = finish(resumed, spec)
    expected, expected_curve = finish(uninterrupted, spec)
    assert result.loss_nats == pytest.approx(expected.loss_nats, abs=1e-9)
    assert curve.train_loss_nats == pytest.approx(expected_curve.train_loss_nats, abs=1e-9)
    assert curve.grad_norm == pytest.approx(expected_curve.grad_norm, rel=1e-9)
    changed_environment = {"num_microbatches": str(num_microbatches)}
    assert result.environment == expected.environment | changed_environment


@pytest.fixture
def saved_run(tokens, tmp_path):
    """A folder with the states of a run after two and three steps, and the spec of the run.

    The state after the first step was saved too. The third save has removed it, because only the
    two newest states are kept.
    """
    small = dataclasses.replace(TINY, width=4, ffn_width=4)
    spec = make_spec(tokens, shape=small, base_shape=small)
    bank = build_bank(spec, tokens)
    bank.admit(0, spec)
    folder = tmp_path / spec.id
    for _ in range(3):
        bank.advance(1)
        save_state(folder, bank.get_state(0))
    return folder, spec


def list_saved_steps(folder, suffix="safetensors"):
    """Return the steps in the names of the files with this suffix."""
    # A file is named step-STEP-HASH.safetensors.
    paths = [path for path in folder.iterdir() if path.name.endswith(suffix)]
    return sorted(int(path.name.split("-")[1]) for path in paths)


def load_step(folder, spec, **environment_changes):
    """Load the newest state; return its step (None if there is no state) and the notes."""
    notes = []
    environment = get_environment(CPU) | environment_changes
    state = load_newest_state(folder, spec.id, environment, notes)
    return None if state is None else state.header.step, notes


def test_two_states_are_kept_and_the_newest_is_loaded(saved_run):
    folder, spec = saved_run
    assert list_saved_steps(folder) == [2, 3]
    assert load_step(folder, spec) == (3, [])
    assert load_step(folder / "elsewhere", spec) == (None, [])


def check_is_set_aside(folder, spec, path):
    """Assert that the damaged newest state is set aside and the older one loaded.

    The file is then renamed back, so that it can be damaged again.
    """
    step, notes = load_step(folder, spec)
    assert step == 2
    # The note has the first 8 digits of the file's hash and the first 12 of the run's id.
    short_name = path.name[: len("step-00000003-") + 8]
    message = (
        f"checkpoint {short_name} of run {spec.id[:12]} is not used: it is damaged: its "
        "bytes do not match its hash"
    )
    assert notes == [message]
    path.with_name(path.name + ".aside").rename(path)


def test_flipped_bits_and_truncation_are_noticed(saved_run):
    folder, spec = saved_run
    path = max(folder.glob("*.safetensors"))
    content = path.read_bytes()
    header_end = 8 + int.from_bytes(content[:8], "little")
    # Flip a bit in every byte of the header and in some bytes of the tensors.
    positions = [*range(header_end), *range(header_end, len(content), 997)]
    for position in positions:
        damaged = bytearray(content)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        check_is_set_aside(folder, spec, path)
    for length in range(0, len(content), 2111):
        path.write_bytes(content[:length])
        check_is_set_aside(folder, spec, path)


def test_foreign_files_with_a_correct_hash_are_set_aside(saved_run):
    """A file of another program may have a name that contains the hash of its content."""
    folder, spec = saved_run
    for content in (
        b"",
        b"\x80\x04K\x01.",  # a pickle
        safetensors.torch.save({"weights": torch.ones(3)}),
        safetensors.torch.save({"weights": torch.ones(3)}, {"header": "{}"}),
        safetensors.torch.save({"weights": torch.ones(3)}, {"header": '{"step":NaN}'}),
    ):
        name = f"step-00000009-{hashlib.sha256(content).hexdigest()}.safetensors"
        (folder / name).write_bytes(content)
        step, notes = load_step(folder, spec)
        assert (step, len(notes)) == (3, 1)
        assert (folder / (name + ".aside")).exists()


def test_states_of_another_torch_or_another_run_are_not_used(saved_run, tokens):
    folder, spec = saved_run
    _, notes = load_step(folder, spec, torch="9.9")
    assert notes[0].endswith(f"it was written under torch {torch.__version__}")
    other_spec = dataclasses.replace(spec, seed=1)
    other_bank = build_bank(other_spec, tokens)
    other_bank.admit(0, other_spec)
    other_bank.advance(5)
    # The first call set the run's own states aside, so this folder now has only a foreign state.
    save_state(folder, other_bank.get_state(0))
    step, notes = load_step(folder, spec)
    assert step is None
    assert notes[0].endswith(f"it belongs to run {other_spec.id[:12]}")


def test_state_with_wrong_tensors_is_refused_and_the_slot_stays_free(saved_run, tokens):
    folder, spec = saved_run
    state = load_newest_state(folder, spec.id, get_environment(CPU), [])
    bank = build_bank(spec, tokens)
    for tensors in (
        {**state.tensors, "weights": torch.zeros(3)},
        {**state.tensors, "first": state.tensors["first"].double()},
        {**state.tensors, "more": torch.zeros(1)},
        {name: tensor for name, tensor in state.tensors.items() if name != "second"},
    ):
        with pytest.raises(StateError, match="differs from the run in the tensors "):
            bank.admit(0, spec, dataclasses.replace(state, tensors=tensors))
        assert bank.steps == {}


def test_discarded_state_is_set_aside_and_the_older_one_used(saved_run, tokens):
    folder, spec = saved_run
    bank, notes = build_bank(spec, tokens), []
    discard_newest_state(folder, "wrong tensors", notes)
    assert list_saved_steps(folder) == [2] and list_saved_steps(folder, ".aside") == [3]
    bank.admit(0, spec, load_newest_state(folder, spec.id, get_environment(CPU), notes))
    assert bank.steps == {0: 2}


class ProcessKilledError(BaseException):
    """Stands for a kill of the process: no handler of `Exception` sees it."""


class CallInterrupter:
    """Raises an error instead of one of the calls with which a save writes files.

    Args:
        call_number: Number of the call that fails, from 1.
    """

    def __init__(self, monkeypatch, call_number, error):
        self.num_left, self.error = call_number, error
        for module, name in (
            (os, "fsync"),
            (Path, "replace"),
            (Path, "unlink"),
            (safetensors.torch, "save_file"),
        ):
            monkeypatch.setattr(module, name, self._wrap(getattr(module, name)))

    def _wrap(self, function):
        def call(*arguments, **options):
            self.num_left -= 1
            if self.num_left == 0:
                raise self.error
            return function(*arguments, **options)

        return call


@pytest.mark.parametrize(
    "error",
    [ProcessKilledError(), OSError(28, "No space left on device")],
    ids=["process killed", "disk full"],
)
@pytest.mark.parametrize("call_number", range(1, 8))
def test_interrupted_save_leaves_a_good_state(saved_run, tokens, monkeypatch, call_number, error):
    folder, spec = saved_run
    bank = build_bank(spec, tokens)
    bank.admit(0, spec, load_newest_state(folder, spec.id, get_environment(CPU), []))
    bank.advance(1)
    with monkeypatch.context() as patch:
        interrupter = CallInterrupter(patch, call_number, error)
        with contextlib.suppress(ProcessKilledError, StateError):
            save_state(folder, bank.get_state(0))
    # A save has at least five calls, so each of the first five numbers must interrupt it.
    assert interrupter.num_left <= 0 or call_number > 5
    step, notes = load_step(folder, spec)
    assert step in (3, 4) and notes == []


def test_state_is_synced_before_it_gets_its_final_name(saved_run, monkeypatch):
    folder, spec = saved_run
    events = []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(descriptor):
        events.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real_fsync(descriptor)

    def replace(path, target):
        events.append("replace")
        real_replace(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    state = load_newest_state(folder, spec.id, get_environment(CPU), [])
    save_state(folder, state)
    assert [Path(event).suffix or event for event in events] == [".part", "replace", str(folder)]
