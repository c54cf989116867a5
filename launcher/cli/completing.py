"""What a shell is offered while a command is typed: plans, studies, frozen configs, words of a list.

The standard library and click.

Only names are looked at, here and one folder below: a key press must not wait for a ledger to be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import click
from click.shell_completion import CompletionItem

NUM_OFFERED = 200
_LEDGER, _LAUNCH = "ledger.db", "launch.json"


def plans(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """TOML files; else whatever file the shell finds."""
    return _offered(incomplete, (path for folder in _folders(incomplete) for path in folder.glob("*.toml")), "file")


def studies(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Folders with a ledger; else whatever folder the shell finds."""
    found = (path.parent for folder in _folders(incomplete) for path in folder.glob(f"*/{_LEDGER}"))
    return _offered(incomplete, found, "dir")


def frozen_configs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Folders of frozen configs, their digest in full; else whatever file the shell finds."""
    launches = (path.parent for folder in _folders(incomplete) for path in _launches(folder))
    return _offered(incomplete, launches, "file")


def words(known: Iterable[str]) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """A completer that offers these words."""

    def offered(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(word) for word in known if word.startswith(incomplete)]

    return offered


def _folders(incomplete: str) -> list[Path]:
    """The folder that is being typed, and those in it."""
    base = Path(incomplete if incomplete.endswith("/") else Path(incomplete).parent) if incomplete else Path()
    try:
        inner = [path for path in base.iterdir() if path.is_dir() and not path.name.startswith(".")]
    except OSError:
        return []
    return [base, *sorted(inner)[:NUM_OFFERED]]


def _launches(folder: Path) -> Iterable[Path]:
    """Launch files of the study that a folder is, of the studies in it, or of its folder `frozen`."""
    for pattern in (f"frozen/*/{_LAUNCH}", f"*/{_LAUNCH}"):
        yield from folder.glob(pattern)


def _offered(incomplete: str, paths: Iterable[Path], otherwise: str) -> list[CompletionItem]:
    """Those that go on from what is typed, sorted; the shell's own files or folders where there are none."""
    names = sorted({str(path) for path in paths})
    fitting = [name for name in names if name.startswith(incomplete.removeprefix("./"))][:NUM_OFFERED]
    dotted = "./" if incomplete.startswith("./") else ""
    return [CompletionItem(dotted + name) for name in fitting] or [CompletionItem(incomplete, type=otherwise)]
