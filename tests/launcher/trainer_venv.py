"""Interpreters that have other people's trainers, for tests that ask those trainers themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.exporters import proof


def interpreter(name: str) -> Path:
    """The Python of `FORERUN_<NAME>_PYTHON`, or of `.venv-trainers/<name>`; without either the test is skipped."""
    python = proof.interpreter(name)
    if python is None:
        pytest.skip(f"{name} is not installed: make trainers TRAINERS={name}")
    return python
