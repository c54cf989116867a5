"""The verb that shows a study in W&B or TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from launcher.base.talk import say
from launcher.cli.options import OptionProblems, answer, json_option, study_argument
from proxies.core import canon

if TYPE_CHECKING:
    from launcher.dashboards.records import Logged, RunRecord
    from launcher.dashboards.wandb_writer import Arrived, Place, Workspace

FOLLOW_SECONDS = 30.0
IDLE_PER_PASS = 4.0
"""Rest, in times that the last pass took: what follows a study must not take its cores."""
_LACKING_SHOWN = 20
NOT_ARRIVED = 2
"""Exit code."""
ABSENT = "no workspace: wandb-workspaces is not installed: pip install 'forerun[workspaces]'"

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
@json_option
def dashboards(
    study_dir: Path, mode: Mode, online: bool, sync: bool, follow: bool, tensorboard_dir: Path | None, project: str,
    entity: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Log STUDY to W&B: a run for every proxy, one for the study, its main runs, a workspace. Again: what is new.

    Works on an unfinished study too. Offline unless told: nothing leaves this machine. W&B's is a copy: the study's
    ledger is the truth, and is only read. Exit 2 if something that was sent did not arrive.
    """
    from launcher.dashboards.wandb_writer import Place

    mode = "online" if online else mode
    if sync and mode != "offline":
        raise OptionProblems([f"--sync uploads what is logged offline: not with --mode {mode}"])
    place = Place(project=project, entity=entity or None)
    done = _follow if follow else _pass
    found = done(study_dir, mode, sync or mode == "online", tensorboard_dir, place)
    answer(as_json, found.body, found.text)
    if found.arrived is not None and found.arrived.lacking:
        raise SystemExit(NOT_ARRIVED)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Done:
    """What a pass over a study gave."""

    runs: Sequence[RunRecord]
    mode: Mode
    logged: Logged | None = None
    arrived: Arrived | None = None
    workspace: Workspace | None = None
    tensorboard_dir: Path | None = None
    shown: Logged | None = None

    @property
    def body(self) -> dict[str, Any]:
        """As JSON."""
        study, logged, kept, shown = self.runs[0], self.logged, self.workspace, self.shown
        return {
            "run_id": study.run_id, "mode": self.mode, "url": self.arrived and self.arrived.url,
            "path": None if logged is None else str(logged.folders[study.run_id]),
            "logged": {
                "tables": len(study.tables), "table_rows": sum(len(table.rows) for table in study.tables.values()),
                "pictures": len(study.pictures), "summary_values": len(study.summary),
                "artifacts": [*study.artifacts],
            },
            "runs": logged and _counts("num", logged),
            "workspace": kept and {"path": kept.path and str(kept.path), "url": kept.url},
            "arrived": self.arrived and canon.to_json(self.arrived),
            "tensorboard": shown and {"log_dir": str(self.tensorboard_dir), **_counts("num_runs", shown)},
        }  # fmt: skip

    @property
    def text(self) -> str:
        """For people."""
        lines = []
        if logged := self.logged:
            study, new = self.runs[0], len(logged.written)
            lines += [
                f"W&B: {len(logged.folders)} runs, {new} written now, {len(logged.folders) - new} as they were",
                f"the study itself is run {study.run_id} in {logged.folders[study.run_id]}",
                *logged.damaged,
            ]
        if self.arrived is not None:
            lines += self._arrived_lines(self.arrived)
        if self.workspace is not None:
            lines.append(f"workspace: {self.workspace.url or self.workspace.path}" if self.workspace.path else ABSENT)
        if shown := self.shown:
            new = len(shown.written)
            lines += [f"TensorBoard: {len(shown.folders)} runs in {self.tensorboard_dir}, {new} written now",
                      *shown.damaged]  # fmt: skip
        if self.mode == "offline" and self.arrived is None:
            lines.append("nothing has left this machine; --sync uploads it, with your own login, and verifies it")
        return "\n".join([*lines, "this is a copy that can be made again; the study's ledger is the truth"])

    def _arrived_lines(self, arrived: Arrived) -> list[str]:
        lacking = [f"did not arrive: {name}: {'; '.join(said)}" for name, said in arrived.lacking.items()]
        more = [f"... and {len(lacking) - _LACKING_SHOWN} more"] if len(lacking) > _LACKING_SHOWN else []
        whole = f"{arrived.url} has {arrived.num_there} runs whole, as it says when asked; {arrived.num_sent} sent now"
        again = ["the same command sends again what is not there"] if lacking else []
        return [whole, *lacking[:_LACKING_SHOWN], *more, *again]


def _counts(name: str, logged: Logged) -> dict[str, Any]:
    return {name: len(logged.folders), "num_written": len(logged.written), "damaged": [*logged.damaged]}


def _pass(study_dir: Path, mode: Mode, sync: bool, tensorboard_dir: Path | None, place: Place) -> _Done:
    """All of it once."""
    from launcher.dashboards.runs import study_runs
    from launcher.dashboards.tensorboard import write_runs
    from launcher.dashboards.wandb_writer import keep_workspace, log_runs, upload_runs

    runs = study_runs(study_dir)
    shown = None if tensorboard_dir is None else write_runs(tensorboard_dir, runs)
    done = _Done(runs=runs, mode=mode, tensorboard_dir=tensorboard_dir, shown=shown)
    if mode == "disabled":
        return done
    logged = log_runs(study_dir, runs)
    arrived = upload_runs(study_dir, runs, place) if sync else None
    workspace = keep_workspace(study_dir, runs, place, online=sync)
    return replace(done, logged=logged, arrived=arrived, workspace=workspace)


def _follow(study_dir: Path, mode: Mode, sync: bool, tensorboard_dir: Path | None, place: Place) -> _Done:
    """Again and again, once more after the driver has ended; what fails meanwhile is told, and tried again."""
    from launcher.base.wandb_calls import DashboardError
    from launcher.plan.file import load_plan
    from launcher.plan.study import PLAN_FILE
    from launcher.views.now import now_body
    from sweeps.store.ledger import Ledger

    while True:
        plan = load_plan(study_dir / PLAN_FILE)
        at_work = now_body(study_dir, Ledger.read(study_dir), plan)["at_work"] is not False
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
            new = sum(len(each.written) for each in (done.logged, done.shown) if each)
            say(f"{len(done.runs)} runs, {new} written; following the study until its driver ends")
        time.sleep(max(FOLLOW_SECONDS, IDLE_PER_PASS * (time.monotonic() - began)))
