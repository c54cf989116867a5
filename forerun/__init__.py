"""The Python interface of forerun for notebooks, with one function per command.

    import forerun

    fit = forerun.fit("runs.csv")
    print(fit)
    print(forerun.allocate(fit, flops=1e21).params)

Enters:   tables of runs (files, or in memory), fits, study folders, frozen configs.
Leaves:   the commands' output: numbers as attributes, the keys of `--json` in `body`, the text by
`print`.
Promises: `import forerun` loads only the standard library, and everything else at first use; the
results are those of the commands.
Refuses:  the input that the commands refuse, with a ValueError that names arguments (`flops=`)
instead of options (`--flops`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun._launcher.report.figures import plots
    from forerun.answers import (
        Allocation,
        Explanation,
        Fit,
        Prediction,
        Predictions,
        Verdict,
    )
    from forerun.api import allocate, explain, fit, load, predict, transfer
    from forerun.errors import RequestError

    __version__: str

__all__ = [
    "Allocation",
    "Explanation",
    "Fit",
    "Prediction",
    "Predictions",
    "RequestError",
    "Verdict",
    "allocate",
    "explain",
    "fit",
    "load",
    "plots",
    "predict",
    "transfer",
]


def __getattr__(name: str) -> object:
    """Load an object of `__all__`, or the version, when it is first used."""
    if name not in (*__all__, "__version__"):
        raise AttributeError(f"module 'forerun' has no attribute {name!r}")
    from importlib import import_module, metadata

    if name == "__version__":
        value: object = metadata.version("forerun")
    elif name == "plots":
        value = import_module("forerun._launcher.report.figures.plots")
    else:
        value = getattr(import_module("forerun.api"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the names that can be loaded, for completion."""
    return sorted({*globals(), *__all__, "__version__"})
