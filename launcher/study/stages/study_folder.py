"""Opening of studies: a plan with its corpus, the user's code, and the ledger. Torch is imported
only for a user's own model.

A study's question (the plan keys that decide what is measured) must be the one that its ledger
recorded. A study's folder must not hold links that lead out of it, because writing the study would
change files outside.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from forerun._launcher.main_run.progress_output import StepProgress, print_progress
from forerun._launcher.study.calibration.procedure import apply_calibrations, group_runs
from forerun._launcher.study.experiments.search import find_run_problems
from forerun._launcher.study.plan.file import PlanError, add_line_numbers, find_todos, load_plan
from forerun._launcher.study.plan.plan import Plan
from forerun._launcher.study.plan.study import PLAN_FILE, Study
from forerun._launcher.study.plan.writing import format_plan
from forerun._proxies.core import canon
from forerun._proxies.core.errors import InputError
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.powers import Ratios
from forerun._proxies.core.programs import Factory
from forerun._proxies.data.tokens import SCHEMA_VERSION, Manifest, Source, TokenStore, read_manifest
from forerun._sweeps.store.checkpoints import CHECKPOINTS_DIR
from forerun._sweeps.store.curves import CURVES_DIR
from forerun._sweeps.store.errors import StudyMissing
from forerun._sweeps.store.fork import import_runs, read_parent
from forerun._sweeps.store.ledger import CALIBRATION, LEDGER_NAME, Ledger

_MAX_NAMED = 8
"""Maximum number of links that are named."""
_SUBFOLDERS = (CURVES_DIR, CHECKPOINTS_DIR, "frozen", "wandb")
"""Subfolders whose entries are checked for links."""


class LinksOutError(InputError):
    """A study's folder holds links that lead out of it."""


def refuse_links_out(study_dir: Path) -> None:
    """Refuse a study if links in its folder lead out of it. The folder itself may be a link.

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


def read_study(
    plan_path: Path,
    study_dir: Path,
    overrides: tuple[str, ...] = (),
    *,
    source_sha256: str | None = None,
) -> Study:
    """Return the study that a plan file asks for.

    Args:
        plan_path: Plan file.
        study_dir: Folder of the study, which need not exist.
        overrides: Values of `--set`.
        source_sha256: Hash of the source of the user's own model, if it is known or does not
            matter; None to load the model's module and compute the hash.

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
    problems = add_line_numbers(plan_path, find_todos(plan), overrides)
    if problems := [*problems, *find_run_problems(study, study.space)]:
        raise PlanError(str(plan_path), problems)
    return study


def _read_manifest_of(plan: Plan, corpus: Path | None) -> Manifest:
    """Return the manifest of the plan's corpus with the plan's weights of its sources. If a command
    has its own data, the manifest has only the name of the data.
    """
    if corpus is None:
        return build_unnamed_manifest(plan.data.external, plan.data.vocab_size)
    manifest = read_manifest(corpus)
    return manifest.reweight(plan.data.weights) if plan.data.weights else manifest


def build_unnamed_manifest(name: str, vocab_size: int) -> Manifest:
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
        return plan.build_factory(source_sha256)
    from forerun._proxies.external.factory import (
        load_factory,  # imports the user's module, and torch with it
    )

    values = {
        name: axis.get_value(name, None).compute_value(Ratios())
        for name, axis in plan.search.user_axes.items()
    }
    return plan.build_factory(load_factory(plan.proxy.factory, code_dir, values)[1].source_sha256)


def read_recorded_study(study_dir: Path) -> Study:
    """Return the study of a folder, from the plan kept in it.

    Raises:
        PlanError: The folder has no plan.
    """
    return read_study(study_dir / PLAN_FILE, study_dir)


def open_recorded_study(study_dir: Path) -> tuple[Study, Ledger]:
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
    study = apply_calibrations(
        read_study(study_dir / PLAN_FILE, study_dir, source_sha256=sha), ledger
    )
    ledger.check_plan(study.question)
    return study, ledger


def verify_corpus(study: Study) -> TokenStore | None:
    """Read the whole corpus once to verify it, and return it; None if there is none. Without this,
    a damaged corpus would be noticed only in the workers, by one failed run after another.

    Raises:
        DataError: The corpus differs from its manifest, or is too short for one window.
    """
    if study.corpus is None:
        return None
    with StepProgress(f"reading {study.corpus}") as heartbeat:
        store = TokenStore(
            study.corpus, weights=study.plan.data.weights or None, on_shard=heartbeat.step
        )
    seq_len = study.plan.model.seq_len
    store.read_train_batch(seed=0, first_sequence=0, num_sequences=1, seq_len=seq_len)
    store.read_validation_batch(num_sequences=1, seq_len=seq_len)
    return store


def open_ledger(study: Study, parent_dir: Path | None = None) -> Ledger:
    """Open the study's ledger for writing, and write the plan next to it.

    Args:
        study: Study to open.
        parent_dir: Study whose finished runs are imported first; None for no parent.

    Raises:
        SweepError: See `Ledger.open`; for the parent, `forerun._sweeps.store.fork`.
        LinksOutError: See `refuse_links_out`.
    """
    refuse_links_out(study.study_dir)
    if (study.study_dir / LEDGER_NAME).exists():
        # The ledger may be empty: a driver may have been killed before the first record.
        with contextlib.suppress(StudyMissing):
            study = apply_calibrations(study, Ledger.read(study.study_dir))
    required = {key: study.question[key] for key in ("data_id", "semantics")}
    # Read the parent before anything is created. Its data and semantics must be the same.
    parent = None if parent_dir is None else read_parent(study.study_dir, parent_dir, required)
    ledger = Ledger.open(
        study.study_dir, study.question, create=True, is_amendable=is_user_code_key
    )
    try:
        values = cast(dict[str, dict[str, object]], study.plan.model_dump())
        values["data"]["path"] = str(study.corpus or "")
        values["proxy"]["code_path"] = str(study.code_dir)
        canon.write_atomic(study.study_dir / PLAN_FILE, format_plan(values).encode())
        if parent is not None and parent_dir is not None:
            _import_parent(study, ledger, parent, parent_dir)
    except BaseException:
        ledger.close()
        raise
    return ledger


def is_user_code_key(key: str) -> bool:
    """Return whether a key of the study's question concerns the user's training code, its command
    line, or its log. Such a key may be amended while no run is recorded.
    """
    fixed = ("proxy.command", "proxy.factory", "factory_sha256")
    return key in fixed or key.startswith(("proxy.metrics_", "proxy.dimensions"))


def _import_parent(study: Study, ledger: Ledger, parent: Ledger, parent_dir: Path) -> None:
    """Import the parent's runs and calibration, and print how many."""
    imported = import_runs(ledger, study.study_dir, parent, parent_dir)
    runs = format_counted(imported.num_runs, "finished run")
    print_progress(f"fork: {runs} imported from {parent_dir}, {imported.num_known} here already")
    for problem in imported.damaged:
        print_progress(f"fork: not imported: {problem}")
    records = parent.read_records(CALIBRATION)
    needed = {group.asked.key for group in group_runs(study)} if records else set()
    taken = [r for r in records if r.key in needed and ledger.find(CALIBRATION, r.key) is None]
    for record in taken:  # otherwise the same runs would have other ids here
        ledger.append(CALIBRATION, record.key, record.body)
    if taken:
        print_progress(
            f"fork: {format_counted(len(taken), 'choice')} of its calibration imported, which "
            "are not measured again"
        )
