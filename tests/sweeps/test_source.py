import math
import random

import pytest
from spaces import SPACE
from sweep_fakes import bank_key, make_spec, outcome

from sweeps.search.source import SearchSource, Signal, StaticSource
from sweeps.store.ledger import Ledger


def make_run(point):
    return make_spec(log2_lr=math.log2(point["learning_rate"]))


def search_source(ledger, num_trials=20, parallelism=4):
    return SearchSource(
        SPACE, make_run, ledger, stage="sweep", study_seed=3, num_trials=num_trials, parallelism=parallelism
    )


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open(tmp_path, {}, create=True) as ledger:
        yield ledger


def test_a_list_comes_key_by_key_the_costliest_first():
    specs = [make_spec(width=width, seed=seed) for seed in range(3) for width in (32, 128, 64)]
    source = StaticSource(specs, bank_key)
    order = list(iter(lambda: source.next({}), Signal.DONE))
    assert [spec.shape.width for spec in order] == [128] * 3 + [64] * 3 + [32] * 3
    assert [spec.seed for spec in order[:3]] == [0, 1, 2]
    assert source.next({}) is Signal.DONE


def finish(source, seed):
    """Carry a search out, results coming in any order."""
    rng, running, results, specs = random.Random(seed), [], {}, []
    while True:
        answer = source.next(results)
        if answer is Signal.DONE:
            return specs
        if answer is Signal.WAIT:
            spec = running.pop(rng.randrange(len(running)))
            results[spec.id] = outcome(spec)[0]
        else:
            specs.append(answer)
            running.append(answer)


def test_any_finishing_order_gives_the_same_search(tmp_path):
    searches = []
    for seed in range(4):
        with Ledger.open(tmp_path / str(seed), {}, create=True) as ledger:
            searches.append(finish(search_source(ledger), seed))
    assert searches[0] == searches[1] == searches[2] == searches[3]


def test_an_interrupted_search_goes_on_as_it_would_have(tmp_path):
    with Ledger.open(tmp_path / "whole", {}, create=True) as ledger:
        whole = finish(search_source(ledger), 0)
    for num_before in (1, 7, 13):
        study = tmp_path / str(num_before)
        with Ledger.open(study, {}, create=True) as ledger:
            finish(search_source(ledger, num_trials=num_before), 1)
        with Ledger.open(study, {}, create=False) as ledger:
            assert finish(search_source(ledger), 2) == whole
            assert [record.key for record in ledger.records("suggestion")] == [f"sweep/{i}" for i in range(20)]
