import contextlib
import dataclasses
import os
import sqlite3
import subprocess
import sys
import textwrap

import pytest
from sweep_fakes import make_spec, make_specs, outcome, pruned_outcome

from proxies.core.spec import Run
from sweeps.store.curves import store_curve
from sweeps.store.errors import (
    DuplicateRecord,
    LedgerCorrupt,
    LedgerLost,
    PlanChanged,
    StaleDriver,
    StudyHeld,
    SweepError,
)
from sweeps.store.ledger import LEDGER_NAME, Ledger
from sweeps.store.lock import LOCK_NAME

PLAN = {"seed": 1, "search": {"num_trials": 12, "learning_rate": [1e-4, 0.1]}}


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open(tmp_path, PLAN, create=True) as ledger:
        yield ledger


def reopened(ledger, tmp_path):
    ledger.close()
    return Ledger.open(tmp_path, PLAN, create=False)


def test_a_changed_plan_is_refused_key_by_key(ledger, tmp_path):
    ledger.close()
    changed = {
        "seed": 2,
        "search": {"num_trials": 12, "learning_rate": [1e-4, 0.2]},
        "model": {"width": 64},
    }
    with pytest.raises(PlanChanged) as caught:
        Ledger.open(tmp_path, changed, create=True)
    assert caught.value.changes == {
        "seed": ("1", "2"),
        "search.learning_rate": ("[0.0001,0.1]", "[0.0001,0.2]"),
        "model.width": ("(not there)", "64"),
    }
    assert "search.learning_rate: [0.0001,0.1] -> [0.0001,0.2]" in str(caught.value)
    assert "--study ANOTHER: no run is recorded" in str(caught.value)
    # a refusal holds nothing and changes nothing
    with Ledger.open(tmp_path, PLAN, create=False) as ledger:
        ledger.commit(make_spec(), outcome(make_spec())[0])
    with pytest.raises(PlanChanged) as caught:
        Ledger.open(tmp_path, changed, create=True, is_amendable=lambda key: True)
    assert f"forerun run PLAN --study ANOTHER --fork {tmp_path}" in str(caught.value)


def test_a_plan_may_be_amended_while_no_run_is_recorded(ledger, tmp_path):
    ledger.close()
    changed = PLAN | {"seed": 2}
    with pytest.raises(PlanChanged):
        Ledger.open(tmp_path, changed, create=False, is_amendable=lambda key: key == "model")
    for plan in (changed, PLAN, PLAN, changed):
        Ledger.open(tmp_path, plan, create=False, is_amendable=lambda key: key == "seed").close()
        assert Ledger.read(tmp_path).plan == plan
        with Ledger.open(tmp_path, plan, create=False) as ledger:
            if not ledger.records_for_plan("count"):
                ledger.append_for_plan("count", "2", len(ledger.records("count")))
    assert len(Ledger.read(tmp_path).records("plan")) == 4
    assert len(Ledger.read(tmp_path).records("count")) == 3, "one for each amended plan"
    assert Ledger.read(tmp_path).records_for_plan("count") == {"2": 2}


@pytest.mark.parametrize("how", ["missing", "empty"])
@pytest.mark.parametrize("create", [True, False])
def test_a_lost_ledger_beside_curves_is_refused(ledger, tmp_path, how, create):
    spec = make_spec()
    store_curve(tmp_path, spec.id, outcome(spec)[1])
    ledger.close()
    path = tmp_path / LEDGER_NAME
    path.unlink() if how == "missing" else path.write_bytes(b"")
    with pytest.raises(
        LedgerLost, match="missing or empty, yet curves/ holds finished runs: restore it"
    ) as caught:
        Ledger.open(tmp_path, PLAN, create=create)
    # there is nothing that it could read
    assert "repair" not in str(caught.value).replace(str(tmp_path), "")
    with pytest.raises(LedgerLost):
        Ledger.read(tmp_path)


def test_a_second_driver_is_told_who_holds_the_study(ledger, tmp_path):
    script = f"""
        from pathlib import Path
        from sweeps.store.ledger import Ledger
        Ledger.open(Path({str(tmp_path)!r}), {PLAN!r}, create=False)
    """
    second = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert "StudyHeld" in second.stderr
    assert f"pid {os.getpid()} on {os.uname().nodename}" in second.stderr
    with pytest.raises(StudyHeld, match=f"pid {os.getpid()}"):  # nor twice in one process
        Ledger.open(tmp_path, PLAN, create=False)


def test_a_driver_that_was_taken_over_commits_nothing(ledger, tmp_path):
    (tmp_path / LOCK_NAME).unlink()  # an operator, or a filesystem without locks
    with Ledger.open(tmp_path, PLAN, create=False) as other:
        with pytest.raises(StaleDriver, match="taken over this study"):
            ledger.append("note", "0", "from the stale one")
        other.append("note", "0", "from the new one")
    assert [record.body for record in Ledger.read(tmp_path).records("note")] == ["from the new one"]


def test_a_full_disk_loses_nothing(tmp_path):
    """A real limit on file sizes, in a process of its own."""
    script = f"""
        import resource, signal, sys
        from pathlib import Path
        from sweeps.store.errors import DiskFull
        from sweeps.store.ledger import Ledger
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        ledger = Ledger.open(Path({str(tmp_path)!r}), {PLAN!r}, create=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
        try:
            for index in range(1000):
                ledger.append("note", str(index), "x" * 500)
                print(index, flush=True)
        except DiskFull as error:
            sys.exit(f"DiskFull: {{error}}")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert done.stderr.startswith("DiskFull"), done.stderr
    with Ledger.open(tmp_path, PLAN, create=False) as ledger:
        acknowledged = done.stdout.split()
        assert len(acknowledged) > 20
        assert [record.key for record in ledger.records("note")] == acknowledged


def test_what_was_pruned_is_no_outcome_of_the_whole_and_may_have_one(ledger, tmp_path):
    first, second, third = specs = make_specs(3)
    cut = {spec.id: pruned_outcome(spec, 2)[0] for spec in specs[:2]}
    for result, spec in zip(cut.values(), specs, strict=False):
        ledger.commit(spec, result)
    for spec in (second, third):
        ledger.commit(spec, outcome(spec)[0])
    with reopened(ledger, tmp_path) as again:
        whole = {spec.id: outcome(spec)[0] for spec in (second, third)}
        assert [record.kind for record in again.records()[-5:-1]] == [
            "pruned",
            "pruned",
            "result",
            "result",
        ]
        assert dict(again.results()) == whole
        assert dict(again.first_results()) == whole | cut, "a search goes by what came first"
        assert (
            list(again.own_results())
            == [run.result for run in again.runs()]
            == [*cut.values(), *whole.values()]
        )
        for spec in specs[1:]:
            with pytest.raises(DuplicateRecord):
                again.commit(spec, pruned_outcome(spec, 2)[0])
        with pytest.raises(DuplicateRecord):
            again.commit(first, cut[first.id])


@pytest.mark.parametrize("forge", ["finished as pruned", "pruned as whole", "pruned at its end"])
def test_a_kind_that_its_outcome_is_not_is_no_ledger(ledger, tmp_path, forge):
    (spec,) = make_specs(1)
    whole, part = outcome(spec)[0], pruned_outcome(spec, 2)[0]
    late = dataclasses.replace(part, num_steps=spec.schedule.num_steps)
    forged = {"finished as pruned": ("pruned", whole), "pruned as whole": ("result", part)}
    kind, result = forged.get(forge, ("pruned", late))
    with pytest.raises(LedgerCorrupt, match=rf"{kind}: its run is .* after \d+ steps"):
        ledger.append(kind, spec.id, Run(spec=spec, result=result))
    ledger.close()
    with pytest.raises(LedgerCorrupt, match=kind):
        Ledger.read(tmp_path)


CUT_SHORT = """
import os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA journal_mode = TRUNCATE")
connection.execute("PRAGMA cache_size = 1")
connection.execute("BEGIN")
connection.execute("UPDATE records SET body = body || 'x', hash = hash || 'x'")
os._exit(0)
"""


def cut_short(study):
    """A commit that a crash cut short: changed pages in the ledger, what they held in the
    journal.
    """
    subprocess.run([sys.executable, "-c", CUT_SHORT, str(study / LEDGER_NAME)], check=True)
    journal = study / f"{LEDGER_NAME}-journal"
    assert journal.stat().st_size > 512
    return journal


def bytes_in(study):
    return {path.name: path.read_bytes() for path in study.iterdir()}


def test_readers_change_nothing_whatever_journal_lies_beside_the_ledger(tmp_path):
    for name, num_notes in (("one", 40), ("other", 200)):
        with Ledger.open(tmp_path / name, PLAN, create=True) as ledger:
            for number in range(num_notes):
                ledger.append("note", str(number), {"text": 50 * name})
    one, other = tmp_path / "one", tmp_path / "other"
    journal = cut_short(one)
    own = bytes_in(one)
    assert len(Ledger.read(one).records("note")) == 40, "its own journal is heeded"
    assert bytes_in(one) == own
    (other / journal.name).write_bytes(journal.read_bytes())
    foreign = bytes_in(other)
    for read in (Ledger.read, lambda study: Ledger.open(study, PLAN, create=False)):
        with pytest.raises(LedgerCorrupt, match="nothing was changed"):
            read(other)
        assert {name: text for name, text in bytes_in(other).items() if name != LOCK_NAME} == {
            name: text for name, text in foreign.items() if name != LOCK_NAME
        }
    (other / journal.name).unlink()
    assert len(Ledger.read(other).records("note")) == 200
    with Ledger.open(one, PLAN, create=False) as ledger:
        assert len(ledger.records("note")) == 40


def test_a_reader_holds_to_what_was_there_when_it_read(ledger, tmp_path):
    ledger.append("note", "0", "before")
    reader = Ledger.read(tmp_path)
    ledger.append("note", "1", "after")
    assert [record.body for record in reader.records("note")] == ["before"] and reader.find(
        "note", "1"
    ) is None
    ledger.close()
    assert ledger.find("note", "1").body == "after", "a driver that has ended reads what it wrote"
    (tmp_path / LEDGER_NAME).unlink()
    with Ledger.open(tmp_path, PLAN, create=True) as other:
        other.append_all([("note", str(number), "of another study") for number in range(3)])
    with pytest.raises(SweepError, match="the ledger was replaced; run the command again"):
        reader.find("note", "0")


def test_a_record_that_is_damaged_after_it_was_verified_is_refused(ledger, tmp_path):
    ledger.append_all([("note", "0", "whole"), ("note", "1", "damaged")])
    with contextlib.closing(sqlite3.connect(tmp_path / LEDGER_NAME)) as disk, disk:
        disk.execute("UPDATE records SET body = '\"other\"' WHERE kind = 'note' AND key = '1'")
    for one in (ledger, Ledger.read):
        with pytest.raises(
            LedgerCorrupt, match=r"record 3 is not what was written.*forerun repair"
        ):
            (one if one is ledger else one(tmp_path)).find("note", "1")
    assert ledger.find("note", "0").body == "whole"


def test_runs_are_the_same_from_the_file_and_from_memory(ledger, tmp_path):
    """A driver reads them back, a reader holds them."""
    first, second = make_specs(2)
    ledger.commit(first, pruned_outcome(first, 2)[0])
    ledger.commit_all([Run(spec=spec, result=outcome(spec)[0]) for spec in (first, second)])
    reader = Ledger.read(tmp_path)
    assert (
        ledger.runs() == reader.runs() == tuple(reader.each_run())
        and ledger.num_runs == reader.num_runs == 3
    )
    assert [run.result.status == "pruned" for run in ledger.each_run()] == [True, False, False]


def test_a_ledger_that_was_moved_from_under_its_driver_is_said_so(ledger, tmp_path):
    moved = (tmp_path / LEDGER_NAME).rename(tmp_path / "elsewhere.db")
    with pytest.raises(SweepError, match="was moved or removed"):
        ledger.append("note", "1", {})
    moved.rename(tmp_path / LEDGER_NAME)
    with reopened(ledger, tmp_path) as again:
        again.append("note", "1", {})
