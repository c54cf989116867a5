"""A study's workspace in W&B, panel by panel.

This module is the only user of library `wandb_workspaces`, which imports wandb. Only
`forerun._launcher.report.dashboards.wandb_process` imports this module. The panels name columns of
`RunRecord`: rows, `config`, and `summary`.
"""

from __future__ import annotations

import json
from typing import Any

import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws
from wandb_workspaces import expr

_MAIN_LOSS = [
    "main_run/train_loss_nats",
    "expected_loss_nats",
    "expected_low_nats",
    "expected_high_nats",
]
_MAIN_METRICS = ("main_run/validation_loss_nats", "main_run/grad_norm", "tokens_per_second", "mfu")
_LAYER_METRICS = ("update_ratio", "weight_rms", "param_norm", "grad_norm")
_PINNED_COLUMNS = [
    "summary:validation_loss_nats",
    "summary:objective_nats",
    "config:stage",
    "config:arm",
    "config:width",
    "config:learning_rate",
    "summary:status",
]
_MAX_RUNS = 100
"""Maximum number of runs in a panel."""


def build_workspace(content: dict[str, Any], entity: str, project: str) -> Any:
    """Build the workspace of a study.

    Args:
        content: `name` and `study` (id) of the study, `digests` of its main runs, and its searched
            `hyperparameters`.
        entity: W&B entity; may be empty if the workspace is not saved.
        project: W&B project.
    """
    sections = [
        ws.Section(
            name="Transfer",
            is_open=True,
            panels=[
                wr.ScatterPlot(
                    title="Loss against the learning rate, by width",
                    x=wr.Config("log2_learning_rate"),
                    y=wr.SummaryMetric("objective_nats"),
                    z=wr.Config("width"),
                )
            ],
        ),
        ws.Section(name="Search", panels=_build_search_panels(content), is_open=True),
        ws.Section(
            name="Scaling",
            is_open=True,
            panels=[
                wr.ScatterPlot(
                    title="Loss against FLOPs, every run",
                    x=wr.Config("planned_flops"),
                    y=wr.SummaryMetric("validation_loss_nats"),
                    z=wr.Config("width"),
                    log_x=True,
                )
            ],
        ),
        ws.Section(name="Main run", panels=_build_main_run_panels(), is_open=True),
    ]
    is_of_study = expr.Config("study") == content["study"]
    # A main run logged by its own launch has no study id until it is logged with the study.
    has_digest = [expr.Config("digest") == digest for digest in content["digests"]]
    runs = ws.RunsetSettings(
        filters=expr.Or(is_of_study, *has_digest) if has_digest else [is_of_study],
        pinned_columns=list(_PINNED_COLUMNS),
    )
    return ws.Workspace(
        entity=entity,
        project=project,
        name=content["name"],
        sections=sections,
        runset_settings=runs,
        settings=ws.WorkspaceSettings(x_axis="step", max_runs=_MAX_RUNS),
    )


def to_json(workspace: Any) -> Any:
    """Return the saved part of a workspace as plain JSON."""
    return json.loads(workspace._to_model().spec.model_dump_json(by_alias=True, exclude_none=True))


def _build_search_panels(content: dict[str, Any]) -> list[Any]:
    names = ("stage", "arm", *content["hyperparameters"], "width")
    columns = [
        wr.ParallelCoordinatesPlotColumn(wr.Config(name), log=name == "learning_rate")
        for name in names
    ]
    columns.append(wr.ParallelCoordinatesPlotColumn(wr.SummaryMetric("objective_nats")))
    return [
        wr.ParallelCoordinatesPlot(
            title="Hyperparameters and loss", columns=columns, layout=wr.Layout(w=24, h=8)
        ),
        *(
            wr.ScatterPlot(
                title=f"Loss against {name}",
                x=wr.Config(name),
                y=wr.SummaryMetric("objective_nats"),
                log_x=name == "learning_rate",
            )
            for name in content["hyperparameters"]
        ),
        wr.LinePlot(
            title="Training loss over tokens, by width",
            x="tokens",
            y=["train_loss_nats"],
            groupby="config.width",
        ),
    ]


def _build_main_run_panels() -> list[Any]:
    return [
        wr.LinePlot(
            title="Training loss and its predicted band",
            x="step",
            y=list(_MAIN_LOSS),
            layout=wr.Layout(w=24, h=8),
        ),
        *(
            wr.LinePlot(title=name.removeprefix("main_run/"), x="step", y=[name])
            for name in _MAIN_METRICS
        ),
        *(
            wr.LinePlot(title=f"{name} by layer", x="step", metric_regex=f"layers/.*/{name}")
            for name in _LAYER_METRICS
        ),
    ]
