"""A pytest plugin that writes each outcome into a file, and leaves out what passed by it: tests of a lent GPU resume.

    PYTHONPATH=benchmarks python -m pytest -p gpu_tests -m gpu --outcomes build/gpu/gpu-tests.json

`make gpu` does this. Outcomes of another device, torch, Python or source are forgotten; tests that failed run again,
after those that have not run yet.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from gpu_runs import ROOT, machine

from proxies.core import canon

MOST_SAID = 2000
"""Characters kept of why a test failed: the end of a traceback has the error."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, required=True, help="JSON file to write and to resume from.")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Outcomes(config.getoption("--outcomes")))


class Outcomes:
    """How each test ended, by its id."""

    def __init__(self, path: Path) -> None:
        tests = hashlib.sha256(b"".join(file.read_bytes() for file in sorted((ROOT / "tests").rglob("*.py"))))
        here = {**machine(), "tests": tests.hexdigest()[:12]}
        before = json.loads(path.read_text()) if path.exists() else {}
        self._path = path
        self._content = before if before.get("machine") == here else {"machine": here, "tests": {}}
        self._tests: dict[str, dict[str, Any]] = self._content["tests"]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """After pytest's own choice by marks."""
        passed = [item for item in items if self._tests.get(item.nodeid, {}).get("outcome") == "passed"]
        config.hook.pytest_deselected(items=passed)
        items[:] = sorted((item for item in items if item not in passed), key=lambda item: item.nodeid in self._tests)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A failed setup or teardown is the test's outcome too."""
        if report.when == "call" or report.outcome != "passed":
            self._tests[report.nodeid] = {
                "outcome": report.outcome, "seconds": round(report.duration, 2),
                "said": report.longreprtext[-MOST_SAID:],
            }  # fmt: skip
            self._path.parent.mkdir(parents=True, exist_ok=True)
            canon.write_atomic(self._path, (json.dumps(self._content, indent=1, sort_keys=True) + "\n").encode())

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """That all have passed before is no failure to find tests; and what the time left undone is none either: 3."""
        failed = any(test["outcome"] == "failed" for test in self._tests.values())
        if "session-timeout" in str(session.shouldfail) and not failed:
            session.exitstatus = 3
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._tests:
            session.exitstatus = pytest.ExitCode.OK
