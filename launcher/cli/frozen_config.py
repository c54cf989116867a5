"""The frozen config that a verb was given: its folder, its decision, and the data and code around
it.
"""

from __future__ import annotations

from pathlib import Path

import click

from forerun._launcher.main_run.frozen.config_checks import require_sound
from forerun._launcher.main_run.frozen.frozen import Decision
from forerun._launcher.main_run.frozen.frozen_folder import find_study
from forerun._launcher.main_run.frozen.launch_file import read_launch
from forerun._launcher.main_run.progress_output import print_progress


def find_config_folder(frozen: Path) -> Path:
    """Return the folder of a frozen config that is given as the folder, its launch file, or a link
    to either.
    """
    if frozen.is_dir():
        return frozen
    return (frozen.resolve() if frozen.is_symlink() else frozen).parent


def read_sound_config(frozen: Path) -> tuple[Decision, Path]:
    """Return the decision and the folder of a frozen config, and print a warning if problems of the
    config were accepted.

    Raises:
        FrozenError: There is no launch config.
        TamperedError: The config was edited, its attestations are missing or belong to another
            config, or the ledger lacks its evidence, and nobody has accepted that problem.
    """
    decision, folder = read_launch(frozen), find_config_folder(frozen)
    if accepted := require_sound(folder, decision.digest):
        print_progress(f"warning: {accepted}")
    return decision, folder


def find_corpus(folder: Path, given: Path | None) -> Path:
    """Return the corpus `given`; if that is None, the corpus of the study that contains a frozen
    config's folder.

    Raises:
        UsageError: The study has no corpus.
        PlanError, DataError: There is no study, or it is not sound.
    """
    from forerun._launcher.study.stages.study_folder import read_recorded_study

    corpus = given or read_recorded_study(folder.resolve().parent.parent).corpus
    if corpus is None:
        raise click.UsageError("the study has no corpus: name one with --data")
    return corpus


def find_user_code(folder: Path, decision: Decision) -> Path | None:
    """Return the folder with the code of a user's own model; None if the model is forerun's.

    The plan of the study around the config names the folder. Without a study, it is the current
    folder.
    """
    from forerun._launcher.study.stages.study_folder import open_recorded_study

    if decision.model is None:
        return None
    study_dir = find_study(folder)
    return Path() if study_dir is None else open_recorded_study(study_dir)[0].code_dir
