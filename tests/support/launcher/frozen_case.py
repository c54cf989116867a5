"""Case for tests of the frozen folder: a study with a frozen launch config."""

from __future__ import annotations

from forerun._launcher.main_run.frozen.frozen_folder import ATTESTED, write_frozen
from forerun._sweeps.store.ledger import Ledger


def freeze(study, decision):
    """Freeze a decision in a study with an empty ledger; return the frozen folder."""
    with Ledger.open(study, {}, create=True):
        pass
    return write_frozen(study / "frozen", decision, {kind: {} for kind in ATTESTED}).parent
