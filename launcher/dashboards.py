"""A study as one W&B run: a one-way window that can be rebuilt at any time. The only door to wandb.

wandb runs in a process of its own, which gets the record on stdin and an environment from a short list: so no secret of
the command line or the environment reaches the disk, no thread or signal handler of wandb's enters this process, and
nothing can hang or stay behind. What it wrote is read back before anybody is told that it is there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from launcher.lifeline import die_with_parent

if TYPE_CHECKING:
    from launcher.dashboard_record import Record

WANDB_DIR = "wandb"
OFFLINE_SECONDS, ONLINE_SECONDS = 180.0, 900.0
"""The longest wait for wandb."""

_PASSED = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY")
_PASSED_ONLINE = (
    "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_CONFIG_DIR", "WANDB_IDENTITY_TOKEN_FILE", "NETRC", "SSL_CERT_FILE",
    "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", *_PROXIES, *(name.lower() for name in _PROXIES),
)  # fmt: skip
_NUM_SAID = 400
_SETTINGS: dict[str, Any] = {
    "console": "off", "disable_code": True, "disable_git": True, "save_code": False, "disable_job_creation": True,
    "x_disable_meta": True, "x_disable_stats": True, "x_disable_machine_info": True, "x_save_requirements": False,
    "silent": True, "init_timeout": 30.0, "symlink": False, "host": "forerun", "program": "forerun",
}  # fmt: skip


class DashboardError(Exception):
    """The study could not be logged; the study itself is untouched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Logged:
    """A study that W&B has, or can be given."""

    run_id: str
    path: Path
    """The run's folder; what `wandb sync` takes, if it was logged offline."""
    mode: Literal["offline", "online"]
    url: str | None
    """Of the run's page, online."""
    num_tables: int
    num_table_rows: int
    num_pictures: int
    num_summary_values: int


def log_study(
    study_dir: Path, record: Record, *, online: bool = False, project: str = "forerun", entity: str | None = None
) -> Logged:
    """Log a study, in place of what was logged of it before. The study is only read, but for its folder `wandb`.

    Args:
        study_dir: the study's folder.
        record: what to log.
        online: send it, with the login that wandb finds; else it is only written below `study_dir`.
        project: of W&B.
        entity: of W&B: a user or team; None is the login's own.

    Raises:
        DashboardError: wandb cannot be started, or what was asked for is not whole on the disk afterwards.
        OSError: the folder cannot be written.
    """
    home = study_dir.absolute() / WANDB_DIR
    home.mkdir(parents=True, exist_ok=True)
    older = _ours(home, record.run_id)
    data_dir = Path(tempfile.mkdtemp(prefix=f"data-{record.run_id}-", dir=home))
    mode: Literal["offline", "online"] = "online" if online else "offline"
    order = {"mode": mode, "root_dir": str(home.parent), "project": project, "entity": entity, "record": asdict(record)}
    try:
        answer = _ask(order, data_dir, online=online)
        path = _written(answer, home, record)
    except BaseException:
        for partial in set(_ours(home, record.run_id)) - set(older):
            shutil.rmtree(partial, ignore_errors=True)
        raise
    for folder in set(older) - {path}:  # named by the second: the clock may have been set back
        shutil.rmtree(folder, ignore_errors=True)
    return Logged(
        run_id=record.run_id, path=study_dir / WANDB_DIR / path.name, mode=mode, url=answer.get("url"),
        num_tables=len(record.tables), num_table_rows=sum(len(t.rows) for t in record.tables.values()),
        num_pictures=len(record.pictures), num_summary_values=len(record.summary),
    )  # fmt: skip


def fetch_history(run_path: str, wanted: Collection[str], min_step: int) -> list[dict[str, Any]]:
    """What a run logged online, row by row from `_step` `min_step` on: of each the wanted names and `_step`.

    Args:
        run_path: `entity/project/run`.
        wanted: names; rows with none of them are left out.
        min_step: wandb's own count of rows.

    Raises:
        DashboardError: W&B does not answer, or knows no such run, or not to this login.
    """
    order = {"fetch": run_path, "wanted": sorted(wanted), "min_step": min_step}
    with tempfile.TemporaryDirectory(prefix="forerun-wandb-") as folder:
        rows: list[dict[str, Any]] = _ask(order, Path(folder), online=True)["rows"]
    return rows


def _ours(home: Path, run_id: str) -> list[Path]:
    """What was logged of this study so far: runs, and the files of their tables."""
    patterns = (f"offline-run-*-{run_id}", f"run-*-{run_id}", f"data-{run_id}-*")
    return [path for pattern in patterns for path in home.glob(pattern) if path.is_dir() and not path.is_symlink()]


def short_environment(data_dir: Path, *, online: bool) -> dict[str, str]:
    """What a process of wandb's gets of our environment: no secret but, online, the login it needs."""
    names = _PASSED + (_PASSED_ONLINE if online else ())
    given = {name: os.environ[name] for name in names if name in os.environ}
    ours = str(Path(__file__).parents[1])
    given["PYTHONPATH"] = os.pathsep.join(filter(None, (ours, given.get("PYTHONPATH"))))
    # Files of tables are staged here, and uploaded from here; the default is a folder of the user's own.
    given |= {"WANDB_DATA_DIR": str(data_dir), "WANDB_CACHE_DIR": str(data_dir / "cache")}
    given["WANDB_ERROR_REPORTING"] = "false"  # else wandb looks its error service up, even offline
    if not online:
        given["WANDB_CONFIG_DIR"] = str(data_dir / "config")
    return given


def _ask(order: dict[str, Any], data_dir: Path, *, online: bool) -> dict[str, Any]:
    """Have a process of its own log it; ends it, whatever happens here."""
    limit_seconds = ONLINE_SECONDS if online else OFFLINE_SECONDS
    job = subprocess.Popen(
        [sys.executable, "-P", "-m", "launcher.dashboards"],
        cwd=data_dir,
        env=short_environment(data_dir, online=online),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509  (one system call, and no thread of ours holds a lock)
    )
    try:
        said, _ = job.communicate(json.dumps(order).encode(), timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        raise DashboardError(f"wandb did not end within {limit_seconds:.0f} s, and was ended") from None
    finally:
        if job.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        for pipe in (job.stdin, job.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
    text = said.decode(errors="replace").strip()
    try:
        answer = json.loads(text.splitlines()[-1])
    except (ValueError, IndexError):
        answer = None
    if not isinstance(answer, dict) or not answer.keys() & {"dir", "rows", "problem"}:
        raise DashboardError(f"wandb ended with code {job.returncode}: {text[-_NUM_SAID:] or 'it said nothing'}")
    if "problem" in answer:
        hint = " (wandb's own login is used: `wandb login`, or WANDB_API_KEY)" if online else ""
        raise DashboardError(f"wandb failed: {answer['problem']}{hint}")
    return answer


def _written(answer: dict[str, Any], home: Path, record: Record) -> Path:
    """The run's folder, once all that was logged is found in it: wandb says nothing when a disk is full.

    Raises:
        DashboardError: it is elsewhere, or not whole.
    """
    from proxies.external.growing import MetricsError
    from proxies.external.wandb_run import WandbRun

    path = Path(answer["dir"]).parent
    if path.parent != home:
        raise DashboardError(f"wandb wrote to {path}, not below {home}: is that folder writable?")
    file = path / f"run-{record.run_id}.wandb"
    wanted = frozenset(f"{key}.path" for key in _logged_keys(record))
    try:
        rows = WandbRun(file, wanted).read(file.stat().st_size)
    except (MetricsError, OSError) as error:
        raise DashboardError(f"what wandb wrote cannot be read back: {error}; is the disk full?") from error
    found = {name: media for row in rows for name, media in row.items()}
    lost = sorted(name for name in wanted if not (path / "files" / str(found.get(name, "?"))).is_file())
    if lost:
        raise DashboardError(f"wandb did not write {', '.join(lost)} to {file}; is the disk full?")
    return path


def _logged_keys(record: Record) -> list[str]:
    return [f"tables/{name}" for name in record.tables] + [f"pictures/{name}" for name in record.pictures]


def _serve() -> NoReturn:
    """In the process of its own: do what the first line of stdin orders, answer in one line."""
    order = json.loads(sys.stdin.buffer.readline())
    try:
        answer = _fetch(order) if "fetch" in order else _follow(order) if "follow" in order else _log(order)
    except BaseException as error:  # whatever wandb raises is told, not shown as a traceback
        answer = {"problem": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), flush=True)
    sys.exit(0)


def _log(order: dict[str, Any]) -> dict[str, Any]:
    import wandb

    record = order["record"]
    settings = wandb.Settings(mode=order["mode"], root_dir=order["root_dir"], **_SETTINGS)
    run = wandb.init(
        project=order["project"], entity=order["entity"], id=record["run_id"], name=record["name"], job_type="study",
        config=record["config"], settings=settings,
    )  # fmt: skip
    run.summary.update(record["summary"])
    tables = {
        f"tables/{name}": wandb.Table(columns=table["columns"], data=table["rows"])
        for name, table in record["tables"].items()
    }
    drawn = {
        f"pictures/{name}": wandb.Html(text, inject=False, data_is_not_path=True)
        for name, text in record["pictures"].items()
    }
    run.log({**tables, **drawn})
    answer = {"dir": run.dir, "url": run.url if order["mode"] == "online" else None}
    run.finish()
    wandb.teardown()
    return answer


def _follow(order: dict[str, Any]) -> dict[str, Any]:
    """Log a run's metrics while they grow, until stdin ends; charts are drawn over `step`, our own."""
    import wandb

    from launcher.mirror_rows import Row, follow

    settings = wandb.Settings(mode=order["mode"], root_dir=order["follow"], **_SETTINGS)
    run = wandb.init(
        project=order["project"], id=order["run_id"], name=order["name"], job_type="main run", config=order["config"],
        settings=settings,
    )  # fmt: skip
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    take = 1

    def tell(row: Row) -> None:
        nonlocal take
        take += row.goes_back
        run.log({"step": row.step, "take": take, **row.columns})

    where = {"dir": run.dir, "url": run.url if order["mode"] == "online" else None}
    num_rows = follow(Path(order["follow"]), tell)
    run.finish()
    wandb.teardown()
    return {**where, "num_rows": num_rows}


def _fetch(order: dict[str, Any]) -> dict[str, Any]:
    import wandb

    wanted, rows = {*order["wanted"]}, []
    for row in wandb.Api(timeout=30).run(order["fetch"]).scan_history(min_step=order["min_step"], use_cache=False):
        kept = {key: value for key, value in row.items() if key in wanted}
        rows += [{**kept, "_step": row["_step"]}] if kept.keys() - {"_timestamp", "_step"} else []
    wandb.teardown()
    return {"rows": rows}


if __name__ == "__main__":
    _serve()
