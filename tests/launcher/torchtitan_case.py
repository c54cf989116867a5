"""A main run for torchtitan: grouped key/value heads, and no forward multiplier equal to one."""

from __future__ import annotations

import ast
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
    shape = changes.get("shape", SHAPE)
    return dataclasses.replace(
        spec, **{"base_shape": shape.at_width(32), "batch_tokens": 8 * shape.seq_len, **changes, "shape": shape}
    )


def wide_decision(manifest: Manifest, num_ranks: int = 1, **changes: Any) -> Decision:
    """The decision of `wide_spec`, with fields of either changed."""
    of_spec = {name: changes.pop(name) for name in ("parametrization", "schedule", "shape") if name in changes}
    decision = decision_of(wide_spec(manifest.data_id, **of_spec), manifest, num_ranks=num_ranks, every_steps=10)
    return dataclasses.replace(decision, **changes)


def literals(text: str) -> dict[str, Any]:
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign)
    }


def piece(text: str, name: str, namespace: dict[str, Any]) -> Any:
    """One function or class of the generated module, among its literals and what else is given."""
    node = next(n for n in ast.parse(text).body if getattr(n, "name", None) == name)
    scope = {**literals(text), **namespace}
    exec(compile(ast.Module(body=[node], type_ignores=[]), name, "exec"), scope)
    return scope[name]
