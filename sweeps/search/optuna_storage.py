"""The best trials of a study that Optuna keeps in a file: a SQLite database or a journal. Nothing
is written to it.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from proxies.core.errors import InputError
from proxies.core.notation import counted
from proxies.core.plain_files import open_plain

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

_SQLITE = b"SQLite format 3\0"
_NUM_NAMED = 8


class OptunaStorageError(InputError):
    """A file that is no storage of Optuna's, or a study in it that has no best trial."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptunaTrials:
    """The best finished trials of one study."""

    study: str
    num_finished: int
    """Of them, those of `params` are the best."""
    params: tuple[dict[str, object], ...]
    """Parameters as they were suggested, by the study's own names; the best trial first."""


def best_trials(file: Path, study: str = "", *, most: int) -> OptunaTrials:
    """The best trials of a study, by its own direction.

    Args:
        file: what `sqlite:///FILE`, or a journal's backend, was given.
        study: its name; may be empty where the file holds one.
        most: trials at most.

    Raises:
        OptunaStorageError: it cannot be read, holds no such study or several, or the study has
            several objectives or no finished trial; the message names the file.
    """
    import optuna

    storage = _storage(file)
    names = sorted(summary.study_name for summary in optuna.get_all_study_summaries(storage))
    if not names:
        raise OptunaStorageError(f"{file} holds no study")
    if study not in names and (study or len(names) > 1):
        more = ", ..." if len(names) > _NUM_NAMED else ""
        found = f"{', '.join(names[:_NUM_NAMED])}{more}"
        said = (
            f"has no study {study!r}"
            if study
            else f"holds {counted(len(names), 'study')}; name one as FILE:STUDY"
        )
        raise OptunaStorageError(f"{file} {said}: it has {found}")
    loaded = optuna.load_study(study_name=study or names[0], storage=storage)
    if len(loaded.directions) > 1:
        raise OptunaStorageError(
            f"{file}: study {loaded.study_name!r} has "
            f"{counted(len(loaded.directions), 'objective')}: must be 1"
        )
    finished = loaded.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    if not finished:
        raise OptunaStorageError(f"{file}: study {loaded.study_name!r} has no finished trial")
    sign = 1 if loaded.direction is optuna.study.StudyDirection.MINIMIZE else -1
    ranked = sorted(finished, key=lambda trial: (sign * float(trial.value or 0.0), trial.number))
    return OptunaTrials(
        study=loaded.study_name,
        num_finished=len(finished),
        params=tuple(dict(trial.params) for trial in ranked[:most]),
    )


def _storage(file: Path) -> BaseStorage:
    """The file, opened for reading alone: Optuna would else make tables in a database that is
    somebody else's.
    """
    import optuna
    from optuna.storages.journal import JournalFileBackend

    try:
        with open_plain(file) as opened:
            begins = opened.read(len(_SQLITE))
        if begins == _SQLITE:
            uri = f"file:{quote(str(file.resolve()))}?mode=ro"
            # SQLAlchemy would decode the name
            opening = {"creator": lambda: sqlite3.connect(uri, uri=True)}
            return optuna.storages.RDBStorage("sqlite://", engine_kwargs=opening)
        if not begins.startswith(b"{"):
            raise OptunaStorageError(
                f"{file} is neither a SQLite database nor a journal of Optuna's"
            )
        return optuna.storages.JournalStorage(JournalFileBackend(str(file)))
    except OptunaStorageError:
        raise
    except OSError as error:
        raise OptunaStorageError(f"{file} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # SQLAlchemy's and the journal's own are many
        raise OptunaStorageError(
            f"{file} is no storage that Optuna can read: {error}".splitlines()[0]
        ) from error
