"""Every anchor ends in a failed coordinate check or in `drifts`, and the same set-up without the
mistake does not.

`pytest tests/anchors -s` prints a row of docs/negative-anchors.md for each.
"""

import dataclasses
import json
import math
import random
import time

import mup
import numpy as np
import pytest
import torch
from anchors import ANCHORS, overwritten_rates, slope_said, told, verdict_said
from main_run import spec_of, tiny_decision, write_corpus
from mup_reference import mup_model
from planted import BASE, WIDTHS
from tiny_study import forerun, write_plan

from launcher.exporters.trainers import native
from launcher.frozen.frozen import TamperedError, groups_of
from launcher.frozen.launch_file import read_launch, write_launch
from launcher.study.gates import coordinate_gate
from launcher.trainer import assembly
from proxies.coordinates.verdict import TOLERANCE
from proxies.core import canon
from proxies.model.decoder import Decoder
from proxies.parametrization.parametrization import initial_tensor, parameter_table
from proxies.training import solo
from transfer.question import Point, Question
from transfer.verdict.optima_verdict import judge_optima
from transfer.verdict.verdict import judge

ISSUE_66 = {96: (-9.0, 4.1184), 192: (-10.0, 3.7074), 384: (-11.0, 3.3776), 768: (-11.0, 3.1009)}
"""microsoft/mup issue 66, nanoGPT: width to log2 of the best rate and its loss."""
ALARM = {60_000_000: 4.01, 125_000_000: 3.68, 250_000_000: 3.43, 500_000_000: 3.22}
"""Parameters to a loss, about as in the published false alarm."""


def gate_of(found):
    return coordinate_gate({"mup": canon.to_json(found)}, "mup").outcome


@pytest.fixture(scope="module")
def twins():
    """Clean checks by their setting: most anchors share one."""
    return {}


@pytest.mark.parametrize("anchor", ANCHORS, ids=lambda anchor: anchor.name)
def test_the_check_fails_where_its_twin_passes(anchor, store, monkeypatch, twins):
    began = time.perf_counter()
    found = anchor.check(store, monkeypatch, mistaken=True)
    seconds = time.perf_counter() - began
    key = (anchor.tied, str(anchor.setting))
    twin = (
        twins[key]
        if key in twins
        else twins.setdefault(key, anchor.check(store, monkeypatch, mistaken=False))
    )
    wrong, right = anchor.number(found), anchor.number(twin)
    number = (
        f"{anchor.layer} {anchor.reads}: slope {slope_said(wrong)}, without the mistake "
        f"{slope_said(right)}"
    )
    told(anchor.name, f"coordinate check: {found.outcome.replace('_', ' ')}", number, seconds)
    assert found.outcome == "blows_up" and gate_of(found) == "failed"
    assert any(anchor.says in mistake for mistake in found.mistakes)
    assert wrong[1] > right[2] + TOLERANCE
    assert (twin.outcome, twin.mistakes) == ("passes", ()) and gate_of(twin) == "passed"


def test_mup_itself_grows_the_std_of_tied_embeddings():
    """The planted number is mup's own: real mup models, std of the shared matrix against width."""
    base = dataclasses.replace(BASE, tied=True)

    def slope(std_at):
        return float(
            np.polyfit(np.log2(WIDTHS), np.log2([std_at(width) for width in WIDTHS]), 1)[0]
        )

    def theirs(width):
        model = mup_model(base.at_width(width), base)
        assert (
            isinstance(model.lm_head, mup.MuReadout)
            and model.lm_head.weight is model.tok_embeddings.weight
        )
        return model.tok_embeddings.weight.std().item()

    def ours(width):
        spec = dataclasses.replace(spec_of("data"), shape=base.at_width(width), base_shape=base)
        return initial_tensor(parameter_table(spec)[0], seed=0).std().item()

    torch.manual_seed(0)
    grows, keeps = slope(theirs), slope(ours)
    told(
        "tied embeddings in mup 1.0.0 itself",
        "std at the start",
        f"slope {grows:+.2f}, ours {keeps:+.2f}",
        0,
    )
    assert grows == pytest.approx(0.5, abs=0.02)
    assert keeps == pytest.approx(0, abs=0.02)


# What stands between proxies on one base and a main run on another.


MAIN = spec_of("data")
"""A main run of width 32, on a base of 16."""
FROZEN = groups_of(parameter_table(MAIN))


def live(base_shape):
    """The main run's model, and its optimizer with the groups of a base."""
    model = Decoder(MAIN.shape, device="meta")
    groups = groups_of(parameter_table(dataclasses.replace(MAIN, base_shape=base_shape)))
    return model, assembly.build_optimizer(model, groups, MAIN.optimizer)


def test_groups_of_another_base_are_not_the_frozen_ones():
    model, optimizer = live(MAIN.shape)
    wrong = [
        problem
        for problem in assembly.mismatches(model, optimizer, FROZEN, MAIN.optimizer)
        if "learning_rate" in problem
    ]
    number = f"{len(wrong)} of {len(list(model.parameters()))} rates: {wrong[0]}"
    told("target on its own base", "proof of the live optimizer", number, 0)
    assert wrong[0] == "layers.0.attention.wq.weight: learning_rate is 0.03125, frozen as 0.015625"
    assert len(wrong) == sum(row.kind == "hidden" for row in parameter_table(MAIN))
    assert assembly.mismatches(*live(MAIN.base_shape), FROZEN, MAIN.optimizer) == []


def test_rates_that_a_scheduler_has_overwritten_are_not_the_frozen_ones(monkeypatch):
    """What the embedded trainer proves when it starts, and at each resume."""
    model, optimizer = live(MAIN.base_shape)
    solo.set_rates(optimizer, FROZEN, 0.5)
    assert assembly.mismatches(model, optimizer, FROZEN, MAIN.optimizer, lr_share=0.5) == []
    overwritten_rates(monkeypatch)
    solo.set_rates(optimizer, FROZEN, 0.5)
    wrong = assembly.mismatches(model, optimizer, FROZEN, MAIN.optimizer, lr_share=0.5)
    number = f"{len(wrong)} of {len(list(model.parameters()))} rates: {wrong[0]}"
    told("scheduler overwrites group rates", "proof of the live optimizer", number, 0)
    assert (
        wrong[0] == "layers.0.attention.wq.weight: learning_rate is 0.015625, frozen as 0.0078125"
    )


def test_a_launch_file_moved_to_another_base_is_refused(tmp_path):
    write_corpus(tmp_path)
    decision = tiny_decision(tmp_path / "tokens")
    assert native.parity(decision) == []
    path = write_launch(tmp_path / "frozen", decision)
    assert read_launch(path) == decision
    body = json.loads(path.read_text())
    body["decision"]["base_shape"] = canon.to_json(decision.shape)
    path.write_text(json.dumps(body))
    with pytest.raises(TamperedError):
        read_launch(path)
    # Written anew with groups to match, it is a config of its own: one that no study vouches for.
    groups = groups_of(parameter_table(dataclasses.replace(MAIN, base_shape=MAIN.shape)))
    moved = dataclasses.replace(decision, base_shape=decision.shape, groups=groups)
    code, _, err = forerun("verify", write_launch(tmp_path / "frozen", moved))
    told("launch file written for another base", "forerun verify", f"exit {code}", 0)
    assert code == 5 and "evidence.json is missing" in err


def test_a_study_has_one_base(tmp_path):
    plan, study = write_plan(tmp_path), tmp_path / "study"
    assert forerun("check", plan, "--study", study)[0] in (0, 3, 4)
    code, _, err = forerun("check", plan, "--study", study, "--set", "proxy.base_width=16")
    told("proxies on another base in one study", "the ledger's first record", f"exit {code}", 0)
    assert code == 2 and "proxy.base_width" in err


# Drift that was published, and an alarm that was false.


def grid(minima, rates, *, optimum, drift, num_seeds, seed=0):
    """Runs in parabolas of 0.06 nats per squared octave; the optimum moves by `drift` octaves a
    doubling.
    """
    rng, first = random.Random(seed), min(minima)
    return [
        Point(
            size=size,
            log2_value=float(rate),
            loss_nats=low
            + 0.03 * (rate - optimum - drift * math.log2(size / first)) ** 2
            + rng.gauss(0, 0.005),
            seed=run,
        )
        for (size, low), some in zip(minima.items(), rates, strict=True)
        for run in range(num_seeds)
        for rate in some
    ]


def test_the_published_optima_of_mup_issue_66_drift():
    question = Question(target_size=1536, base_size=96)
    found = judge_optima([(width, best) for width, (best, _) in ISSUE_66.items()], question)
    told("nanoGPT, mup issue 66: its optima", "verdict", verdict_said(found), 0)
    assert found.outcome == "drifts" and found.drift.value == pytest.approx(-0.7)
    still = judge_optima([(width, -9.0) for width in ISSUE_66], question)
    assert still.outcome != "drifts" and still.drift.value == pytest.approx(0)
    fine = judge_optima(
        [(width, -9 + 0.02 * (-1) ** i) for i, width in enumerate(ISSUE_66)], question
    )
    assert fine.outcome == "holds"


SPIKES_NATS = (0.05, 0.1, 0.2, 0.35, 0.5)
FIVE, FOUR, THREE = range(-10, -5), range(-10, -6), range(-9, -6)
PUBLISHED = (FIVE, THREE, FOUR, THREE)
"""Rates by size of a one-seed sweep like the published one."""


QUESTION = Question(target_size=1_000_000_000, base_size=60_000_000, axis="params")


def spiked(points):
    """Each run of a one-seed grid spiked by each amount: the points, and whether the size's best
    rate is another for it, which is how such a grid is read by eye.
    """

    def best(runs, size):
        return min((p.loss_nats, p.log2_value) for p in runs if p.size == size)[1]

    for index, run in enumerate(points):
        for nats in SPIKES_NATS:
            wrong = dataclasses.replace(run, loss_nats=run.loss_nats + nats)
            runs = [*points[:index], wrong, *points[index + 1 :]]
            yield runs, best(runs, run.size) != best(points, run.size)


@pytest.mark.parametrize(
    "rates",
    [
        pytest.param(PUBLISHED, id="published"),
        pytest.param((FIVE, FOUR, FOUR, FOUR), id="four", marks=pytest.mark.slow),
        pytest.param((FIVE,) * 4, id="five", marks=pytest.mark.slow),
    ],
)
def test_one_spiked_seed_never_makes_a_drift(rates):
    began = time.perf_counter()
    points = grid(ALARM, rates, optimum=-8, drift=0.0, num_seeds=1)
    found = [(judge(runs, QUESTION, draws=200).outcome, moved) for runs, moved in spiked(points)]
    seconds = time.perf_counter() - began
    outcomes, by_eye = (
        [outcome for outcome, _ in found],
        [outcome for outcome, moved in found if moved],
    )
    number = ", ".join(
        f"{outcomes.count(o)} {o.replace('_', ' ')}" for o in ("drifts", "cannot_tell", "holds")
    )
    told(
        f"one seed, one spike, rates {[len(some) for some in rates]}",
        "verdict",
        f"{number}; best rate moved in {len(by_eye)}: {by_eye.count('cannot_tell')} cannot tell",
        seconds,
    )
    assert "drifts" not in outcomes
    assert len(by_eye) >= 10, "some spikes must be of the kind that alarms"
    if rates is PUBLISHED:
        assert set(by_eye) == {"cannot_tell"}


def test_one_spiked_seed_does_not_hide_a_true_drift():
    """Or the test above would pass by never saying `drifts`."""
    began = time.perf_counter()
    points = grid(ALARM, [range(-13, -5)] * 4, optimum=-8, drift=-0.7, num_seeds=1)
    outcomes = [judge(runs, QUESTION, draws=200).outcome for runs, _ in list(spiked(points))[2::80]]
    seconds = time.perf_counter() - began
    number = f"{outcomes.count('drifts')} of {len(outcomes)} drifts"
    told("a true drift of 0.7 octaves, one seed, one spike", "verdict", number, seconds)
    assert outcomes.count("drifts") >= len(outcomes) / 2
