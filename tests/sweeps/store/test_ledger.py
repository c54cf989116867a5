"""Tests of a study's ledger, the database of its records: plans, locks, full disks, crashes, and
readers.
"""

import contextlib
import dataclasses
import os
import sqlite3
import subprocess
import sys
import textwrap

import pytest
from sweep_fakes import make_outcome, make_pruned_outcome, make_spec, make_specs

from forerun._proxies.core.spec import Run
from forerun._sweeps.store.curves import store_curve
from forerun._sweeps.store.errors import (
    DuplicateRecord,
    LedgerCorrupt,
    LedgerLost,
    PlanChanged,
    StaleDriver,
    StudyHeld,
    SweepError,
)
from forerun._sweeps.store.ledger import LEDGER_NAME, Ledger
from forerun._sweeps.store.lock import LOCK_NAME

PLAN = {"seed": 1, "search": {"num_trials": 12, "learning_rate": [1e-4, 0.1]}}


@pytest.fixture
def ledger(tmp_path):
    """A new ledger, open for writing."""
    with Ledger.open(tmp_path, PLAN, create=True) as ledger:
        yield ledger


def reopen(ledger, tmp_path):
    ledger.close()
    return Ledger.open(tmp_path, PLAN, create=False)


def test_changed_plan_is_refused_with_every_changed_key(ledger, tmp_path):
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
    # Refusing a plan leaves no lock and changes nothing.
    with Ledger.open(tmp_path, PLAN, create=False) as ledger:
        ledger.commit(make_spec(), make_outcome(make_spec())[0])
    with pytest.raises(PlanChanged) as caught:
        Ledger.open(tmp_path, changed, create=True, is_amendable=lambda key: True)
    assert f"forerun run PLAN --study ANOTHER --fork {tmp_path}" in str(caught.value)


def test_plan_may_be_amended_before_the_first_run(ledger, tmp_path):
    ledger.close()
    changed = PLAN | {"seed": 2}
    with pytest.raises(PlanChanged):
        Ledger.open(tmp_path, changed, create=False, is_amendable=lambda key: key == "model")
    for plan in (changed, PLAN, PLAN, changed):
        Ledger.open(tmp_path, plan, create=False, is_amendable=lambda key: key == "seed").close()
        assert Ledger.read(tmp_path).plan == plan
        with Ledger.open(tmp_path, plan, create=False) as ledger:
            if not ledger.read_records_for_plan("count"):
                ledger.append_for_plan("count", "2", len(ledger.read_records("count")))
    assert len(Ledger.read(tmp_path).read_records("plan")) == 4
    # The second of the two equal plans is no amendment, so it has the record of the first.
    assert len(Ledger.read(tmp_path).read_records("count")) == 3
    assert Ledger.read(tmp_path).read_records_for_plan("count") == {"2": 2}


@pytest.mark.parametrize("how", ["missing", "empty"])
@pytest.mark.parametrize("create", [True, False])
def test_missing_ledger_is_refused_if_there_are_curves(ledger, tmp_path, how, create):
    spec = make_spec()
    store_curve(tmp_path, spec.id, make_outcome(spec)[1])
    ledger.close()
    path = tmp_path / LEDGER_NAME
    path.unlink() if how == "missing" else path.write_bytes(b"")
    with pytest.raises(
        LedgerLost, match="missing or empty, yet curves/ holds finished runs: restore it"
    ) as caught:
        Ledger.open(tmp_path, PLAN, create=create)
    # `forerun repair` has nothing to read, so it is not suggested.
    assert "repair" not in str(caught.value).replace(str(tmp_path), "")
    with pytest.raises(LedgerLost):
        Ledger.read(tmp_path)


def test_second_driver_is_refused_with_the_name_of_the_first(ledger, tmp_path):
    script = f"""
        from pathlib import Path
        from forerun._sweeps.store.ledger import Ledger
        Ledger.open(Path({str(tmp_path)!r}), {PLAN!r}, create=False)
    """
    second = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert "StudyHeld" in second.stderr
    assert f"pid {os.getpid()} on {os.uname().nodename}" in second.stderr
    # A second ledger in the same process is refused too.
    with pytest.raises(StudyHeld, match=f"pid {os.getpid()}"):
        Ledger.open(tmp_path, PLAN, create=False)


def test_replaced_driver_commits_nothing(ledger, tmp_path):
    # An operator did this, or the file system has no locks.
    (tmp_path / LOCK_NAME).unlink()
    with Ledger.open(tmp_path, PLAN, create=False) as new_ledger:
        with pytest.raises(StaleDriver, match="taken over this study"):
            ledger.append("note", "0", "from the stale one")
        new_ledger.append("note", "0", "from the new one")
    assert [record.body for record in Ledger.read(tmp_path).read_records("note")] == [
        "from the new one"
    ]


def test_full_disk_loses_no_acknowledged_record(tmp_path):
    """Set a real limit on file sizes, in a new process."""
    script = f"""
        import resource, signal, sys
        from pathlib import Path
        from forerun._sweeps.store.errors import DiskFull
        from forerun._sweeps.store.ledger import Ledger
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
        assert [record.key for record in ledger.read_records("note")] == acknowledged


def test_pruned_run_may_be_finished_later(ledger, tmp_path):
    specs = make_specs(3)
    first, second, third = specs
    pruned = {spec.id: make_pruned_outcome(spec, 2)[0] for spec in specs[:2]}
    for result, spec in zip(pruned.values(), specs, strict=False):
        ledger.commit(spec, result)
    for spec in (second, third):
        ledger.commit(spec, make_outcome(spec)[0])
    with reopen(ledger, tmp_path) as reopened:
        finished = {spec.id: make_outcome(spec)[0] for spec in (second, third)}
        # The last record is that of the second driver
        assert [record.kind for record in reopened.read_records()[-5:-1]] == [
            "pruned",
            "pruned",
            "result",
            "result",
        ]
        assert dict(reopened.get_results()) == finished
        assert dict(reopened.get_first_results()) == finished | pruned, (
            "a search uses the first result of a run"
        )
        assert (
            list(reopened.get_own_results())
            == [run.result for run in reopened.read_runs()]
            == [*pruned.values(), *finished.values()]
        )
        for spec in specs[1:]:
            with pytest.raises(DuplicateRecord):
                reopened.commit(spec, make_pruned_outcome(spec, 2)[0])
        with pytest.raises(DuplicateRecord):
            reopened.commit(first, pruned[first.id])


@pytest.mark.parametrize("forgery", ["finished as pruned", "pruned as whole", "pruned at its end"])
def test_record_kind_that_contradicts_its_result_is_refused(ledger, tmp_path, forgery):
    (spec,) = make_specs(1)
    finished, pruned = make_outcome(spec)[0], make_pruned_outcome(spec, 2)[0]
    pruned_at_end = dataclasses.replace(pruned, num_steps=spec.schedule.num_steps)
    forged = {"finished as pruned": ("pruned", finished), "pruned as whole": ("result", pruned)}
    kind, result = forged.get(forgery, ("pruned", pruned_at_end))
    with pytest.raises(LedgerCorrupt, match=rf"{kind}: its run is .* after \d+ steps"):
        ledger.append(kind, spec.id, Run(spec=spec, result=result))
    ledger.close()
    with pytest.raises(LedgerCorrupt, match=kind):
        Ledger.read(tmp_path)


INTERRUPTED_COMMIT = """
import os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA journal_mode = TRUNCATE")
connection.execute("PRAGMA cache_size = 1")
connection.execute("BEGIN")
connection.execute("UPDATE records SET body = body || 'x', hash = hash || 'x'")
os._exit(0)
"""


def interrupt_commit(study):
    """Leave the files of a commit that crashed: changed pages in the ledger, and their old content
    in the journal.
    """
    subprocess.run([sys.executable, "-c", INTERRUPTED_COMMIT, str(study / LEDGER_NAME)], check=True)
    journal = study / f"{LEDGER_NAME}-journal"
    assert journal.stat().st_size > 512
    return journal


def read_files(study):
    return {path.name: path.read_bytes() for path in study.iterdir()}


def test_readers_change_nothing_with_any_journal_next_to_the_ledger(tmp_path):
    for name, num_notes in (("one", 40), ("other", 200)):
        with Ledger.open(tmp_path / name, PLAN, create=True) as ledger:
            for number in range(num_notes):
                ledger.append("note", str(number), {"text": 50 * name})
    own_study, foreign_study = tmp_path / "one", tmp_path / "other"
    journal = interrupt_commit(own_study)
    own_files = read_files(own_study)
    assert len(Ledger.read(own_study).read_records("note")) == 40, "its own journal is applied"
    assert read_files(own_study) == own_files
    (foreign_study / journal.name).write_bytes(journal.read_bytes())
    foreign_files = read_files(foreign_study)
    foreign_files.pop(LOCK_NAME)
    for open_ledger in (Ledger.read, lambda study: Ledger.open(study, PLAN, create=False)):
        with pytest.raises(LedgerCorrupt, match="nothing was changed"):
            open_ledger(foreign_study)
        files = read_files(foreign_study)
        files.pop(LOCK_NAME)
        assert files == foreign_files
    (foreign_study / journal.name).unlink()
    assert len(Ledger.read(foreign_study).read_records("note")) == 200
    with Ledger.open(own_study, PLAN, create=False) as ledger:
        assert len(ledger.read_records("note")) == 40


def test_reader_keeps_the_state_it_read(ledger, tmp_path):
    ledger.append("note", "0", "before")
    reader = Ledger.read(tmp_path)
    ledger.append("note", "1", "after")
    assert [record.body for record in reader.read_records("note")] == ["before"]
    assert reader.find("note", "1") is None
    ledger.close()
    assert ledger.find("note", "1").body == "after", "a closed driver can read what it wrote"
    (tmp_path / LEDGER_NAME).unlink()
    with Ledger.open(tmp_path, PLAN, create=True) as other_ledger:
        other_ledger.append_all([("note", str(number), "of another study") for number in range(3)])
    with pytest.raises(SweepError, match="the ledger was replaced; run the command again"):
        reader.find("note", "0")


def test_record_damaged_after_verification_is_refused(ledger, tmp_path):
    ledger.append_all([("note", "0", "whole"), ("note", "1", "damaged")])
    with contextlib.closing(sqlite3.connect(tmp_path / LEDGER_NAME)) as disk, disk:
        disk.execute("UPDATE records SET body = '\"other\"' WHERE kind = 'note' AND key = '1'")
    message = r"record 3 is not what was written.*forerun repair"
    with pytest.raises(LedgerCorrupt, match=message):
        ledger.find("note", "1")
    with pytest.raises(LedgerCorrupt, match=message):
        Ledger.read(tmp_path).find("note", "1")
    assert ledger.find("note", "0").body == "whole"


def test_runs_are_the_same_from_driver_and_reader(ledger, tmp_path):
    """A driver reads its runs from the file; a reader keeps them in memory."""
    first, second = make_specs(2)
    ledger.commit(first, make_pruned_outcome(first, 2)[0])
    ledger.commit_all([Run(spec=spec, result=make_outcome(spec)[0]) for spec in (first, second)])
    reader = Ledger.read(tmp_path)
    assert ledger.read_runs() == reader.read_runs() == tuple(reader.iterate_runs())
    assert ledger.num_runs == reader.num_runs == 3
    assert [run.result.status == "pruned" for run in ledger.iterate_runs()] == [True, False, False]


def test_ledger_moved_while_its_driver_runs_is_reported(ledger, tmp_path):
    moved = (tmp_path / LEDGER_NAME).rename(tmp_path / "elsewhere.db")
    with pytest.raises(SweepError, match="was moved or removed"):
        ledger.append("note", "1", {})
    moved.rename(tmp_path / LEDGER_NAME)
    with reopen(ledger, tmp_path) as reopened:
        reopened.append("note", "1", {})
