"""On PYTHONPATH, has every worker note the runs it begins in the file that FORERUN_TEST_DIARY
names.

Where FORERUN_TEST_STEPS names one, also at which step each run is begun, is, and is saved.
"""

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path


class Spy(importlib.abc.MetaPathFinder):
    """Wraps what a module holds when it is first imported."""

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
    advance = module.WorkerHost.advance

    def noted(host, call):
        with Path(os.environ["FORERUN_TEST_DIARY"]).open("a") as diary:
            diary.writelines(
                f"{module.canon.decode(module.RunSpec, spec).id}\n" for _, spec in call.admit
            )
        return advance(host, call)

    module.WorkerHost.advance = noted


def wrap_resumable(module):
    admit, advance, store = module.ResumableRuns.admit, module.ResumableRuns.advance, module.store
    held = {}

    def note(*lines):
        with Path(os.environ["FORERUN_TEST_STEPS"]).open("a") as diary:
            diary.writelines(f"{what} {run_id} {step}\n" for what, run_id, step in lines)

    def admitted(engine, index, spec):
        admit(engine, index, spec)
        held[index] = spec.id
        note(("begin", spec.id, engine.steps[index]))

    def advanced(engine, num_steps):
        ended = advance(engine, num_steps)
        note(*(("at", held[index], step) for index, step in engine.steps.items()))
        return ended

    def stored(folder, state):
        done = store(folder, state)
        note(("saved", state.header.run_id, state.header.step))
        return done

    module.ResumableRuns.admit, module.ResumableRuns.advance, module.store = (
        admitted,
        advanced,
        stored,
    )


if "FORERUN_TEST_DIARY" in os.environ:
    sys.meta_path.insert(0, Spy("launcher.workers.host", wrap_host))
if "FORERUN_TEST_STEPS" in os.environ:
    sys.meta_path.insert(0, Spy("launcher.workers.resumable", wrap_resumable))
