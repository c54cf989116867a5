"""Section `[cluster]` of a plan: where proxies run. No part of the question: it may change on resume."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from launcher.plan_sections import Count, Section


class ClusterSection(Section):
    """Where proxies run."""

    backend: Literal["ray", "inline"] = Field("ray", description="ray: local workers; inline: this process.")
    num_workers: Annotated[int, Field(ge=0)] = Field(0, description="Ray workers, one thread each; 0: one per core.")
    max_attempts: Count = Field(3, description="Times a run is tried when its worker dies.")
