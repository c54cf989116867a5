"""Tests of the report of a study: while the study is under way, with lost loss curves, and if the
ladder fits no law.
"""

import itertools

import pytest
from tiny_study import copy_records, run_json

from forerun._launcher.main_run.logbook.logbook import write_logbook
from forerun._launcher.report.page.report_builder import build_report
from forerun._launcher.study.stages.study_findings import (
    build_decision_from_findings,
    gather_findings,
)
from forerun._launcher.study.stages.study_folder import read_recorded_study
from forerun._proxies.core import canon
from forerun._scaling_fits.laws.law import CannotTellError
from forerun._sweeps.store.curves import get_curve_path
from forerun._sweeps.store.errors import CurveCorrupt
from forerun._sweeps.store.ledger import Ledger


@pytest.fixture(scope="module")
def study(finished_study_dir):
    return read_recorded_study(finished_study_dir / "study")


@pytest.fixture(scope="module")
def body(study, finished_study_dir):
    """The report of the finished study as JSON."""
    ledger = Ledger.read(finished_study_dir / "study")
    return build_report(study, ledger, gather_findings(study, ledger)).to_json()


def test_stages_appear_in_the_report_one_after_another_and_none_disappears(
    finished_study_dir, tmp_path
):
    sections = ("search", "transfer", "ladder", "fit", "choice", "digest")
    total = len(Ledger.read(finished_study_dir / "study").read_records())
    reached = []
    for number in sorted({*range(2, total, 11), total}):
        study, ledger = copy_records(
            finished_study_dir / "study",
            tmp_path / str(number),
            lambda record, num_records=number: record.seq < num_records,
        )
        body = build_report(study, ledger, gather_findings(study, ledger)).to_json()
        canon.to_canonical_json(body)  # fails on NaN
        reached.append([key for key in sections if body[key]])
    assert reached[0] == []
    assert reached[-1] == list(sections)
    assert all(set(before) <= set(after) for before, after in itertools.pairwise(reached))
    assert len({len(stages) for stages in reached}) >= 3, "some moments are between stages"


@pytest.mark.parametrize("is_cached", [False, True], ids=["not cached", "cached"])
@pytest.mark.parametrize("damage", ["lost", "flipped"])
def test_lost_or_damaged_curve_prevents_the_config_and_not_the_report(
    finished_study_dir, tmp_path, capsys, damage, is_cached
):
    study, ledger = copy_records(
        finished_study_dir / "study", tmp_path / "study", lambda record: True
    )
    findings = gather_findings(study, ledger)
    if is_cached:
        assert build_report(study, ledger).digest is not None
    path = get_curve_path(study.study_dir, findings.ladder[0].id)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()
    if damage == "flipped":
        path.write_bytes(content)
    assert build_report(study, ledger) == build_report(study, ledger)
    capsys.readouterr()
    body = build_report(study, ledger).to_json()  # prints the message again
    assert (body["digest"], body["has_logbook"]) == (None, False)
    assert body["choice"]["prediction"]["loss"] > 0
    assert "has no launch config" in capsys.readouterr().err
    with pytest.raises(CurveCorrupt, match="restore it from a copy"):
        build_decision_from_findings(study, findings)
    write_logbook(study.study_dir)
    assert build_report(study, ledger, findings).has_logbook is True


def test_numbers_of_the_report_agree(study, body):
    spend, ledger = body["spend"], Ledger.read(study.study_dir)
    assert spend["num_runs"] == len(ledger.get_results()) == sum(spend["by_status"].values())
    assert spend["flops_causal"] == sum(result.flops for result in ledger.get_results().values())
    assert len(body["search"]["trials"]) == study.plan.search.num_trials
    trials = body["search"]["trials"]
    best_rate = body["search"]["best"]["learning_rate"]
    best = next(trial for trial in trials if float(f"{trial['learning_rate']:.3g}") == best_rate)
    assert best["loss_nats"] == min(trial["loss_nats"] for trial in trials)
    assert {run["arm"] for run in body["transfer"]["tests"][0]["runs"]} == {"mup", "sp"}
    assert len(body["ladder"]["rungs"]) == len(study.plan.ladder.widths) * len(
        study.plan.ladder.num_steps
    )
    frontier = [point["flops"] for point in body["frontier"]]
    assert frontier == sorted(frontier)
    assert frontier[-1] == pytest.approx(study.plan.target.budget_flops)
    assert body["digest"] == canon.compute_content_id(body["decision"])


def test_ladder_that_fits_no_law_cannot_tell(finished_study_dir, tmp_path, study):
    """All rungs (runs of the ladder) but two diverged: the fit has a status, and no main run can be
    chosen.
    """
    ladder = [
        spec.id for spec in gather_findings(study, Ledger.read(finished_study_dir / "study")).ladder
    ]

    def edit(record):
        if record.key not in ladder[2:]:
            return record.body
        lost = {"status": "diverged", "loss_nats": None, "reason": "planted"}
        return {**record.body, "result": {**record.body["result"], **lost}}

    edited_study, ledger = copy_records(
        finished_study_dir / "study", tmp_path / "study", lambda record: record.kind != "fit", edit
    )
    findings = gather_findings(edited_study, ledger)
    assert findings.fit is not None
    assert findings.choice is None
    body = build_report(edited_study, ledger, findings).to_json()
    assert body["digest"] is None
    with pytest.raises(CannotTellError):
        build_decision_from_findings(edited_study, findings)
    code, refused = run_json("freeze", tmp_path / "study")
    assert (code, refused["error"]) == (4, "CannotTellError")
