"""What two executions of one run say of the machines they ran on: pure functions, every branch planted."""

import dataclasses

import pytest
from sweep_fakes import make_spec, outcome

from proxies.core import canon
from proxies.core.programs import Factory
from sweeps.run.rerun_verdict import FACTOR, LEAST_SHARE, NUM_NUDGED, Ran, Verdict, Wanted, distance, judge, promised

SPEC = make_spec(num_steps=6)
CPU = {"python": "3", "torch": "2", "machine": "x", "device": "cpu", "cpu": "one kind"}


def ran(host, shift=0.0, *, process="1", from_step=4, status="finished", spec=SPEC, **environment):
    """An execution there, its losses higher by `shift` from a step on."""
    result, curve = outcome(spec)
    losses = [loss + shift * (step >= from_step) for step, loss in zip(curve.steps, curve.train_loss_nats, strict=True)]
    curve = dataclasses.replace(curve, train_loss_nats=tuple(losses))
    place = {**CPU, "host": host, "process": process, **environment}
    ended = {"status": status, "loss_nats": None, "reason": "too high"} if status == "diverged" else {
        "loss_nats": result.loss_nats + shift
    }  # fmt: skip
    return Ran(
        result=dataclasses.replace(result, curve_id=canon.content_id(curve), environment=place, **ended), curve=curve
    )


def other_chip(host, shift=0.0, **more):
    return ran(host, shift, cpu="another kind", **more)


def found(first, again=(), nudged=(), *, more_hosts=False, spec=SPEC):
    return judge(spec, first, tuple(again), tuple(nudged), more_hosts=more_hosts)


def test_a_replay_is_wanted_elsewhere_first():
    assert found(ran("a")) == Wanted(replay="again", away_from=("a",))


def test_the_same_bits_agree_wherever_they_were_made():
    for second, apart in ((ran("b"), "host"), (ran("a", process="2"), "process"), (ran("a"), "nothing")):
        verdict = found(ran("a"), [second])
        assert (verdict.outcome, verdict.apart, verdict.odd_host) == ("agrees", apart, "")
        assert (verdict.largest_nats, verdict.at_step, verdict.end_nats, verdict.allowed_nats) == (0.0, None, 0.0, 0.0)
    assert found(ran("a"), [other_chip("b")]).outcome == "agrees"
    assert found(ran(""), [ran("b")]).apart == "unknown"


def test_one_bit_is_enough_where_the_same_are_promised():
    """No noise is asked for; the last place of one loss, or of the end alone, is a fault."""
    second = ran("b", 2.0**-50)
    verdict = found(ran("a"), [second])
    assert (verdict.outcome, verdict.allowed_from, verdict.allowed_nats) == ("differs", "bitwise", 0.0)
    assert verdict.at_step == 4 and 0 < verdict.largest_nats < 1e-14 and verdict.odd_host == ""
    end = dataclasses.replace(ran("b"), result=dataclasses.replace(ran("b").result, loss_nats=9.0))
    assert found(ran("a"), [end]).outcome == "differs"


def test_a_host_that_gives_two_answers_is_the_odd_one():
    verdict = found(ran("a"), [ran("a", 1e-9, process="2")], more_hosts=True)
    assert (verdict.outcome, verdict.odd_host) == ("differs", "a")


def test_a_third_host_tells_which_of_two_is_wrong():
    first, wrong = ran("a"), ran("b", 0.01)
    assert found(first, [wrong], more_hosts=True) == Wanted(replay="again", away_from=("a", "b"), strictly=True)
    assert found(first, [wrong]).odd_host == "" and "third host" in found(first, [wrong]).reason
    assert found(first, [wrong, ran("c")]).odd_host == "b"
    assert found(wrong, [first, ran("c")]).odd_host == "b"
    third = found(first, [wrong, ran("c", 0.02)])
    assert (third.outcome, third.odd_host) == ("differs", "") and "neither" in third.reason


def test_on_another_chip_as_much_may_differ_as_a_nudge_makes_times_ten():
    first, nudged = ran("a"), [ran("a", 1e-4), other_chip("b", 1e-4)]
    near, far = other_chip("b", 0.9 * FACTOR * 1e-4), other_chip("b", 2.0 * FACTOR * 1e-4)
    assert found(first, [near]) == Wanted(replay="nudged", near="a")
    assert found(first, [near], nudged[:1]) == Wanted(replay="nudged", near="b")
    assert len(nudged) == NUM_NUDGED
    verdict = found(first, [near], nudged)
    assert (verdict.outcome, verdict.allowed_from) == ("agrees", "nudged")
    assert verdict.allowed_nats == pytest.approx(FACTOR * 1e-4)
    verdict = found(first, [far], nudged)
    assert (verdict.outcome, verdict.odd_host) == ("differs", "")
    assert found(first, [far, ran("c")], nudged).odd_host == "b"


def test_a_machine_that_computes_wrongly_cannot_widen_what_is_allowed():
    """Its own nudged run is far from everything: the honest one's counts."""
    first, wrong = ran("a"), other_chip("b", 0.5)
    verdict = found(first, [wrong], [ran("a", 1e-5), other_chip("b", -0.5)])
    assert verdict.outcome == "differs" and verdict.allowed_nats == pytest.approx(FACTOR * 1e-5)


def test_a_nudge_that_moves_no_loss_allows_the_rounding_of_a_loss():
    first = ran("a")
    least = FACTOR * LEAST_SHARE * max(first.curve.train_loss_nats)
    for shift, outcome_wanted in ((0.9 * least, "agrees"), (1.1 * least, "differs")):
        verdict = found(first, [other_chip("b", shift)], [ran("a"), other_chip("b")])
        assert (verdict.outcome, verdict.allowed_nats) == (outcome_wanted, pytest.approx(least))


def test_a_run_at_the_edge_of_divergence_accuses_nobody():
    first, second = ran("a"), other_chip("b", status="diverged")
    nudged = [ran("a", 1e-6), other_chip("b", status="diverged")]
    assert found(first, [second], nudged).outcome == "cannot_tell"
    steady = [ran("a", 1e-6), other_chip("b", 1e-6)]
    assert found(first, [second], steady).outcome == "differs", "no nudge has it diverge"
    assert found(first, [ran("b", status="diverged")]).outcome == "differs", "the same bits are promised"


def test_bits_are_promised_on_one_kind_of_cpu_alone():
    one, other = ran("a"), ran("b")
    assert promised(SPEC, one, other)
    for key in CPU:
        assert not promised(SPEC, one, ran("b", **{key: "other"})), key
    assert not promised(SPEC, ran("a", device="H100"), ran("b", device="H100")), "atomic additions"
    for key in ("resumed_at_step", "num_microbatches"):
        assert not promised(SPEC, one, ran("b", **{key: "2"})) and not promised(SPEC, ran("a", **{key: "2"}), other)
    unknown = [
        dataclasses.replace(each, result=dataclasses.replace(each.result, environment={})) for each in (one, other)
    ]
    assert not promised(SPEC, *unknown), "an older version did not say where"
    theirs = make_spec(num_slots=1)
    theirs = dataclasses.replace(theirs, factory=Factory(target="m:f", source_sha256="0" * 64))
    assert not promised(theirs, one, other)


def test_a_distance_is_of_the_steps_that_both_have():
    short = dataclasses.replace(
        ran("b"), curve=dataclasses.replace(ran("b").curve, steps=(1, 2), train_loss_nats=(9.0, 9.0), grad_norm=())
    )
    far = distance(ran("a"), short)
    assert far.largest_nats == max(abs(9.0 - loss) for loss in ran("a").curve.train_loss_nats[:2])
    assert far.at_step == 1


def test_every_verdict_travels():
    verdict = found(ran("a"), [ran("b")])
    assert canon.decode(Verdict, canon.to_json(verdict)) == verdict
