"""A run that is cut and goes on from its state gives, to the last bit, what it gives uncut; a bad
state is refused.
"""

import contextlib
import dataclasses
import hashlib
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from proxy_cases import TINY, run_spec, theirs

from proxies.core.programs import Factory
from proxies.core.schedule import Schedule
from proxies.data.tokens import TokenStore
from proxies.model.bank_adamw import BankAdamW
from proxies.training.bank import Bank
from proxies.training.outcome import environment
from proxies.training.slot_state import StateError, newest, put_newest_aside, store
from proxies.training.solo import Solo

pytestmark = pytest.mark.usefixtures("few_windows")

WIDE = TINY.at_width(32)
WARMING = Schedule(
    kind="cosine", num_steps=12, warmup_steps=2, batch_warmup_steps=5, batch_warmup_stages=4
)
FACTORY = Factory(target="mine:build", source_sha256="0" * 64)
CPU = torch.device("cpu")


@pytest.fixture(name="tokens", scope="session")
def tokens_fixture(corpus):
    """The corpus: `store` is what is tested here."""
    return TokenStore(corpus)


def spec_of(corpus, **changes):
    wanted = {"shape": WIDE, "base_shape": TINY, "weight_decay": 0.1, "seed": 7, "clip_norm": 0.5}
    return run_spec(corpus.manifest.data_id, **{**wanted, **changes})


def outcome(result, curve):
    return dataclasses.replace(result, seconds=0.0), curve


def bank_of(spec, corpus, **options):
    return Bank(spec.shape, spec.batch_tokens, spec.numerics, corpus, optimizer="adamw", **options)


def finish(engine, spec):
    while True:
        for _, result, curve in engine.advance(100):
            if result.id == spec.id:
                return outcome(result, curve)


def through_a_file(folder, engine, index, spec):
    """The state as another process would find it."""
    store(folder, engine.state(index))
    notes = []
    state = newest(folder, spec.id, environment(CPU), notes)
    assert notes == []
    return state


COMPILED = {"compiled": True}


# torch's own compiler calls it
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("mode", "cut"),
    [
        ({}, 1),
        ({"dtype": "float64"}, 11),
        ({"dtype": "bfloat16"}, 3),
        ({"fused_loss": True}, 3),
        pytest.param(COMPILED, 3, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_bank_goes_on_in_another_slot_among_others(tokens, tmp_path, mode, cut):
    spec = spec_of(tokens, **mode)
    before = bank_of(spec, tokens)
    before.admit(0, spec)
    before.admit(3, spec_of(tokens, **mode, seed=1, num_steps=20))
    before.advance(cut)
    state = through_a_file(tmp_path, before, 0, spec)
    assert state.header.step == cut

    after = bank_of(spec, tokens)
    after.admit(0, spec_of(tokens, **mode, seed=2, num_steps=2, learning_rate=0.3))
    after.advance(10)
    after.admit(0, spec_of(tokens, **mode, seed=3, num_steps=20, parametrization="sp"))
    after.advance(2)
    after.admit(2, spec, state)
    whole = bank_of(spec, tokens)
    whole.admit(1, spec)
    assert after.steps == {0: 2, 2: cut}
    assert finish(after, spec) == finish(whole, spec)


@pytest.mark.parametrize("planted", ["first", "second", "updates"])
def test_the_comparison_can_fail(tokens, monkeypatch, planted):
    """Planted: a state restored without one of its parts."""
    spec = spec_of(tokens)
    before, after, whole = (bank_of(spec, tokens) for _ in range(3))
    before.admit(0, spec)
    before.advance(3)
    state = before.state(0)
    restore = BankAdamW.restore

    def careless(optimizer, trial, tensors, num_updates):
        kept = dict(tensors) | (
            {planted: torch.zeros_like(tensors[planted])} if planted in tensors else {}
        )
        restore(optimizer, trial, kept, 0 if planted == "updates" else num_updates)

    monkeypatch.setattr(BankAdamW, "restore", careless)
    after.admit(0, spec, state)
    whole.admit(0, spec)
    assert finish(after, spec) != finish(whole, spec)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("changes", "cut"),
    [
        ({}, 11),
        ({"dtype": "bfloat16"}, 1),
        ({"schedule": WARMING}, 3),
        pytest.param(COMPILED, 3, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_trial_alone_goes_on(tokens, tmp_path, changes, cut):
    spec = spec_of(tokens, num_slots=1, **changes)
    before, after, whole = (Solo(tokens, device="cpu") for _ in range(3))
    before.admit(0, spec)
    before.advance(cut)
    after.admit(0, spec, through_a_file(tmp_path, before, 0, spec))
    whole.admit(0, spec)
    assert after.steps == {0: cut}
    assert finish(after, spec) == finish(whole, spec)


def test_a_model_of_ones_own_goes_on_with_its_buffers(tokens, tmp_path):
    spec = dataclasses.replace(spec_of(tokens, shape=TINY, num_slots=1), factory=FACTORY)
    before, after, whole = (Solo(tokens, device="cpu", build=theirs) for _ in range(3))
    whole.admit(0, spec)
    before.admit(0, spec)
    before.advance(4)
    state = through_a_file(tmp_path, before, 0, spec)
    after.admit(0, spec, state)
    wanted = finish(whole, spec)
    assert finish(after, spec) == wanted
    forgotten = state.tensors | {"calls": torch.zeros_like(state.tensors["calls"])}
    after.admit(0, spec, dataclasses.replace(state, tensors=forgotten))
    assert finish(after, spec) != wanted, "the buffer does not show: this test could not fail"


@pytest.mark.parametrize(("engine", "num_microbatches"), [("bank", 3), ("solo", 4)])
def test_batches_in_parts_are_the_same_mathematics(tokens, engine, num_microbatches):
    """Split because of too little memory, from the middle of a run on: losses to 1e-9, and the
    result says so.
    """
    spec = spec_of(tokens, dtype="float64", num_slots=4 if engine == "bank" else 1)
    made = (
        (lambda **k: bank_of(spec, tokens, **k))
        if engine == "bank"
        else (lambda **k: Solo(tokens, **k))
    )
    whole, before, split = made(), made(), made(num_microbatches=num_microbatches)
    whole.admit(0, spec)
    before.admit(0, spec)
    before.advance(5)
    split.admit(0, spec, before.state(0))
    (wanted, curve), (result, parts) = finish(whole, spec), finish(split, spec)
    assert result.loss_nats == pytest.approx(wanted.loss_nats, abs=1e-9)
    assert parts.train_loss_nats == pytest.approx(curve.train_loss_nats, abs=1e-9)
    assert parts.grad_norm == pytest.approx(curve.grad_norm, rel=1e-9)
    assert result.environment == wanted.environment | {"num_microbatches": str(num_microbatches)}


@pytest.fixture
def saved(tokens, tmp_path):
    """A folder with the states after 1, 2 and 3 steps of a run, and the run; the oldest is gone
    already.
    """
    small = dataclasses.replace(TINY, width=4, ffn_width=4)
    spec = spec_of(tokens, shape=small, base_shape=small)
    bank = bank_of(spec, tokens)
    bank.admit(0, spec)
    folder = tmp_path / spec.id
    for _ in range(3):
        bank.advance(1)
        store(folder, bank.state(0))
    return folder, spec


def steps_in(folder, suffix="safetensors"):
    return sorted(int(path.name[5:13]) for path in folder.iterdir() if path.name.endswith(suffix))


def found(folder, spec, **changes):
    notes = []
    state = newest(folder, spec.id, environment(CPU) | changes, notes)
    return None if state is None else state.header.step, notes


def test_two_are_kept_and_the_newest_is_used(saved):
    folder, spec = saved
    assert steps_in(folder) == [2, 3]
    assert found(folder, spec) == (3, [])
    assert found(folder / "elsewhere", spec) == (None, [])


def the_newest(folder):
    return max(folder.glob("*.safetensors"))


def test_every_flipped_byte_and_every_cut_is_noticed(saved):
    folder, spec = saved
    path = the_newest(folder)
    content = path.read_bytes()
    header_end = 8 + int.from_bytes(content[:8], "little")
    places = [*range(header_end), *range(header_end, len(content), 997)]
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        assert_put_aside(folder, spec, path)
    for length in range(0, len(content), 2111):
        path.write_bytes(content[:length])
        assert_put_aside(folder, spec, path)


def assert_put_aside(folder, spec, path):
    step, notes = found(folder, spec)
    assert step == 2
    said = (
        f"checkpoint {path.name[:22]} of run {spec.id[:12]} is not used: it is damaged: its "
        "bytes do not match its hash"
    )
    assert notes == [said]
    path.with_name(path.name + ".aside").rename(path)


def test_a_header_with_a_good_hash_is_still_read_with_care(saved):
    """What somebody else's program wrote under a proper name."""
    folder, spec = saved
    for content in (
        b"",
        b"\x80\x04K\x01.",  # a pickle
        safetensors.torch.save({"weights": torch.ones(3)}),
        safetensors.torch.save({"weights": torch.ones(3)}, {"header": "{}"}),
        safetensors.torch.save({"weights": torch.ones(3)}, {"header": '{"step":NaN}'}),
    ):
        name = f"step-00000009-{hashlib.sha256(content).hexdigest()}.safetensors"
        (folder / name).write_bytes(content)
        step, notes = found(folder, spec)
        assert (step, len(notes)) == (3, 1)
        assert (folder / (name + ".aside")).exists()


def test_a_foreign_one_is_put_aside_with_what_is_foreign(saved, tokens):
    folder, spec = saved
    assert found(folder, spec, torch="9.9")[1][0].endswith(
        f"it was written under torch {torch.__version__}"
    )
    other = dataclasses.replace(spec, seed=1)
    stranger = bank_of(other, tokens)
    stranger.admit(0, other)
    stranger.advance(5)
    store(folder, stranger.state(0))
    step, notes = found(folder, spec)
    assert step is None
    assert notes[0].endswith(f"it belongs to run {other.id[:12]}")


def test_tensors_of_another_shape_are_refused_and_the_slot_stays_free(saved, tokens):
    folder, spec = saved
    state = newest(folder, spec.id, environment(CPU), [])
    bank = bank_of(spec, tokens)
    for wrong in (
        {**state.tensors, "weights": torch.zeros(3)},
        {**state.tensors, "first": state.tensors["first"].double()},
        {**state.tensors, "more": torch.zeros(1)},
        {name: tensor for name, tensor in state.tensors.items() if name != "second"},
    ):
        with pytest.raises(StateError, match="unlike the run in "):
            bank.admit(0, spec, dataclasses.replace(state, tensors=wrong))
        assert bank.free_slots == [0, 1, 2, 3]
    notes = []
    put_newest_aside(folder, "no good", notes)
    assert steps_in(folder) == [2] and steps_in(folder, ".aside") == [3]
    bank.admit(0, spec, newest(folder, spec.id, environment(CPU), notes))
    assert bank.steps == {0: 2}


class CutOffError(BaseException):
    """The process is gone."""


def interrupt_at(monkeypatch, number, error):
    """Let the so-manieth system call of a save not happen."""
    left = [number]

    def counted(call):
        def counting(*arguments, **options):
            left[0] -= 1
            if left[0] == 0:
                raise error
            return call(*arguments, **options)

        return counting

    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    monkeypatch.setattr(Path, "replace", counted(Path.replace))
    monkeypatch.setattr(Path, "unlink", counted(Path.unlink))
    monkeypatch.setattr(safetensors.torch, "save_file", counted(safetensors.torch.save_file))
    return left


@pytest.mark.parametrize(
    "error", [CutOffError(), OSError(28, "No space left on device")], ids=["killed", "full"]
)
@pytest.mark.parametrize("number", range(1, 8))
def test_at_every_moment_there_is_a_good_one(saved, tokens, monkeypatch, number, error):
    folder, spec = saved
    bank = bank_of(spec, tokens)
    bank.admit(0, spec, newest(folder, spec.id, environment(CPU), []))
    bank.advance(1)
    with monkeypatch.context() as patch:
        left = interrupt_at(patch, number, error)
        with contextlib.suppress(CutOffError, StateError):
            store(folder, bank.state(0))
    assert left[0] <= 0 or number > 5, "the call was never made"
    step, notes = found(folder, spec)
    assert step in (3, 4) and notes == []


def test_what_is_written_is_synced_before_it_has_its_name(saved, tokens, monkeypatch):
    """Planted once by hand: without the fsync this fails."""
    folder, spec = saved
    events = []
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: (events.append(str(Path(f"/proc/self/fd/{fd}").readlink())), sync(fd)),
    )
    monkeypatch.setattr(
        Path, "replace", lambda path, to: (events.append("replace"), replace(path, to))
    )
    state = newest(folder, spec.id, environment(CPU), [])
    store(folder, state)
    assert [Path(event).suffix or event for event in events] == [".part", "replace", str(folder)]
