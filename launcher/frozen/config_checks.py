"""Checks of a frozen config against what lies beside it: every verb that acts on a config makes them first.

`launch.json` proves only that its content has the digest it names: whoever edits a number can hash it again. The
attestations beside it still name the digest that was frozen, and the study's ledger holds the record and the runs that
it was frozen from.
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
"""Kind of the attestation that keeps what was accepted, and why."""


def find_problems(folder: Path, digest: str, *, complete: bool) -> dict[str, list[str]]:
    """Return what is wrong beside a launch file, by check; a check without a problem is left out.

    Args:
        folder: Folder of the config.
        digest: Digest of the config.
        complete: Whether what `freeze` writes must all be there, and the study's ledger must hold the evidence.
    """
    bodies, problems = find_attestations(folder, digest, needed=ATTESTED if complete else ())
    if complete and bodies.get("evidence"):
        try:
            problem = check_ledger(folder, digest)
        except SweepError as error:
            problem = f"the ledger does not prove the evidence: {error}"
        problems["evidence"] = [problem] if problem else []
    found: dict[str, list[str]] = {}
    for name, texts in problems.items():
        found.setdefault("evidence" if name == "evidence" else "attestations", []).extend(texts)
    return {check: texts for check, texts in found.items() if texts}


def check_ledger(folder: Path, digest: str) -> str:
    """Return what the ledger of the study around a config lacks of its evidence; empty if nothing, or no ledger.

    Raises:
        TamperedError: The evidence is not sound.
        SweepError: The ledger cannot be read.
    """
    study_dir = study_of(folder)
    if study_dir is None:
        return ""
    try:
        head, num_later, lost = since_frozen(folder, digest, Ledger.read(study_dir))
    except (KeyError, TypeError):
        return "attestations/evidence.json names no record of a ledger and no runs: `forerun freeze` writes it again"
    if num_later is None:
        return (
            f"{study_dir / LEDGER_NAME}: record {head[:12]}, at which this config was frozen, is missing: this ledger "
            "is an older copy, belongs to another study, was repaired or was rewritten; restore the ledger of that "
            "time, or freeze again from this one"
        )
    if lost:
        runs = counted(len(lost), "run")
        return f"{study_dir / LEDGER_NAME} lacks {runs} of the config's evidence, such as {min(lost)[:12]}"
    return ""


def require_sound(folder: Path, digest: str, *, complete: bool = False) -> str:
    """Refuse a config with a problem that nobody has accepted.

    Args:
        folder: Folder of the config.
        digest: Digest of the config.
        complete: See `find_problems`.

    Returns:
        A sentence on the problems that were accepted; empty where there is no problem.

    Raises:
        TamperedError: Something beside the config is not its own, or is missing. All of it is named.
    """
    problems = find_problems(folder, digest, complete=complete)
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


def accept_problems(folder: Path, digest: str, checks: tuple[str, ...], reason: str, author: str) -> list[str]:
    """Put the problems that somebody accepts on record beside the config; returns them, none if there is nothing."""
    found = find_problems(folder, digest, complete=True)
    problems = [problem for check in dict.fromkeys(checks) for problem in found.get(check, ())]
    if problems:
        before, _ = _read_accepted(folder, digest)
        body: dict[str, canon.Json] = {
            "problems": [*sorted(before | set(problems))], "reason": reason, "author": author,
        }  # fmt: skip
        attest(folder, ACCEPTED, digest, body)
    return problems


def _read_accepted(folder: Path, digest: str) -> tuple[set[str], str]:
    path = path_of(folder, ACCEPTED)
    if not path.is_file():
        return set(), ""
    try:
        body = read_attestation(path, digest)
    except TamperedError:  # among the problems already
        return set(), ""
    problems = body.get("problems")
    return set(cast(list[str], problems)) if isinstance(problems, list) else set(), str(body.get("reason", ""))
