"""A tokenizer in a process of its own, for its file comes from strangers.

A regular expression or a normalizer of a `tokenizer.json` may panic, hang, or take all memory, and while it works
Python hears no signal. So another process loads and applies it: it has a time limit, and is killed whenever its asker
ends. The tokenizer's own threads work there as they would here.

Every message is a head of two whole numbers (kind, number of bytes) and its bytes.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO, cast

import numpy as np
from numpy.typing import NDArray

from proxies.data.tokens import DataError

START_SECONDS = 120.0
"""Time limit for starting Python and loading a tokenizer: half a second for 250,000 entries on a quiet machine."""
BATCH_SECONDS, BYTES_PER_SECOND = 30.0, 50_000
"""Time limit for a batch: a constant, and a speed. BPE of ordinary text reads 1 to 5 MB a second on one core."""
_HEAD = struct.Struct("<qq")
_ANSWER, _PROBLEM = 0, 1
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_READ_BYTES = 2**20


class TokenizerProcess:
    """Another process that runs `serve`."""

    def __init__(self, path: Path, module: str) -> None:
        """Start it.

        Args:
            path: The tokenizer's file, for messages.
            module: Module to run, which calls `serve`.
        """
        self._path = path
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        folder = str(Path(__file__).parents[2])
        search_path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": search_path},
            bufsize=0,
        )
        os.set_blocking(cast(IO[bytes], self._process.stdin).fileno(), False)
        self._end = weakref.finalize(self, _end, self._process, self._errors)

    def ask(self, kind: int, message: bytes, seconds: float) -> bytes:
        """Send a message and return the answer.

        Raises:
            DataError: The tokenizer cannot do it, or not in that time; the process is gone then.
        """
        try:
            self._exchange_until = time.monotonic() + seconds
            self._send(_HEAD.pack(kind, len(message)) + message)
            status, num_bytes = _HEAD.unpack(self._receive(_HEAD.size))
            answer = self._receive(num_bytes)
        except _NoAnswerError as error:
            self._end()
            raise DataError(f"{self._path}: the tokenizer {error}; use another tokenizer file") from None
        except BaseException:  # also Ctrl-C
            self._end()
            raise
        if status == _PROBLEM:
            raise DataError(f"{self._path}: {answer.decode(errors='replace')}")
        return answer

    def _send(self, message: bytes) -> None:
        left, pipe = memoryview(message), cast(IO[bytes], self._process.stdin).fileno()
        while left:
            self._wait([], [pipe])
            try:
                left = left[os.write(pipe, left) :]
            except BrokenPipeError:
                raise _NoAnswerError(self._describe_end()) from None

    def _receive(self, num_bytes: int) -> bytes:
        parts, pipe = list[bytes](), cast(IO[bytes], self._process.stdout).fileno()
        while num_bytes:
            self._wait([pipe], [])
            part = os.read(pipe, min(num_bytes, _READ_BYTES))
            if not part:
                raise _NoAnswerError(self._describe_end())
            parts.append(part)
            num_bytes -= len(part)
        return b"".join(parts)

    def _wait(self, to_read: list[int], to_write: list[int]) -> None:
        seconds = self._exchange_until - time.monotonic()
        if seconds <= 0 or not any(select.select(to_read, to_write, [], seconds)):
            raise _NoAnswerError("took longer than its limit for this text: a pattern of it may never end")

    def _describe_end(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "stopped answering"
        if code == -signal.SIGKILL:
            return "was killed, probably for memory: a rule of it may make text too long"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return (
            f"ended ({f'signal {-code}' if code < 0 else f'exit code {code}'}): {lines[-1] if lines else 'no output'}"
        )


class _NoAnswerError(Exception):
    """The process did not answer."""


def _end(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, errors):
        if stream is not None:
            stream.close()


def serve(answer: Callable[[int, bytes], bytes], parent: int) -> None:
    """Answer messages on standard input until it ends; in a process of its own.

    Args:
        answer: Takes kind and content of a message. What it raises becomes the asker's error.
        parent: Id of the process that started this one.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the asker decides
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while head := source.read(_HEAD.size):
        kind, num_bytes = _HEAD.unpack(head)
        try:
            status, content = _ANSWER, answer(kind, source.read(num_bytes))
        except BaseException as error:  # a panic of Rust is no Exception
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            status, content = _PROBLEM, f"the tokenizer failed: {reason}".encode(errors="replace")
        sink.write(_HEAD.pack(status, len(content)) + content)
        sink.flush()


def pack_texts(texts: list[bytes]) -> bytes:
    """Return texts as one message."""
    lengths = np.array([len(texts), *map(len, texts)], dtype="<i8")
    return lengths.tobytes() + b"".join(texts)


def unpack_texts(message: bytes) -> list[str]:
    """Return the texts of a message."""
    num_texts = int(np.frombuffer(message, "<i8", 1)[0])
    lengths: NDArray[np.int64] = np.frombuffer(message, "<i8", num_texts, 8)
    ends = np.cumsum(lengths) + 8 * (num_texts + 1)
    return [message[end - length : end].decode() for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]


def unpack_json(message: bytes) -> dict[str, object]:
    """Return an answer that is an object of JSON."""
    return cast(dict[str, object], json.loads(message))
