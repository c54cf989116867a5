"""A study's workspace in W&B, panel by panel: the only user of `wandb_workspaces`, which imports
wandb.

Used by `launcher.dashboards.wandb_process` alone.
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
_MAIN_MORE = ("main_run/validation_loss_nats", "main_run/grad_norm", "tokens_per_second", "mfu")
_LAYERS = ("update_ratio", "weight_rms", "param_norm", "grad_norm")
_PINNED = [
    "summary:validation_loss_nats",
    "summary:objective_nats",
    "config:stage",
    "config:arm",
    "config:width",
    "config:learning_rate",
    "summary:status",
]
_MOST_RUNS = 100
"""In a panel."""


def build(told: dict[str, Any], entity: str, project: str) -> Any:
    """The workspace of a study.

    Args:
        told: name and id of the study, digests of its main runs, hyperparameters.
        entity: of W&B; may be empty where it is not saved.
        project: of W&B.
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
                ),
            ],
        ),
        ws.Section(name="Search", panels=_search(told), is_open=True),
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
                ),
            ],
        ),
        ws.Section(name="Main run", panels=_main_run(), is_open=True),
    ]
    mine = expr.Config("study") == told["study"]
    # A main run that its launch logs knows no study before it is logged with one.
    alike = [expr.Config("digest") == digest for digest in told["digests"]]
    runs = ws.RunsetSettings(
        filters=expr.Or(mine, *alike) if alike else [mine], pinned_columns=list(_PINNED)
    )
    return ws.Workspace(
        entity=entity,
        project=project,
        name=told["name"],
        sections=sections,
        runset_settings=runs,
        settings=ws.WorkspaceSettings(x_axis="step", max_runs=_MOST_RUNS),
    )


def spec_of(workspace: Any) -> Any:
    """What is saved of it, as plain JSON."""
    return json.loads(workspace._to_model().spec.model_dump_json(by_alias=True, exclude_none=True))


def _search(told: dict[str, Any]) -> list[Any]:
    named = ("stage", "arm", *told["hyperparameters"], "width")
    columns = [
        wr.ParallelCoordinatesPlotColumn(wr.Config(name), log=name == "learning_rate")
        for name in named
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
            for name in told["hyperparameters"]
        ),
        wr.LinePlot(
            title="Training loss over tokens, by width",
            x="tokens",
            y=["train_loss_nats"],
            groupby="config.width",
        ),
    ]


def _main_run() -> list[Any]:
    return [
        wr.LinePlot(
            title="Training loss and its predicted band",
            x="step",
            y=list(_MAIN_LOSS),
            layout=wr.Layout(w=24, h=8),
        ),
        *(
            wr.LinePlot(title=name.removeprefix("main_run/"), x="step", y=[name])
            for name in _MAIN_MORE
        ),
        *(
            wr.LinePlot(title=f"{name} by layer", x="step", metric_regex=f"layers/.*/{name}")
            for name in _LAYERS
        ),
    ]
