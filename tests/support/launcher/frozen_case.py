"""Helper for tests of frozen configs: it freezes a decision in a new study."""

from __future__ import annotations

from forerun._launcher.main_run.frozen.frozen_folder import ATTESTED, write_frozen
from forerun._sweeps.store.ledger import Ledger


def freeze(study, decision):
    """Freeze a decision in a new study with an empty ledger; return the folder of the config."""
    with Ledger.open(study, {}, create=True):
        pass
    return write_frozen(study / "frozen", decision, {kind: {} for kind in ATTESTED}).parent
