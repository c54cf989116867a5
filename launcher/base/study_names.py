"""What people type for a study or a frozen config: a path, `latest`, the first characters of a
digest, or nothing.

A path that exists wins over a word. Names of frozen configs are looked for in the study that the
name begins with (`runs/study/973e`, `runs/study/frozen/973e`), else in the default study. Standard
library only.
"""

from __future__ import annotations

import re
from pathlib import Path

from proxies.core.errors import InputError
from proxies.core.notation import counted

LATEST = "latest"
NUM_SHOWN = 12
"""Characters of a digest that are shown, and enough to name it."""
_LAUNCH, _LEDGER, _FROZEN = "launch.json", "ledger.db", "frozen"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PREFIX = re.compile(r"[0-9a-f]{1,64}")


class StudyNameError(InputError):
    """A name that fits no frozen config, or several."""


def default_study() -> Path:
    """`./study` if it exists, else the current folder if it holds a ledger, else `./study`, which
    is to be made.
    """
    study = Path("study")
    return Path() if not study.exists() and Path(_LEDGER).is_file() else study


def configs_in(folder: Path) -> list[Path]:
    """Folders of frozen configs in a study, or in a study's `frozen/`; by name."""
    inside = folder / _FROZEN
    place = inside if inside.is_dir() else folder
    try:
        return sorted(
            one
            for one in place.iterdir()
            if _DIGEST.fullmatch(one.name) and (one / _LAUNCH).exists()
        )
    except OSError:
        return []


def frozen_named(text: str | None, study: Path | None = None) -> Path:
    """The frozen config that `text` names; None: the only one of the study.

    Args:
        text: A path, digest, or `latest`.
        study: Where a word is looked up; None: the default study.

    Raises:
        StudyNameError: none or several have that name; all that could be meant are named.
    """
    study = study or default_study()
    if text is None:
        return _only(study, "no FROZEN was given, and")
    path = Path(text)
    if path.exists() or path.is_symlink():
        is_study = (
            path.is_dir()
            and not (path / _LAUNCH).exists()
            and ((path / _LEDGER).exists() or configs_in(path))
        )
        return _only(path, "") if is_study else path
    word = path.name
    where = study if path.parent == Path() else path.parent
    configs = configs_in(where)
    # the launch file is written again by a freeze that decides the same
    if word == LATEST and configs:
        return max(configs, key=lambda one: (one / _LAUNCH).stat().st_mtime_ns)
    if _PREFIX.fullmatch(word) and configs:
        found = [one for one in configs if one.name.startswith(word)]
        if len(found) == 1:
            return found[0]
        if found:
            raise StudyNameError(
                f"{text} fits {counted(len(found), 'frozen config')}: {_listed(found)}; give more "
                "characters"
            )
    there = f"{where} has {_listed(configs)}" if configs else _none(where)
    raise StudyNameError(f"{text}: no such path, and no digest begins so: {there}")


def study_named(text: str | None) -> Path:
    """The study that `text` names: its folder, or any name of a frozen config in it; None: the
    default study.

    A folder that does not exist is given back as it is: what reads it says what is missing.
    """
    if text is None:
        return default_study()
    path = Path(text)
    if path.exists():
        config = path.parent if path.name == _LAUNCH else path
        return (
            config.parent.parent
            if (config / _LAUNCH).exists() and config.parent.name == _FROZEN
            else path
        )
    if path.name == LATEST or _PREFIX.fullmatch(path.name):
        try:
            return study_named(str(frozen_named(text)))
        except StudyNameError:
            return path
    return path


def shown_name(frozen: Path) -> str:
    """A frozen config as commands take it: its path, with a digest cut to what is enough to name
    it.
    """
    folder = frozen.parent if frozen.name == _LAUNCH else frozen
    if not _DIGEST.fullmatch(folder.name):
        return str(frozen)
    alike = [
        one for one in configs_in(folder.parent) if one.name[:NUM_SHOWN] == folder.name[:NUM_SHOWN]
    ]
    return str(folder if len(alike) > 1 else folder.with_name(folder.name[:NUM_SHOWN]))


def _only(study: Path, begin: str) -> Path:
    configs = configs_in(study)
    if len(configs) == 1:
        return configs[0]
    found = (
        f"{study} holds {counted(len(configs), 'frozen config')}: {_listed(configs)}; name "
        f"one, or `{LATEST}`"
    )
    raise StudyNameError(f"{begin} {found if configs else _none(study)}".strip())


def _none(where: Path) -> str:
    return f"{where} holds no frozen config; `forerun freeze {where}` writes one"


def _listed(configs: list[Path]) -> str:
    short = [one.name[:NUM_SHOWN] for one in configs]
    names = short if len(set(short)) == len(short) else [one.name for one in configs]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more
