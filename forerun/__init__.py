"""forerun from Python: what a notebook needs, by the names of the commands.

    import forerun

    fit = forerun.fit("runs.csv")
    print(fit)
    print(forerun.allocate(fit, flops=1e21).params)

Enters:   tables of runs (files, or in memory), fits, study folders, frozen configs.
Leaves:   what the commands print: numbers as attributes, the keys of `--json` in `body`, the text by `print`.
Promises: importing it loads the standard library alone; the rest is loaded at first use; answers are the commands' own.
Refuses:  what the commands refuse, with the same sentences, as a ValueError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.api import (
        Allocation,
        Explanation,
        Fit,
        Prediction,
        RequestError,
        Verdict,
        allocate,
        explain,
        fit,
        load,
        predict,
        transfer,
    )
    from launcher.figures import plots

__all__ = [
    "Allocation", "Explanation", "Fit", "Prediction", "RequestError", "Verdict", "allocate", "explain", "fit", "load",
    "plots", "predict", "transfer",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """A name of `__all__`, loaded now."""
    if name not in __all__:
        raise AttributeError(f"module 'forerun' has no attribute {name!r}")
    from importlib import import_module

    found = import_module("launcher.figures.plots") if name == "plots" else getattr(import_module("forerun.api"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """What can be loaded, for completion."""
    return sorted({*globals(), *__all__})
