"""Refuse a trainer of another version than the one that the export was written for.

Importing this module ends the program before the trainer is imported. Another version has other
names or, worse, uses the same names for something else.
"""

import importlib.util

from forerun_numbers import other_versions, read_numbers, refuse

FROZEN = read_numbers()


def has_module(name: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its package is missing
        return False


if problems := other_versions(FROZEN.needs):
    wanted = " ".join(f"{name}=={version}" for name, version in FROZEN.needs.items())
    refuse(
        *problems,
        f"install it (pip install {wanted}), or export with a version of forerun that knows yours",
    )
if missing := [name for name in FROZEN.needs_modules if not has_module(name)]:
    # A checkout has the version number of its last release
    refuse(
        f"{', '.join(missing)}: missing, so this is a checkout of another version; install the "
        f"release {FROZEN.needs}"
    )
