"""A child process that loads and applies a tokenizer, because its file is not trusted.

A regular expression or a normalizer of a `tokenizer.json` may panic, hang, or take all memory, and
Python handles no signal while it runs. The child has a time limit, and the kernel kills it when its
parent ends. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forerun._proxies.core.canon import IMPORT_DIR
from forerun._proxies.data.tokens import DataError

START_SECONDS = 120.0
"""Time limit for starting Python and loading a tokenizer. 250,000 entries take half a second on an
idle machine."""
BATCH_SECONDS, BYTES_PER_SECOND = 30.0, 50_000
"""Time limit for a batch: a constant, plus its size divided by a speed. BPE encodes 1 to 5 MB/s on
one core."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class TokenizerProcess:
    """A child process that answers requests by `serve`."""

    def __init__(self, path: Path, module: str) -> None:
        """Start the process.

        Args:
            path: The tokenizer's file, for messages.
            module: Module that the process runs; it calls `serve`.
        """
        self._path = path
        folder = str(IMPORT_DIR)
        search_path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": search_path},
        )
        self._end = weakref.finalize(self, _end_process, self._process)

    def ask(self, request: object, seconds: float) -> Any:
        """Send a request and return the answer; both are values of JSON.

        Args:
            request: The request, for the function that `serve` got.
            seconds: Time limit.

        Raises:
            DataError: The tokenizer failed, or there was no answer within the limit, after which
                the process is killed.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        limit = threading.Timer(seconds, self._process.kill)
        limit.start()
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        except BaseException:  # also Ctrl-C
            self._end()
            raise
        finally:
            is_too_slow = not limit.is_alive()
            limit.cancel()
        if not line:
            self._end()
            problem = (
                "took longer than its limit for this text: one of its patterns may never end"
                if is_too_slow
                else f"failed: its process ended with exit code {self._process.returncode}, "
                "perhaps for memory"
            )
            raise DataError(f"{self._path}: the tokenizer {problem}; use another tokenizer file")
        answer = json.loads(line)
        if "problem" in answer:
            raise DataError(f"{self._path}: the tokenizer failed: {answer['problem']}")
        return answer["answer"]


def _end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with process:  # closes its pipes and waits for its end
        pass


def serve(answer: Callable[[Any], object], parent: int) -> None:
    """Answer the requests on standard input until it ends.

    Args:
        answer: Returns the answer to a request. An error that it raises is sent to the parent.
        parent: Id of the process that started this one.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the line above
        return
    # Ctrl-C reaches the whole process group; the parent decides what happens.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        try:
            message = {"answer": answer(json.loads(line))}
        except BaseException as error:  # a panic in Rust is not an Exception
            message = {"problem": (str(error).strip() or type(error).__name__).splitlines()[0]}
        print(json.dumps(message), flush=True)
