"""Opening studies: a plan with its corpus and its user's code, the ledger beside it. No torch but for own models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

from launcher.arms import axis_sizes, run_at
from launcher.plan import Plan
from launcher.plan_file import PlanError, commented_plan, load_plan
from launcher.rungs import ladder_runs
from launcher.study import PLAN_FILE, Study
from proxies import canon
from proxies.checks import SpecError
from proxies.data.tokens import SCHEMA_VERSION, Manifest, Source, TokenStore, read_manifest
from proxies.numbers import KINDS
from proxies.programs import Factory
from proxies.rules import decay_share, decays
from proxies.spec import RunSpec
from sweeps.ledger import Ledger
from sweeps.space import Params
from transfer.question import AXES


def plan_study(
    plan_path: Path, study_dir: Path, overrides: tuple[str, ...] = (), *, source_sha256: str | None = None
) -> Study:
    """A study as a plan file asks for it.

    Raises:
        PlanError, DataError: what is wrong with the plan or its corpus.
    """
    plan = load_plan(plan_path, overrides)
    here = plan_path.parent
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
    if problems := _implied_problems(study):
        raise PlanError(str(plan_path), problems)
    return study


def _implied_problems(study: Study) -> list[str]:
    """What is wrong with the runs that the plan will ask for: better said before the first than after the search."""
    search = study.plan.search
    points: list[Params] = [
        {"learning_rate": rate, "warmup_fraction": warmup, "clip_norm": search.clip_norm[0]}
        for rate, warmup in zip(search.learning_rate, search.warmup_fraction, strict=True)
    ]
    makers: dict[str, Callable[[Params], list[RunSpec]]] = {
        "search": lambda point: [study.trial(point)],
        "transfer": lambda point: [
            run_at(study, axis, size, point, 0) for axis in AXES if axis != "params" for size in axis_sizes(study, axis)
        ],
        "ladder": lambda point: ladder_runs(study, point),
    }
    problems: dict[str, None] = {}
    for stage, make in makers.items():
        for point in points:
            try:
                found = [problem for run in make(point) for problem in _decay_problems(run)]
            except SpecError as error:
                found = error.problems
            problems.update(dict.fromkeys(f"{stage}: {problem}" for problem in found))
    return list(problems)


def _decay_problems(run: RunSpec) -> list[str]:
    """A step must leave something of a weight, at every size and duration."""
    rate, decay = run.hparams.learning_rate, run.hparams.weight_decay
    shares = {
        kind: decay_share(run.parametrization, kind, run.ratios, rate, decay)
        for kind in KINDS
        if decays(run.parametrization, kind)
    }
    return [
        f"weight_decay = {decay} at learning rate {rate}: a step would take {share:.3g} of a {kind} weight at width "
        f"{run.shape.width} and {run.schedule.num_steps} steps"
        for kind, share in shares.items()
        if share >= 1
    ][:1]


def _manifest(plan: Plan, corpus: Path | None) -> Manifest:
    """What is trained on: a corpus, in the plan's proportions, or the name of a command's own data."""
    if corpus is None:
        return Manifest(
            schema_version=SCHEMA_VERSION,
            tokenizer="unnamed",
            vocab_size=plan.data.vocab_size,
            dtype="uint32",
            end_id=None,
            sources=(Source(name=plan.data.external, weight=1.0, num_documents=0, train=(), validation=()),),
        )
    manifest = read_manifest(corpus)
    return manifest.reweighted(plan.data.weights) if plan.data.weights else manifest


def _factory(plan: Plan, code_dir: Path, source_sha256: str | None) -> Factory | None:
    if not plan.proxy.factory:
        return None
    if source_sha256 is not None:
        return Factory(target=plan.proxy.factory, source_sha256=source_sha256)
    from proxies.external.factory import load  # imports the user's module, and torch with it

    return load(plan.proxy.factory, code_dir)[1]


def recorded_study(study_dir: Path) -> Study:
    """The study of a folder, from the plan kept in it.

    Raises:
        PlanError: there is none.
    """
    return plan_study(study_dir / PLAN_FILE, study_dir)


def recorded(study_dir: Path) -> tuple[Study, Ledger]:
    """The study of a folder and its ledger, for reading; works while a driver runs.

    Raises:
        SweepError, PlanError, DataError: no study, not a sound one, or a plan that is not the recorded one.
    """
    ledger = Ledger.read(study_dir)
    # To read a study takes its records, not its user's code.
    sha = str(cast(dict[str, canon.Json], ledger.plan).get("factory_sha256", ""))
    study = plan_study(study_dir / PLAN_FILE, study_dir, source_sha256=sha)
    ledger.check_plan(study.question)
    return study, ledger


def verified_corpus(study: Study) -> TokenStore | None:
    """The corpus, read through once and for all: in a worker, damage would fail run after run. None if there is none.

    Raises:
        DataError: it is not what its manifest says, or too short for one window.
    """
    if study.corpus is None:
        return None
    store = TokenStore(study.corpus, weights=study.plan.data.weights or None)
    seq_len = study.plan.model.seq_len
    store.train_batch(seed=0, first_sequence=0, num_sequences=1, seq_len=seq_len)
    store.validation_batch(num_sequences=1, seq_len=seq_len)
    return store


def open_ledger(study: Study) -> Ledger:
    """The study's ledger, for writing; a new one gets the plan beside it.

    Raises:
        SweepError: see `Ledger.open`.
    """
    ledger = Ledger.open(study.study_dir, study.question, create=True)
    values = cast(dict[str, dict[str, object]], study.plan.model_dump())
    values["data"]["path"] = str(study.corpus or "")
    values["proxy"]["code_path"] = str(study.code_dir)
    canon.write_atomic(study.study_dir / PLAN_FILE, commented_plan(values).encode())
    return ledger
