"""Where a run ended: the machine, the process, the kind of processor."""

import os

from sweeps.store import sites
from sweeps.store.sites import site


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
