"""A main run for torchtitan: grouped key/value heads, and no forward multiplier equal to one."""

from __future__ import annotations

import dataclasses
from typing import Any

from main_run import decision_of, spec_of

from launcher.frozen import Decision
from proxies.data.tokens import Manifest
from proxies.schedule import Schedule
from proxies.shape import Shape
from proxies.spec import RunSpec

SHAPE = Shape(num_layers=2, width=64, num_heads=4, num_kv_heads=2, ffn_width=160, vocab_size=256, seq_len=32)
SCHEDULES = (
    Schedule(kind="cosine", num_steps=12, warmup_steps=3, final_fraction=0.1),
    Schedule(kind="linear", num_steps=12),
    Schedule(kind="wsd", num_steps=12, warmup_steps=2, decay_steps=7, final_fraction=0.05),
    Schedule(kind="constant", num_steps=12, warmup_steps=11),
)


def wide_spec(data_id: str, **changes: Any) -> RunSpec:
    spec = spec_of(data_id, embedding_multiplier=2.0, output_multiplier=1.5)
    return dataclasses.replace(spec, **{"shape": SHAPE, "base_shape": SHAPE.at_width(32), **changes})


def wide_decision(manifest: Manifest, num_ranks: int = 1, **changes: Any) -> Decision:
    """The decision of `wide_spec`, with fields of either changed."""
    of_spec = {name: changes.pop(name) for name in ("parametrization", "schedule") if name in changes}
    decision = decision_of(wide_spec(manifest.data_id, **of_spec), manifest, num_ranks=num_ranks, every_steps=10)
    return dataclasses.replace(decision, **changes)
