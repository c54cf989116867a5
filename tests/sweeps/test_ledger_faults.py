"""SIGKILL, torn writes and failing calls, at every call that touches a study: nothing that was
reported is lost.
"""

import pytest
from ledger_faults import FAULTS, compiled, table_of


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    library = compiled(tmp_path_factory.mktemp("shim"))
    if library is None:
        pytest.skip(
            "no C compiler (cc, gcc) that builds fault_shim.c: faults at every call need one"
        )
    return library


def test_a_sample_of_calls(shim):
    found = table_of(shim, every=31, faults=("SIGKILL", "half a write, SIGKILL", "ENOSPC"))
    assert found["violations"] == []
    assert sum(row["points"] for row in found["rows"]) > 40
    assert all(row["killed"] == row["points"] for row in found["rows"] if "SIGKILL" in row["fault"])
    assert all(
        row["refused"] > 0.5 * row["points"] for row in found["rows"] if row["fault"] == "ENOSPC"
    )


@pytest.mark.parametrize(
    ("plant", "fault", "first", "every"),
    [
        ("no_journal", "half a write, SIGKILL", 1, 7),
        ("in_place", "half a write, SIGKILL", 240, 1),  # frozen files come last
        ("no_sync", "power loss", 1, 7),
    ],
)
def test_planted_bugs_are_caught(shim, plant, fault, first, every):
    found = table_of(shim, first=first, every=every, names=("study",), faults=(fault,), plant=plant)
    assert found["violations"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["study", "fork", "repair"])
def test_every_call(shim, name):
    found = table_of(shim, names=(name,))
    assert found["violations"] == []
    assert {row["fault"] for row in found["rows"]} == set(FAULTS)
    assert all(row["points"] > 60 for row in found["rows"])
