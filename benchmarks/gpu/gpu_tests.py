"""The tests marked `gpu` on a lent GPU, four processes at once, for compiling takes most of their
time.

    python benchmarks/gpu/gpu_tests.py --outcomes build/gpu/gpu-tests.json    # `make gpu` does this

Each outcome is written into the file, and what passed by it is left out: a second call resumes.
Outcomes of another device, torch, Python or source are forgotten; tests that failed run again,
after those that have not run yet. This file is also the pytest plugin that does that for one
process. Exit codes: 0, all passed; 1, some failed; 3, some are left.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
from gpu_runs import ROOT, machine, resumed, write

NUM_PROCESSES = 4
MOST_SAID = 2000
"""Characters kept of why a test failed: the end of a traceback has the error."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--outcomes",
        type=Path,
        required=True,
        help="JSON file to resume from; written as FILE.PROCESS.",
    )
    parser.addoption("--process", type=int, required=True, help="Which of the processes this is.")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(
        Outcomes(config.getoption("--outcomes"), config.getoption("--process"))
    )


def opened(path: Path) -> dict[str, Any]:
    """The file's content; no outcomes, if they are of another machine or source."""
    tests = hashlib.sha256(
        b"".join(file.read_bytes() for file in sorted((ROOT / "tests").rglob("*.py")))
    )
    return resumed(path, {**machine(), "tests": tests.hexdigest()[:12]}, "tests")


def of_process(path: Path, process: int) -> Path:
    """Where one of the processes writes."""
    return path.with_name(f"{path.name}.{process}")


class Outcomes:
    """How each test ended, by its id."""

    def __init__(self, path: Path, process: int) -> None:
        self._content, self._path, self._process = opened(path), of_process(path, process), process
        self._before: dict[str, dict[str, Any]] = self._content["tests"]
        self._tests = self._content["tests"] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """After pytest's own choice by marks."""
        open_ones = [
            item for item in items if self._before.get(item.nodeid, {}).get("outcome") != "passed"
        ]
        mine = [
            item for index, item in enumerate(open_ones) if index % NUM_PROCESSES == self._process
        ]
        config.hook.pytest_deselected(items=[item for item in items if item not in mine])
        items[:] = sorted(mine, key=lambda item: item.nodeid in self._before)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A failed setup or teardown is the test's outcome too."""
        if report.when == "call" or report.outcome != "passed":
            self._tests[report.nodeid] = {
                "outcome": report.outcome,
                "seconds": round(report.duration, 2),
                "said": report.longreprtext.replace(f"{ROOT}/", "")[-MOST_SAID:],
            }
            write(self._path, self._content)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """That nothing is left for this process is no failure; and what the time left undone is
        none either: 3.
        """
        failed = any(test["outcome"] == "failed" for test in self._tests.values())
        if "session-timeout" in str(session.shouldfail) and not failed:
            session.exitstatus = 3
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK


def merge(path: Path) -> None:
    """The outcomes of all processes into the file."""
    content = opened(path)
    for process in range(NUM_PROCESSES):
        if (part := of_process(path, process)).exists():
            content["tests"] |= opened(part)["tests"]
            part.unlink()
    write(path, content)


def main(arguments: list[str]) -> int:
    """Run what is left and merge the outcomes; see above for the exit codes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--outcomes", type=Path, required=True, help="JSON file to write and to resume from."
    )
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="After which no further test is begun."
    )
    parser.add_argument("--collect-only", action="store_true", help="Name the tests alone.")
    asked = parser.parse_args(arguments)
    more = ["--collect-only"] if asked.collect_only else []
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    merge(asked.outcomes)  # what a killed call left
    running = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "gpu_tests",
                "-m",
                "gpu",
                "--outcomes",
                asked.outcomes,
                "--process",
                str(process),
                "--session-timeout",
                str(asked.seconds),
                *more,
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
        )
        for process in range(NUM_PROCESSES)
    ]
    codes = [one.wait() for one in running]
    merge(asked.outcomes)
    failed = any(code not in (0, 3) for code in codes)
    return 1 if failed else max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
