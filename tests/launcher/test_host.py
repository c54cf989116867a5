"""The worker's side of the pool: records in, records out, one engine at a time."""

import dataclasses
import json
from unittest import mock

import pytest
from main_run import spec_of, write_corpus

from launcher.study.stages import bank_key
from launcher.workers.host import HostFactory
from proxies.core import canon
from proxies.core.spec import Curve, Numerics, RunResult
from proxies.external.factory import load
from sweeps.run.crew import AHEAD
from sweeps.run.pool import HostCall, carry_out


def call(spec, admit=(), seconds=60.0, **options):
    """By default every slot goes on, and to its end."""
    slots = {"bank_key": options.pop("key", bank_key(spec)), "num_slots": spec.numerics.num_slots}
    hold = options.pop("hold", dict.fromkeys(range(spec.numerics.num_slots)))
    return HostCall(**slots, admit=tuple(admit), seconds=seconds, hold=hold, **options)


def advanced(host, num_steps, call):
    """A call whose time is up after so many steps."""
    with mock.patch("launcher.workers.host.MOST_STEPS", num_steps):
        return host.advance(call)


def trained(host, specs):
    """Every run's result, one call after another, over JSON as it would travel."""
    finished, admit = (
        [],
        [(slot, json.loads(canon.canonical(spec))) for slot, spec in enumerate(specs)],
    )
    while len(finished) < len(specs):
        finished += host.advance(call(specs[0], admit)).finished
        admit = ()
    return {canon.decode(RunResult, f.result).id: f for f in finished}


THEIRS = """
from torch import nn

class Theirs(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.table = nn.Embedding(shape.vocab_size, shape.width)
        self.hidden = nn.ModuleList(nn.Linear(shape.width, shape.width) for _ in range(shape.num_layers))
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)

    def forward(self, ids):
        x = self.table(ids)
        for hidden in self.hidden:
            x = x + hidden(x).tanh()
        return self.head(x)

def build(shape):
    return Theirs(shape)
"""  # noqa: E501


def test_one_trial_at_a_time_side_by_side_and_a_model_of_ones_own(tmp_path):
    """The same run alone, in a bank of two, and with the user's model: three keys, three engines,
    one host.
    """
    (tmp_path / "theirs.py").write_text(THEIRS)
    alone = dataclasses.replace(spec_of(write_corpus(tmp_path).data_id), numerics=Numerics())
    banked = dataclasses.replace(alone, numerics=Numerics(num_slots=2))
    own = dataclasses.replace(alone, factory=load("theirs:build", tmp_path)[1])
    host = HostFactory(
        study_dir=str(tmp_path / "study"), corpus=str(tmp_path / "tokens"), code_dir=str(tmp_path)
    )()
    losses = {}
    for spec in (alone, banked, own):
        assert advanced(host, 3, call(spec, [(0, canon.to_json(spec))], key=spec.id)).finished == ()
        (finished,) = host.advance(call(spec, key=spec.id)).finished
        result = canon.decode(RunResult, finished.result)
        assert (result.id, result.status) == (spec.id, "finished")
        losses[spec.id] = result.loss_nats
    assert losses[alone.id] == pytest.approx(losses[banked.id], abs=1e-5)
    assert abs(losses[alone.id] - losses[own.id]) > 0.01


def test_a_saved_run_goes_on_in_another_worker(tmp_path):
    """The first host is gone; the second has the same result, bit for bit, and says where it
    began.
    """
    spec = dataclasses.replace(
        spec_of(write_corpus(tmp_path).data_id), numerics=Numerics(num_slots=2)
    )
    factory = HostFactory(study_dir=str(tmp_path / "study"), corpus=str(tmp_path / "tokens"))
    admit = [(0, canon.to_json(spec))]
    whole = trained(factory(), [spec])[spec.id]
    assert not (tmp_path / "study").exists(), "a run this short is not saved"

    host = factory()
    advanced(host, 5, call(spec, admit))
    saved = host.advance(call(spec, seconds=0, save=True))
    assert (saved.steps, saved.notes) == ({0: 5}, ())
    (state,) = (tmp_path / "study" / "checkpoints" / spec.id).iterdir()
    host.advance(call(spec, seconds=0, save=True))
    assert list(state.parent.iterdir()) == [state], "nothing has moved: nothing is written"

    again = factory()
    first = advanced(again, 1, call(spec, [(1, canon.to_json(spec))]))
    assert (first.steps, first.notes) == ({1: 6}, (f"run {spec.id[:12]} resumes from step 5",))
    (finished,) = again.advance(call(spec)).finished
    assert finished.curve == whole.curve
    assert finished.result["loss_nats"] == whole.result["loss_nats"]


FAILING = THEIRS.replace("return self.head(x)", "return self.head(self.broken(x))").replace(
    "def build",
    """    calls = 0

    def broken(self, x):
        self.calls += 1
        if self.calls > 8: raise KeyError('rope')
        return x

def build""",
)


def test_an_error_in_the_users_model_names_their_line(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    spec = spec_of(write_corpus(tmp_path).data_id)
    spec = dataclasses.replace(
        spec, numerics=Numerics(), factory=load("failing:build", tmp_path)[1]
    )
    factory = HostFactory(
        study_dir=str(tmp_path), corpus=str(tmp_path / "tokens"), code_dir=str(tmp_path)
    )
    report = carry_out(0, call(spec, [(0, canon.to_json(spec))]), factory)
    assert report.cause == "user_code" and not report.refused
    assert (
        report.error
        == "failing.py, line 21: `if self.calls > 8: raise KeyError('rope')`: KeyError: 'rope'"
    )
    lines = report.log_tail.splitlines()
    assert lines[0] == "failing.py, line 15, in forward: return self.head(self.broken(x))"
    assert lines[-1] == "KeyError: 'rope'" and "Traceback" not in report.log_tail


def looked_at(host, spec, admit, hold):
    """Calls until a run waits; what is said of those that do, by slot, and what has ended
    meanwhile.
    """
    ended = {}
    while True:
        done = advanced(host, 3, call(spec, admit, hold=hold))
        ended |= {canon.decode(RunResult, each.result).id: each for each in done.finished}
        if done.paused:
            return {each.slot: each for each in done.paused}, ended
        admit = ()


def test_who_is_pruned_disturbs_nobody_and_makes_room(tmp_path):
    """To the last bit: the neighbours, the run in the slot that came free, and the steps that the
    pruned one did.
    """
    first = dataclasses.replace(
        spec_of(write_corpus(tmp_path).data_id), numerics=Numerics(num_slots=3)
    )
    specs = [dataclasses.replace(first, seed=seed) for seed in range(4)]
    factory = HostFactory(study_dir=str(tmp_path / "study"), corpus=str(tmp_path / "tokens"))
    whole = {}
    for spec in specs:
        whole |= trained(factory(), [spec])

    host, steps = factory(), first.schedule.num_steps
    admit = [(slot, canon.to_json(spec)) for slot, spec in enumerate(specs[:3])]
    rung = steps // 3
    paused, _ = looked_at(host, first, admit, {0: rung, 1: rung, 2: None})
    assert set(paused) == {0, 1}
    again = host.advance(call(first, seconds=60.0, hold={0: rung, 1: rung, 2: None}))
    assert {each.slot for each in again.paused} == {0, 1} and set(again.steps.values()) == {rung}
    result, curve = (
        canon.decode(kind, part)
        for kind, part in ((RunResult, paused[1].result), (Curve, paused[1].curve))
    )
    full = canon.decode(Curve, whole[specs[1].id].curve)
    assert (result.status, result.num_steps, result.curve_id) == (
        "pruned",
        rung,
        canon.content_id(curve),
    )
    assert (curve.train_loss_nats, curve.grad_norm) == (
        full.train_loss_nats[:rung],
        full.grad_norm[:rung],
    )

    refill = [(1, canon.to_json(specs[3]))]
    found, ended = looked_at(host, first, refill, {0: 2 * rung, 1: None, 2: None})
    assert set(found) == {0}, "it goes on to its next rung"
    while len(ended) < 3:
        for each in host.advance(call(first, seconds=60.0)).finished:
            ended[canon.decode(RunResult, each.result).id] = each
    assert set(ended) == {specs[0].id, specs[2].id, specs[3].id}
    for run_id, each in ended.items():
        assert (
            each.curve == whole[run_id].curve
            and each.result["loss_nats"] == whole[run_id].result["loss_nats"]
        )


def test_a_call_ahead_trains_on_unless_the_answer_before_it_needs_a_reply(tmp_path):
    """One who waits to be looked at, one who has ended, an error: in each case nothing is done
    until it is answered.
    """
    spec = dataclasses.replace(
        spec_of(write_corpus(tmp_path).data_id), numerics=Numerics(num_slots=2)
    )
    host = HostFactory(study_dir=str(tmp_path / "study"), corpus=str(tmp_path / "tokens"))()
    whole = trained(host, [spec])[spec.id]
    rung = spec.schedule.num_steps // 2
    advanced(host, 2, call(spec, [(0, canon.to_json(spec))], hold={0: rung}))
    assert advanced(host, 1, AHEAD).steps == {0: 3}
    assert [each.slot for each in host.advance(AHEAD).paused] == [0]
    idle = host.advance(AHEAD)
    assert (idle.steps, idle.paused, idle.finished) == ({0: rung}, (), ()), (
        "it still waits, and that is known"
    )
    advanced(host, 1, call(spec))
    with mock.patch("proxies.training.bank.Bank.advance", side_effect=RuntimeError("broken")):
        assert carry_out(0, AHEAD, lambda: host).error is not None
    assert host.advance(AHEAD).steps == {0: rung + 1}, "nobody knows what is in there"
    advanced(host, 1, call(spec))
    (finished,) = host.advance(AHEAD).finished
    assert finished.curve == whole.curve
    assert host.advance(AHEAD).steps == {}
