"""Ends the program before it imports the trainer, if the trainer is not the one that the export was written for.

Importing this does it. Another version has other names or, worse, the same names for something else.
"""

import importlib.util

from forerun_numbers import other_versions, read_numbers, refuse

FROZEN = read_numbers()


def missing_modules(names: list[str]) -> list[str]:
    """Return those of the trainer's modules that are not there."""
    missing = []
    for name in names:
        try:
            there = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            there = False
        missing += [] if there else [name]
    return missing


if problems := other_versions(FROZEN.needs):
    wanted = " ".join(f"{name}=={version}" for name, version in FROZEN.needs.items())
    refuse(*problems, f"install it (pip install {wanted}), or export with a version of forerun that knows yours")
if missing := missing_modules(FROZEN.needs_modules):
    # A checkout calls itself by the version of its last release.
    refuse(
        f"{', '.join(missing)}: not there, so this is a checkout of another version; install the release {FROZEN.needs}"
    )
