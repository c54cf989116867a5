"""Where a run ended, and what a host in quarantine has spoilt: what ended there before it was found, no more."""

import dataclasses
import os

import pytest
from sweep_fakes import make_specs, outcome

from sweeps.store import sites
from sweeps.store.curves import store_curve
from sweeps.store.fork import import_runs
from sweeps.store.ledger import Ledger
from sweeps.store.quarantine import QUARANTINED, HostQuarantined, quarantined, refuse_quarantined, suspects
from sweeps.store.sites import site

SPECS = make_specs(5)


def record(ledger, spec, host, folder):
    result, curve = outcome(spec)
    store_curve(folder, spec.id, curve)
    ledger.commit(spec, dataclasses.replace(result, environment={"host": host} if host else {}))


@pytest.fixture
def folder(tmp_path):
    """Two runs of a, one of b, a found, one more of a, and one of nobody knows where."""
    with Ledger.open(tmp_path / "study", {"seed": 1}, create=True) as ledger:
        for spec, host in zip(SPECS[:3], ("a", "b", "a"), strict=True):
            record(ledger, spec, host, tmp_path / "study")
        ledger.append(QUARANTINED, "a", {"run_id": SPECS[1].id, "reason": "it differs"})
        record(ledger, SPECS[3], "a", tmp_path / "study")
        record(ledger, SPECS[4], "", tmp_path / "study")
    return tmp_path / "study"


def test_suspect_is_what_ended_there_before_it_was_found(folder):
    ledger = Ledger.read(folder)
    assert quarantined(ledger) == ("a",)
    assert suspects(ledger) == {"a": [SPECS[0], SPECS[2]]}


def test_a_fork_leaves_it_behind_and_keeps_the_quarantine(folder, tmp_path):
    parent = Ledger.read(folder)
    for times in (1, 2):
        with Ledger.open(tmp_path / "child", {"seed": 2}, create=True) as child:
            found = import_runs(child, tmp_path / "child", parent, folder)
            assert (found.num_runs, found.num_known, found.num_suspect) == ((3, 0, 2) if times == 1 else (0, 3, 2))
    child = Ledger.read(tmp_path / "child")
    assert set(child.results()) == {SPECS[1].id, SPECS[3].id, SPECS[4].id}
    assert quarantined(child) == ("a",) and suspects(child) == {"a": []}


def test_the_only_machine_is_refused_until_it_is_trusted_again(folder):
    ledger = Ledger.read(folder)
    with pytest.raises(HostQuarantined, match=r"a computes wrongly.*cluster.trusted_hosts=\[\"a\"\]") as refused:
        refuse_quarantined("a", ledger, ())
    assert refused.value.exit_code == 3
    refuse_quarantined("a", ledger, ("a",))
    refuse_quarantined("b", ledger, ())


def test_a_process_says_where_it_is(monkeypatch):
    here = site()
    assert here["process"].split()[0] == str(os.getpid()) and here["cpu"] and here["host"] == sites.host()
    monkeypatch.setenv(sites.HOST_VARIABLE, " node-7 ")
    assert sites.host() == "node-7"


def test_a_kind_of_processor_is_its_model_and_its_instructions(tmp_path):
    def kind(model, flags):
        path = tmp_path / "cpuinfo"
        path.write_text(f"processor\t: 0\nmodel name\t: {model}\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t: x\n")
        return sites._cpu(path)

    assert kind("Xeon", "avx2 fma") == kind("Xeon", "fma avx2")
    assert len({kind("Xeon", "fma avx2"), kind("Xeon", "fma"), kind("Epyc", "fma avx2")}) == 3
    assert sites._cpu(tmp_path / "none")
