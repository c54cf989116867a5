"""Main runs for Megatron-LM, and its arguments as a dictionary."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from export_case import SHAPE
from main_run import decision_of, spec_of

from launcher.frozen.frozen import Decision
from proxies.core.rules import named
from proxies.core.spec import RunSpec
from proxies.data.tokens import Manifest

MEGATRON_MUP = named("mup_no_wd_scaling", decayed="two_dimensional")


def spec_for(data_id: str, *, of_shape: dict[str, Any] | None = None, **changes: Any) -> RunSpec:
    """A run with grouped key/value heads, and no forward multiplier equal to one."""
    shape = dataclasses.replace(SHAPE, **(of_shape or {}))
    spec = spec_of(data_id, embedding_multiplier=2.0, output_multiplier=1.5)
    return dataclasses.replace(
        spec, **{"shape": shape, "base_shape": shape.at_width(32), **changes}
    )


def decision_for(manifest: Manifest, spec: RunSpec, num_ranks: int = 1, **changes: Any) -> Decision:
    return dataclasses.replace(
        decision_of(spec, manifest, num_ranks=num_ranks, every_steps=10), **changes
    )


def with_hidden_eps(decision: Decision, divisor: float) -> Decision:
    """Matrices inside the blocks with a smaller eps, as `--use-mup` gives them."""
    groups = tuple(
        dataclasses.replace(g, settings={**g.settings, "eps": g.settings["eps"] / divisor})
        if g.kind == "hidden"
        else g
        for g in decision.groups
    )
    return dataclasses.replace(decision, groups=groups)


def arguments_in(folder: Path) -> dict[str, str]:
    lines = [line.split() for line in (folder / "arguments.txt").read_text().splitlines()]
    found = {line[0]: " ".join(line[1:]) for line in lines}
    assert len(found) == len(lines), "a flag is there twice"
    return found
