"""What the losses of a run mean for its next attempt, in this driver and in the next."""

import dataclasses

import pytest
from sweep_fakes import make_spec

from sweeps.run.lost_runs import MOST_IN_A_ROW, Loss, Losses, RetryStatus
from sweeps.store.ledger import Ledger

SPEC = dataclasses.replace(make_spec(), batch_tokens=8 * 8)  # eight sequences


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open(tmp_path / "study", {}, create=True) as ledger:
        yield ledger


def lose(losses, *causes, spec=SPEC, **more):
    for cause in causes:
        losses.record(
            spec.id, Loss(cause=cause, detail="why", log_tail="last words", worker=2, **more)
        )


def standing(ledger, spec=SPEC, max_attempts=3):
    """As the next driver finds it."""
    return Losses(ledger).standing(spec.id, spec, max_attempts)


@pytest.mark.parametrize(
    ("causes", "wanted"),
    [
        ([], (0, 1)),
        (["lost_worker", "crashed", "hung", "user_code", "error"], (4, 1)),
        (["preempted"] * 5, (0, 1)),
        (["out_of_memory"], (0, 2)),
        (["out_of_memory"] * 3, (0, 8)),
        (["out_of_memory"] * 5, (2, 8)),
        (["lost_worker", "out_of_memory", "hung"], (1, 2)),
    ],
)
def test_what_counts(ledger, causes, wanted):
    losses = Losses(ledger)
    lose(losses, *causes)
    num_lost, num_microbatches = wanted
    found = losses.standing(SPEC.id, SPEC, 3)
    assert (found.num_lost, found.num_microbatches.get("", 1)) == (num_lost, num_microbatches)
    assert standing(ledger) == found
    assert standing(ledger, make_spec(seed=9)) == RetryStatus(num_lost=0, num_in_a_row=0)


def test_memory_runs_out_by_kind_of_device(ledger):
    """Three times on the small one, of eight sequences a batch; the large one takes whole batches
    until it fails.
    """
    losses = Losses(ledger)
    lose(losses, *["out_of_memory"] * 3, kind="NVIDIA A100")
    assert standing(ledger).num_microbatches == {"NVIDIA A100": 8}
    lose(losses, "out_of_memory", kind="NVIDIA H100")
    assert (
        standing(ledger).num_microbatches == {"NVIDIA A100": 8, "NVIDIA H100": 2}
        and standing(ledger).num_lost == 0
    )
    lose(losses, "out_of_memory", kind="NVIDIA A100")
    assert standing(ledger).num_lost == 1, "one sequence a pass is the least"


def test_a_run_fails_by_its_own_fault_alone(ledger):
    losses = Losses(ledger)
    lose(losses, "crashed", "error")
    assert (standing(ledger).alone, standing(ledger).failed) == (True, False)
    lose(losses, "lost_worker", alone=True)
    assert not standing(ledger).failed, "killed from outside"
    lose(losses, "crashed")
    assert not standing(ledger).failed, "it may have been a neighbour"
    lose(losses, "crashed", alone=True)
    assert standing(ledger).failed
    assert not standing(ledger, max_attempts=5).failed


@pytest.mark.parametrize("cause", ["preempted", "lost_worker", "out_of_memory"])
def test_a_loss_that_does_not_count_gives_no_run_up(ledger, cause):
    """An error on a shared worker, then a preemption while alone: the neighbor may be to blame."""
    losses = Losses(ledger)
    lose(losses, "error")
    lose(losses, cause, alone=True)
    assert (standing(ledger, max_attempts=1).alone, standing(ledger, max_attempts=1).failed) == (
        True,
        False,
    )
    lose(losses, "error", alone=True)
    lose(losses, cause)
    assert standing(ledger, max_attempts=1).failed, "it has been alone with an error of its own"


def test_the_same_failure_is_known_by_its_last_line(ledger):
    """Failures of all runs are compared, without numbers, except those on shared workers or from
    outside.
    """
    losses, detail = (
        Losses(ledger),
        "run {}, attempt-1: exit code 1; log ends with: step {} | AssertionError: {} != 7",
    )

    def repeats(cause, *numbers, seed=0, alone=True, log_tail=""):
        loss = Loss(
            cause=cause, detail=detail.format(*numbers), log_tail=log_tail, worker=0, alone=alone
        )
        losses.record(make_spec(seed=seed).id, loss)
        return losses.has_repeated(loss)

    assert not repeats("user_code", "0123456789ab", 5, 3)
    assert not repeats("user_code", "0123456789ab", 5, 3, log_tail="KeyError: 'x'"), "another one"
    assert not repeats("user_code", "ba9876543210", 5, 3, alone=False, seed=1)
    assert not any(
        repeats(cause, "0123456789ab", 5, 3) for cause in ("preempted", "lost_worker") for _ in "12"
    )
    assert repeats("user_code", "ba9876543210", 6, 2.5e-3, seed=1)
    losses.pardon("fixed")
    assert not repeats("user_code", "0123456789ab", 5, 3)


def test_whoever_gets_on_begins_to_count_anew(ledger):
    losses = Losses(ledger)
    for step in (0, 20, 20, 40, 60):
        lose(losses, "error", step=step, alone=True)
        assert not standing(ledger).failed
    assert standing(ledger).num_lost == 1
    lose(losses, "error", "error", step=60, alone=True)
    assert standing(ledger).failed


def test_what_kills_without_a_word_and_gets_nowhere_fails_in_the_end(ledger):
    losses = Losses(ledger)
    lose(losses, *["lost_worker"] * (MOST_IN_A_ROW - 1))
    assert (standing(ledger).alone, standing(ledger).failed) == (True, False)
    lose(losses, "lost_worker", step=7, alone=True)
    assert (standing(ledger).alone, standing(ledger).failed) == (False, False)
    lose(losses, *["lost_worker"] * (MOST_IN_A_ROW - 1), step=7, alone=True)
    assert standing(ledger).failed
    assert standing(ledger).num_in_a_row == MOST_IN_A_ROW
    assert not standing(ledger, max_attempts=20).failed
