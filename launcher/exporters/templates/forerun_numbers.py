"""Reads `forerun.json`, the numbers of a frozen launch config, for the programs beside it.

`forerun export` wrote the file. Whoever edits it has another run: what is not whole is refused.
"""

import importlib.metadata
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from proxies.core import canon
from proxies.data.tokens import TokenStore

HERE = Path(__file__).resolve().parent
NUMBERS_FILE = HERE / "forerun.json"
RECORDS = {"shape", "forward", "schedule", "parallelism", "checkpointing"}
"""Of the frozen config: their fields are attributes here."""


def refuse(*problems: str) -> NoReturn:
    """End with 2 and a sentence."""
    print(f"{Path(sys.argv[0]).name}: {'; '.join(problems)}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def read_numbers() -> SimpleNamespace:
    """What `forerun.json` holds: digest, trainer and versions of the export, and each of its
    numbers by name.
    """
    again = "copy the export's whole folder again, or run `forerun export` again"
    try:
        found = canon.parse(NUMBERS_FILE.read_bytes())
    except OSError as error:
        refuse(f"{NUMBERS_FILE} cannot be read ({error.strerror}): {again}")
    except canon.CanonError as error:
        refuse(f"{NUMBERS_FILE} is damaged ({error}): {again}")
    sha256 = found.pop("sha256", None) if isinstance(found, dict) else None
    if not isinstance(found, dict) or sha256 != canon.content_id(found):
        refuse(f"{NUMBERS_FILE} was edited: its numbers do not match its sha256; {again}")
    head: dict[str, Any] = {**found}
    for name, value in head.pop("numbers").items():
        head[name] = SimpleNamespace(**value) if name in RECORDS else value
    return SimpleNamespace(**head)


def open_corpus(frozen: SimpleNamespace, folder: str | None) -> TokenStore:
    """The frozen corpus, all of it checked by its hashes; `folder`: what FORERUN_DATA names."""
    if not folder:
        refuse("FORERUN_DATA is not set: it must name the corpus folder")
    try:
        store = TokenStore(Path(folder), weights=frozen.data_weights or None)
    except (ValueError, OSError) as error:
        refuse(str(error))
    if store.manifest.data_id != frozen.data_id:
        refuse(f"{folder} has data_id {store.manifest.data_id}, frozen as {frozen.data_id}")
    return store


def other_versions(wanted: dict[str, str]) -> list[str]:
    """Sentences about the distributions that are not installed at the version that the export was
    written for.
    """
    problems = []
    for name, version in wanted.items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed = "is not installed"
        # torch's and others' local versions (0.3.0+cpu) are the release.
        if installed.partition("+")[0] != version:
            problems.append(f"{name} {installed}: must be {version}")
    return problems
