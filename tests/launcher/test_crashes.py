"""Why an attempt died, told from logs as torchrun, torch and the system write them."""

import pytest

from launcher.supervisor.crashes import ADVICE, CAUSES, EXIT_CODES, WORDS, crash_of, end_of

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
"""
PEER = "[rank0]: RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2345\n"
OWN = 'Traceback (most recent call last):\n  File "x.py", line 3, in f\n[rank1]: ValueError: a bad shard\n'


def crash(log, **kwargs):
    return crash_of(log, **{"step": 7, "exit_code": 1, **kwargs})


@pytest.mark.parametrize(
    ("log", "cause", "detail"),
    [
        (PEER + CHILD_FAILED.format(code=-9), "killed", "by signal 9"),
        (CHILD_FAILED.format(code=-15), "killed", "by signal 15"),
        (PEER + CHILD_FAILED.format(code=-11), "error", "by signal 11"),
        (PEER + OWN + CHILD_FAILED.format(code=1), "error", "ValueError: a bad shard"),
        (OWN + PEER + CHILD_FAILED.format(code=-15), "error", "ValueError: a bad shard"),
        (PEER + CHILD_FAILED.format(code=1), "error", "RuntimeError: [../gloo/transport/tcp/pair.cc:534]"),
        ("", "error", "exit code 1"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried\n" + PEER, "out_of_memory", "torch.OutOfMemoryError: CUDA"),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried", "out_of_memory", "RuntimeError: Def"),
        ("RuntimeError: CUDA error: invalid device ordinal\n", "no_device", "RuntimeError: CUDA error: invalid"),
        ("OSError: [Errno 28] No space left on device: '/x'", "disk_full", "OSError: [Errno 28]"),
        ("torch.distributed.DistNetworkError: The server socket has failed to listen: EADDRINUSE", "port", "torch."),
        ("RendezvousConnectionError: The connection to the C10d store has failed.", "port", "Rendezvous"),
    ],
)
def test_the_cause(log, cause, detail):
    found = crash(log)
    assert found.cause == cause
    assert found.detail.startswith(detail)


def test_a_kernels_kill_for_memory_is_told_from_anothers():
    log = PEER + CHILD_FAILED.format(code=-9)
    assert (crash(log).cause, crash(log, num_oom_kills=1).cause) == ("killed", "out_of_memory")


def test_what_the_watchdog_ended_hung_whatever_the_log_says():
    found = crash(OWN + CHILD_FAILED.format(code=-9), hung="no line of metrics for 11 s after step 7")
    assert (found.cause, found.words) == ("hung", "hung after step 7 (no line of metrics for 11 s after step 7)")


def test_the_supervised_process_itself_killed():
    assert crash("", exit_code=-9).cause == "killed"
    assert crash("", exit_code=-6).cause == "error"


def test_no_step_at_all():
    assert crash("", step=None).words == "crashed before its first step (exit code 1)"


def test_secrets_and_control_characters_stay_out():
    found = crash("ValueError: \x1b[31mapi_key=hunter2hunter2\nx\n")
    assert "hunter2" not in found.detail + found.log_tail and "\x1b" not in found.detail + found.log_tail


def test_every_cause_has_words_advice_and_an_exit_code():
    assert set(CAUSES) == set(WORDS) == set(ADVICE) == set(EXIT_CODES)


def test_only_this_attempts_end_of_the_log_is_read(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"CUDA out of memory\n" + b"x" * 10 + b"\nend\xff")
    assert end_of(path, 19) == "x" * 10 + "\nend\ufffd"
    assert end_of(tmp_path / "absent", 0) == ""
    path.write_bytes(b"a" * 2**20 + b"end")
    assert len(end_of(path, 0)) == 2**18
