"""Run the tests marked `gpu` in four processes, because compiling takes most of the time.

    python benchmarks/gpu/gpu_tests.py --outcomes build/gpu/gpu-tests.json

`make gpu` runs this script. Each outcome is written to the file. A second call resumes: it leaves
out the tests that passed and runs the tests that failed again, after those that have not run yet.
Outcomes of another device, torch, Python or source are dropped. This file is also the pytest plugin
that does all this in each of the processes. Exit codes: 0, all passed; 1, some failed; 3, some are
left.
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
from gpu_runs import ROOT, describe_device, load_results, write_result

NUM_PROCESSES = 4
"""Processes of pytest, each with its share of the tests."""
MAX_MESSAGE_CHARS = 2000
"""Characters kept of a failed test's traceback, from its end, which has the error."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this plugin to pytest."""
    parser.addoption(
        "--outcomes",
        type=Path,
        required=True,
        help="JSON file to resume from; written as FILE.PROCESS.",
    )
    parser.addoption("--process", type=int, required=True, help="Which of the processes this is.")


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin."""
    config.pluginmanager.register(
        Outcomes(config.getoption("--outcomes"), config.getoption("--process"))
    )


def load_outcomes(path: Path) -> dict[str, Any]:
    """Return the file's content, without outcomes if these are of another machine or source."""
    tests = hashlib.sha256(
        b"".join(file.read_bytes() for file in sorted((ROOT / "tests").rglob("*.py")))
    )
    return load_results(path, {**describe_device(), "tests": tests.hexdigest()[:12]}, "tests")


def get_process_file(path: Path, process: int) -> Path:
    """Return the file that one of the processes writes."""
    return path.with_name(f"{path.name}.{process}")


class Outcomes:
    """Pytest plugin that runs the remaining tests of one process and records their outcomes."""

    def __init__(self, path: Path, process: int) -> None:
        self._content, self._path, self._process = (
            load_outcomes(path),
            get_process_file(path, process),
            process,
        )
        self._earlier_tests: dict[str, dict[str, Any]] = self._content["tests"]
        self._tests = self._content["tests"] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Keep this process's share of the remaining tests, after pytest's selection by marks."""
        remaining = [
            item
            for item in items
            if self._earlier_tests.get(item.nodeid, {}).get("outcome") != "passed"
        ]
        share = [
            item for index, item in enumerate(remaining) if index % NUM_PROCESSES == self._process
        ]
        config.hook.pytest_deselected(items=[item for item in items if item not in share])
        # Tests that failed in an earlier call come last.
        items[:] = sorted(share, key=lambda item: item.nodeid in self._earlier_tests)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of a test, which includes a failed setup or teardown."""
        if report.when == "call" or report.outcome != "passed":
            self._tests[report.nodeid] = {
                "outcome": report.outcome,
                "seconds": round(report.duration, 2),
                "said": report.longreprtext.replace(f"{ROOT}/", "")[-MAX_MESSAGE_CHARS:],
            }
            write_result(self._path, self._content)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Exit with 0 if no test was left for this process, and with 3 if the time was up."""
        failed = any(test["outcome"] == "failed" for test in self._tests.values())
        if "session-timeout" in str(session.shouldfail) and not failed:
            session.exitstatus = 3
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK


def merge_outcomes(path: Path) -> None:
    """Merge the outcomes of all processes into the file, and remove the files of the processes."""
    content = load_outcomes(path)
    for process in range(NUM_PROCESSES):
        if (part := get_process_file(path, process)).exists():
            content["tests"] |= load_outcomes(part)["tests"]
            part.unlink()
    write_result(path, content)


def main(arguments: list[str]) -> int:
    """Run the remaining tests, merge the outcomes and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--outcomes", type=Path, required=True, help="JSON file to write and to resume from."
    )
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="No test starts after this time."
    )
    parser.add_argument("--collect-only", action="store_true", help="Only list the tests.")
    options = parser.parse_args(arguments)
    pytest_options = ["--collect-only"] if options.collect_only else []
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    merge_outcomes(options.outcomes)  # of a call that was killed
    running = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-c",  # an outcome file elsewhere would move pytest's root away from the settings
                "pyproject.toml",
                "-p",
                "gpu_tests",
                "-m",
                "gpu",
                "--outcomes",
                options.outcomes,
                "--process",
                str(process),
                "--session-timeout",
                str(options.seconds),
                *pytest_options,
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
        )
        for process in range(NUM_PROCESSES)
    ]
    codes = [process.wait() for process in running]
    merge_outcomes(options.outcomes)
    failed = any(code not in (0, 3) for code in codes)
    return 1 if failed else max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
