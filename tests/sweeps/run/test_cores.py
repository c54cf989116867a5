"""Tests of the number of CPU cores that a process may use."""

import os

import pytest

from forerun._sweeps.run.cores import count_cores


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
def test_quota_of_the_container_limits_the_cores(tmp_path, monkeypatch, quota, cores):
    """The machine has 16 cores, and the process is in a group without a quota of its own."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    (tmp_path / "own").write_text("0::/inner\n")
    (tmp_path / "cpu.max").write_text(quota + "\n")
    assert count_cores(tmp_path, tmp_path / "own") == cores
