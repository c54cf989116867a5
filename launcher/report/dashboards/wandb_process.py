"""The subprocess that talks to wandb. Only this module and `workspaces` import wandb.

`forerun._launcher.main_run.wandb_client` starts the process. The process reads orders from stdin,
one per line, and answers each order in one line. An order is a JSON object with one of these keys:

- `record`: log a run. Lines with a `row` each follow, then a line with `finish`. The answer has
  `dir` and `url`.
- `expected`: ask the service for the logged runs that it lacks. The answer has `lacking`, with
  sentences by run id, and `url`.
- `workspace`: build a study's workspace, and save it online if `save` is set. The answer has `spec`
  and `url`, or `absent` if the library `wandb_workspaces` is not installed.
- `fetch`: read a run back. The answer has `rows`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from forerun._launcher.main_run.wandb_client import ANSWER
from forerun._proxies.core.notation import format_counted

_SETTINGS: dict[str, Any] = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "save_code": False,
    "disable_job_creation": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
    "silent": True,
    "init_timeout": 30.0,
    "symlink": False,
    "host": "forerun",
    "program": "forerun",
}
"""Settings of every run: wandb collects no code, console output, or facts about the machine."""
_POLL_SECONDS = 1.0
"""Seconds between two questions to the service."""


def _serve_orders() -> NoReturn:
    """Answer every order from stdin, until stdin ends or an order fails."""
    for order in _read_orders():
        try:
            answer = next(handler(order) for key, handler in _HANDLERS.items() if key in order)
        except BaseException as error:
            # Whatever wandb raises is reported to the caller instead of as a traceback.
            answer = {"problem": f"{type(error).__name__}: {error}"}
        print(f"\n{ANSWER}{json.dumps(answer)}", flush=True)
        if "problem" in answer:
            break
    else:
        if "wandb" in sys.modules:
            import wandb

            wandb.teardown()
    sys.exit(0)


def _read_orders() -> Iterator[dict[str, Any]]:
    return map(json.loads, sys.stdin.buffer)


def _log_run(order: dict[str, Any]) -> dict[str, Any]:
    """Log a run row by row, with forerun's `step` as the x axis of every metric.

    If stdin ends early, the rows received so far are all that is logged.
    """
    import wandb

    record = order["record"]
    run = wandb.init(
        project=order["project"],
        entity=order["entity"],
        id=record["run_id"],
        name=record["name"],
        group=record["group"],
        job_type=record["job_type"],
        config=record["config"],
        settings=wandb.Settings(mode=order["mode"], root_dir=order["root_dir"], **_SETTINGS),
    )
    answer = {"dir": run.dir, "url": run.url if order["mode"] == "online" else None}
    for number, line in enumerate(_read_orders()):
        if "finish" in line:
            break
        if number == 0:
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
        run.log(line["row"])
    run.summary.update(record["summary"])
    run.finish()
    return answer


def _check_arrival(order: dict[str, Any]) -> dict[str, Any]:
    """Ask the service which of the logged runs it lacks.

    A service takes a while to show what it received. So the question is repeated until every run
    has arrived, or until the order's `seconds` are over.
    """
    import wandb

    api: Any = wandb.Api(timeout=30)
    project_path = f"{order['entity'] or api.default_entity}/{order['project']}"
    expected, deadline = order["expected"], time.monotonic() + order["seconds"]
    while True:
        runs = _list_runs(api, project_path, order["study"])
        lacking = {
            record["run_id"]: list_missing_parts(runs.get(record["run_id"]), record)
            for record in expected
        }
        lacking = {run_id: problems for run_id, problems in lacking.items() if problems}
        if not lacking or time.monotonic() >= deadline:
            break
        time.sleep(_POLL_SECONDS)
        api.flush()
    return {"lacking": lacking, "url": f"{api.settings['base_url'].rstrip('/')}/{project_path}"}


def _list_runs(api: Any, project_path: str, study: str) -> dict[str, Any]:
    """Return a study's runs on the service, by id."""
    try:
        return {
            run.id: run
            for run in api.runs(project_path, {"config.study": study}, per_page=100, lazy=False)
        }
    except ValueError as error:
        if "could not find project" in str(error).lower():
            return {}
        raise


def list_missing_parts(run: Any, record: dict[str, Any]) -> list[str]:
    """Return sentences on the parts of one run that the service lacks."""
    if run is None:
        return ["the run does not exist"]
    problems = []
    if run.config.get("content_sha256") != record["content"]:
        problems.append("its settings differ from those that were logged")
    # The summary is sent last, so it tells whether the run arrived completely.
    if run.summary_metrics.get("content_sha256") != record["content"]:
        problems.append("its summary differs from what was logged")
    if run.historyLineCount != record["num_rows"]:
        problems.append(
            f"history: {run.historyLineCount} of {format_counted(record['num_rows'], 'row')}"
        )
    return problems


def _build_workspace(order: dict[str, Any]) -> dict[str, Any]:
    """Build a study's workspace, and save it online if the order says so."""
    try:
        from forerun._launcher.report.dashboards.workspaces import build_workspace, to_json
    except ImportError as error:
        if not (error.name or "").startswith("wandb_workspaces"):
            raise
        return {"absent": True}
    import wandb

    is_saved, entity = order["save"], order["entity"] or ""
    if is_saved and not entity:
        entity = str(wandb.Api(timeout=30).default_entity)
    workspace = build_workspace(order["workspace"], entity, order["project"])
    if is_saved:
        workspace.save()
    return {"spec": to_json(workspace), "url": workspace.url if is_saved else None}


def _fetch_rows(order: dict[str, Any]) -> dict[str, Any]:
    """Read the named columns of a run from the service; rows without any of them are left out."""
    import wandb

    run, names = wandb.Api(timeout=30).run(order["fetch"]), {*order["names"], "_step"}
    history = run.scan_history(min_step=order["min_step"], use_cache=False)
    rows = [{name: value for name, value in row.items() if name in names} for row in history]
    return {"rows": [row for row in rows if row.keys() - {"_timestamp", "_step"}]}


_HANDLERS = {
    "record": _log_run,
    "expected": _check_arrival,
    "workspace": _build_workspace,
    "fetch": _fetch_rows,
}

if __name__ == "__main__":
    _serve_orders()
