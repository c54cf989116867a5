"""A `sitecustomize` module, which Python imports at its start if it is found on PYTHONPATH. It
records what the workers of a study do.

FORERUN_TEST_DIARY names a file to which each worker appends the ids of the runs that it begins, one
a line. FORERUN_TEST_STEPS names a file to which it appends lines `EVENT RUN_ID STEP`: `begin` with
the step at which a run begins, `at` with the step that the run has reached after each call, and
`saved` with each step at which the run is saved.
"""

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path


class ImportHook(importlib.abc.MetaPathFinder):
    """An import hook that calls a function on a module once, right after its first import."""

    def __init__(self, name, wrap):
        self.name, self.wrap = name, wrap

    def find_spec(self, name, path, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_wrap(module):
            execute(module)
            self.wrap(module)

        spec.loader.exec_module = execute_and_wrap
        return spec


def wrap_host(module):
    """Make the host record the runs that it admits."""
    advance = module.WorkerHost.advance

    def advance_and_record(host, call):
        with Path(os.environ["FORERUN_TEST_DIARY"]).open("a") as diary:
            for _, spec in call.admit:
                diary.write(f"{module.canon.decode(module.RunSpec, spec).id}\n")
        return advance(host, call)

    module.WorkerHost.advance = advance_and_record


def wrap_resumable(module):
    """Make the engine record the steps at which runs begin, have arrived, and are saved."""
    admit, advance, save = (
        module.ResumableRuns.admit,
        module.ResumableRuns.advance,
        module.save_state,
    )
    run_ids = {}

    def record(event, run_id, step):
        with Path(os.environ["FORERUN_TEST_STEPS"]).open("a") as diary:
            diary.write(f"{event} {run_id} {step}\n")

    def admit_and_record(engine, index, spec):
        admit(engine, index, spec)
        run_ids[index] = spec.id
        record("begin", spec.id, engine.steps[index])

    def advance_and_record(engine, num_steps, seconds):
        finished = advance(engine, num_steps, seconds)
        for index, step in engine.steps.items():
            record("at", run_ids[index], step)
        return finished

    def save_and_record(folder, state):
        save(folder, state)
        record("saved", state.header.run_id, state.header.step)

    module.ResumableRuns.admit = admit_and_record
    module.ResumableRuns.advance = advance_and_record
    module.save_state = save_and_record


if "FORERUN_TEST_DIARY" in os.environ:
    sys.meta_path.insert(0, ImportHook("forerun._launcher.study.workers.host", wrap_host))
if "FORERUN_TEST_STEPS" in os.environ:
    sys.meta_path.insert(0, ImportHook("forerun._launcher.study.workers.resumable", wrap_resumable))
