"""Fixtures that several folders of tests import: a finished tiny study and a frozen one.

Both studies take long, so each is made once for all tests. Fits and verdicts are cached. The
command line is imported only where a fixture uses it, because tests marked `gpu` run on machines
without pydantic.
"""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import os
import shutil
from collections.abc import Mapping

import numpy as np
import pytest

from forerun._scaling_fits.forecast import uncertainty
from forerun._scaling_fits.laws import law
from forerun._transfer.verdict import verdict

RESULTS = {}
"""Cached fits and verdicts by function and arguments."""


@contextlib.contextmanager
def use_cached_results():
    """Replace the functions that fit and judge by versions that compute each result once.

    About a hundred tests fit the same few ladders and judge the same few grids of runs. Without the
    cache, this work would take half of the processor time. The functions are pure, because their
    randomness has a seed. The cache knows nothing of constants that a test patches, so such a test
    must use arguments of its own.
    """
    functions = ((uncertainty, "fit_runs"), (law, "fit_law"), (verdict, "judge"))
    with pytest.MonkeyPatch.context() as patch:
        for module, name in functions:
            patch.setattr(module, name, cache_results(getattr(module, name)))
        yield


def cache_results(function):
    """Wrap a pure function so that it computes each result once."""

    @functools.wraps(function)
    def get_result(*args, **options):
        arguments = [describe_argument(argument) for argument in (*args, *options.values())]
        key = repr([function.__name__, *options, *arguments])
        if key not in RESULTS:
            RESULTS[key] = function(*args, **options)
        return RESULTS[key]

    return get_result


@pytest.fixture(scope="module", autouse=True)
def cached_results():
    """The cache of fits and verdicts, for one test module at a time.

    A fixture of package scope would need `__init__.py`. A fixture of session scope would also patch
    the functions in tests of other packages.
    """
    with use_cached_results():
        yield


def describe_argument(value):
    """Return the content of a table, a fit, or an option in a form whose `repr` is complete."""
    if isinstance(value, np.ndarray):
        return hashlib.sha256(value.tobytes()).hexdigest(), value.shape
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return [describe_argument(getattr(value, field.name)) for field in fields]
    if isinstance(value, Mapping):
        return [(name, describe_argument(item)) for name, item in value.items()]
    if isinstance(value, tuple | list):
        return [describe_argument(item) for item in value]
    return value


def make_folder_once(tmp_path_factory, name, make):
    """Return a folder that one process of pytest-xdist makes for all; tests must not change it.

    Args:
        tmp_path_factory: The fixture of pytest.
        name: Name of the folder.
        make: Function that fills the empty folder.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        complete_mark = folder.with_suffix(".complete")
        if not complete_mark.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            # Fixtures of a session are made before the module's cache is in use.
            with use_cached_results():
                make(folder)
            complete_mark.touch()
    return folder


@pytest.fixture(scope="session")
def finished_study_dir(tmp_path_factory):
    """Folder with `plan.toml`, `corpus/`, and the finished `study/`; tests must not change it."""
    from tiny_study import run_json, write_plan

    def make(folder):
        code, answer = run_json("run", write_plan(folder), "--study", folder / "study")
        assert code == 0, answer

    return make_folder_once(tmp_path_factory, "finished", make)


@pytest.fixture(scope="session")
def frozen_study(finished_study_dir, tmp_path_factory):
    """The finished study after a freeze that accepts two gates, one failed and one undecided.

    A gate is a check that must pass, or be accepted with a reason, before a study can be frozen.
    Tests must not change the study.
    """
    from tiny_study import run_json, set_gates

    def make(folder):
        shutil.copytree(finished_study_dir / "study", folder / "study")
        with pytest.MonkeyPatch.context() as patch:
            set_gates(patch)
            accept = ("--accept", "coordinates", "--accept", "transfer", "--reason", "planted")
            code, answer = run_json("freeze", folder / "study", *accept)
        assert code == 0, answer

    return make_folder_once(tmp_path_factory, "frozen_once", make) / "study"
