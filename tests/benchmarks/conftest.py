"""Fixtures for tests of the GPU benchmarks."""

import importlib
import os

import pytest
from gpu_benchmark import ROOT

REFUSING_IMPORTS = """
import sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"ray", "optuna", "wandb", "pydantic", "click"}:
            raise ModuleNotFoundError(f"the GPU machine lacks {name}", name=name)

sys.meta_path.insert(0, Refusing())
"""
"""A sitecustomize module. Imports of packages that a GPU machine may lack fail with it."""


@pytest.fixture
def bare_environment(tmp_path):
    """Environment variables with which Python cannot import packages a GPU machine may lack."""
    (tmp_path / "refusing").mkdir()
    (tmp_path / "refusing" / "sitecustomize.py").write_text(REFUSING_IMPORTS)
    # MAKEFLAGS of the `make` that runs these tests would change the one that is tested.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MAKE", "FORERUN_"))
    }
    return {**environment, "PYTHONPATH": str(tmp_path / "refusing")}


@pytest.fixture
def import_benchmark(monkeypatch):
    """Function that imports a module of the benchmarks by its name."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "gpu")
    return importlib.import_module
