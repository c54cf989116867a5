"""Opening of studies: a plan with its corpus, its user's code, and its ledger. Imports torch only
for a user's own model.

A study's folder must not hold links that lead out of it, because writing the study would change
files there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from launcher.base.talk import Heartbeat, say
from launcher.calibration.procedure import calibrated, groups_of
from launcher.experiments.search import implied_problems
from launcher.plan.file import PlanError, load_plan, todo_problems, with_lines
from launcher.plan.plan import Plan
from launcher.plan.study import PLAN_FILE, Study
from launcher.plan.writing import commented_plan
from proxies.core import canon
from proxies.core.errors import InputError
from proxies.core.notation import counted
from proxies.core.powers import Ratios
from proxies.core.programs import Factory
from proxies.data.tokens import SCHEMA_VERSION, Manifest, Source, TokenStore, read_manifest
from sweeps.store.checkpoints import CHECKPOINTS_DIR
from sweeps.store.curves import CURVES_DIR
from sweeps.store.errors import StudyMissing
from sweeps.store.fork import import_runs, read_parent
from sweeps.store.ledger import CALIBRATION, LEDGER_NAME, Ledger

_MAX_NAMED = 8
"""Maximum number of links that are named."""
_SUBFOLDERS = (CURVES_DIR, CHECKPOINTS_DIR, "frozen", "wandb")
"""Subfolders whose entries are checked for links."""


class LinksOutError(InputError):
    """A study's folder holds links that lead out of it."""


def refuse_links_out(study_dir: Path) -> None:
    """Check that everything that forerun writes in a study lies in its folder. The folder itself
    may be a link.

    The files of the user's own trainer (`external/`) and the main run's folder are not checked.

    Raises:
        LinksOutError: Some links lead elsewhere; the message names them.
    """
    home = study_dir.resolve()
    folders = [home, *(home / name for name in _SUBFOLDERS)]
    out = sorted(
        f"{link.relative_to(home)} -> {link.readlink()}"
        for folder in folders
        for link in _list_links(folder)
        if not Path(os.path.realpath(link)).is_relative_to(home)  # resolve() fails on a loop
    )
    if out:
        more = f" and {len(out) - _MAX_NAMED} more" if len(out) > _MAX_NAMED else ""
        raise LinksOutError(
            f"{study_dir} holds links that lead out of it: {', '.join(out[:_MAX_NAMED])}{more}. "
            "These links point outside the study: remove them, or move the whole study and make a "
            "link of its folder"
        )


def _list_links(folder: Path) -> Iterator[Path]:
    if folder.is_symlink() or not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                yield Path(entry.path)


def plan_study(
    plan_path: Path,
    study_dir: Path,
    overrides: tuple[str, ...] = (),
    *,
    source_sha256: str | None = None,
) -> Study:
    """Return the study that a plan file asks for.

    Raises:
        PlanError, DataError: The plan or its corpus has problems.
    """
    here = plan_path.parent
    plan = load_plan(plan_path, overrides)
    code_dir = (here / plan.proxy.code_path).resolve()
    corpus = (here / plan.data.path).resolve() if plan.data.path else None
    study = Study(
        plan=plan,
        study_dir=study_dir,
        corpus=corpus,
        manifest=_read_manifest_of(plan, corpus),
        code_dir=code_dir,
        factory=_pin_factory(plan, code_dir, source_sha256),
    )
    problems = with_lines(plan_path, todo_problems(plan), overrides)
    if problems := [*problems, *implied_problems(study, study.space)]:
        raise PlanError(str(plan_path), problems)
    return study


def _read_manifest_of(plan: Plan, corpus: Path | None) -> Manifest:
    """Return the manifest of the plan's corpus with the plan's proportions; for a command with its
    own data, a manifest that has only its name.
    """
    if corpus is None:
        return unnamed(plan.data.external, plan.data.vocab_size)
    manifest = read_manifest(corpus)
    return manifest.reweighted(plan.data.weights) if plan.data.weights else manifest


def unnamed(name: str, vocab_size: int) -> Manifest:
    """Return a manifest for data of which only a name and the vocabulary size are known."""
    source = Source(name=name, weight=1.0, num_documents=0, train=(), validation=())
    return Manifest(
        schema_version=SCHEMA_VERSION,
        tokenizer="unnamed",
        vocab_size=vocab_size,
        dtype="uint32",
        end_id=None,
        sources=(source,),
    )


def _pin_factory(plan: Plan, code_dir: Path, source_sha256: str | None) -> Factory | None:
    if not plan.proxy.factory:
        return None
    if source_sha256 is not None:
        return plan.factory(source_sha256)
    from proxies.external.factory import load  # imports the user's module, and torch with it

    values = {name: axis.value(name, None).at(Ratios()) for name, axis in plan.search.own.items()}
    return plan.factory(load(plan.proxy.factory, code_dir, values)[1].source_sha256)


def recorded_study(study_dir: Path) -> Study:
    """Return the study of a folder, from the plan kept in it.

    Raises:
        PlanError: The folder has no plan.
    """
    return plan_study(study_dir / PLAN_FILE, study_dir)


def recorded(study_dir: Path) -> tuple[Study, Ledger]:
    """Return the study of a folder and its ledger, for reading. This works while a driver runs.

    Raises:
        SweepError, PlanError, DataError: There is no study, it is not sound, or its plan differs
            from the recorded one.
        LinksOutError: See `refuse_links_out`.
    """
    refuse_links_out(study_dir)
    ledger = Ledger.read(study_dir)
    # Reading a study needs its records, not the user's code.
    sha = str(cast(dict[str, canon.Json], ledger.plan).get("factory_sha256", ""))
    study = calibrated(plan_study(study_dir / PLAN_FILE, study_dir, source_sha256=sha), ledger)
    ledger.check_plan(study.question)
    return study, ledger


def verified_corpus(study: Study) -> TokenStore | None:
    """Read the whole corpus once to verify it, and return it; None if there is none. In a worker, a
    damaged corpus would fail run after run.

    Raises:
        DataError: The corpus differs from its manifest, or is too short for one window.
    """
    if study.corpus is None:
        return None
    with Heartbeat(f"reading {study.corpus}") as heartbeat:
        store = TokenStore(
            study.corpus, weights=study.plan.data.weights or None, on_shard=heartbeat.step
        )
    seq_len = study.plan.model.seq_len
    store.train_batch(seed=0, first_sequence=0, num_sequences=1, seq_len=seq_len)
    store.validation_batch(num_sequences=1, seq_len=seq_len)
    return store


def open_ledger(study: Study, parent_dir: Path | None = None) -> Ledger:
    """Open the study's ledger for writing, and write the plan next to it.

    Args:
        study: Study to open.
        parent_dir: Study whose finished runs are imported first; None for no parent.

    Raises:
        SweepError: See `Ledger.open`; for the parent, `sweeps.store.fork`.
        LinksOutError: See `refuse_links_out`.
    """
    refuse_links_out(study.study_dir)
    if (study.study_dir / LEDGER_NAME).exists():
        with contextlib.suppress(
            StudyMissing
        ):  # the driver may have been killed before the first record
            study = calibrated(study, Ledger.read(study.study_dir))
    same = {key: study.question[key] for key in ("data_id", "semantics")}
    # Read the parent before anything is created.
    parent = None if parent_dir is None else read_parent(study.study_dir, parent_dir, same)
    ledger = Ledger.open(study.study_dir, study.question, create=True, is_amendable=is_of_user_code)
    try:
        values = cast(dict[str, dict[str, object]], study.plan.model_dump())
        values["data"]["path"] = str(study.corpus or "")
        values["proxy"]["code_path"] = str(study.code_dir)
        canon.write_atomic(study.study_dir / PLAN_FILE, commented_plan(values).encode())
        if parent is not None and parent_dir is not None:
            _import_parent(study, ledger, parent, parent_dir)
    except BaseException:
        ledger.close()
        raise
    return ledger


def is_of_user_code(key: str) -> bool:
    """Return whether a plan key names the user's training code, the way it is called, or where it
    logs.
    """
    fixed = ("proxy.command", "proxy.factory", "factory_sha256")
    return key in fixed or key.startswith(("proxy.metrics_", "proxy.dimensions"))


def _import_parent(study: Study, ledger: Ledger, parent: Ledger, parent_dir: Path) -> None:
    """Import the parent's runs and calibration, and print how many."""
    imported = import_runs(ledger, study.study_dir, parent, parent_dir)
    runs = counted(imported.num_runs, "finished run")
    say(f"fork: {runs} imported from {parent_dir}, {imported.num_known} here already")
    for problem in imported.damaged:
        say(f"fork: not imported: {problem}")
    records = parent.records(CALIBRATION)
    needed = {group.asked.key for group in groups_of(study)} if records else set()
    taken = [r for r in records if r.key in needed and ledger.find(CALIBRATION, r.key) is None]
    for record in taken:  # otherwise the same runs would have other ids here
        ledger.append(CALIBRATION, record.key, record.body)
    if taken:
        say(
            f"fork: {counted(len(taken), 'choice')} of its calibration imported, which are not "
            "measured again"
        )
