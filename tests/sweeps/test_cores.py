import os

import pytest

from sweeps.run.pool import num_cores


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
def test_a_quota_of_the_container_counts(tmp_path, monkeypatch, quota, cores):
    """On a machine of 16 cores, in a group without a quota of its own."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    (tmp_path / "own").write_text("0::/inner\n")
    (tmp_path / "cpu.max").write_text(quota + "\n")
    assert num_cores(tmp_path, tmp_path / "own") == cores
