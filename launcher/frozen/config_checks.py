"""Checks of a frozen config against its attestations and the study's ledger. Verbs that act on a
config run them first.

`launch.json` proves only that its content has the digest it names, which can be computed again
after an edit. The attestations in the config's folder still name the digest that was frozen, and
the study's ledger holds the record and the runs that the config was frozen from.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import cast

from launcher.base.study_names import shown_name
from launcher.frozen.frozen import TamperedError
from launcher.frozen.frozen_folder import ATTESTED, find_attestations, since_frozen, study_of
from launcher.frozen.launch_file import attest, path_of, read_attestation
from proxies.core import canon
from proxies.core.notation import counted
from sweeps.store.errors import SweepError
from sweeps.store.ledger import LEDGER_NAME, Ledger

ACCEPTED = "accepted"
"""Kind of the attestation that records accepted problems, with the reason."""


def find_problems(folder: Path, digest: str) -> dict[str, list[str]]:
    """Return the problems of a config's folder by check (`CHECKS`); a check without problems is
    left out.

    Args:
        folder: Folder of the config.
        digest: Digest of the config.
    """
    bodies, problems = find_attestations(folder, digest, needed=ATTESTED)
    if bodies.get("evidence"):
        try:
            problem = check_ledger(folder, digest)
        except SweepError as error:
            problem = f"the ledger does not prove the evidence: {error}"
        problems["evidence"] = [problem] if problem else []
    by_check: dict[str, list[str]] = {}
    for kind, texts in problems.items():
        if texts:
            by_check.setdefault("evidence" if kind == "evidence" else "attestations", []).extend(
                texts
            )
    return by_check


def check_ledger(folder: Path, digest: str) -> str:
    """Return what the study's ledger lacks of a config's evidence; empty if it lacks nothing or
    there is no ledger.

    Raises:
        TamperedError: The evidence was edited.
        SweepError: The ledger cannot be read.
    """
    study_dir = study_of(folder)
    if study_dir is None:
        return ""
    try:
        head, num_later, lost = since_frozen(folder, digest, Ledger.read(study_dir))
    except (KeyError, TypeError):
        return (
            "attestations/evidence.json names no record of a ledger and no runs: `forerun "
            "freeze` writes it again"
        )
    if num_later is None:
        return (
            f"{study_dir / LEDGER_NAME}: record {head[:12]}, at which this config was frozen, is "
            "missing: this ledger "
            "is an older copy, belongs to another study, was repaired or was rewritten; restore "
            "the ledger of that "
            "time, or freeze again from this one"
        )
    if lost:
        runs = counted(len(lost), "run")
        return (
            f"{study_dir / LEDGER_NAME} lacks {runs} of the config's evidence, such as "
            f"{min(lost)[:12]}"
        )
    return ""


def require_sound(folder: Path, digest: str) -> str:
    """Check that a config's folder has no problems except accepted ones.

    Args:
        folder: Folder of the config.
        digest: Digest of the config.

    Returns:
        A sentence on the accepted problems; empty if there are no problems.

    Raises:
        TamperedError: There are problems that nobody accepted; the error lists all of them.
    """
    problems = find_problems(folder, digest)
    if not problems:
        return ""
    accepted, reason = _read_accepted(folder, digest)
    refused = {check: texts for check, texts in problems.items() if not set(texts) <= accepted}
    if not refused:
        texts = itertools.chain(*problems.values())
        return f"the config has problems that were accepted ({reason}): {'; '.join(texts)}"
    options = " ".join(f"--accept {check}" for check in refused)
    advice = (
        f"freeze again, restore the files from a copy, or use the config as it is: forerun launch "
        f"{shown_name(folder)} {options} --reason TEXT (recorded)"
    )
    raise TamperedError(str(folder), [*itertools.chain(*refused.values()), advice])


def accept_problems(
    folder: Path, digest: str, checks: tuple[str, ...], reason: str, author: str
) -> list[str]:
    """Record in an attestation that a person accepts the config's problems.

    Args:
        folder: Folder of the config.
        digest: Digest of the config.
        checks: Checks whose problems are accepted (`CHECKS`).
        reason: Reason that the person gave.
        author: Name of the person.

    Returns:
        The accepted problems; nothing is recorded if there are none.
    """
    by_check = find_problems(folder, digest)
    problems = [problem for check in dict.fromkeys(checks) for problem in by_check.get(check, ())]
    if problems:
        accepted, _ = _read_accepted(folder, digest)
        body: dict[str, canon.Json] = {
            "problems": [*sorted(accepted | set(problems))],
            "reason": reason,
            "author": author,
        }
        attest(folder, ACCEPTED, digest, body)
    return problems


def _read_accepted(folder: Path, digest: str) -> tuple[set[str], str]:
    """Return the problems that were accepted before, and the reason; empty if there are none."""
    path = path_of(folder, ACCEPTED)
    if not path.is_file():
        return set(), ""
    try:
        body = read_attestation(path, digest)
    except TamperedError:  # `find_problems` reports it
        return set(), ""
    problems = body.get("problems")
    return set(cast(list[str], problems)) if isinstance(problems, list) else set(), str(
        body.get("reason", "")
    )
