"""Cases for tests of the Megatron-LM export: specs, decisions, and the exported arguments."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from export_case import SHAPE
from main_run import make_decision, make_spec

from forerun._launcher.main_run.frozen.frozen import Decision
from forerun._proxies.core.rules import get_parametrization
from forerun._proxies.core.spec import RunSpec
from forerun._proxies.data.tokens import Manifest

MEGATRON_MUP = get_parametrization("mup_no_wd_scaling", decayed="two_dimensional")


def make_megatron_spec(
    data_id: str, *, shape_changes: dict[str, Any] | None = None, **changes: Any
) -> RunSpec:
    """Return a run with grouped key/value heads and no forward multiplier equal to one."""
    shape = dataclasses.replace(SHAPE, **(shape_changes or {}))
    spec = make_spec(data_id, embedding_multiplier=2.0, output_multiplier=1.5)
    return dataclasses.replace(
        spec, **{"shape": shape, "base_shape": shape.at_width(32), **changes}
    )


def make_megatron_decision(
    manifest: Manifest, spec: RunSpec, num_ranks: int = 1, **changes: Any
) -> Decision:
    """Return the decision that freezes a run, with fields of the decision changed."""
    return dataclasses.replace(
        make_decision(spec, manifest, num_ranks=num_ranks, every_steps=10), **changes
    )


def scale_hidden_eps(decision: Decision, divisor: float) -> Decision:
    """Return the decision with the eps of the hidden matrices divided, as by `--use-mup`."""
    groups = tuple(
        dataclasses.replace(g, settings={**g.settings, "eps": g.settings["eps"] / divisor})
        if g.kind == "hidden"
        else g
        for g in decision.groups
    )
    return dataclasses.replace(decision, groups=groups)


def read_arguments(folder: Path) -> dict[str, str]:
    """Return the flags in `arguments.txt` with their values."""
    lines = [line.split() for line in (folder / "arguments.txt").read_text().splitlines()]
    arguments = {line[0]: " ".join(line[1:]) for line in lines}
    assert len(arguments) == len(lines), "a flag appears twice"
    return arguments
