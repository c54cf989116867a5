"""The corpus reader that exports carry: some modules of `proxies`, as files beside the trainer's own."""

from __future__ import annotations

import inspect
from types import ModuleType

import proxies
import proxies.core
import proxies.data
from proxies.core import canon, checks
from proxies.data import mixture, permutation, tokens, windows

_READER = (proxies, proxies.core, proxies.data, canon, checks, mixture, permutation, tokens, windows)
"""What reads a corpus, with numpy and the standard library alone."""


def reader_files(*more: ModuleType) -> dict[str, str]:
    """Text of each module's file, by its path; `more`: modules beside the reader's own."""
    files = {}
    for module in (*_READER, *more):
        path = module.__name__.replace(".", "/")
        files[path + ("/__init__.py" if hasattr(module, "__path__") else ".py")] = inspect.getsource(module)
    return files
