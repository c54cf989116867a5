"""What the losses of a run mean for its next attempt, in this driver and in the next."""

import dataclasses

import pytest
from sweep_fakes import make_spec

from proxies import canon
from proxies.spec import Numerics
from sweeps.ledger import Ledger
from sweeps.losses import Loss, Losses, Standing, failed_result

SPEC = dataclasses.replace(make_spec(), batch_tokens=8 * 8)  # eight sequences


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open(tmp_path / "study", {}, create=True) as ledger:
        yield ledger


def lose(losses, *causes, spec=SPEC):
    for cause in causes:
        losses.record(spec.id, Loss(cause=cause, detail="why", log_tail="last words", worker=2))


def standing(ledger, spec=SPEC):
    """As the next driver finds it."""
    return Losses(ledger).standing(spec.id, spec)


@pytest.mark.parametrize(
    ("causes", "wanted"),
    [
        ([], (0, 1)),
        (["lost_worker", "hung", "user_code", "error"], (4, 1)),
        (["preempted"] * 5, (0, 1)),
        (["out_of_memory"], (0, 2)),
        (["out_of_memory"] * 3, (0, 8)),
        (["out_of_memory"] * 5, (2, 8)),
        (["lost_worker", "out_of_memory", "hung"], (2, 2)),
    ],
)
def test_what_counts(ledger, causes, wanted):
    losses = Losses(ledger)
    lose(losses, *causes)
    num_lost, num_microbatches = wanted
    assert losses.standing(SPEC.id, SPEC) == Standing(num_lost=num_lost, num_microbatches=num_microbatches)
    assert standing(ledger) == losses.standing(SPEC.id, SPEC)
    assert standing(ledger, make_spec(seed=9)) == Standing(num_lost=0, num_microbatches=1)


def test_parts_begin_where_the_run_itself_does(ledger):
    spec = dataclasses.replace(SPEC, numerics=Numerics(microbatch_tokens=16))  # in four parts already
    assert standing(ledger, spec).num_microbatches == 1
    lose(Losses(ledger), "out_of_memory", spec=spec)
    assert standing(ledger, spec).num_microbatches == 8


def test_a_record_says_what_happened(ledger):
    losses = Losses(ledger)
    lose(losses, "hung", "lost_worker")
    records = ledger.records("lost")
    assert [record.key for record in records] == [f"{SPEC.id}/0", f"{SPEC.id}/1"]
    assert records[0].body == {"cause": "hung", "detail": "why", "log_tail": "last words", "worker": 2}
    assert canon.decode(Loss, records[1].body).cause == "lost_worker"
    lose(Losses(ledger), "hung")  # the next driver goes on counting
    assert ledger.records("lost")[-1].key == f"{SPEC.id}/2"


def test_a_pardon_is_for_what_was_before_it(ledger):
    losses = Losses(ledger)
    lose(losses, "hung", "hung")
    losses.pardon("nothing has ended well")
    assert losses.standing(SPEC.id, SPEC) == standing(ledger) == Standing(num_lost=0, num_microbatches=1)
    lose(losses, "hung")
    assert standing(ledger).num_lost == 1
    losses.pardon("again")
    assert [record.key for record in ledger.records("pardon")] == ["0", "1"]


def test_a_failed_run_has_an_outcome_with_its_reason():
    result = failed_result(SPEC.id, "lost 3 times")
    assert (result.status, result.reason, result.loss_nats) == ("failed", "lost 3 times", None)
