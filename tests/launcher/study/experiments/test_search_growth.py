"""Tests of a complete search whose losses are planted (nothing is trained): ranges grow, trials are
repeated, and an interrupted search ends like an uninterrupted one.
"""

import dataclasses
import math

import pytest
from search_case import OPTIMUM, StopError, make_driver, make_study
from tiny_study import copy_records, run_json, write_plan_with

from forerun._launcher.report.views.search import build_search_section
from forerun._launcher.study.experiments.search import GROWTH, SearchState
from forerun._launcher.study.experiments.transfer_results import load_search_result
from forerun._launcher.study.stages.search_runs import run_search
from forerun._launcher.study.stages.study_folder import open_ledger
from forerun._sweeps.store.ledger import Ledger


def run_whole_search(study, seed=0):
    """Run a search to its end; return its ledger."""
    with open_ledger(study) as ledger:
        run_search(study, ledger, make_driver(ledger, seed))
    return Ledger.read(study.study_dir)


def read_findings(study, ledger):
    """Return the suggestions and growths of a search, the ids of its runs, and its result."""
    records = {}
    for kind in ("suggestion", GROWTH):
        records[kind] = [(record.key, record.body) for record in ledger.read_records(kind)]
    return records, sorted(ledger.get_results()), load_search_result(study, ledger)


@pytest.fixture(scope="module")
def finished_search(folder):
    """A study and its ledger after an uninterrupted search."""
    study = make_study(folder, "finished")
    return study, run_whole_search(study)


def test_range_grows_until_it_brackets_the_optimum(finished_search):
    study, ledger = finished_search
    [record, *_] = ledger.read_records(GROWTH)
    [edge] = record.body["edges"]
    assert (edge["axis"], edge["side"], edge["range"][1], edge["wider"][1]) == (
        "learning_rate",
        "high",
        2**-3,
        2**-1,
    )
    state = SearchState(study, ledger)
    first, second, *_ = state.phases
    assert (first.num_trials, second.num_known, second.num_trials) == (12, 12, 18)
    points = state.points
    # The first trials of the second phase probe the space beyond the old end, up to the new end.
    assert [math.log2(point["learning_rate"]) for point in points[12:16]] == [-2.5, -2, -1.5, -1]
    body = build_search_section(study, ledger, load_search_result(study, ledger))
    assert abs(math.log2(body.best["learning_rate"]) - OPTIMUM) < 1
    num_runs = len(points) + study.plan.search.num_replicates
    assert state.count_runs() == (num_runs, num_runs)


def test_repeats_decide_the_best_trial(finished_search):
    study, ledger = finished_search
    result = load_search_result(study, ledger)
    replicated = result.replicated
    assert len(replicated.specs) == 8 == len({spec.id for spec in replicated.specs})
    assert study.plan.search.seed not in {spec.seed for spec in replicated.specs}
    best = replicated.comparison.standings[0]
    assert result.best_trial == replicated.candidates[best.candidate]
    assert result.best == study.space.round_point(result.points[result.best_trial])
    body = build_search_section(study, ledger, result).replicates
    num_repeats = sum(standing.num_repeats for standing in body.standings)
    assert body.num_runs == num_repeats == 8


def test_search_begins_with_the_plans_warm_start(folder):
    plan_part = (
        "[search]\nnum_trials = 8\nnum_startup = 4\nparallelism = 3\nwarm_start = [{ "
        "learning_rate = 0.01 }, {}]"
    )
    study = make_study(folder, "warm", plan_part)
    with open_ledger(study) as ledger, pytest.raises(StopError):
        run_search(study, ledger, make_driver(ledger, 3, 1))
    points = SearchState(study, run_whole_search(study)).points
    middle = study.space.make_point([0.5] * study.space.num_coordinates)
    assert points[:2] == [middle | {"learning_rate": 0.01}, middle] and len(points) == 8
    without_warm_start = make_study(folder, "cold", plan_part.partition("warm_start")[0])
    cold_points = SearchState(without_warm_start, run_whole_search(without_warm_start)).points
    assert points[2] == cold_points[2], "the other startup points do not change"


@pytest.mark.parametrize("stop_after", [0, 15, 25])
def test_interrupted_search_ends_like_an_uninterrupted_one(folder, finished_search, stop_after):
    study = dataclasses.replace(finished_search[0], study_dir=folder / f"stopped-{stop_after}")
    with open_ledger(study) as ledger, pytest.raises(StopError):
        run_search(study, ledger, make_driver(ledger, 7, stop_after))
    ledger = run_whole_search(study, seed=stop_after)
    assert read_findings(study, ledger) == read_findings(*finished_search)


@pytest.mark.parametrize("first_lost", [0, 1])
def test_growths_lost_in_a_repair_are_made_again(finished_search, tmp_path, first_lost):
    """A repair may lose the record of a growth and keep the trials after it. These must not count
    as trials until the growth is recorded again.
    """
    study, ledger = finished_search
    lost = ledger.read_records(GROWTH)[first_lost:]
    assert len(lost) == 2 - first_lost
    repaired, kept = copy_records(
        study.study_dir, tmp_path / "repaired", lambda record: record not in lost
    )
    num_trials = 12 + 6 * first_lost
    state = SearchState(repaired, kept)
    assert len(state.points) == num_trials == state.phases[-1].num_trials
    with open_ledger(repaired) as repaired_ledger:
        driver = make_driver(repaired_ledger, 0, stop_after=0)
        run_search(repaired, repaired_ledger, driver)
    findings = read_findings(repaired, Ledger.read(repaired.study_dir))
    assert findings == read_findings(study, ledger)


def test_too_large_weight_decay_is_refused_at_validate(folder):
    code, body = run_json(
        "validate", write_plan_with(folder, "[search]\naxes = { weight_decay = [0.1, 100.0] }")
    )
    assert code == 2 and "a step would take" in "\n".join(body["problems"])
