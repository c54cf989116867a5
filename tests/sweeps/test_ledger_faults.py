"""Tests of faults at the system calls that write a study's files: SIGKILL, torn writes, and calls
that fail. No record that was reported as written is lost.
"""

import pytest
from ledger_faults import FAULTS, compile_shim, make_fault_table


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    """The compiled library that injects faults into system calls."""
    library = compile_shim(tmp_path_factory.mktemp("shim"))
    if library is None:
        pytest.skip(
            "no C compiler (cc, gcc) that builds fault_shim.c: faults at every call need one"
        )
    return library


def test_no_record_is_lost_at_a_sample_of_calls(shim):
    table = make_fault_table(shim, every=31, faults=("SIGKILL", "half a write, SIGKILL", "ENOSPC"))
    assert table["violations"] == []
    assert sum(row["points"] for row in table["rows"]) > 40
    assert all(row["killed"] == row["points"] for row in table["rows"] if "SIGKILL" in row["fault"])
    assert all(
        row["refused"] > 0.5 * row["points"] for row in table["rows"] if row["fault"] == "ENOSPC"
    )


@pytest.mark.parametrize(
    ("bug", "fault", "first", "every"),
    [
        ("no_journal", "half a write, SIGKILL", 1, 7),
        # The frozen files come last: their calls begin at about number 240
        ("in_place", "half a write, SIGKILL", 240, 1),
        ("no_sync", "power loss", 1, 7),
    ],
)
def test_planted_bugs_are_caught(shim, bug, fault, first, every):
    table = make_fault_table(
        shim, first=first, every=every, names=("study",), faults=(fault,), bug=bug
    )
    assert table["violations"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["study", "fork", "repair"])
def test_no_record_is_lost_at_any_call(shim, name):
    table = make_fault_table(shim, names=(name,))
    assert table["violations"] == []
    assert {row["fault"] for row in table["rows"]} == set(FAULTS)
    assert all(row["points"] > 60 for row in table["rows"])
