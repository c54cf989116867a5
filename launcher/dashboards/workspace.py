"""A study's workspace: what it is built from, where it is kept, and that it is saved online once and not twice."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.base.wandb_calls import ask
from launcher.dashboards.dashboards import Place
from launcher.dashboards.index import WORKSPACE_FILE, alone, home_of, read_index, write_index, write_workspace
from launcher.dashboards.record import Record
from launcher.views.html import Body
from proxies.core import canon
from proxies.core.canon import Json

ABSENT = "no workspace: wandb-workspaces is not installed: pip install 'forerun[workspaces]'"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A workspace that was built."""

    path: Path | None
    """None: its library is not installed."""
    url: str | None = None
    """Where W&B shows it, if it was saved there."""


def described(body: Body, study: Record, digests: Sequence[str]) -> dict[str, Json]:
    """What a study's workspace shows.

    Args:
        body: of the report.
        study: the record of the study itself.
        digests: of its frozen configs.
    """
    searched = body["search"]["best"] if body["search"] else body["question"]["search"].keys() & {"learning_rate"}
    return {
        "name": study.name, "study": study.run_id, "digests": [*digests], "hyperparameters": sorted(searched),
        "tables": {name: [*table.columns] for name, table in study.tables.items()},
        "pictures": [*sorted(study.pictures)],
    }  # fmt: skip


def keep_workspace(study_dir: Path, told: dict[str, Json], place: Place, *, online: bool = False) -> Kept:
    """Write `wandb/workspace.json`, if it is not there as it would be now; online save it to W&B too.

    Raises:
        DashboardError: W&B refused it, or does not answer.
        OSError: the file cannot be written.
    """
    home = home_of(study_dir)
    with alone(home):
        index, content = read_index(home), canon.content_id(told)
        path = home / WORKSPACE_FILE
        if index.workspace == content and path.is_file() and not online:
            return Kept(path=path)
        known = index.views.get(f"{place.entity or ''}/{place.project}")
        order: dict[str, Any] = {"workspace": told, "save": online, "view": known, **asdict(place)}
        with tempfile.TemporaryDirectory(prefix="forerun-wandb-") as scratch:
            answer = ask(order, Path(scratch), online=online)
        if answer.get("absent"):
            return Kept(path=None)
        views = dict(index.views)
        if online:
            views[f"{place.entity or ''}/{place.project}"] = answer["view"]
        write_workspace(home, {"name": told["name"], "spec": answer["spec"]})
        write_index(home, dataclasses.replace(index, workspace=content, views=views))
        return Kept(path=path, url=answer.get("url"))
