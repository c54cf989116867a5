import os

import pytest

from sweeps.run.cores import num_cores

HERE = len(os.sched_getaffinity(0))


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


def test_the_older_kind_of_groups(machine):
    own = "5:memory:/a\n4:cpu,cpuacct:/a\n"
    files = {
        "cpu__a__cpu--cfs_quota_us": "300000",
        "cpu__a__cpu--cfs_period_us": "100000",
        "cpu__cpu--cfs_quota_us": "-1",
    }
    assert machine(own, **files) == 3
    assert machine("4:cpu,cpuacct:/b\n", **files) == 16
