"""Opening studies: a plan with its corpus and its user's code, the ledger beside it. No torch but
for own models.
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

# Links in a study's folder that lead out of it: what writes the study would write there. Standard
# library only.

_NUM_NAMED = 8
_LOOKED_INTO = (CURVES_DIR, CHECKPOINTS_DIR, "frozen", "wandb")


class LinksOutError(InputError):
    """A study's folder holds links that lead out of it."""


def refuse_links_out(study_dir: Path) -> None:
    """See that what a study's own writers open lies in its folder, which may itself be a link.

    What the user's own trainer makes (`external/`) and the main run's folder are theirs, and not
    looked into.

    Raises:
        LinksOutError: some links lead elsewhere; they are named.
    """
    home = study_dir.resolve()
    folders = [home, *(home / name for name in _LOOKED_INTO)]
    out = sorted(
        f"{link.relative_to(home)} -> {link.readlink()}"
        for folder in folders
        for link in _links(folder)
        if not Path(os.path.realpath(link)).is_relative_to(home)  # resolve() fails on a loop
    )
    if out:
        more = f" and {len(out) - _NUM_NAMED} more" if len(out) > _NUM_NAMED else ""
        raise LinksOutError(
            f"{study_dir} holds links that lead out of it: {', '.join(out[:_NUM_NAMED])}{more}. "
            "What is written there "
            "would change other files: remove them, or move the whole study and make a link of its "
            "folder"
        )


def _links(folder: Path) -> Iterator[Path]:
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
    """A study as a plan file asks for it.

    Raises:
        PlanError, DataError: what is wrong with the plan or its corpus.
    """
    here = plan_path.parent
    plan = load_plan(plan_path, overrides)
    code_dir = (here / plan.proxy.code_path).resolve()
    corpus = (here / plan.data.path).resolve() if plan.data.path else None
    study = Study(
        plan=plan,
        study_dir=study_dir,
        corpus=corpus,
        manifest=_manifest(plan, corpus),
        code_dir=code_dir,
        factory=_factory(plan, code_dir, source_sha256),
    )
    problems = with_lines(plan_path, todo_problems(plan), overrides)
    if problems := [*problems, *implied_problems(study, study.space)]:
        raise PlanError(str(plan_path), problems)
    return study


def _manifest(plan: Plan, corpus: Path | None) -> Manifest:
    """What is trained on: a corpus, in the plan's proportions, or the name of a command's own
    data.
    """
    if corpus is None:
        return unnamed(plan.data.external, plan.data.vocab_size)
    manifest = read_manifest(corpus)
    return manifest.reweighted(plan.data.weights) if plan.data.weights else manifest


def unnamed(name: str, vocab_size: int) -> Manifest:
    """Data of which nothing is known but a name and the vocabulary."""
    source = Source(name=name, weight=1.0, num_documents=0, train=(), validation=())
    return Manifest(
        schema_version=SCHEMA_VERSION,
        tokenizer="unnamed",
        vocab_size=vocab_size,
        dtype="uint32",
        end_id=None,
        sources=(source,),
    )


def _factory(plan: Plan, code_dir: Path, source_sha256: str | None) -> Factory | None:
    if not plan.proxy.factory:
        return None
    if source_sha256 is not None:
        return plan.factory(source_sha256)
    from proxies.external.factory import load  # imports the user's module, and torch with it

    values = {name: axis.value(name, None).at(Ratios()) for name, axis in plan.search.own.items()}
    return plan.factory(load(plan.proxy.factory, code_dir, values)[1].source_sha256)


def recorded_study(study_dir: Path) -> Study:
    """The study of a folder, from the plan kept in it.

    Raises:
        PlanError: there is none.
    """
    return plan_study(study_dir / PLAN_FILE, study_dir)


def recorded(study_dir: Path) -> tuple[Study, Ledger]:
    """The study of a folder and its ledger, for reading; works while a driver runs.

    Raises:
        SweepError, PlanError, DataError: no study, not a sound one, or a plan that is not the
            recorded one.
        LinksOutError: see `refuse_links_out`.
    """
    refuse_links_out(study_dir)
    ledger = Ledger.read(study_dir)
    # To read a study takes its records, not its user's code.
    sha = str(cast(dict[str, canon.Json], ledger.plan).get("factory_sha256", ""))
    study = calibrated(plan_study(study_dir / PLAN_FILE, study_dir, source_sha256=sha), ledger)
    ledger.check_plan(study.question)
    return study, ledger


def verified_corpus(study: Study) -> TokenStore | None:
    """The corpus, read through once and for all: in a worker, damage would fail run after run. None
    if there is none.

    Raises:
        DataError: it is not what its manifest says, or too short for one window.
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
    """The study's ledger, for writing; a new one gets the plan beside it.

    Args:
        study: what is asked.
        parent_dir: a study whose finished runs are taken over first.

    Raises:
        SweepError: see `Ledger.open`, and for the parent `sweeps.store.fork`.
        LinksOutError: see `refuse_links_out`.
    """
    refuse_links_out(study.study_dir)
    if (study.study_dir / LEDGER_NAME).exists():
        with contextlib.suppress(StudyMissing):  # its driver was killed before the first record
            study = calibrated(study, Ledger.read(study.study_dir))
    same = {key: study.question[key] for key in ("data_id", "semantics")}
    # before anything is made
    parent = None if parent_dir is None else read_parent(study.study_dir, parent_dir, same)
    ledger = Ledger.open(study.study_dir, study.question, create=True, is_amendable=is_of_user_code)
    try:
        values = cast(dict[str, dict[str, object]], study.plan.model_dump())
        values["data"]["path"] = str(study.corpus or "")
        values["proxy"]["code_path"] = str(study.code_dir)
        canon.write_atomic(study.study_dir / PLAN_FILE, commented_plan(values).encode())
        if parent is not None and parent_dir is not None:
            _take_over(study, ledger, parent, parent_dir)
    except BaseException:
        ledger.close()
        raise
    return ledger


def is_of_user_code(key: str) -> bool:
    """Return whether a plan key says what code of the user's trains, how it is called, or where it
    logs.
    """
    fixed = ("proxy.command", "proxy.factory", "factory_sha256")
    return key in fixed or key.startswith(("proxy.metrics_", "proxy.dimensions"))


def _take_over(study: Study, ledger: Ledger, parent: Ledger, parent_dir: Path) -> None:
    """Import the parent's runs, and say how many."""
    found = import_runs(ledger, study.study_dir, parent, parent_dir)
    runs = counted(found.num_runs, "finished run")
    say(f"fork: {runs} imported from {parent_dir}, {found.num_known} here already")
    for sentence in found.damaged:
        say(f"fork: not imported: {sentence}")
    records = parent.records(CALIBRATION)
    needed = {group.asked.key for group in groups_of(study)} if records else set()
    taken = [r for r in records if r.key in needed and ledger.find(CALIBRATION, r.key) is None]
    for record in taken:  # or the same runs would have other ids here
        ledger.append(CALIBRATION, record.key, record.body)
    if taken:
        say(
            f"fork: {counted(len(taken), 'choice')} of its calibration imported, which are not "
            "measured again"
        )
