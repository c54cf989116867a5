import os

import pytest

from sweeps.run.cores import num_cores


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 16 cores: writes what its control groups say."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))

    def write(own, **files):
        (tmp_path / "own").write_text(own)
        for path, text in files.items():
            file = tmp_path / "groups" / path.replace("__", "/").replace("--", ".")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return num_cores(tmp_path / "groups", tmp_path / "own")

    return write


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000", 16),
        ("400000 100000", 4),
        ("250000 100000", 3),
        ("10000 100000", 1),
        ("6400000 100000", 16),
        ("?", 16),
    ],
)
def test_a_quota_of_the_container_counts(machine, quota, cores):
    assert machine("0::/\n", **{"cpu--max": quota + "\n"}) == cores
