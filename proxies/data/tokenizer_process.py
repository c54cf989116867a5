"""A child process that loads and applies a tokenizer, because its file is not trusted.

A regular expression or a normalizer of a `tokenizer.json` may panic, hang, or take all memory, and
Python handles no signal while it runs. The child has a time limit, and the kernel kills it when its
parent ends.

A message is a header of two integers (kind, number of bytes) and that many bytes.
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
"""Time limit for starting Python and loading a tokenizer. 250,000 entries take half a second on an
idle machine."""
BATCH_SECONDS, BYTES_PER_SECOND = 30.0, 50_000
"""Time limit for a batch: a constant, plus its size divided by a speed. BPE encodes 1 to 5 MB/s on
one core."""
_HEADER = struct.Struct("<qq")
_ANSWER, _PROBLEM = 0, 1
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_READ_BYTES = 2**20


class TokenizerProcess:
    """A child process that answers messages by `serve`."""

    def __init__(self, path: Path, module: str) -> None:
        """Start the process.

        Args:
            path: The tokenizer's file, for messages.
            module: Module that the process runs; it calls `serve`.
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
        self._end = weakref.finalize(self, _end_process, self._process, self._errors)

    def ask(self, kind: int, message: bytes, seconds: float) -> bytes:
        """Send a message and return the answer.

        Args:
            kind: Kind of the message, for the function that answers it.
            message: Content of the message.
            seconds: Time limit.

        Raises:
            DataError: The tokenizer failed, or there was no answer within the limit. In the second
                case the process is killed.
        """
        try:
            self._deadline = time.monotonic() + seconds
            self._send(_HEADER.pack(kind, len(message)) + message)
            status, num_bytes = _HEADER.unpack(self._receive(_HEADER.size))
            answer = self._receive(num_bytes)
        except _NoAnswerError as error:
            self._end()
            raise DataError(
                f"{self._path}: the tokenizer {error}; use another tokenizer file"
            ) from None
        except BaseException:  # also Ctrl-C
            self._end()
            raise
        if status == _PROBLEM:
            raise DataError(f"{self._path}: {answer.decode(errors='replace')}")
        return answer

    def _send(self, message: bytes) -> None:
        pipe = cast(IO[bytes], self._process.stdin).fileno()
        unsent = memoryview(message)
        while unsent:
            self._wait([], [pipe])
            try:
                unsent = unsent[os.write(pipe, unsent) :]
            except BrokenPipeError:
                raise _NoAnswerError(self._describe_end()) from None

    def _receive(self, num_bytes: int) -> bytes:
        pipe = cast(IO[bytes], self._process.stdout).fileno()
        parts: list[bytes] = []
        while num_bytes:
            self._wait([pipe], [])
            part = os.read(pipe, min(num_bytes, _READ_BYTES))
            if not part:
                raise _NoAnswerError(self._describe_end())
            parts.append(part)
            num_bytes -= len(part)
        return b"".join(parts)

    def _wait(self, to_read: list[int], to_write: list[int]) -> None:
        seconds = self._deadline - time.monotonic()
        if seconds <= 0 or not any(select.select(to_read, to_write, [], seconds)):
            raise _NoAnswerError(
                "took longer than its limit for this text: one of its patterns may never end"
            )

    def _describe_end(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "stopped answering"
        if code == -signal.SIGKILL:
            return "was killed, probably for memory: one of its rules may make text too long"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"ended ({cause}): {lines[-1] if lines else 'no output'}"


class _NoAnswerError(Exception):
    """The process did not answer; the message continues "the tokenizer"."""


def _end_process(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, errors):
        if stream is not None:
            stream.close()


def serve(answer: Callable[[int, bytes], bytes], parent: int) -> None:
    """Answer the messages on standard input until it ends.

    Args:
        answer: Function of a message's kind and content. An error that it raises is sent to the
            parent.
        parent: Id of the process that started this one.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the line above
        return
    # Ctrl-C reaches the whole process group; the parent decides what happens.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while header := source.read(_HEADER.size):
        kind, num_bytes = _HEADER.unpack(header)
        try:
            status, content = _ANSWER, answer(kind, source.read(num_bytes))
        except BaseException as error:  # a panic in Rust is not an Exception
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            status, content = _PROBLEM, f"the tokenizer failed: {reason}".encode(errors="replace")
        sink.write(_HEADER.pack(status, len(content)) + content)
        sink.flush()


def pack_texts(texts: list[bytes]) -> bytes:
    """Pack texts into one message."""
    lengths = np.array([len(texts), *map(len, texts)], dtype="<i8")
    return lengths.tobytes() + b"".join(texts)


def unpack_texts(message: bytes) -> list[str]:
    """Unpack the texts of a message."""
    num_texts = int(np.frombuffer(message, "<i8", 1)[0])
    lengths: NDArray[np.int64] = np.frombuffer(message, "<i8", num_texts, 8)
    ends = np.cumsum(lengths) + 8 * (num_texts + 1)
    return [
        message[end - length : end].decode()
        for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)
    ]


def unpack_json(message: bytes) -> dict[str, object]:
    """Parse an answer that is a JSON object."""
    return cast(dict[str, object], json.loads(message))
