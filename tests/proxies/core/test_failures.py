"""Tests of failures: the cause of an error or a dead process, and the part of a log that is kept.

The error texts and logs are copied from torch and torchrun.
"""

from pathlib import Path

import pytest

from forerun._proxies.core import failures
from forerun._proxies.core.failures import (
    classify,
    count_oom_kills,
    describe_error,
    diagnose_crash,
    get_log_tail,
)


class OutOfMemoryError(RuntimeError):
    """An error with the name of torch's own."""


class ErrorWithCause(Exception):  # noqa: N818
    """An error that states its cause."""

    def __init__(self, cause):
        self.cause = cause


ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate "
    "memory: you tried to"
)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out_of_memory"),
        (RuntimeError(ALLOCATOR), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (OSError(12, "Cannot allocate memory"), "out_of_memory"),
        (RuntimeError("shapes differ"), "error"),
        (ValueError("not enough memory of the past"), "error"),
        (ErrorWithCause("user_code"), "user_code"),
        (ErrorWithCause("bad_data"), "bad_data"),
        (ErrorWithCause("nonsense"), "error"),
    ],
)
def test_errors_are_classified_by_their_cause(error, cause):
    assert classify(error) == cause


FAILED_GRAPH_MESSAGE = (
    "CUDA error: operation failed due to a previous error during capture\nSearch for "
    "`cudaError...` in https"
)
"""Message of torch when the recording of a CUDA graph fails, whatever the cause."""


class FailingGraphRecording:
    """A context manager that raises at its end, as a failed recording of a CUDA graph does."""

    def __init__(self, error):
        self.error = error

    def __enter__(self):
        return self

    def __exit__(self, *_):
        raise self.error


def chain_errors(inner, outer):
    """Return the outer error, raised while the inner one was handled."""
    try:
        with FailingGraphRecording(outer):
            raise inner
    except Exception as error:
        return error


def test_out_of_memory_in_a_recording_is_the_cause_of_its_failure():
    memory_error = OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2 GiB\nand what torch advises"
    )
    error = chain_errors(memory_error, RuntimeError(FAILED_GRAPH_MESSAGE))
    assert classify(error) == "out_of_memory"
    assert describe_error(error) == "CUDA out of memory. Tried to allocate 2 GiB"
    # Memory is not the cause if another error ended the recording, or if the outer error is not
    # about a recording.
    error = chain_errors(ValueError("no such shape"), RuntimeError(FAILED_GRAPH_MESSAGE))
    assert classify(error) == "error"
    assert describe_error(error) == f"RuntimeError: {FAILED_GRAPH_MESSAGE}"
    assert classify(chain_errors(memory_error, KeyError("rope"))) == "error"
    error = chain_errors(memory_error, RuntimeError("shapes differ"))
    error.__suppress_context__ = True  # as if raised `from None`
    assert classify(error) == "error"


def test_log_tail_has_the_last_twenty_lines():
    text = "\n".join(f"line {number}\x1b[0m" for number in range(100)) + "\n\n"
    lines = get_log_tail(text).splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("line 80[0m", "line 99[0m", 20)
    assert len(get_log_tail("é" * 5000).encode()) <= 2048
    assert get_log_tail("") == get_log_tail("\n \n") == ""


def test_kills_by_the_kernel_are_counted(tmp_path, monkeypatch):
    events = tmp_path / "memory.events"
    monkeypatch.setattr(failures, "_list_oom_counters", lambda: [tmp_path / "nowhere", events])
    assert count_oom_kills() == 0
    events.write_text("low 0\nhigh 0\nmax 31\noom 2\noom_kill 3\noom_group_kill 1\n")
    assert count_oom_kills() == 3
    events.write_text("oom_kill many\n")
    assert count_oom_kills() == 0
    # Counters of the root and of this process's control group, below the root
    monkeypatch.undo()
    root, *groups = failures._list_oom_counters()
    assert root == Path("/sys/fs/cgroup/memory.events")
    assert all(path.parent.is_relative_to("/sys/fs/cgroup") for path in groups)


CHILD_FAILED = """
E1122 02:00:00.1 torch/distributed/elastic/multiprocessing/api.py:871] failed (exitcode: {code}) local_rank: 1 (pid: 5)
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
forerun._launcher.main_run.trainer FAILED
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 5)
  traceback : Signal 9 (SIGKILL) received by PID 5
"""  # noqa: E501
"""End of torchrun's log, with the exit code of the rank that failed first."""
PEER_ERROR = (
    "[rank0]: RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer "
    "[127.0.0.1]:2345\n"
)
"""Error of a rank that lost the connection to the failed rank: a consequence, not the cause."""
RANK_ERROR = (
    'Traceback (most recent call last):\n  File "x.py", line 3, in f\n[rank1]: ValueError: a bad '
    "shard\n"
)
"""Error of the rank that failed."""


def diagnose(log, **kwargs):
    """Diagnose a process that exited with code 1 after step 7, unless the arguments say more."""
    return diagnose_crash(log, **{"step": 7, "exit_code": 1, **kwargs})


@pytest.mark.parametrize(
    ("log", "cause", "detail"),
    [
        (PEER_ERROR + CHILD_FAILED.format(code=-9), "killed", "by signal 9"),
        (CHILD_FAILED.format(code=-15), "killed", "by signal 15"),
        (PEER_ERROR + CHILD_FAILED.format(code=-11), "crashed", "by signal 11"),
        (PEER_ERROR + RANK_ERROR + CHILD_FAILED.format(code=1), "error", "ValueError: a bad shard"),
        (
            RANK_ERROR + PEER_ERROR + CHILD_FAILED.format(code=-15),
            "error",
            "ValueError: a bad shard",
        ),
        (
            PEER_ERROR + CHILD_FAILED.format(code=1),
            "error",
            "RuntimeError: [../gloo/transport/tcp/pair.cc:534]",
        ),
        ("", "error", "exit code 1"),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried\n" + PEER_ERROR,
            "out_of_memory",
            "torch.OutOfMemoryError: CUDA",
        ),
        (
            "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried",
            "out_of_memory",
            "RuntimeError: Def",
        ),
        (
            "RuntimeError: CUDA error: invalid device ordinal\n",
            "no_device",
            "RuntimeError: CUDA error: invalid",
        ),
        ("OSError: [Errno 28] No space left on device: '/x'", "disk_full", "OSError: [Errno 28]"),
        (
            "torch.distributed.DistNetworkError: The server socket has failed to listen: EADDRINUSE",  # noqa: E501
            "port",
            "torch.",
        ),
        (
            "RendezvousConnectionError: The connection to the C10d store has failed.",
            "port",
            "Rendezvous",
        ),
    ],
)
def test_cause_and_detail_come_from_the_log(log, cause, detail):
    crash = diagnose(log)
    assert crash.cause == cause
    assert crash.detail.startswith(detail)


def test_run_killed_by_the_watchdog_counts_as_hung_whatever_its_log_contains():
    crash = diagnose(
        RANK_ERROR + CHILD_FAILED.format(code=-9), hung="no line of metrics for 11 s after step 7"
    )
    assert crash.cause == "hung"
    assert crash.words == "hung after step 7 (no line of metrics for 11 s after step 7)"


def test_signal_decides_whether_a_process_was_killed_or_crashed():
    assert diagnose("", exit_code=-9).cause == "killed"
    assert diagnose("", exit_code=-6).cause == "crashed"


def test_secrets_and_control_characters_are_removed():
    crash = diagnose("ValueError: \x1b[31mapi_key=hunter2hunter2\nx\n")
    text = crash.detail + crash.log_tail
    assert "hunter2" not in text and "\x1b" not in text


def test_only_an_unknown_cause_may_be_a_bug_of_forerun():
    codes = {cause: kind.exit_code for cause, kind in failures.CAUSES.items()}
    assert {cause for cause, code in codes.items() if code == 1} == {"error"}
    assert {cause for cause, code in codes.items() if code == 130} == {
        "killed",
        "preempted",
        "hung",
    }
    assert set(codes.values()) == {1, 2, 130}
