"""What an error is taken for, and what of a log may be kept."""

from pathlib import Path

import pytest

from sweeps.run import causes
from sweeps.run.causes import ADVICE, CAUSES, WORDS, classify, described, log_tail, oom_kills, redacted


class OutOfMemoryError(RuntimeError):
    """As torch calls its own."""


class Told(Exception):  # noqa: N818
    def __init__(self, cause):
        self.cause = cause


ALLOCATOR = "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"


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


def test_every_cause_has_words_and_advice():
    assert set(WORDS) == set(ADVICE) == set(CAUSES)


def test_an_error_in_words():
    assert described(ValueError("the corpus is not there")) == "ValueError: the corpus is not there"
    assert described(KeyError()) == "KeyError"
    assert described(MemoryError()) == "no memory left"
    assert described(OutOfMemoryError("CUDA out of memory.\nSee documentation")) == "CUDA out of memory."
    assert len(described(ValueError("x" * 10_000))) == 2000


def test_a_log_ends_in_its_last_lines():
    text = "\n".join(f"line {number}\x1b[0m" for number in range(100)) + "\n\n"
    lines = log_tail(text).splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("line 80[0m", "line 99[0m", 20)
    assert len(log_tail("é" * 5000).encode()) <= 2048
    assert log_tail("") == log_tail("\n \n") == ""


SECRETS = (
    "postgres://jane:hunter2hunter2@db/x",
    "WANDB_API_KEY=hunter2hunter2",
    'config = {"api_key": "hunter2hunter2", "lr": 1}',
    "Authorization: Bearer hunter2hunter2",
    "--password: hunter2hunter2",
    "token = hunter2hunter2",
    "key 0123456789abcdef0123456789abcdef01234567 refused",
    "hf_hunter2hunter2hunter2 is not valid",
    "sk-hunter2hunter2hunter2hunter2",
)


@pytest.mark.parametrize("text", SECRETS)
def test_no_secret_is_kept(text):
    for kept in (redacted(text), log_tail(f"before\n{text}\nafter"), described(ValueError(text))):
        assert "hunter2" not in kept and "0123456789abcdef" not in kept
        assert "***" in kept


@pytest.mark.parametrize(
    "text", ["loss 2.5 at token 17", "lr=1e-3 batch_tokens=4096", "tokens: 4096", "sha256 " + "0" * 64]
)
def test_what_is_no_secret_stays(text):
    assert redacted(text) == text


def test_the_kernels_kills_are_counted(tmp_path, monkeypatch):
    events = tmp_path / "memory.events"
    monkeypatch.setattr(causes, "_oom_counters", lambda: [tmp_path / "nowhere", events])
    assert oom_kills() == 0
    events.write_text("low 0\nhigh 0\nmax 31\noom 2\noom_kill 3\noom_group_kill 1\n")
    assert oom_kills() == 3
    events.write_text("oom_kill many\n")
    assert oom_kills() == 0
    monkeypatch.undo()
    assert oom_kills() >= 0
    assert all(isinstance(path, Path) for path in causes._oom_counters())
