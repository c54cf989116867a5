"""The process that works with wandb, and the only door to it: does what one line of stdin orders, answers in one line.

`launcher.base.wandb_calls` and `launcher.dashboards.mirrors` start it. The orders, each known by a key of its own:

- `runs`: log the runs of a file of lines (`record`, then its `row`s); answers `dirs` by run id, and `digests`.
- `expected`: ask the service which of what was logged it lacks; answers `lacking`, sentences by run id.
- `workspace`: build a study's workspace, and save it online; answers `spec`, or `absent` without its library.
- `follow`: log a main run while it grows, until stdin ends; answers `dir`.
- `fetch`: read a run back; answers `rows`.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

_SETTINGS: dict[str, Any] = {
    "console": "off", "disable_code": True, "disable_git": True, "save_code": False, "disable_job_creation": True,
    "x_disable_meta": True, "x_disable_stats": True, "x_disable_machine_info": True, "x_save_requirements": False,
    "silent": True, "init_timeout": 30.0, "symlink": False, "host": "forerun", "program": "forerun",
}  # fmt: skip
_LOOK_AGAIN_SECONDS = 1.0
_MOST_NAMED = 5


def _serve() -> NoReturn:
    order = json.loads(sys.stdin.buffer.readline())
    try:
        answer = next(do(order) for key, do in _DOES.items() if key in order)
    except BaseException as error:  # whatever wandb raises is told, not shown as a traceback
        answer = {"problem": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), flush=True)
    sys.exit(0)


def _log(order: dict[str, Any]) -> dict[str, Any]:
    import wandb

    dirs: dict[str, str] = {}
    digests: dict[str, dict[str, str]] = {}
    url = None
    run: Any = None
    record: dict[str, Any] = {}
    with Path(order["runs"]).open(encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            if "row" in line:
                run.log(line["row"])
                continue
            if run is not None:
                digests[run.id] = _finish(run, record)
            record = line["record"]
            run = _begin(wandb, order, record)
            dirs[run.id] = run.dir
            url = run.url if order["mode"] == "online" else None
    if run is not None:
        digests[run.id] = _finish(run, record)
    wandb.teardown()
    return {"dirs": dirs, "digests": digests, "url": url}


def _begin(wandb: Any, order: dict[str, Any], record: dict[str, Any]) -> Any:
    settings = wandb.Settings(mode=order["mode"], root_dir=order["root_dir"], **_SETTINGS)
    run = wandb.init(
        project=order["project"], entity=order["entity"], id=record["run_id"], name=record["name"],
        group=record["group"], job_type=record["job_type"], tags=record["tags"], config=record["config"],
        settings=settings,
    )  # fmt: skip
    if record["over"]:
        run.define_metric(record["over"])
        run.define_metric("*", step_metric=record["over"])
    return run


def _finish(run: Any, record: dict[str, Any]) -> dict[str, str]:
    """Log the rest of a run, and end it; the digests of its artifacts by name."""
    import wandb

    shown = {
        f"tables/{name}": wandb.Table(columns=table["columns"], data=table["rows"])
        for name, table in record["tables"].items()
    } | {
        f"pictures/{name}": wandb.Html(text, inject=False, data_is_not_path=True)
        for name, text in record["pictures"].items()
    }  # fmt: skip
    if shown:
        run.log(shown)
    run.summary.update(record["summary"])
    digests = {}
    for name, given in record["artifacts"].items():
        artifact = wandb.Artifact(name, type=given["kind"], metadata=given["metadata"])
        for file_name, text in given["files"].items():
            with artifact.new_file(file_name, encoding="utf-8") as file:
                file.write(text)
        run.log_artifact(artifact, aliases=[*given["aliases"], "latest"])
        digests[name] = artifact.manifest.digest()
    run.finish()
    return digests


def _look(order: dict[str, Any]) -> dict[str, Any]:
    """Until all has arrived, or for as long as is ordered: a service takes a while to show what it was sent."""
    import wandb

    api: Any = wandb.Api(timeout=30)
    where = f"{order['entity'] or api.default_entity}/{order['project']}"
    expected, until = order["expected"], time.monotonic() + order["seconds"]
    while True:
        there = _there(api, where, order["study"])
        lacking = {wanted["run_id"]: _lacks(there.get(wanted["run_id"]), wanted) for wanted in expected}
        lacking = {run_id: said for run_id, said in lacking.items() if said}
        if not lacking or time.monotonic() >= until:
            break
        time.sleep(_LOOK_AGAIN_SECONDS)
        api.flush()
    wandb.teardown()
    return {"lacking": lacking, "url": f"{api.settings['base_url'].rstrip('/')}/{where}"}


def _there(api: Any, where: str, study: str) -> dict[str, Any]:
    """The runs of a study that the service has."""
    try:
        return {run.id: run for run in api.runs(where, {"config.study": study}, per_page=100, lazy=False)}
    except ValueError as error:
        if "could not find project" in str(error).lower():
            return {}
        raise


def _lacks(run: Any, wanted: dict[str, Any]) -> list[str]:
    """What the service does not have of a run, in sentences."""
    if run is None:
        return ["the run is not there"]
    lacks = []
    if run.config.get("content_sha256") != wanted["content"]:
        lacks.append("its settings are not those that were logged")
    has = run.summary_metrics
    unlike = sorted(key for key, value in wanted["summary"].items() if not _same(has.get(key), value))
    if unlike:
        lacks.append(f"summary: {_named(unlike)} not as logged")
    if run.historyLineCount != wanted["num_rows"]:
        lacks.append(f"history: {run.historyLineCount} of {wanted['num_rows']} rows")
    if wanted["files"]:
        sizes = {file.name: file.size for file in run.files(per_page=100)}
        lost = sorted(name for name, size in wanted["files"].items() if sizes.get(name) != size)
        lacks += [f"files: {_named(lost)} not whole"] if lost else []
    if wanted["artifacts"]:
        logged = _artifacts(run)
        for name, given in wanted["artifacts"].items():
            lacks += _artifact_lacks(logged.get(name), name, given)
    return lacks


def _artifacts(run: Any) -> dict[str, Any]:
    """By name; none where wandb cannot tell of one: it fails at an artifact that was begun and never committed."""
    try:
        return {artifact.name.split(":")[0]: artifact for artifact in run.logged_artifacts()}
    except AssertionError:
        return {}


def _artifact_lacks(artifact: Any, name: str, given: dict[str, Any]) -> list[str]:
    if artifact is None or artifact.state != "COMMITTED":
        return [f"artifact {name}: not there"]
    if artifact.digest != given["digest"]:
        return [f"artifact {name}: its content is not what was logged"]
    metadata = dict(artifact.metadata)
    unlike = sorted(key for key, value in given["metadata"].items() if not _same(metadata.get(key), value))
    return [f"artifact {name}: {_named(unlike)} not as logged"] if unlike else []


def _same(found: Any, value: Any) -> bool:
    if isinstance(found, float) and isinstance(value, int | float):
        return math.isclose(found, value, rel_tol=1e-9)  # a service may write fewer digits
    return bool(found == value)


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(names[:_MOST_NAMED])}{more}"


def _workspace(order: dict[str, Any]) -> dict[str, Any]:
    try:
        from launcher.dashboards.workspaces import build, save, spec_of
    except ImportError as error:
        if not (error.name or "").startswith("wandb_workspaces"):
            raise
        return {"absent": True}
    import wandb

    if not order["save"]:
        return {"spec": spec_of(build(order["workspace"], order["entity"] or "", order["project"]))}
    entity = order["entity"] or wandb.Api(timeout=30).default_entity
    return save(build(order["workspace"], str(entity), order["project"]), order["view"])


def _follow(order: dict[str, Any]) -> dict[str, Any]:
    """Log a run's metrics while they grow, until stdin ends; charts are drawn over `step`, our own."""
    import wandb

    from launcher.dashboards.mirror_rows import Row, follow

    record = {**order, "group": "main run", "job_type": "main run", "tags": [], "over": "step"}
    run = _begin(wandb, {**order, "root_dir": order["follow"], "entity": None}, record)
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

    rows = list(_fetched(wandb.Api(timeout=30).run(order["fetch"]), {*order["wanted"]}, order["min_step"]))
    wandb.teardown()
    return {"rows": rows}


def _fetched(run: Any, wanted: set[str], min_step: int) -> Iterator[dict[str, Any]]:
    for row in run.scan_history(min_step=min_step, use_cache=False):
        kept = {key: value for key, value in row.items() if key in wanted}
        if kept.keys() - {"_timestamp", "_step"}:
            yield {**kept, "_step": row["_step"]}


_DOES = {"runs": _log, "expected": _look, "workspace": _workspace, "follow": _follow, "fetch": _fetch}

if __name__ == "__main__":
    _serve()
