"""The verb that shows a study in W&B or TensorBoard."""

from __future__ import annotations

import errno
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from launcher.base.talk import say
from launcher.cli.options import answer, json_option, study_argument
from launcher.cli.problems import OptionProblems
from proxies.core import canon

if TYPE_CHECKING:
    from launcher.dashboards.dashboards import Arrived, Logged, Place
    from launcher.dashboards.events import Shown
    from launcher.dashboards.study import Told
    from launcher.dashboards.workspace import Kept

FOLLOW_SECONDS = 30.0
IDLE_PER_PASS = 4.0
"""Rest, in times that the last pass took: what follows a study must not take its cores."""
_LACKING_SHOWN = 20
NOT_ARRIVED = 2
"""Exit code."""

Mode = Literal["offline", "online", "disabled"]


@click.command()
@study_argument
@click.option("--mode", type=click.Choice(get_args(Mode)), default="offline", show_default=True,
              help="offline: write files; online: send; disabled: nothing of W&B.")  # fmt: skip
@click.option("--online", is_flag=True, help="The same as --mode online: send it to W&B now, with your own login.")
@click.option("--sync", is_flag=True, help="Upload what is logged offline, and verify what arrived.")
@click.option("--follow", is_flag=True, help="Go on while a driver is at work on the study.")
@click.option("--tensorboard", "tensorboard_dir", metavar="DIR", type=click.Path(path_type=Path),
              help="The same records as event files below DIR.")  # fmt: skip
@click.option("--project", envvar="WANDB_PROJECT", default="forerun", show_default=True, help="W&B project.")
@click.option("--entity", envvar="WANDB_ENTITY", help="W&B user or team; default: your login's own.")
@click.option("--optuna", "optuna_port", type=click.IntRange(1024, 65535), metavar="PORT",
              help="Show it in optuna-dashboard instead, at 127.0.0.1:PORT, until Ctrl-C.")  # fmt: skip
@json_option
def dashboards(
    study_dir: Path, mode: Mode, online: bool, sync: bool, follow: bool, tensorboard_dir: Path | None, project: str,
    entity: str | None, optuna_port: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Log STUDY to W&B: a run for every proxy, one for the study, its main runs, a workspace. Again: what is new.

    Works on an unfinished study too. Offline unless told: nothing leaves this machine. W&B's is a copy: the study's
    ledger is the truth, and is only read. Exit 2 if something that was sent did not arrive.
    """
    if optuna_port is not None:
        _serve_optuna(study_dir, optuna_port)
        return
    from launcher.dashboards.dashboards import Place

    mode = "online" if online else mode
    if sync and mode != "offline":
        raise OptionProblems([f"--sync uploads what is logged offline: not with --mode {mode}"])
    place = Place(project=project, entity=entity or None)
    done = _follow if follow else _pass
    found = done(study_dir, mode, sync, tensorboard_dir, place)
    answer(as_json, found.body, found.text)
    if found.arrived is not None and found.arrived.lacking:
        raise SystemExit(NOT_ARRIVED)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Done:
    """What a pass over a study gave."""

    told: Told
    mode: Mode
    logged: Logged | None
    arrived: Arrived | None
    kept: Kept | None
    shown: Shown | None

    @property
    def body(self) -> dict[str, Any]:
        """As JSON."""
        study, logged, kept, shown = self.told.study, self.logged, self.kept, self.shown
        return {
            "run_id": study.run_id, "mode": self.mode, "url": self.arrived and self.arrived.url,
            "path": None if logged is None else str(logged.folders[study.run_id]),
            "logged": {
                "tables": len(study.tables), "table_rows": sum(len(table.rows) for table in study.tables.values()),
                "pictures": len(study.pictures), "summary_values": len(study.summary),
                "artifacts": [*study.artifacts],
            },
            "runs": None if logged is None else {
                "num": len(logged.folders), "num_written": len(logged.written), "damaged": [*logged.damaged],
            },
            "workspace": kept and {"path": kept.path and str(kept.path), "url": kept.url},
            "arrived": self.arrived and canon.to_json(self.arrived),
            "tensorboard": shown and {
                "log_dir": str(shown.log_dir), "num_runs": shown.num_runs, "num_written": shown.num_written,
                "damaged": [*shown.damaged],
            },
        }  # fmt: skip

    @property
    def text(self) -> str:
        """For people."""
        lines = []
        if self.logged is not None:
            lines += self._logged_lines(self.logged)
        if self.arrived is not None:
            lines += self._arrived_lines(self.arrived)
        if self.kept is not None:
            from launcher.dashboards.workspace import ABSENT

            kept = self.kept.url or self.kept.path
            lines.append(f"workspace: {kept}" if kept else ABSENT)
        if self.shown is not None:
            shown = self.shown
            lines += [f"TensorBoard: {shown.num_runs} runs in {shown.log_dir}, {shown.num_written} written now",
                      *shown.damaged]  # fmt: skip
        if self.mode == "offline" and self.arrived is None:
            lines.append("nothing has left this machine; --sync uploads it, with your own login, and verifies it")
        return "\n".join([*lines, "this is a copy that can be made again; the study's ledger is the truth"])

    def _logged_lines(self, logged: Logged) -> list[str]:
        study = self.told.study
        num = len(logged.written)
        counts = (("tables", study.tables), ("pictures", study.pictures), ("artifacts", study.artifacts))
        what = ", ".join(f"{name} {len(parts)}" for name, parts in counts)
        return [
            f"W&B: {len(logged.folders)} runs, {num} written now, {len(logged.folders) - num} as they were",
            f"the study itself is run {study.run_id} ({what}) in {logged.folders[study.run_id]}",
            *logged.damaged,
        ]

    def _arrived_lines(self, arrived: Arrived) -> list[str]:
        lacking = [f"did not arrive: {name}: {'; '.join(said)}" for name, said in arrived.lacking.items()]
        more = [f"... and {len(lacking) - _LACKING_SHOWN} more"] if len(lacking) > _LACKING_SHOWN else []
        whole = f"{arrived.url} has {arrived.num_there} runs whole, as it says when asked; {arrived.num_sent} sent now"
        again = ["the same command sends again what is not there"] if lacking else []
        return [whole, *lacking[:_LACKING_SHOWN], *more, *again]


def _pass(study_dir: Path, mode: Mode, sync: bool, tensorboard_dir: Path | None, place: Place) -> _Done:
    """All of it once."""
    from launcher.dashboards.dashboards import log_runs, send_runs, upload_runs
    from launcher.dashboards.events import write_events
    from launcher.dashboards.study import told_of
    from launcher.dashboards.workspace import keep_workspace

    told = told_of(study_dir)
    shown = None if tensorboard_dir is None else write_events(tensorboard_dir, told.runs)
    if mode == "disabled":
        return _Done(told=told, mode=mode, logged=None, arrived=None, kept=None, shown=shown)
    arrived = None
    if mode == "online":
        logged, arrived = send_runs(study_dir, told.runs, place)
    else:
        logged = log_runs(study_dir, told.runs, uploadable=sync)
        arrived = upload_runs(study_dir, told.runs, place) if sync else None
    kept = keep_workspace(study_dir, told.workspace, place, online=arrived is not None)
    return _Done(told=told, mode=mode, logged=logged, arrived=arrived, kept=kept, shown=shown)


def _follow(study_dir: Path, mode: Mode, sync: bool, tensorboard_dir: Path | None, place: Place) -> _Done:
    """Again and again, once more after the driver has ended; what fails meanwhile is told, and tried again."""
    from launcher.base.wandb_calls import DashboardError
    from launcher.plan.file import load_plan
    from launcher.plan.study import PLAN_FILE
    from launcher.views.now import now_body
    from sweeps.store.glance import Glance
    from sweeps.store.ledger import Ledger

    while True:
        plan = load_plan(study_dir / PLAN_FILE)
        at_work = now_body(study_dir, Glance.of(Ledger.read(study_dir)), plan)["at_work"] is not False
        began = time.monotonic()
        try:
            done = _pass(study_dir, mode, sync, tensorboard_dir, place)
        except DashboardError as error:
            if not at_work:
                raise
            say(f"forerun: {error}; once more later")
        else:
            if not at_work:
                return done
            new = len(done.logged.written) if done.logged else done.shown.num_written if done.shown else 0
            say(f"{len(done.told.runs)} runs, {new} new; following the study until its driver ends")
        time.sleep(max(FOLLOW_SECONDS, IDLE_PER_PASS * (time.monotonic() - began)))


def _serve_optuna(study_dir: Path, port: int) -> None:
    """Serve the study to this machine's browsers, following a driver at work, until interrupted."""
    from sweeps.views.optuna_view import StudyStorage

    try:
        from optuna_dashboard import run_server
    except ImportError:
        raise click.UsageError("optuna-dashboard is not installed: pip install 'forerun[optuna-dashboard]'") from None
    storage = StudyStorage(study_dir)
    say(f"{study_dir} at http://127.0.0.1:{port}, read only, until Ctrl-C")
    try:
        run_server(storage, host="127.0.0.1", port=port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise click.UsageError(f"--optuna {port}: something else serves there already: name another port") from None
