"""The process that works with wandb, and alone imports it: it obeys lines of stdin and answers each
in a line.

`launcher.base.wandb_calls` starts it. The orders, each known by a key of its own:

- `record`: log a run, whose `row`s follow, and `finish`; answers `dir` and `url`.
- `expected`: ask the service which of what was logged it lacks; answers `lacking`, sentences by run
  id.
- `workspace`: build a study's workspace, and save it online; answers `spec` and `url`, or `absent`
  without its library.
- `fetch`: read a run back; answers `rows`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from launcher.base.wandb_calls import ANSWER
from proxies.core.notation import counted

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
_LOOK_AGAIN_SECONDS = 1.0


def _serve() -> NoReturn:
    problem = False
    for order in _orders():
        try:
            answer = next(do(order) for key, do in _DOES.items() if key in order)
        except (
            BaseException
        ) as error:  # whatever wandb raises is reported, not shown as a traceback
            answer, problem = {"problem": f"{type(error).__name__}: {error}"}, True
        print(f"\n{ANSWER}{json.dumps(answer)}", flush=True)
        if problem:
            break
    if not problem and "wandb" in sys.modules:
        import wandb

        wandb.teardown()
    sys.exit(0)


def _orders() -> Iterator[dict[str, Any]]:
    return map(json.loads, sys.stdin.buffer)


def _log(order: dict[str, Any]) -> dict[str, Any]:
    """Log a run row by row: all are drawn over `step`, our own. Where stdin ends midway, what came
    is all there is.
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
    where = {"dir": run.dir, "url": run.url if order["mode"] == "online" else None}
    for number, line in enumerate(_orders()):
        if "finish" in line:
            break
        if number == 0:
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
        run.log(line["row"])
    run.summary.update(record["summary"])
    run.finish()
    return where


def _look(order: dict[str, Any]) -> dict[str, Any]:
    """Until all has arrived, or for as long as is ordered: a service takes a while to show what it
    was sent.
    """
    import wandb

    api: Any = wandb.Api(timeout=30)
    where = f"{order['entity'] or api.default_entity}/{order['project']}"
    expected, until = order["expected"], time.monotonic() + order["seconds"]
    while True:
        there = _there(api, where, order["study"])
        lacking = {
            wanted["run_id"]: _lacks(there.get(wanted["run_id"]), wanted) for wanted in expected
        }
        lacking = {run_id: said for run_id, said in lacking.items() if said}
        if not lacking or time.monotonic() >= until:
            break
        time.sleep(_LOOK_AGAIN_SECONDS)
        api.flush()
    return {"lacking": lacking, "url": f"{api.settings['base_url'].rstrip('/')}/{where}"}


def _there(api: Any, where: str, study: str) -> dict[str, Any]:
    """The runs of a study that the service has."""
    try:
        return {
            run.id: run
            for run in api.runs(where, {"config.study": study}, per_page=100, lazy=False)
        }
    except ValueError as error:
        if "could not find project" in str(error).lower():
            return {}
        raise


def _lacks(run: Any, wanted: dict[str, Any]) -> list[str]:
    """What the service does not have of a run, in sentences."""
    if run is None:
        return ["the run does not exist"]
    lacks = []
    if run.config.get("content_sha256") != wanted["content"]:
        lacks.append("its settings differ from those that were logged")
    # sent with all of it, when the run ends
    if run.summary_metrics.get("content_sha256") != wanted["content"]:
        lacks.append("its summary differs from what was logged")
    if run.historyLineCount != wanted["num_rows"]:
        lacks.append(f"history: {run.historyLineCount} of {counted(wanted['num_rows'], 'row')}")
    return lacks


def _workspace(order: dict[str, Any]) -> dict[str, Any]:
    try:
        from launcher.dashboards.workspaces import build, spec_of
    except ImportError as error:
        if not (error.name or "").startswith("wandb_workspaces"):
            raise
        return {"absent": True}
    import wandb

    if not order["save"]:
        return {
            "spec": spec_of(build(order["workspace"], order["entity"] or "", order["project"])),
            "url": None,
        }
    entity = order["entity"] or wandb.Api(timeout=30).default_entity
    workspace = build(order["workspace"], str(entity), order["project"])
    workspace.save()
    return {"spec": spec_of(workspace), "url": workspace.url}


def _fetch(order: dict[str, Any]) -> dict[str, Any]:
    import wandb

    run, wanted = wandb.Api(timeout=30).run(order["fetch"]), {*order["wanted"], "_step"}
    history = run.scan_history(min_step=order["min_step"], use_cache=False)
    rows = [{name: value for name, value in row.items() if name in wanted} for row in history]
    return {"rows": [row for row in rows if row.keys() - {"_timestamp", "_step"}]}


_DOES = {"record": _log, "expected": _look, "workspace": _workspace, "fetch": _fetch}

if __name__ == "__main__":
    _serve()
