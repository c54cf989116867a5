"""Runs in W&B: a one-way window that is made from the ledger, and can be made again at any time.

Every run is written by wandb in a process of its own (`launcher.base.wandb_calls`), read back
before anybody is told that it is there, and not written again while nothing about it changes: its
folder has a note of what it was made of. What was uploaded is asked back from the service.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.base.talk import Meter
from launcher.base.wandb_calls import (
    WANDB_DIR,
    DashboardError,
    Mode,
    WandbProcess,
    ask,
    job,
    upload,
)
from launcher.dashboards.records import RunRecord
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.notation import counted
from proxies.core.plain_files import open_to_append, read_plain

ENTRY_FILE, LOCK_FILE, WORKSPACE_FILE = "forerun.json", "forerun.lock", "workspace.json"
ARRIVAL_SECONDS = 60.0
"""How long the service may take to show what it was sent."""
_SECONDS_A_RUN, _SECONDS_A_ROW = 2.0, 0.005
"""A tenth of it is what wandb takes on an idle core."""
_FOLDER = re.compile(r"(?:offline-)?run-\d{8}_\d{6}-(?P<run_id>[0-9a-f]+)")
FLUSH_SECONDS = 10.0
"""How long wandb may take to have on the disk what it has taken."""
_READ_BYTES, _POLL_SECONDS = 2**26, 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class WandbTarget:
    """Where W&B puts it."""

    project: str = "forerun"
    entity: str | None = None
    """A user or team; None is the login's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenRun:
    """A run that was written, as `forerun.json` in its folder keeps it."""

    content: str
    """The content id of the `RunRecord` that it was made of."""
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadState:
    """What the service was asked back."""

    url: str
    """Where the project is shown."""
    num_sent: int
    num_there: int
    """Runs that are there whole: settings, summary and number of rows as logged."""
    lacking: dict[str, list[str]]
    """By the run's name, what did not arrive, in sentences."""


def log_runs(study_dir: Path, runs: Sequence[RunRecord]) -> tuple[dict[str, Path], list[str]]:
    """Log runs offline, those that were not logged as they are now, in place of what was logged of
    them before.

    The study is only read, but for its folder `wandb`. Returns the folder of every run by its id,
    and the ids of those that were written just now.

    Raises:
        DashboardError: wandb cannot be started, or what was asked for is not whole on the disk
            afterwards.
        CurveCorrupt: a run's curve is not what was recorded.
        OSError: the folder cannot be written.
    """
    with _alone(study_dir) as home:
        there = _entries(home)
        new = [run for run in runs if not _is_there(there.get(run.run_id), run)]
        with contextlib.ExitStack() as opened, Meter("logging runs", len(new)) as meter:
            writer = (
                opened.enter_context(writing(study_dir, "offline", WandbTarget())) if new else None
            )
            for run in new:
                assert writer is not None
                writer.write(run)
                meter.add(1)
        there = _entries(home)
    return {run.run_id: there[run.run_id][0] for run in runs if run.run_id in there}, [
        run.run_id for run in new
    ]


def upload_runs(study_dir: Path, runs: Sequence[RunRecord], place: WandbTarget) -> UploadState:
    """Upload what was logged offline and the service does not have as it is now; then ask it back
    for all.

    Raises:
        DashboardError: there is no login, or no answer.
    """
    with _alone(study_dir) as home:
        there, before = _entries(home), _asked(home, runs, place, seconds=0.0)
        new = [there[run_id] for run_id in before["lacking"] if run_id in there]
        if new:
            upload(
                [folder for folder, _ in new],
                **asdict(place),
                more_seconds=sum(_seconds(entry.num_rows) for _, entry in new),
            )
        after = _asked(home, runs, place, seconds=ARRIVAL_SECONDS) if new else before
    names = {run.run_id: f"{run.name} ({run.run_id})" for run in runs}
    lacking = {names[run_id]: said for run_id, said in after["lacking"].items()}
    return UploadState(
        url=after["url"], num_sent=len(new), num_there=len(runs) - len(lacking), lacking=lacking
    )


def keep_workspace(
    study_dir: Path, runs: Sequence[RunRecord], place: WandbTarget, *, online: bool = False
) -> tuple[Path | None, str | None]:
    """Write `wandb/workspace.json`, and online save it to W&B, unless both were done as they would
    be now.

    Returns that file, None where the library is not installed, and where W&B shows the workspace,
    if it was saved.

    Args:
        study_dir: the study's folder.
        runs: all its runs, the study itself first.
        place: where it is saved.
        online: whether it is.

    Raises:
        DashboardError: W&B refused it, or does not answer.
        OSError: the file cannot be written.
    """
    told = _workspace(runs)
    with _alone(study_dir) as home:
        path, content = home / WORKSPACE_FILE, canon.content_id([told, asdict(place)])
        kept: Any = canon.parse(read_plain(path)) if path.is_file() else {}
        if kept.get("content") == content and (kept["url"] or not online):
            return path, kept["url"]
        answer = ask({"workspace": told, "save": online, **asdict(place)}, online=online)
        if answer.get("absent"):
            return None, None
        canon.write_atomic(path, canon.pretty({"name": told["name"], "content": content, **answer}))
        return path, answer["url"]


def _workspace(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """What a study's workspace shows."""
    study = runs[0]
    search: Any = study.config.get("search", {})
    best = [
        key.removeprefix("search/best_") for key in study.summary if key.startswith("search/best_")
    ]
    searched = sorted({*best} - {"loss_nats"}) or [
        key for key in ("learning_rate",) if key in search
    ]
    return {
        "name": study.name,
        "study": study.run_id,
        "hyperparameters": searched,
        "digests": [run.config["digest"] for run in runs if run.group == "main run"],
    }


@contextlib.contextmanager
def _alone(study_dir: Path) -> Iterator[Path]:
    """The folder where wandb writes for a study; within, no other process logs it.

    Raises:
        DashboardError: one does.
    """
    home = study_dir.absolute() / WANDB_DIR
    home.mkdir(parents=True, exist_ok=True)
    with open_to_append(home / LOCK_FILE) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DashboardError(
                f"another process is logging this study (it holds {home / LOCK_FILE})"
            ) from None
        yield home


def _folders(home: Path, run_id: str) -> list[Path]:
    """All that was written of a run, the newest last, whether whole or not."""
    found = [
        path
        for path in home.glob(f"*run-*-{run_id}")
        if _FOLDER.fullmatch(path.name) and not path.is_symlink()
    ]
    return sorted(found, key=lambda path: path.name.removeprefix("offline-"))


def _entries(home: Path) -> dict[str, tuple[Path, WrittenRun]]:
    """Every run that was written whole, by its id."""
    found = {}
    for path in home.glob(f"*/{ENTRY_FILE}"):
        if named := _FOLDER.fullmatch(path.parent.name):
            with contextlib.suppress(OSError, ValueError):
                found[named["run_id"]] = (
                    path.parent,
                    canon.decode(WrittenRun, canon.parse(read_plain(path))),
                )
    return found


def _is_there(found: tuple[Path, WrittenRun] | None, run: RunRecord) -> bool:
    """Whether a run was written as it is now, and still lies there."""
    return (
        found is not None
        and found[1].content == run.content
        and (found[0] / f"run-{run.run_id}.wandb").is_file()
    )


@contextlib.contextmanager
def writing(
    root_dir: Path, mode: Mode, place: WandbTarget, *, dies_with_us: bool = True
) -> Iterator[Writer]:
    """Within, a process of wandb's writes runs below `root_dir/wandb`; see
    `launcher.base.wandb_calls.WandbProcess`.

    Raises:
        OSError: the folder cannot be written.
    """
    home = root_dir.absolute() / WANDB_DIR
    home.mkdir(parents=True, exist_ok=True)
    scratch = home / "scratch"
    scratch.mkdir(exist_ok=True)
    try:
        with job(scratch, online=mode == "online", dies_with_us=dies_with_us) as running:
            yield Writer(running, home, mode, place, keeps_parts=not dies_with_us)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class Writer:
    """Writes runs with wandb, one after another."""

    def __init__(
        self,
        running: WandbProcess,
        home: Path,
        mode: Mode,
        place: WandbTarget,
        *,
        keeps_parts: bool,
    ) -> None:
        """`keeps_parts`: what is there of a run that could not be written whole stays, beside what
        was there before.
        """
        self.job, self._home, self._mode, self._place = running, home, mode, place
        self._keeps_parts = keeps_parts

    def write(self, run: RunRecord) -> tuple[Path, str | None, int]:
        """Write one run, each row as it comes; once it is whole on the disk, what was there of it
        before goes.

        Returns its folder, which `wandb sync` takes if it was logged offline, where W&B shows it,
        and how many rows.

        Raises:
            DashboardError: wandb fails, or what it wrote is not whole.
            CurveCorrupt, OSError: its rows cannot be read.
        """
        rows, older = run.rows(), _folders(self._home, run.run_id)
        if older and time.time() - max(path.stat().st_mtime for path in older) < 2:
            time.sleep(1.1)  # wandb names a folder by the second
        mark = {"content_sha256": run.content}
        record = {**run.body, "config": {**run.config, **mark}, "summary": {**run.summary, **mark}}
        order = {
            "record": record,
            "mode": self._mode,
            "root_dir": str(self._home.parent),
            **asdict(self._place),
        }
        try:
            self.job.put(order)
            num_rows = 0
            for row in rows:
                self.job.put({"row": row})
                num_rows += 1
            self.job.put({"finish": True})
            answer = self.job.answer(_seconds(num_rows))
            folder = Path(answer["dir"]).parent
            entry = self._read_back(run, folder, num_rows)
        except BaseException:
            if not self._keeps_parts:
                _remove([path for path in _folders(self._home, run.run_id) if path not in older])
            raise
        canon.write_atomic(folder / ENTRY_FILE, canon.pretty(entry))
        _remove(older)
        return folder, answer["url"], num_rows

    def _read_back(self, run: RunRecord, folder: Path, num_rows: int) -> WrittenRun:
        """What is known of a run, once all of it is found in its folder: wandb says nothing when a
        disk is full.
        """
        from proxies.external.growing_file import MetricsError
        from proxies.external.wandb_run import WandbRun

        if folder.parent != self._home:
            raise DashboardError(
                f"wandb wrote to {folder}, not below {self._home}: is that folder writable?"
            )
        file = folder / f"run-{run.run_id}.wandb"
        reader = WandbRun(file, frozenset({"_step"}))
        left, until = num_rows, time.monotonic() + FLUSH_SECONDS
        try:
            while left > 0 and (not reader.at_end or time.monotonic() < until):
                left -= len(reader.read(_READ_BYTES))
                if left and reader.at_end:
                    time.sleep(_POLL_SECONDS)
        except (MetricsError, OSError) as error:
            raise DashboardError(
                f"what wandb wrote cannot be read back: {error}; is the disk full?"
            ) from error
        if left:
            raise DashboardError(
                f"wandb did not write {left} of {counted(num_rows, 'row')} to {file}; is the disk "
                "full?"
            )
        return WrittenRun(content=run.content, num_rows=num_rows)


def _remove(folders: Sequence[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _seconds(num_rows: int) -> float:
    return _SECONDS_A_RUN + _SECONDS_A_ROW * num_rows


def _asked(
    home: Path, runs: Sequence[RunRecord], place: WandbTarget, *, seconds: float
) -> dict[str, Any]:
    """What the service lacks of the runs; what was never logged it lacks."""
    there = _entries(home)
    expected: list[Json] = []
    for run in runs:
        num_rows = there[run.run_id][1].num_rows if run.run_id in there else -1
        expected.append({"run_id": run.run_id, "content": run.content, "num_rows": num_rows})
    order = {
        "expected": expected,
        "study": runs[0].config["study"],
        "seconds": seconds,
        **asdict(place),
    }
    return ask(order, online=True, more_seconds=seconds + len(expected))
