"""Names by which users refer to studies and frozen configs on the command line.

A name is a path, `latest`, or the first characters of a digest; it may also be left out. If a path
of that name exists, the name means the path. Otherwise a frozen config is looked up in the study
that the name begins with (`runs/study/973e`, `runs/study/frozen/973e`), or else in the default
study. This module needs no third-party package.
"""

from __future__ import annotations

import re
from pathlib import Path

from forerun._proxies.core.errors import InputError
from forerun._proxies.core.notation import format_counted

LATEST = "latest"
NUM_SHOWN = 12
"""Number of characters of a digest that messages show."""
_MAX_LISTED = 8
"""Maximum number of configs that a message lists."""
_LAUNCH, _LEDGER, _FROZEN = "launch.json", "ledger.db", "frozen"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PREFIX = re.compile(r"[0-9a-f]{1,64}")


class StudyNameError(InputError):
    """The name matches no frozen config, or several."""


def find_default_study() -> Path:
    """Return the study that is meant if none is named.

    This is the working directory if it holds a ledger and no folder `study`, and otherwise
    `./study`, which need not exist yet.
    """
    study = Path("study")
    return Path() if not study.exists() and Path(_LEDGER).is_file() else study


def list_frozen_configs(folder: Path) -> list[Path]:
    """Return the folders of all frozen configs of a study, sorted by name.

    Args:
        folder: Folder of the study, or its `frozen/`.
    """
    frozen_dir = folder / _FROZEN
    parent = frozen_dir if frozen_dir.is_dir() else folder
    try:
        return sorted(
            config
            for config in parent.iterdir()
            if _DIGEST.fullmatch(config.name) and (config / _LAUNCH).exists()
        )
    except OSError:
        return []


def find_frozen_config(text: str | None, study: Path | None = None) -> Path:
    """Find the frozen config that `text` names.

    Args:
        text: A path, the start of a digest, or `latest`; None for the only config of the study.
        study: Study in which a word is looked up; None for the default study.

    Raises:
        StudyNameError: No config or several have that name; the message lists the candidates.
    """
    study = study or find_default_study()
    if text is None:
        return _require_only_config(study, "no FROZEN was given, and")
    path = Path(text)
    if path.exists() or path.is_symlink():
        is_study = (
            path.is_dir()
            and not (path / _LAUNCH).exists()
            and ((path / _LEDGER).exists() or list_frozen_configs(path))
        )
        return _require_only_config(path, "") if is_study else path
    word = path.name
    parent = study if path.parent == Path() else path.parent
    configs = list_frozen_configs(parent)
    # Another freeze of the same decision writes the launch file again, which makes it the latest.
    if word == LATEST and configs:
        return max(configs, key=lambda config: (config / _LAUNCH).stat().st_mtime_ns)
    if _PREFIX.fullmatch(word) and configs:
        matches = [config for config in configs if config.name.startswith(word)]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise StudyNameError(
                f"{text} fits {format_counted(len(matches), 'frozen config')}: "
                f"{_list_names(matches)}; give more characters"
            )
    available = f"{parent} has {_list_names(configs)}" if configs else _explain_no_config(parent)
    raise StudyNameError(f"{text}: no such path, and no digest begins so: {available}")


def find_study(text: str | None) -> Path:
    """Find the study that `text` names.

    If nothing is found, the name is returned as a path, and the study's reader reports what is
    missing.

    Args:
        text: Folder of the study, or any name of a frozen config in it; None for the default study.
    """
    if text is None:
        return find_default_study()
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
            return find_study(str(find_frozen_config(text)))
        except StudyNameError:
            return path
    return path


def shorten_config_name(frozen: Path) -> str:
    """Return a short path by which commands accept a frozen config.

    The digest is shortened if it is still unique among the configs of the study.
    """
    folder = frozen.parent if frozen.name == _LAUNCH else frozen
    if not _DIGEST.fullmatch(folder.name):
        return str(frozen)
    same_prefix = [
        config
        for config in list_frozen_configs(folder.parent)
        if config.name[:NUM_SHOWN] == folder.name[:NUM_SHOWN]
    ]
    return str(folder if len(same_prefix) > 1 else folder.with_name(folder.name[:NUM_SHOWN]))


def _require_only_config(study: Path, begin: str) -> Path:
    configs = list_frozen_configs(study)
    if len(configs) == 1:
        return configs[0]
    problem = (
        f"{study} holds {format_counted(len(configs), 'frozen config')}: {_list_names(configs)}; "
        f"name one, or `{LATEST}`"
    )
    raise StudyNameError(f"{begin} {problem if configs else _explain_no_config(study)}".strip())


def _explain_no_config(where: Path) -> str:
    return f"{where} holds no frozen config; `forerun freeze {where}` writes one"


def _list_names(configs: list[Path]) -> str:
    short = [config.name[:NUM_SHOWN] for config in configs]
    names = short if len(set(short)) == len(short) else [config.name for config in configs]
    num_more = len(names) - _MAX_LISTED
    more = f" and {num_more} more" if num_more > 0 else ""
    return ", ".join(names[:_MAX_LISTED]) + more
