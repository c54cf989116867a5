"""Running the stages of a study for a verb, and ending the verb with the exit code of the
outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from proxies.core.canon import Json
from proxies.core.errors import ExitCode

if TYPE_CHECKING:
    from launcher.study.stages import Runner


def with_runner(
    plan_path: Path,
    study_dir: Path,
    overrides: tuple[str, ...],
    work: Callable[[Runner], tuple[Json, str]],
    parent_dir: Path | None = None,
    *,
    verb: str,
    verbose: bool = False,
) -> tuple[Json, str]:
    """Open a plan's study for writing, and do some work on it.

    Runs that have finally failed are named first in the answer.

    Args:
        plan_path: Plan file.
        study_dir: Folder of the study.
        overrides: Values of `--set`.
        work: Function of the runner; it returns the JSON body and the text of the answer.
        parent_dir: Study whose finished runs are used first; None for no such study.
        verb: Verb whose stages the progress counts.
        verbose: Whether to print a line for each run that ends.

    Raises:
        PlanError, DataError, SweepError, GateError: The work cannot be done.
    """
    from launcher.base.talk import say
    from launcher.experiments.transferred_values import target_guess
    from launcher.study.gates import data_warning, failed_text
    from launcher.study.own_count import count
    from launcher.study.progress import Reporter
    from launcher.study.stages import Runner
    from launcher.study.study_folder import open_ledger, plan_study, verified_corpus

    study = plan_study(plan_path, study_dir, overrides)
    verified_corpus(study)  # before the study folder is touched
    if study.factory is not None:  # a model that cannot be built must not create the study
        from launcher.study.own_count import own_model

        own_model(study)
    with open_ledger(study, parent_dir) as ledger:
        study = count(study, ledger)
        if (
            verb != "check"
            and not ledger.records("fit")
            and (text := data_warning(study, target_guess(study).duration))
        ):
            say(f"warning: {text}")
        reporter = Reporter(study, ledger, verb, verbose=verbose)
        with Runner(study, ledger, reporter).running() as runner:
            body, text = work(runner)
            reporter.done()
        failed = failed_text(ledger, study_dir)
    return body, f"{failed}\n\n{text}" if failed else text


def exit_by(outcome: str) -> None:
    """End the verb with exit code 3 if a gate failed, and with 4 if the outcome is `cannot
    tell`.
    """
    if outcome != "passed":
        raise SystemExit(ExitCode.GATE if outcome == "failed" else ExitCode.CANNOT_TELL)
