"""`forerun explain FROZEN [FIELD]`: fields of a frozen config, as JSON and as text."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from proxies import canon
from proxies.canon import Json

PLAIN_WIDTH = 120
"""Characters of a line of prose where there is no terminal."""


def explained_fields(frozen: Path, field: str | None) -> tuple[dict[str, Json], str]:
    """Every field, or those of a name.

    Raises:
        FrozenError: there is no launch config.
        TamperedError: it, or its evidence, was edited.
        LedgerCorrupt: the study around it is not sound.
        UnknownFieldError: no field has that name.
    """
    from launcher.explaining.explainers import explain
    from launcher.explaining.known import known_of
    from launcher.explaining.leaves import find, leaves
    from launcher.explaining.text import fields_text, table_text
    from launcher.verbs.options import folder_of

    known = known_of(frozen, folder_of(frozen))
    every = leaves(known.decision)
    found = [explain(known, leaf) for leaf in (every if field is None else find(every, field))]
    body: dict[str, Json] = {
        "digest": known.decision.digest,
        "fields": canon.to_json(found),
        "notes": [*known.notes],
        "rehearsed": known.rehearsed,
    }
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PLAIN_WIDTH
    if field is not None:
        return body, fields_text(found, known.notes, width)
    told = f"\none field whole: forerun explain {frozen} clip_norm"
    notes = [f"note: {note}" for note in known.notes]
    return body, "\n".join([table_text(found), *notes, told])
