"""On PYTHONPATH, has every worker note the runs it begins in the file that FORERUN_TEST_DIARY names."""

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path


class Spy(importlib.abc.MetaPathFinder):
    """Wraps `launcher.host.Host.advance` when its module is first imported."""

    def find_spec(self, name, path, target=None):
        if name != "launcher.host":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_wrap(module):
            execute(module)
            wrap(module)

        spec.loader.exec_module = execute_and_wrap
        return spec


def wrap(module):
    advance = module.Host.advance

    def noted(host, call):
        with Path(os.environ["FORERUN_TEST_DIARY"]).open("a") as diary:
            diary.writelines(f"{module.canon.decode(module.RunSpec, spec).id}\n" for _, spec in call.admit)
        return advance(host, call)

    module.Host.advance = noted


if "FORERUN_TEST_DIARY" in os.environ:
    sys.meta_path.insert(0, Spy())
