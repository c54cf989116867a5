"""Reads `forerun.json`, the numbers of a frozen launch config, for the programs beside it.

`forerun export` wrote the file. Whoever edits it has another run: what is not whole, or of another config, is refused.
"""

import importlib.metadata
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from proxies.core import canon

FORMAT = 1
"""Of `forerun.json`; these programs read no other."""
HERE = Path(__file__).resolve().parent
NUMBERS_FILE = HERE / "forerun.json"
RECORDS = {"shape", "forward", "schedule", "parallelism", "checkpointing"}
"""Of the frozen config: their fields are attributes here."""


def refuse(problem: str) -> NoReturn:
    """End with 2 and a sentence."""
    print(f"{Path(sys.argv[0]).name}: {problem}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def read_numbers() -> SimpleNamespace:
    """What `forerun.json` holds: digest, trainer and versions of the export, and each of its numbers by name."""
    again = "copy the export's whole folder again, or `forerun export` anew"
    try:
        found = canon.parse(NUMBERS_FILE.read_bytes())
    except OSError as error:
        refuse(f"{NUMBERS_FILE} cannot be read ({error.strerror}): {again}")
    except canon.CanonError as error:
        refuse(f"{NUMBERS_FILE} is damaged ({error}): {again}")
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        told = found.get("format") if isinstance(found, dict) else None
        refuse(
            f"{NUMBERS_FILE} has format {told}, these programs read {FORMAT}: they are of different exports; {again}"
        )
    sha256 = found.pop("sha256", None)
    if sha256 != canon.content_id(found):
        refuse(f"{NUMBERS_FILE} was edited: its numbers are no longer those of its sha256; {again}")
    launched = os.environ.get("FORERUN_DIGEST", found["digest"])  # as run.sh says
    if launched != found["digest"]:
        refuse(f"{NUMBERS_FILE} is of the config {found['digest']}, run.sh launches {launched}; {again}")
    head: dict[str, Any] = {**found}
    for name, value in head.pop("numbers").items():
        head[name] = SimpleNamespace(**value) if name in RECORDS else value
    return SimpleNamespace(**head)


def other_versions(wanted: dict[str, str]) -> list[str]:
    """Sentences about the distributions that are not installed at the version that the export was written for."""
    installed = {name: importlib.metadata.version(name) for name in wanted}
    return [
        f"{name} {installed[name]}: {version} is needed"
        for name, version in wanted.items()
        if installed[name] != version
    ]
