"""Read the best trials of a study from a file that Optuna wrote: a SQLite database or a
journal. The file is never changed.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from forerun._proxies.core.errors import InputError
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.plain_files import open_plain

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

_SQLITE = b"SQLite format 3\0"
_MAX_STUDIES_LISTED = 8


class OptunaStorageError(InputError):
    """The file is not an Optuna storage, or the study in it has no best trial."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptunaTrials:
    """The best finished trials of one study."""

    study: str
    num_finished: int
    """Number of finished trials; `params` are the best of them."""
    params: tuple[dict[str, object], ...]
    """Parameters as suggested, by the study's own names; the best trial first."""


def read_best_trials(file: Path, study: str = "", *, max_trials: int) -> OptunaTrials:
    """Read the best trials of a study: of the lowest value, or of the highest if it maximizes.

    Args:
        file: database of a storage `sqlite:///FILE`, or file of a journal storage.
        study: name of the study; may be empty if the file holds one study.
        max_trials: maximum number of trials to return.

    Raises:
        OptunaStorageError: the file cannot be read, holds no such study or several, or the study
            has several objectives or no finished trial; the message names the file.
    """
    import optuna

    storage = _open_storage(file)
    names = sorted(summary.study_name for summary in optuna.get_all_study_summaries(storage))
    if not names:
        raise OptunaStorageError(f"{file} holds no study")
    if study not in names and (study or len(names) > 1):
        more = ", ..." if len(names) > _MAX_STUDIES_LISTED else ""
        listed = f"{', '.join(names[:_MAX_STUDIES_LISTED])}{more}"
        problem = (
            f"has no study {study!r}"
            if study
            else f"holds {format_counted(len(names), 'study')}; name one as FILE:STUDY"
        )
        raise OptunaStorageError(f"{file} {problem}: it has {listed}")
    loaded = optuna.load_study(study_name=study or names[0], storage=storage)
    if len(loaded.directions) > 1:
        raise OptunaStorageError(
            f"{file}: study {loaded.study_name!r} has "
            f"{format_counted(len(loaded.directions), 'objective')}: must be 1"
        )
    finished = loaded.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    if not finished:
        raise OptunaStorageError(f"{file}: study {loaded.study_name!r} has no finished trial")
    sign = 1 if loaded.direction is optuna.study.StudyDirection.MINIMIZE else -1
    # A finished trial has a value; `or` is there for the type checker only
    ranked = sorted(finished, key=lambda trial: (sign * float(trial.value or 0.0), trial.number))
    return OptunaTrials(
        study=loaded.study_name,
        num_finished=len(finished),
        params=tuple(dict(trial.params) for trial in ranked[:max_trials]),
    )


def _open_storage(file: Path) -> BaseStorage:
    """Open the file read-only: Optuna would otherwise create tables in any other database."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    try:
        with open_plain(file) as opened:
            first_bytes = opened.read(len(_SQLITE))
        if first_bytes == _SQLITE:
            uri = f"file:{quote(str(file.resolve()))}?mode=ro"
            # Not as a URL, in which SQLAlchemy would decode the file's name
            engine_kwargs = {"creator": lambda: sqlite3.connect(uri, uri=True)}
            return optuna.storages.RDBStorage("sqlite://", engine_kwargs=engine_kwargs)
        if not first_bytes.startswith(b"{"):
            raise OptunaStorageError(
                f"{file} is neither a SQLite database nor a journal of Optuna's"
            )
        return optuna.storages.JournalStorage(JournalFileBackend(str(file)))
    except OptunaStorageError:
        raise
    except OSError as error:
        raise OptunaStorageError(f"{file} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # SQLAlchemy and the journal raise many kinds
        raise OptunaStorageError(
            f"{file} is not a storage that Optuna can read: {error}".splitlines()[0]
        ) from error
