"""What is gathered from a ledger, at every moment of a study's life."""

import itertools

import pytest
from tiny_study import ask, replay

from launcher.logbook.logbook import write_logbook
from launcher.report.body import body_of
from launcher.study.evidence import decision_of, gather
from launcher.study.study_folder import recorded_study
from proxies.core import canon
from scaling_fits.laws.law import CannotTellError
from sweeps.store.curves import curve_path
from sweeps.store.errors import CurveCorrupt
from sweeps.store.ledger import Ledger


@pytest.fixture(scope="module")
def study(finished):
    return recorded_study(finished / "study")


@pytest.fixture(scope="module")
def body(study, finished):
    ledger = Ledger.read(finished / "study")
    return body_of(study, ledger, gather(study, ledger))


def test_a_report_at_every_moment(finished, tmp_path):
    """Stage after stage appears, nothing that was said disappears, and nothing crashes between."""
    total = len(Ledger.read(finished / "study").records())
    reached = []
    for number in sorted({*range(2, total, 11), total}):
        study, ledger = replay(
            finished / "study", tmp_path / str(number), lambda r, most=number: r.seq < most
        )
        body = body_of(study, ledger, gather(study, ledger))
        canon.canonical(body)
        reached.append(
            [
                key
                for key in ("search", "transfer", "ladder", "fit", "choice", "digest")
                if body[key]
            ]
        )
    assert reached[0] == []
    assert reached[-1] == ["search", "transfer", "ladder", "fit", "choice", "digest"]
    assert all(set(before) <= set(after) for before, after in itertools.pairwise(reached))
    assert len({len(stages) for stages in reached}) >= 3, "some moments lie between stages"


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("harm", ["lost", "flipped"])
def test_a_lost_curve_costs_the_config_and_not_the_report(finished, tmp_path, capsys, harm, warm):
    study, ledger = replay(finished / "study", tmp_path / "study", lambda r: True)
    found = gather(study, ledger)
    if warm:
        assert body_of(study, ledger)["digest"] is not None
    path = curve_path(study.study_dir, found.ladder[0].id)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()
    if harm == "flipped":
        path.write_bytes(content)
    assert body_of(study, ledger) == body_of(study, ledger)
    capsys.readouterr()
    body = body_of(study, ledger)  # and again: it is said each time
    assert (body["digest"], body["has_logbook"]) == (None, False)
    assert body["choice"]["prediction"]["loss"] > 0
    assert "has no launch config" in capsys.readouterr().err
    with pytest.raises(CurveCorrupt, match="restore it from a copy"):
        decision_of(study, found)
    write_logbook(study.study_dir)
    assert body_of(study, ledger, found)["has_logbook"] is True


def test_the_report_adds_up(study, body):
    spend, ledger = body["spend"], Ledger.read(study.study_dir)
    assert spend["num_runs"] == len(ledger.results()) == sum(spend["by_status"].values())
    assert spend["flops_causal"] == sum(result.flops for result in ledger.results().values())
    assert len(body["search"]["trials"]) == study.plan.search.num_trials
    assert min(t["loss_nats"] for t in body["search"]["trials"]) == next(
        t["loss_nats"]
        for t in body["search"]["trials"]
        if float(f"{t['learning_rate']:.3g}") == body["search"]["best"]["learning_rate"]
    )
    assert {run["arm"] for run in body["transfer"]["tests"][0]["runs"]} == {"mup", "sp"}
    assert len(body["ladder"]["rungs"]) == len(study.plan.ladder.widths) * len(
        study.plan.ladder.num_steps
    )
    frontier = [point["flops"] for point in body["frontier"]]
    assert frontier == sorted(frontier)
    assert frontier[-1] == pytest.approx(study.plan.target.budget_flops)
    assert body["digest"] == canon.content_id(body["decision"])


def test_a_ladder_that_fits_no_law_cannot_tell(finished, tmp_path, study):
    """All but two rungs diverged: there is an end, and no number."""
    ladder = [spec.id for spec in gather(study, Ledger.read(finished / "study")).ladder]

    def edit(record):
        if record.key not in ladder[2:]:
            return record.body
        lost = {"status": "diverged", "loss_nats": None, "reason": "planted"}
        return {**record.body, "result": {**record.body["result"], **lost}}

    other, ledger = replay(
        finished / "study", tmp_path / "study", lambda record: record.kind != "fit", edit
    )
    found = gather(other, ledger)
    assert found.fit is not None
    assert found.choice is None
    body = body_of(other, ledger, found)
    assert body["digest"] is None
    with pytest.raises(CannotTellError):
        decision_of(other, found)
    code, refused = ask("freeze", tmp_path / "study")
    assert (code, refused["error"]) == (4, "CannotTellError")
