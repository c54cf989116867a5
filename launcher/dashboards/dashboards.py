"""A study in W&B: a one-way window that is made from the ledger, and can be made again at any time.

Every run is written by wandb in a process of its own (`launcher.base.wandb_calls`), read back before anybody is told
that it is there, and not written again while nothing about it changes. What was uploaded is asked back from the
service.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.base.talk import say
from launcher.base.wandb_calls import DashboardError, Mode, ask, upload
from launcher.dashboards import index as dashboard_index
from launcher.dashboards.index import Entry, Index, alone, folders_of, home_of, is_there, read_index, write_index
from launcher.dashboards.record import Record, Wanted
from sweeps.store.errors import CurveCorrupt

ARRIVAL_SECONDS = 60.0
"""How long the service may take to show what it was sent."""
_MOST_RUNS, _MOST_ROWS = 100, 200_000
"""Of one process of wandb's, so that little is lost when it is killed."""
_SECONDS_A_RUN, _SECONDS_A_ROW = 2.0, 0.005
"""A tenth of it is what wandb takes on an idle core."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Logged:
    """What W&B has, or can be given."""

    mode: Mode
    folders: dict[str, Path]
    """Of every run by its id; what can be uploaded, if it was logged offline."""
    written: tuple[str, ...]
    """Ids of the runs that were written just now; the others were there."""
    damaged: tuple[str, ...]
    """A sentence for every run whose curve is not what was recorded: it is not logged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrived:
    """What the service was asked back."""

    url: str
    """Of the project."""
    num_sent: int
    num_there: int
    """Runs that are there whole: settings, summary, history, files and artifacts as logged."""
    lacking: dict[str, list[str]]
    """By the run's name, what did not arrive, in sentences."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where W&B puts it."""

    project: str = "forerun"
    entity: str | None = None
    """A user or team; None is the login's own."""


def log_runs(study_dir: Path, wanted: Sequence[Wanted], *, uploadable: bool = False) -> Logged:
    """Log runs offline, those that were not logged as they are now, in place of what was logged of them before.

    The study is only read, but for its folder `wandb`.

    Args:
        study_dir: the study's folder.
        wanted: all its runs.
        uploadable: also those anew that were last sent online, or were logged elsewhere.

    Raises:
        DashboardError: wandb cannot be started, or what was asked for is not whole on the disk afterwards.
        OSError: the folder cannot be written.
    """
    home = home_of(study_dir)
    with alone(home):
        runs = read_index(home).runs
        new = [one for one in wanted if not is_there(home, one.record.run_id, runs.get(one.record.run_id), one.content,
                                                     offline=uploadable)]  # fmt: skip
        return _logged(home, wanted, *_log(home, new, "offline", Place()), "offline")


def send_runs(study_dir: Path, wanted: Sequence[Wanted], place: Place) -> tuple[Logged, Arrived]:
    """Log runs online, those that the service does not have as they are now; then ask it back for all.

    Raises as `log_runs`, and DashboardError where there is no login or no answer.
    """
    home = home_of(study_dir)
    with alone(home):
        before = _asked(home, wanted, place, seconds=0.0)
        new = [one for one in wanted if one.record.run_id in before["lacking"]]
        logged = _logged(home, wanted, *_log(home, new, "online", place), "online")
        after = _asked(home, wanted, place, seconds=ARRIVAL_SECONDS) if new else before
        return logged, _arrived(wanted, after, len(logged.written))


def upload_runs(study_dir: Path, wanted: Sequence[Wanted], place: Place) -> Arrived:
    """Upload what was logged offline and the service does not have as it is now; then ask it back for all.

    Raises:
        DashboardError: there is no login, or no answer.
    """
    home = home_of(study_dir)
    with alone(home):
        runs, before = read_index(home).runs, _asked(home, wanted, place, seconds=0.0)
        ids = [run_id for run_id in before["lacking"] if run_id in runs]
        for first in range(0, len(ids), _MOST_RUNS):
            some = ids[first : first + _MOST_RUNS]
            seconds = 300.0 + sum(_seconds(runs[run_id].num_rows) for run_id in some)
            upload([home / runs[run_id].folder for run_id in some], place.project, place.entity, seconds)
            say(f"uploaded {first + len(some)} of {len(ids)} runs")
        after = _asked(home, wanted, place, seconds=ARRIVAL_SECONDS) if ids else before
        return _arrived(wanted, after, len(ids))


def _log(home: Path, new: Sequence[Wanted], mode: Mode, place: Place) -> tuple[list[str], list[str]]:
    """Ids of what was written, and sentences on what could not be; the index is kept up to date on the way."""
    written: list[str] = []
    damaged: list[str] = []
    waiting = list(new)
    while waiting:
        with_files = bool(waiting[0].record.tables or waiting[0].record.artifacts or waiting[0].record.pictures)
        with tempfile.TemporaryDirectory(prefix="forerun-wandb-") as scratch:
            order = Path(scratch) / "runs.jsonl"
            try:
                taken, counts = _write_order(order, waiting, damaged, alone=with_files)
            except OSError as error:
                raise DashboardError(f"{order} cannot be written: {error.strerror}; is the disk full?") from error
            if counts:
                _log_some(home, [one for one in waiting[:taken] if one.record.run_id in counts], counts, order, mode,
                          place)  # fmt: skip
        written += counts
        waiting = waiting[taken:]
        if waiting:
            say(f"logged {len(new) - len(waiting)} of {len(new)} runs")
    return written, damaged


def _write_order(
    path: Path, waiting: Sequence[Wanted], damaged: list[str], *, alone: bool
) -> tuple[int, dict[str, int]]:
    """Lines for `wandb_process`; how many runs were taken, and the number of rows of each that is in it."""
    counts: dict[str, int] = {}
    taken = 0
    with path.open("w", encoding="utf-8") as file:
        for one in waiting[: 1 if alone else _MOST_RUNS]:
            record = one.record
            if taken and (record.tables or record.artifacts or sum(counts.values()) > _MOST_ROWS):
                break
            taken += 1
            try:
                rows = one.rows()
            except CurveCorrupt as error:
                damaged.append(f"{record.name} is not logged: {error}")
                continue
            told = {**asdict(record), "config": {**record.config, "content_sha256": one.content}}
            file.write(json.dumps({"record": told}) + "\n")
            counts[record.run_id] = 0
            for row in rows:
                file.write(json.dumps({"row": row}) + "\n")
                counts[record.run_id] += 1
    return taken, counts


def _log_some(
    home: Path, runs: Sequence[Wanted], counts: dict[str, int], order: Path, mode: Mode, place: Place
) -> None:
    """Have wandb write some runs; once they are whole, what was there of them before goes."""
    older = folders_of(home)
    _await_next_second([path for one in runs for path in older.get(one.record.run_id, ())])
    keeps = runs[0].record
    staged = Path(tempfile.mkdtemp(prefix=f"data-{keeps.run_id}-", dir=home))
    try:
        command = {"runs": str(order), "mode": mode, "root_dir": str(home.parent), **asdict(place)}
        seconds = sum(_seconds(count) for count in counts.values())
        answer = ask(command, staged, online=mode == "online", more_seconds=seconds)
        entries = {
            one.record.run_id: _written(home, one, counts[one.record.run_id], answer) for one in runs
        }  # fmt: skip
    except BaseException:
        for run_id, paths in folders_of(home).items():
            if run_id in counts:
                dashboard_index.remove([path for path in paths if path not in older.get(run_id, ())])
        raise
    kept = {home / entry.folder for entry in entries.values()}
    if keeps.tables or keeps.artifacts:
        kept.add(staged)
    else:
        dashboard_index.remove([staged])
    index = read_index(home)
    write_index(home, dataclasses.replace(index, runs={**index.runs, **entries}))
    dashboard_index.remove([path for one in runs for path in older.get(one.record.run_id, ()) if path not in kept])


def _await_next_second(older: Sequence[Path]) -> None:
    """Until wandb names a folder otherwise than the newest: it does so by the second."""
    if older and time.time() - max(path.stat().st_mtime for path in older) < 2:
        time.sleep(1.1)


def _seconds(num_rows: int) -> float:
    return _SECONDS_A_RUN + _SECONDS_A_ROW * num_rows


def _written(home: Path, one: Wanted, num_rows: int, answer: dict[str, Any]) -> Entry:
    """What is known of a run, once all that was logged is found in its folder: wandb says nothing when a disk is full.

    Raises:
        DashboardError: it is elsewhere, or not whole.
    """
    from proxies.external.growing import MetricsError
    from proxies.external.wandb_run import WandbRun

    record = one.record
    path = Path(answer["dirs"][record.run_id]).parent
    if path.parent != home:
        raise DashboardError(f"wandb wrote to {path}, not below {home}: is that folder writable?")
    file = path / f"run-{record.run_id}.wandb"
    shown = frozenset(f"{key}.path" for key in _shown(record))
    try:
        rows = WandbRun(file, shown | {"_step"}).read(file.stat().st_size)
    except (MetricsError, OSError) as error:
        raise DashboardError(f"what wandb wrote cannot be read back: {error}; is the disk full?") from error
    found = {name: str(media) for row in rows for name, media in row.items() if name in shown}
    lost = sorted(name for name in shown if not (path / "files" / found.get(name, "?")).is_file())
    expected = num_rows + bool(shown)
    if lost or len(rows) != expected:
        what = ", ".join(lost) or f"{expected - len(rows)} of {expected} rows"
        raise DashboardError(f"wandb did not write {what} to {file}; is the disk full?")
    return Entry(
        content=one.content, folder=path.name, num_rows=len(rows), digests=answer["digests"][record.run_id],
        files={name: (path / "files" / name).stat().st_size for name in found.values()},
        home=str(home) if record.tables or record.artifacts else "",
    )  # fmt: skip


def _shown(record: Record) -> list[str]:
    return [f"tables/{name}" for name in record.tables] + [f"pictures/{name}" for name in record.pictures]


def _logged(home: Path, wanted: Sequence[Wanted], written: Collection[str], damaged: list[str], mode: Mode) -> Logged:
    runs = read_index(home).runs
    ids = [one.record.run_id for one in wanted]
    return Logged(
        mode=mode, folders={run_id: home / runs[run_id].folder for run_id in ids if run_id in runs},
        written=tuple(written), damaged=tuple(damaged),
    )  # fmt: skip


def _arrived(wanted: Sequence[Wanted], answer: dict[str, Any], num_sent: int) -> Arrived:
    names = {one.record.run_id: one.record.name for one in wanted}
    lacking = {f"{names[run_id]} ({run_id})": said for run_id, said in answer["lacking"].items()}
    return Arrived(url=answer["url"], num_sent=num_sent, num_there=len(wanted) - len(lacking), lacking=lacking)


def _asked(home: Path, wanted: Sequence[Wanted], place: Place, *, seconds: float) -> dict[str, Any]:
    """What the service lacks of the runs; what was never logged it lacks."""
    index = read_index(home)
    expected = [_expected(index, one) for one in wanted]
    study = wanted[0].record.config["study"]
    order = {"expected": expected, "study": study, "seconds": seconds, **asdict(place)}
    with tempfile.TemporaryDirectory(prefix="forerun-wandb-") as scratch:
        return ask(order, Path(scratch), online=True, more_seconds=seconds + len(expected))


def _expected(index: Index, one: Wanted) -> dict[str, Any]:
    record = one.record
    entry = index.runs.get(record.run_id, Entry(content="", folder="", num_rows=-1))
    return {
        "run_id": record.run_id, "content": one.content, "summary": record.summary, "num_rows": entry.num_rows,
        "files": entry.files,
        "artifacts": {name: {"digest": entry.digests.get(name, ""), "metadata": artifact.metadata}
                      for name, artifact in record.artifacts.items()},
    }  # fmt: skip
