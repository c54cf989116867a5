"""A whole search without training: ranges that grow, repeats, and all of it resumed anywhere."""

import dataclasses
import hashlib
import math
import random

import pytest
from tiny_study import ask, ended, plan_with, replay

from launcher.experiments.search import GROWTH, num_asked, phases, trial_points
from launcher.experiments.transferred_values import searched
from launcher.study.search_runs import run_search
from launcher.study.stages import bank_key
from launcher.study.study_folder import open_ledger, plan_study
from launcher.views.search import search_body
from sweeps.search.source import SourceSignal
from sweeps.store.ledger import Ledger

OPTIMUM = -1.0  # beyond the plan's highest learning rate, 2^-3
GROWING = """
[search]
num_trials = 12
num_startup = 6
parallelism = 3
max_extensions = 2
extension_trials = 6
num_replicates = 8
can_be_off = ["clip_norm"]
axes = { weight_decay = [0.01, 0.1] }
"""


def noise(spec):
    """Some of it of the seed, as much again of the run."""
    of_seed, of_run = (
        int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") / 2**32
        for text in (str(spec.seed), spec.id)
    )
    return 0.01 * of_seed + 0.01 * of_run


def outcome(spec, optimum=OPTIMUM):
    octaves = math.log2(spec.hparams.learning_rate) - optimum
    clip = spec.hparams.clip_norm
    loss = (
        2.0
        + 0.05 * octaves**2
        + (0.2 if clip is None else 0.02 * math.log2(clip) ** 2)
        + noise(spec)
    )
    return ended(spec, None if octaves > 1.2 else loss)


class StopError(Exception):
    """The driver is gone."""


def driver(ledger, seed, stop_after=None, tell=outcome):
    """Runs what a source gives, outcomes coming in any order, until so many have."""
    rng = random.Random(seed)
    left = [math.inf if stop_after is None else stop_after]

    def drive(label, source, specs):
        running = {}
        while True:
            answer = source.next(ledger.results())
            if isinstance(answer, SourceSignal):
                if answer is SourceSignal.DONE and not running:
                    return
                spec = running.pop(rng.choice(sorted(running)))
                if left[0] == 0:
                    raise StopError
                left[0] -= 1
                ledger.commit(spec, tell(spec))
            elif answer.id not in ledger.results():
                running[answer.id] = answer

    return drive


def study_of(folder, name, part=GROWING):
    path = plan_with(folder, part)
    return plan_study(path, folder / name)


def carried_out(study, seed=0, tell=outcome):
    with open_ledger(study) as ledger:
        run_search(study, ledger, driver(ledger, seed, tell=tell), bank_key)
    return Ledger.read(study.study_dir)


def what_was_found(study, ledger):
    kinds = {
        kind: [(r.key, r.body) for r in ledger.records(kind)] for kind in ("suggestion", GROWTH)
    }
    return kinds, sorted(ledger.results()), searched(study, ledger)


@pytest.fixture(scope="module")
def whole(folder):
    study = study_of(folder, "whole")
    return study, carried_out(study)


def test_the_range_grows_until_it_brackets_the_optimum(whole):
    study, ledger = whole
    [record, *_] = ledger.records(GROWTH)
    [edge] = record.body["edges"]
    assert (edge["axis"], edge["side"], edge["range"][1], edge["wider"][1]) == (
        "learning_rate",
        "high",
        2**-3,
        2**-1,
    )
    first, second, *_ = phases(study, ledger)
    assert (first.num_trials, second.num_known, second.num_trials) == (12, 12, 18)
    points = trial_points(ledger)
    assert [math.log2(point["learning_rate"]) for point in points[12:16]] == [-2.5, -2, -1.5, -1]
    body = search_body(study, ledger, searched(study, ledger))
    assert abs(math.log2(body["best"]["learning_rate"]) - OPTIMUM) < 1
    assert num_asked(study, ledger) == (len(points) + 8, len(points) + 8)


def test_repeats_choose_the_best(whole):
    study, ledger = whole
    found = searched(study, ledger)
    again = found.replicated
    assert len(again.specs) == 8 == len({spec.id for spec in again.specs})
    assert study.plan.search.seed not in {spec.seed for spec in again.specs}
    best = again.comparison.standings[0]
    assert found.best_trial == again.candidates[best.candidate]
    assert found.best == study.space.rounded(found.points[found.best_trial])
    body = search_body(study, ledger, found)["replicates"]
    assert body["num_runs"] == sum(one["num_repeats"] for one in body["standings"]) == 8


def test_a_search_begins_with_the_points_of_its_plan(folder):
    given = (
        "[search]\nnum_trials = 8\nnum_startup = 4\nparallelism = 3\nwarm_start = [{ "
        "learning_rate = 0.01 }, {}]"
    )
    study = study_of(folder, "warm", given)
    with open_ledger(study) as ledger, pytest.raises(StopError):
        run_search(study, ledger, driver(ledger, 3, 1), bank_key)
    points = trial_points(carried_out(study))
    middle = study.space.at([0.5] * study.space.num_coordinates)
    assert points[:2] == [middle | {"learning_rate": 0.01}, middle] and len(points) == 8
    plain = trial_points(carried_out(study_of(folder, "cold", given.partition("warm_start")[0])))
    assert points[2] == plain[2], "the rest of the design stays where it was"


@pytest.mark.parametrize("stop_after", [0, 15, 25])
def test_a_search_interrupted_anywhere_goes_on_as_it_would_have(folder, whole, stop_after):
    study = dataclasses.replace(whole[0], study_dir=folder / f"stopped-{stop_after}")
    with open_ledger(study) as ledger, pytest.raises(StopError):
        run_search(study, ledger, driver(ledger, 7, stop_after), bank_key)
    ledger = carried_out(study, seed=stop_after)
    assert what_was_found(study, ledger) == what_was_found(*whole)


@pytest.mark.parametrize("first_lost", [0, 1])
def test_growths_that_a_repair_lost_are_found_again(whole, tmp_path, first_lost):
    """Their trials are kept, and must not be taken for trials of the search before it grew."""
    study, ledger = whole
    lost = ledger.records(GROWTH)[first_lost:]
    assert len(lost) == 2 - first_lost
    again, kept = replay(study.study_dir, tmp_path / "again", lambda record: record not in lost)
    assert len(trial_points(kept)) == phases(again, kept)[-1].num_trials == 12 + 6 * first_lost
    with open_ledger(again) as other:
        run_search(again, other, driver(other, 0, stop_after=0), bank_key)
    assert what_was_found(again, Ledger.read(again.study_dir)) == what_was_found(study, ledger)


def test_a_decay_that_would_leave_nothing_of_a_weight_is_said_at_validate(folder):
    code, body = ask(
        "validate", plan_with(folder, "[search]\naxes = { weight_decay = [0.1, 100.0] }")
    )
    assert code == 2 and "a step would take" in "\n".join(body["problems"])
