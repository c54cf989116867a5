"""Checks of a frozen config against its attestations and the study's ledger, and the acceptance of
their problems by a person.

Verbs that act on a config run these checks first. The digest in `launch.json` is not enough: after
an edit, anybody can compute it again. But the attestations in the config's folder name the digest
that was frozen. And the study's ledger, the file in which a study records its runs, holds the runs
that the config was frozen from.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import cast

from forerun._launcher.main_run.frozen.config_names import shorten_config_name
from forerun._launcher.main_run.frozen.frozen import TamperedError
from forerun._launcher.main_run.frozen.frozen_folder import ATTESTED, find_attestations, find_study
from forerun._launcher.main_run.frozen.launch_file import (
    attest,
    get_attestation_path,
    read_attestation,
)
from forerun._proxies.core import canon
from forerun._proxies.core.notation import format_counted
from forerun._sweeps.store.errors import SweepError
from forerun._sweeps.store.ledger import LEDGER_NAME, Ledger

ACCEPTED = "accepted"
"""Kind of the attestation that records accepted problems, with the reason."""


def find_problems(folder: Path, digest: str) -> dict[str, list[str]]:
    """Return the problems of a config's folder by check (`launch_file.CHECKS`).

    A check without problems is left out.

    Args:
        folder: Folder of the config.
        digest: Digest of the config.
    """
    bodies, problems = find_attestations(folder, digest, needed=ATTESTED)
    evidence_problems = problems.pop("evidence", [])
    if bodies.get("evidence"):
        try:
            problem = check_ledger(folder, digest)
        except SweepError as error:
            problem = f"the ledger does not prove the evidence: {error}"
        evidence_problems += [problem] if problem else []
    by_check = {
        "evidence": evidence_problems,
        "attestations": [*itertools.chain(*problems.values())],
    }
    return {check: texts for check, texts in by_check.items() if texts}


def check_ledger(folder: Path, digest: str) -> str:
    """Return why the study's ledger does not prove a config's evidence.

    The text is empty if the ledger proves it, or if there is no ledger.

    Raises:
        TamperedError: The evidence was edited.
        SweepError: The ledger cannot be read.
    """
    study_dir = find_study(folder)
    if study_dir is None:
        return ""
    ledger = Ledger.read(study_dir)
    evidence = read_attestation(get_attestation_path(folder, "evidence"), digest)
    head, run_ids = evidence.get("ledger_head"), evidence.get("run_ids")
    if not isinstance(head, str) or not isinstance(run_ids, list):
        return (
            "attestations/evidence.json names no record of a ledger and no runs: `forerun freeze` "
            "writes it again"
        )
    if all(record.hash != head for record in ledger.iterate_records()):
        return (
            f"{study_dir / LEDGER_NAME}: record {head[:12]}, at which this config was frozen, is "
            "missing: this ledger is an older copy, belongs to another study, was repaired or was "
            "rewritten; restore the ledger of that time, or freeze again from this one"
        )
    if lost := set(map(str, run_ids)) - set(ledger.get_results()):
        return (
            f"{study_dir / LEDGER_NAME} lacks {format_counted(len(lost), 'run')} of the config's "
            f"evidence, such as {min(lost)[:12]}"
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
        "freeze again, restore the files from a copy, or use the config as it is: forerun launch "
        f"{shorten_config_name(folder)} {options} --reason TEXT (recorded)"
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
    path = get_attestation_path(folder, ACCEPTED)
    if not path.is_file():
        return set(), ""
    try:
        body = read_attestation(path, digest)
    except TamperedError:  # `find_problems` reports it
        return set(), ""
    problems = body.get("problems")
    accepted = set(cast(list[str], problems)) if isinstance(problems, list) else set()
    return accepted, str(body.get("reason", ""))
