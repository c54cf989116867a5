"""The worker's side of the pool: records in, records out, one engine at a time."""

import dataclasses
import json
import subprocess
import sys

import pytest
from main_run import spec_of, write_corpus

from launcher.host import HostFactory
from launcher.stages import bank_key
from proxies import canon
from proxies.external.factory import load
from proxies.spec import Curve, Numerics, RunResult


def trained(host, specs, max_steps=50):
    """Every run's result, one call after another, over JSON as it would travel."""
    finished, admit = [], [(slot, json.loads(canon.canonical(spec))) for slot, spec in enumerate(specs)]
    while len(finished) < len(specs):
        finished += host.advance(bank_key(specs[0]), specs[0].numerics.num_slots, admit, max_steps)
        admit = []
    return {canon.decode(RunResult, f.result).id: f for f in finished}


def test_a_host_gives_what_the_study_recorded(study, ledger):
    """Whatever the neighbours were and however many steps a call makes: the same to the last bit."""
    recorded = {}
    for run in ledger.runs():
        recorded.setdefault(bank_key(run.spec), []).append(run)
    host = HostFactory(corpus=str(study.corpus))()
    for alike in recorded.values():
        runs = alike[: min(2, alike[0].spec.numerics.num_slots)]
        results = trained(host, [run.spec for run in runs], max_steps=3)
        for run in runs:
            result = canon.decode(RunResult, results[run.spec.id].result)
            assert (result.loss_nats, result.curve_id) == (run.result.loss_nats, run.result.curve_id)
            assert canon.content_id(canon.decode(Curve, results[run.spec.id].curve)) == result.curve_id


def test_another_key_is_another_bank_and_drops_what_was_held(study, ledger):
    first, other = (
        next(run.spec for run in ledger.runs() if run.spec.shape.width == width) for width in (8, 16)
    )  # fmt: skip
    host = HostFactory(corpus=str(study.corpus))()
    num_slots = first.numerics.num_slots
    assert host.advance(bank_key(first), num_slots, [(0, canon.to_json(first))], 1) == []
    assert set(trained(host, [other])) == {other.id}
    assert set(trained(host, [first])) == {first.id}, "slot 0 was free again"


def test_an_empty_bank_is_the_drivers_mistake(study):
    with pytest.raises(ValueError, match="an empty bank was asked to advance"):
        HostFactory(corpus=str(study.corpus))().advance("key", 4, [], 10)


def test_what_is_no_run_is_refused(study, ledger):
    spec = canon.to_json(ledger.runs()[0].spec)
    with pytest.raises(canon.CanonError, match="lacks seed"):
        HostFactory(corpus=str(study.corpus))().advance(
            "key", 4, [(0, {k: v for k, v in spec.items() if k != "seed"})], 10
        )


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
"""


def test_one_trial_at_a_time_side_by_side_and_a_model_of_ones_own(tmp_path):
    """The same run alone, in a bank of two, and with the user's model: three keys, three engines, one host."""
    (tmp_path / "theirs.py").write_text(THEIRS)
    alone = dataclasses.replace(spec_of(write_corpus(tmp_path).data_id), numerics=Numerics())
    banked = dataclasses.replace(alone, numerics=Numerics(num_slots=2))
    own = dataclasses.replace(alone, factory=load("theirs:build", tmp_path)[1])
    host = HostFactory(corpus=str(tmp_path / "tokens"), code_dir=str(tmp_path))()
    losses = {}
    for spec in (alone, banked, own):
        assert host.advance(spec.id, spec.numerics.num_slots, [(0, canon.to_json(spec))], 3) == []
        (finished,) = host.advance(spec.id, spec.numerics.num_slots, [], 50)
        result = canon.decode(RunResult, finished.result)
        assert (result.id, result.status) == (spec.id, "finished")
        losses[spec.id] = result.loss_nats
    assert losses[alone.id] == pytest.approx(losses[banked.id], abs=1e-5)
    assert abs(losses[alone.id] - losses[own.id]) > 0.01


def test_the_factory_travels_without_torch():
    """It is unpickled in the driver's and the worker's process; only the worker's first call needs torch."""
    code = (
        "import pickle, sys; from launcher.host import HostFactory; "
        "pickle.loads(pickle.dumps(HostFactory(corpus='c')))(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
