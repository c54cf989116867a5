"""A check of the trainer's version, which runs when this module is imported.

If the installed version is not the one that the export was written for, the import ends the program
with exit code 2. Import this module before the trainer: another version has other names or, worse,
uses the same names for something else.
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
    # A checkout of the main branch has the version number of the last release.
    refuse(
        f"{', '.join(missing)}: missing, so this is a checkout of another version; install the "
        f"release {FROZEN.needs}"
    )
