"""What an error or a dead process is taken for, told from real texts, and what of a log may be
kept.
"""

from pathlib import Path

import pytest

from proxies.core import failures
from proxies.core.failures import classify, crash_of, described, log_tail, oom_kills


class OutOfMemoryError(RuntimeError):
    """As torch calls its own."""


class Told(Exception):  # noqa: N818
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
        (Told("user_code"), "user_code"),
        (Told("bad_data"), "bad_data"),
        (Told("nonsense"), "error"),
    ],
)
def test_an_error_has_its_cause(error, cause):
    assert classify(error) == cause


INVALIDATED = (
    "CUDA error: operation failed due to a previous error during capture\nSearch for "
    "`cudaError...` in https"
)


class Recording:
    """As torch's own: the end of a recording that failed raises, whatever was raised inside."""

    def __init__(self, error):
        self.error = error

    def __enter__(self):
        return self

    def __exit__(self, *_):
        raise self.error


def chain(inner, outer):
    try:
        with Recording(outer):
            raise inner
    except Exception as error:
        return error


def test_memory_that_runs_out_in_a_recording_is_the_cause():
    memory = OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand what torch advises")
    found = chain(memory, RuntimeError(INVALIDATED))
    assert (classify(found), described(found)) == (
        "out_of_memory",
        "CUDA out of memory. Tried to allocate 2 GiB",
    )
    found = chain(ValueError("no such shape"), RuntimeError(INVALIDATED))
    assert (classify(found), described(found)) == ("error", f"RuntimeError: {INVALIDATED}")
    assert classify(chain(memory, KeyError("rope"))) == "error", (
        "what else fails meanwhile fails by itself"
    )
    hidden = chain(memory, RuntimeError("shapes differ"))
    hidden.__suppress_context__ = True  # raised `from None`
    assert classify(hidden) == "error"


def test_a_log_ends_in_its_last_lines():
    text = "\n".join(f"line {number}\x1b[0m" for number in range(100)) + "\n\n"
    lines = log_tail(text).splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("line 80[0m", "line 99[0m", 20)
    assert len(log_tail("é" * 5000).encode()) <= 2048
    assert log_tail("") == log_tail("\n \n") == ""


def test_the_kernels_kills_are_counted(tmp_path, monkeypatch):
    events = tmp_path / "memory.events"
    monkeypatch.setattr(failures, "_oom_counters", lambda: [tmp_path / "nowhere", events])
    assert oom_kills() == 0
    events.write_text("low 0\nhigh 0\nmax 31\noom 2\noom_kill 3\noom_group_kill 1\n")
    assert oom_kills() == 3
    events.write_text("oom_kill many\n")
    assert oom_kills() == 0
    monkeypatch.undo()
    assert oom_kills() >= 0
    assert all(isinstance(path, Path) for path in failures._oom_counters())


CHILD_FAILED = """
E1122 02:00:00.1 torch/distributed/elastic/multiprocessing/api.py:871] failed (exitcode: {code}) local_rank: 1 (pid: 5)
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
launcher.trainer FAILED
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 5)
  traceback : Signal 9 (SIGKILL) received by PID 5
"""  # noqa: E501
PEER = (
    "[rank0]: RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer "
    "[127.0.0.1]:2345\n"
)
OWN = (
    'Traceback (most recent call last):\n  File "x.py", line 3, in f\n[rank1]: ValueError: a bad '
    "shard\n"
)


def crash(log, **kwargs):
    return crash_of(log, **{"step": 7, "exit_code": 1, **kwargs})


@pytest.mark.parametrize(
    ("log", "cause", "detail"),
    [
        (PEER + CHILD_FAILED.format(code=-9), "killed", "by signal 9"),
        (CHILD_FAILED.format(code=-15), "killed", "by signal 15"),
        (PEER + CHILD_FAILED.format(code=-11), "crashed", "by signal 11"),
        (PEER + OWN + CHILD_FAILED.format(code=1), "error", "ValueError: a bad shard"),
        (OWN + PEER + CHILD_FAILED.format(code=-15), "error", "ValueError: a bad shard"),
        (
            PEER + CHILD_FAILED.format(code=1),
            "error",
            "RuntimeError: [../gloo/transport/tcp/pair.cc:534]",
        ),
        ("", "error", "exit code 1"),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried\n" + PEER,
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
def test_the_cause(log, cause, detail):
    found = crash(log)
    assert found.cause == cause
    assert found.detail.startswith(detail)


def test_what_the_watchdog_ended_hung_whatever_the_log_says():
    found = crash(
        OWN + CHILD_FAILED.format(code=-9), hung="no line of metrics for 11 s after step 7"
    )
    assert (found.cause, found.words) == (
        "hung",
        "hung after step 7 (no line of metrics for 11 s after step 7)",
    )


def test_the_supervised_process_itself_killed():
    assert crash("", exit_code=-9).cause == "killed"
    assert crash("", exit_code=-6).cause == "crashed"


def test_secrets_and_control_characters_stay_out():
    found = crash("ValueError: \x1b[31mapi_key=hunter2hunter2\nx\n")
    assert (
        "hunter2" not in found.detail + found.log_tail
        and "\x1b" not in found.detail + found.log_tail
    )


def test_only_an_error_of_no_known_cause_may_be_a_bug_of_forerun():
    codes = {cause: kind.exit_code for cause, kind in failures.CAUSES.items()}
    assert {cause for cause, code in codes.items() if code == 1} == {"error"}
    assert {cause for cause, code in codes.items() if code == 130} == {
        "killed",
        "preempted",
        "hung",
    }
    assert set(codes.values()) == {1, 2, 130}
