"""The worker's side of the pool: records in, records out, one bank at a time."""

import json
import subprocess
import sys

import pytest

from launcher.host import BankHost, BankHostFactory
from launcher.stages import bank_key
from proxies import canon
from proxies.spec import Curve, RunResult


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
    host = BankHostFactory(corpus=str(study.corpus))()
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
    host = BankHost(study.corpus)
    num_slots = first.numerics.num_slots
    assert host.advance(bank_key(first), num_slots, [(0, canon.to_json(first))], 1) == []
    assert set(trained(host, [other])) == {other.id}
    assert set(trained(host, [first])) == {first.id}, "slot 0 was free again"


def test_an_empty_bank_is_the_drivers_mistake(study):
    with pytest.raises(ValueError, match="an empty bank was asked to advance"):
        BankHost(study.corpus).advance("key", 4, [], 10)


def test_what_is_no_run_is_refused(study, ledger):
    spec = canon.to_json(ledger.runs()[0].spec)
    with pytest.raises(canon.CanonError, match="lacks seed"):
        BankHost(study.corpus).advance("key", 4, [(0, {k: v for k, v in spec.items() if k != "seed"})], 10)


def test_the_factory_travels_without_torch():
    """It is unpickled in the driver's and the worker's process; only the worker's first call needs torch."""
    code = (
        "import pickle, sys; from launcher.host import BankHostFactory; "
        "pickle.loads(pickle.dumps(BankHostFactory(corpus='c')))(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
