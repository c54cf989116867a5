"""Checks and inputs that the programs in this folder share: the numbers of a frozen launch config,
the corpus, and the installed versions.

`forerun export` wrote the numbers to `forerun.json`. An edit would make it another run, so the
programs refuse an edited file. They also refuse a corpus other than the frozen one. A refusal ends
the program with exit code 2.
"""

import importlib.metadata
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from forerun._proxies.core import canon
from forerun._proxies.data.tokens import TokenStore

HERE = Path(__file__).resolve().parent
NUMBERS_FILE = HERE / "forerun.json"
RECORDS = {"shape", "forward", "schedule", "parallelism", "checkpointing"}
"""Records of the frozen config, whose fields become attributes."""


def refuse(*problems: str) -> NoReturn:
    """Print the problems and end the program with exit code 2."""
    print(f"{Path(sys.argv[0]).name}: {'; '.join(problems)}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def read_numbers() -> SimpleNamespace:
    """Return the digest, the trainer, and the version of the export, and each number by name.

    A file that is missing, damaged, or edited is refused.
    """
    advice = "copy the export's whole folder again, or run `forerun export` again"
    try:
        body = canon.parse(NUMBERS_FILE.read_bytes())
    except OSError as error:
        refuse(f"{NUMBERS_FILE} cannot be read ({error.strerror}): {advice}")
    except canon.CanonError as error:
        refuse(f"{NUMBERS_FILE} is damaged ({error}): {advice}")
    sha256 = body.pop("sha256", None) if isinstance(body, dict) else None
    if not isinstance(body, dict) or sha256 != canon.compute_content_id(body):
        refuse(f"{NUMBERS_FILE} was edited: its numbers do not match its sha256; {advice}")
    numbers: dict[str, Any] = {**body}
    for name, value in numbers.pop("numbers").items():
        numbers[name] = SimpleNamespace(**value) if name in RECORDS else value
    return SimpleNamespace(**numbers)


def open_corpus(frozen: SimpleNamespace, folder: str | None) -> TokenStore:
    """Open the corpus in a folder, and check its hashes; another corpus is refused.

    Args:
        frozen: The numbers that `read_numbers` returned.
        folder: Value of the environment variable FORERUN_DATA; None or empty is refused.
    """
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
    """Return a problem for each package that is not installed in the given version."""
    problems = []
    for name, version in wanted.items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed = "is not installed"
        # Ignore the local part of a version: 0.3.0+cpu is a build of the release 0.3.0.
        if installed.partition("+")[0] != version:
            problems.append(f"{name} {installed}: must be {version}")
    return problems
