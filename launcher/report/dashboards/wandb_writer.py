"""Writing of runs to W&B: a one-way log from the ledger, which can be repeated at any time.

wandb writes every run in a subprocess (`forerun._launcher.main_run.wandb_client`). The run is read
back before it is reported as written. File `forerun.json` in the run's folder records the run's
content id, and a run with the same content id is not written again. Uploads are verified by asking
the service.
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

from forerun._launcher.main_run.progress_output import WorkMeter
from forerun._launcher.main_run.wandb_client import (
    WANDB_DIR,
    DashboardError,
    Mode,
    WandbProcess,
    ask_wandb,
    run_wandb_process,
    sync_runs,
)
from forerun._launcher.report.dashboards.run_record import RunRecord
from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.plain_files import open_to_append, read_plain

ENTRY_FILE, LOCK_FILE, WORKSPACE_FILE = "forerun.json", "forerun.lock", "workspace.json"
ARRIVAL_SECONDS = 60.0
"""Maximum seconds for the service to show what it received."""
_SECONDS_A_RUN, _SECONDS_A_ROW = 2.0, 0.005
"""Seconds allowed per run and per row, ten times what wandb takes on an idle core."""
_FOLDER_PATTERN = re.compile(r"(?:offline-)?run-\d{8}_\d{6}-(?P<run_id>[0-9a-f]+)")
FLUSH_SECONDS = 10.0
"""Maximum seconds for wandb to write to disk what it has received."""
_READ_BYTES, _POLL_SECONDS = 2**26, 0.05
"""Bytes to read back at once, and seconds to wait where wandb has not written the rest yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WandbTarget:
    """The project and entity that receive the runs in W&B."""

    project: str = "forerun"
    entity: str | None = None
    """User or team; None for the login's default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenRun:
    """A run that was written, as recorded by `forerun.json` in its folder."""

    content: str
    """Content id of the `RunRecord` that was written."""
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadState:
    """The service's answer on which runs it has."""

    url: str
    """Address of the project."""
    num_sent: int
    """Number of runs that were uploaded now."""
    num_there: int
    """Number of runs that arrived completely: settings, summary, and all rows as logged."""
    lacking: dict[str, list[str]]
    """Sentences on what did not arrive, by the run's name."""


def log_runs(study_dir: Path, runs: Sequence[RunRecord]) -> tuple[dict[str, Path], list[str]]:
    """Log offline the runs that changed since they were logged, replacing their earlier logs.

    The study is not changed, except for its folder `wandb`.

    Returns:
        The folder of every run by its id, and the ids of the runs that were written now.

    Raises:
        DashboardError: wandb cannot be started, or what it wrote is not complete on disk.
        CurveCorrupt: A run's curve does not match its record.
        OSError: The folder cannot be written.
    """
    with _lock_folder(study_dir) as home:
        entries = _read_entries(home)
        new = [run for run in runs if not _is_logged(entries.get(run.run_id), run)]
        if new:
            with (
                open_writer(study_dir, "offline") as writer,
                WorkMeter("logging runs", len(new)) as meter,
            ):
                for run in new:
                    writer.write(run)
                    meter.add(1)
        entries = _read_entries(home)
    return {run.run_id: entries[run.run_id][0] for run in runs if run.run_id in entries}, [
        run.run_id for run in new
    ]


def upload_runs(study_dir: Path, runs: Sequence[RunRecord], target: WandbTarget) -> UploadState:
    """Upload the logged runs that the service lacks, then ask the service again for all runs.

    Raises:
        DashboardError: There is no login, or no answer.
    """
    with _lock_folder(study_dir) as home:
        entries, before = _read_entries(home), _ask_missing(home, runs, target, seconds=0.0)
        new = [entries[run_id] for run_id in before["lacking"] if run_id in entries]
        if new:
            sync_runs(
                [folder for folder, _ in new],
                **asdict(target),
                more_seconds=sum(_estimate_seconds(entry.num_rows) for _, entry in new),
            )
        after = _ask_missing(home, runs, target, seconds=ARRIVAL_SECONDS) if new else before
    names = {run.run_id: f"{run.name} ({run.run_id})" for run in runs}
    lacking = {names[run_id]: problems for run_id, problems in after["lacking"].items()}
    return UploadState(
        url=after["url"], num_sent=len(new), num_there=len(runs) - len(lacking), lacking=lacking
    )


def write_workspace(
    study_dir: Path, runs: Sequence[RunRecord], target: WandbTarget, *, online: bool = False
) -> tuple[Path | None, str | None]:
    """Write `wandb/workspace.json`, and save the workspace to W&B, unless both are up to date.

    Args:
        study_dir: The study's folder.
        runs: All runs of the study, the study itself first.
        target: Project and entity of the workspace.
        online: Whether to save the workspace to W&B.

    Returns:
        The file, None if the library is not installed; and the workspace's address in W&B, None if
        it was not saved.

    Raises:
        DashboardError: W&B refused the workspace, or does not answer.
        OSError: The file cannot be written.
    """
    content = _describe_workspace(runs)
    with _lock_folder(study_dir) as home:
        path, content_id = (
            home / WORKSPACE_FILE,
            canon.compute_content_id([content, asdict(target)]),
        )
        saved: Any = canon.parse(read_plain(path)) if path.is_file() else {}
        if saved.get("content") == content_id and (saved["url"] or not online):
            return path, saved["url"]
        answer = ask_wandb({"workspace": content, "save": online, **asdict(target)}, online=online)
        if answer.get("absent"):
            return None, None
        canon.write_atomic(
            path, canon.to_pretty_json({"name": content["name"], "content": content_id, **answer})
        )
        return path, answer["url"]


def _describe_workspace(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return the study's name and id, its searched hyperparameters, and its main runs' digests."""
    study = runs[0]
    search: Any = study.config.get("search", {})
    prefix = "search/best_"
    best = {key.removeprefix(prefix) for key in study.summary if key.startswith(prefix)}
    searched = sorted(best - {"loss_nats"}) or [*({"learning_rate"} & search.keys())]
    return {
        "name": study.name,
        "study": study.run_id,
        "hyperparameters": searched,
        "digests": [run.config["digest"] for run in runs if run.group == "main run"],
    }


@contextlib.contextmanager
def _lock_folder(study_dir: Path) -> Iterator[Path]:
    """Yield the folder where wandb writes for a study, locked against other processes.

    Raises:
        DashboardError: Another process is logging the study.
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


def _list_folders(home: Path, run_id: str) -> list[Path]:
    """Return all folders that were written for a run, oldest first, complete or not."""
    folders = [
        path
        for path in home.glob(f"*run-*-{run_id}")
        if _FOLDER_PATTERN.fullmatch(path.name) and not path.is_symlink()
    ]
    return sorted(folders, key=lambda path: path.name.removeprefix("offline-"))


def _read_entries(home: Path) -> dict[str, tuple[Path, WrittenRun]]:
    """Return the folder and the record of every run that was written completely, by its id."""
    entries = {}
    for path in home.glob(f"*/{ENTRY_FILE}"):
        if match := _FOLDER_PATTERN.fullmatch(path.parent.name):
            with contextlib.suppress(OSError, ValueError):
                entries[match["run_id"]] = (
                    path.parent,
                    canon.decode(WrittenRun, canon.parse(read_plain(path))),
                )
    return entries


def _is_logged(entry: tuple[Path, WrittenRun] | None, run: RunRecord) -> bool:
    """Return whether a run was written as it is now, and its file still exists."""
    return (
        entry is not None
        and entry[1].content == run.content
        and (entry[0] / f"run-{run.run_id}.wandb").is_file()
    )


@contextlib.contextmanager
def open_writer(root_dir: Path, mode: Mode, *, dies_with_us: bool = True) -> Iterator[Writer]:
    """Yield a writer that runs wandb in a subprocess and writes below `root_dir/wandb`.

    Args:
        root_dir: Folder of the study or of the main run.
        mode: Mode of wandb.
        dies_with_us: Whether the subprocess is killed if this process dies
            (`forerun._launcher.main_run.wandb_client.run_wandb_process`).

    Raises:
        OSError: The folder cannot be written.
    """
    home = root_dir.absolute() / WANDB_DIR
    home.mkdir(parents=True, exist_ok=True)
    scratch = home / "scratch"
    scratch.mkdir(exist_ok=True)
    try:
        with run_wandb_process(
            scratch, online=mode == "online", dies_with_us=dies_with_us
        ) as process:
            yield Writer(process, home, mode, keeps_incomplete=not dies_with_us)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class Writer:
    """A writer of runs through one wandb process, one run after another."""

    def __init__(
        self, process: WandbProcess, home: Path, mode: Mode, *, keeps_incomplete: bool
    ) -> None:
        """Store the process and where it writes.

        Args:
            process: The wandb process.
            home: Folder that wandb writes to.
            mode: Mode of wandb.
            keeps_incomplete: Whether the folder of an incompletely written run is kept.
        """
        self.process, self._home, self._mode = process, home, mode
        self._keeps_incomplete = keeps_incomplete

    def write(self, run: RunRecord) -> tuple[Path, str | None, int]:
        """Write one run, row by row; earlier logs of it are removed once it is complete on disk.

        Returns:
            The run's folder (which `wandb sync` takes if it was logged offline), its address in
            W&B, and the number of rows.

        Raises:
            DashboardError: wandb fails, or what it wrote is not complete.
            CurveCorrupt, OSError: The run's rows cannot be read.
        """
        rows, older = run.rows(), _list_folders(self._home, run.run_id)
        # wandb names folders by the second, so a folder of this run must not be too recent.
        if older and time.time() - max(path.stat().st_mtime for path in older) < 2:
            time.sleep(1.1)
        content_mark = {"content_sha256": run.content}
        record = {
            **run.body,
            "config": {**run.config, **content_mark},
            "summary": {**run.summary, **content_mark},
        }
        order = {
            "record": record,
            "mode": self._mode,
            "root_dir": str(self._home.parent),
            **asdict(WandbTarget()),
        }
        try:
            self.process.send(order)
            num_rows = 0
            for row in rows:
                self.process.send({"row": row})
                num_rows += 1
            self.process.send({"finish": True})
            answer = self.process.receive(_estimate_seconds(num_rows))
            folder = Path(answer["dir"]).parent
            entry = self._read_back(run, folder, num_rows)
        except BaseException:
            if not self._keeps_incomplete:
                _remove_folders(
                    [path for path in _list_folders(self._home, run.run_id) if path not in older]
                )
            raise
        canon.write_atomic(folder / ENTRY_FILE, canon.to_pretty_json(entry))
        _remove_folders(older)
        return folder, answer["url"], num_rows

    def _read_back(self, run: RunRecord, folder: Path, num_rows: int) -> WrittenRun:
        """Check that all rows are in the run's folder, and return the run's record.

        wandb reports no error when the disk is full.
        """
        from forerun._proxies.external.growing_file import MetricsError
        from forerun._proxies.external.wandb_run import WandbRun

        if folder.parent != self._home:
            raise DashboardError(
                f"wandb wrote to {folder}, not below {self._home}; "
                "check that this folder is writable"
            )
        file = folder / f"run-{run.run_id}.wandb"
        reader = WandbRun(file, frozenset({"_step"}))
        num_missing, deadline = num_rows, time.monotonic() + FLUSH_SECONDS
        try:
            while num_missing > 0 and (not reader.at_end or time.monotonic() < deadline):
                num_missing -= len(reader.read(_READ_BYTES))
                if num_missing and reader.at_end:
                    time.sleep(_POLL_SECONDS)
        except (MetricsError, OSError) as error:
            raise DashboardError(
                f"what wandb wrote cannot be read back: {error}; check that the disk is not full"
            ) from error
        if num_missing:
            raise DashboardError(
                f"wandb did not write {num_missing} of {format_counted(num_rows, 'row')} to "
                f"{file}; check that the disk is not full"
            )
        return WrittenRun(content=run.content, num_rows=num_rows)


def _remove_folders(folders: Sequence[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _estimate_seconds(num_rows: int) -> float:
    return _SECONDS_A_RUN + _SECONDS_A_ROW * num_rows


def _ask_missing(
    home: Path, runs: Sequence[RunRecord], target: WandbTarget, *, seconds: float
) -> dict[str, Any]:
    """Ask the service which runs it lacks; it lacks every run that was never logged."""
    entries = _read_entries(home)
    expected: list[Json] = []
    for run in runs:
        # No run has -1 rows, so the service never has a run that was not logged.
        num_rows = entries[run.run_id][1].num_rows if run.run_id in entries else -1
        expected.append({"run_id": run.run_id, "content": run.content, "num_rows": num_rows})
    order = {
        "expected": expected,
        "study": runs[0].config["study"],
        "seconds": seconds,
        **asdict(target),
    }
    return ask_wandb(order, online=True, more_seconds=seconds + len(expected))
