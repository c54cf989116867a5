"""Running the stages of a study for a verb, and ending the verb with the exit code of the
outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from forerun._launcher.main_run.progress_output import print_progress
from forerun._proxies.core.canon import Json
from forerun._proxies.core.errors import ExitCode

if TYPE_CHECKING:
    from forerun._launcher.study.stages.stages import StageRunner

Body = dict[str, Json]
"""JSON that a verb prints with `--json`."""


def run_stages(
    plan_path: Path,
    study_dir: Path,
    overrides: tuple[str, ...],
    work: Callable[[StageRunner], tuple[Body, str]],
    parent_dir: Path | None = None,
    *,
    verb: str,
    verbose: bool = False,
) -> tuple[Body, str]:
    """Open a plan's study for writing, and do some work on it.

    If runs have finally failed, the text of the answer begins with their names.

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
    from forerun._launcher.study.experiments.transfer_results import guess_target_sizes
    from forerun._launcher.study.stages.gates import format_failed_runs, warn_of_data
    from forerun._launcher.study.stages.progress import ProgressReporter
    from forerun._launcher.study.stages.stages import StageRunner
    from forerun._launcher.study.stages.study_folder import open_ledger, read_study, verify_corpus
    from forerun._launcher.study.stages.user_model import describe_user_model, record_user_params

    study = read_study(plan_path, study_dir, overrides)
    # A bad corpus, or a model that cannot be built, must not create the study.
    verify_corpus(study)
    if study.factory is not None:
        describe_user_model(study)
    with open_ledger(study, parent_dir) as ledger:
        study = record_user_params(study, ledger)
        if verb != "check" and not ledger.read_records("fit"):
            warning = warn_of_data(study, guess_target_sizes(study).duration)
            if warning:
                print_progress(f"warning: {warning}")
        reporter = ProgressReporter(study, ledger, verb, verbose=verbose)
        with StageRunner(study, ledger, reporter).running() as runner:
            body, text = work(runner)
            reporter.finish()
        failed = format_failed_runs(ledger, study_dir)
    return body, f"{failed}\n\n{text}" if failed else text


def exit_with_outcome(outcome: str) -> None:
    """End the verb with exit code 3 if a gate failed, and with 4 if the outcome is `cannot
    tell`.
    """
    if outcome != "passed":
        raise SystemExit(ExitCode.GATE if outcome == "failed" else ExitCode.CANNOT_TELL)
